"""Small tables at a few sites: those that are reported, and others on which the defaults may be tuned.

Every table is a function of a seed: which rows are tested, which site has which rows, and, where it is simulated, the
rows themselves. Columns are standardised by the sites' sums, as `standardise` of a scenario does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedual.data.partition import dirichlet
from fedual.data.user_files import moments

Rows = tuple[np.ndarray, np.ndarray]
"""Inputs (N, D), and targets (N,): class numbers, or real numbers."""


@dataclass(frozen=True)
class Table:
    """A table at a few sites, with rows that no site has."""

    name: str
    sites: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    model: nn.Module
    loss: str


@dataclass(frozen=True)
class Source:
    """How a table is made: the rows of each site by seed, with those of the test in the end, and the network."""

    make: Callable[[int], tuple[list[Rows], Rows]]
    hidden: int = 16  # 0 for a linear model

    def table(self, name: str, seed: int) -> Table:
        """The table with a seed, standardised."""
        sites, test = self.make(seed)
        mean, sd = moments([x for x, _ in sites])
        (x, y), outputs = test, 1
        classes = y.dtype.kind == "i"
        if classes:
            outputs = int(max(labels.max() for _, labels in [*sites, test])) + 1
        tensors = lambda rows: (torch.tensor((rows[0] - mean) / sd).float(), _targets(rows[1]))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            wide = self.hidden
            layers = [nn.Linear(x.shape[1], wide), nn.ReLU(), nn.Linear(wide, outputs)] if wide else []
            model = nn.Sequential(*layers) if wide else nn.Linear(x.shape[1], outputs)
        return Table(name, [*map(tensors, sites)], tensors(test), model, "cross_entropy" if classes else "mse")


def clinics(seed: int) -> tuple[list[Rows], Rows]:
    """Three clinics of 100 to 300 patients that differ in their means, their base rates and one slope.

    The outcome depends on six columns by a logit with an interaction and a square; the best possible accuracy is about
    three quarters.
    """
    rng = np.random.default_rng([seed, 1])
    slopes = rng.normal(0, 0.6, 6)
    sizes = rng.permutation([100, 180, 300])
    shifts, rates, drift = rng.normal(0, 0.5, (3, 6)), rng.normal(0, 0.4, 3), rng.normal(0, 0.3, 3)

    def rows(clinic: int, count: int) -> Rows:
        x = rng.normal(0, 1, (count, 6)) @ (np.eye(6) + 0.3) + shifts[clinic]
        logit = x @ slopes + rates[clinic] + drift[clinic] * x[:, 0] + 0.3 * x[:, 0] * x[:, 1] - 0.2 * x[:, 2] ** 2
        return x, (rng.random(count) < 1 / (1 + np.exp(-logit))).astype(np.int64)

    sites = [rows(clinic, int(count)) for clinic, count in enumerate(sizes)]
    parts = [rows(clinic, 4 * int(count)) for clinic, count in enumerate(sizes)]
    return sites, (np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))


def noisy(seed: int, columns: int = 10, sizes: tuple[int, ...] = (60, 90, 150, 200), kind: str = "tree") -> Any:
    """Sites whose outcome depends on two columns of many: by a step with a fifth of the labels turned, or linearly."""
    rng = np.random.default_rng([seed, 2])
    shift = rng.normal(0, 0.4, (len(sizes), columns))

    def rows(site: int, count: int) -> Rows:
        x = rng.normal(0, 1, (count, columns)) + shift[site]
        if kind == "tree":
            y = ((x[:, 0] > 0) & (x[:, 1] > -0.5)) ^ (rng.random(count) < 0.2)
        elif kind == "logit":
            y = rng.random(count) < 1 / (1 + np.exp(-0.8 * x[:, 0] + 0.5 * x[:, 1] + 0.5 * shift[site, 0]))
        else:
            return x, np.sin(x[:, 0]) * 2 + x[:, 1] * x[:, 2] + 0.5 * x[:, 3] + rng.normal(0, 1.5, count)
        return x, y.astype(np.int64)

    sites = [rows(site, count) for site, count in enumerate(sizes)]
    parts = [rows(site, 4 * count) for site, count in enumerate(sizes)]
    return sites, (np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))


def split(load: Callable[[], Rows], sites: int, most: int | None = None) -> Callable[[int], tuple[list[Rows], Rows]]:
    """A table, of at most some rows, of which three tenths are tested and the others uneven sites have."""

    def make(seed: int) -> tuple[list[Rows], Rows]:
        x, y = load()
        order = np.random.default_rng([seed, 3]).permutation(len(x))[:most]
        test, train = np.split(order, [round(0.3 * len(order))])
        labels = y[train] if y.dtype.kind == "i" else np.digitize(y[train], np.quantile(y[train], [1 / 3, 2 / 3]))
        parts = dirichlet(labels, sites, seed, client_concentration=3.0, class_concentration=3.0)
        pick = lambda rows: (x[rows].astype(float), y[rows])
        return [pick(train[part.numpy()]) for part in parts], pick(test)

    return make


def _sklearn(name: str, classes: bool = True) -> Callable[[], Rows]:
    def load() -> Rows:
        from sklearn import datasets

        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        keep = x.std(0) > 0
        return x[:, keep], y.astype(np.int64 if classes else float)

    return load


def _statsmodels(name: str, target: str, above: float | None = None, drop: tuple[str, ...] = ()) -> Callable[[], Rows]:
    """A table of statsmodels: the target, or whether it is above a number; the rest are the inputs."""

    def load() -> Rows:
        import statsmodels.api as sm

        frame = getattr(sm.datasets, name).load_pandas().data.dropna()
        y = frame[target].to_numpy(float)
        x = frame.drop(columns=[target, *drop]).to_numpy(float)
        return x, y if above is None else (y > above).astype(np.int64)

    return load


REPORTED = {
    "clinics": Source(clinics),
    "breast_cancer": Source(split(_sklearn("breast_cancer"), 4), 32),
    "diabetes": Source(split(_sklearn("diabetes", False), 3)),
    "fair": Source(split(_statsmodels("fair", "affairs", 0.0), 5)),
    "spector": Source(split(_statsmodels("spector", "GRADE", 0.5), 3), 0),
}
OTHERS = {
    "tree": Source(noisy),
    "logit": Source(lambda seed: noisy(seed, 6, (100, 150, 250), "logit")),
    "sine": Source(lambda seed: noisy(seed, 8, (80, 120, 160), "sine")),
    "wine": Source(split(_sklearn("wine"), 3)),
    "iris": Source(split(_sklearn("iris"), 3)),
    "digits": Source(split(_sklearn("digits"), 5, 500), 32),
    "anes96": Source(split(_statsmodels("anes96", "vote", 0.5), 4)),
    "heart": Source(split(_statsmodels("heart", "censors", 0.5), 3), 0),
    "modechoice": Source(split(_statsmodels("modechoice", "choice", 0.5, ("individual", "mode")), 4)),
    "star98": Source(split(_statsmodels("star98", "NABOVE", 120.0, ("NBELOW",)), 4)),
    "statecrime": Source(split(_statsmodels("statecrime", "murder"), 3), 0),
    "randhie": Source(split(_statsmodels("randhie", "mdvis", 2.5), 5, 6000)),
}
"""The reported tables, and those for tuning: no table is in both, and no seed is used for both."""


def _targets(y: np.ndarray) -> Tensor:
    return torch.tensor(y) if y.dtype.kind == "i" else torch.tensor(y, dtype=torch.float32)
