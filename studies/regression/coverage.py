"""How often the 95 % intervals of a small federated regression hold the truth.

Four sites of uneven sizes, five coefficients. Maximum likelihood counts where it exists, which a linear program tells,
apart from fedual.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize

from fedual.errors import FedualError
from fedual.glm import fit

SEED, REPLICATIONS = 90210, 400
TRUTH = np.array([0.3, 1.2, -0.8, 0.5, 0.0])
"""The intercept, and the slopes of standard normal columns."""
SHARES = (0.45, 0.27, 0.18, 0.10)
"""Of the rows, at each site."""
FORMULA = "y ~ x1 + x2 + x3 + x4"
COLUMNS = {"ml": ("lower", "upper"), "posterior": ("posterior_lower", "posterior_upper")}


@dataclass(frozen=True)
class Setting:
    """What is drawn and fitted."""

    family: str
    rows: int
    scale: float = 1.0  # of the true coefficients
    target: bool = True

    @property
    def name(self) -> str:
        """In records and pages."""
        return f"{self.family}, n = {self.rows}" + ("" if self.target else f", coefficients × {self.scale:g}")


SETTINGS = [
    Setting("binomial", 60),
    Setting("binomial", 200),
    Setting("poisson", 60, 0.5),
    Setting("binomial", 60, 2.5, target=False),
]
"""The last one is often separated, and has no target."""


def draw(setting: Setting, rng: np.random.Generator) -> pd.DataFrame:
    """The rows of all sites."""
    x = rng.normal(size=(setting.rows, len(TRUTH) - 1))
    f = setting.scale * (TRUTH[0] + x @ TRUTH[1:])
    y = rng.random(len(f)) < 1 / (1 + np.exp(-f)) if setting.family == "binomial" else rng.poisson(np.exp(f))
    return pd.DataFrame(x, columns=[f"x{j + 1}" for j in range(x.shape[1])]).assign(y=y.astype(float))


def separated(frame: pd.DataFrame) -> bool:
    """True if some β ≠ 0 has (2y − 1) xᵀβ ≥ 0 in all rows, so that a logistic regression has no maximum."""
    x = np.column_stack([np.ones(len(frame)), frame.drop(columns="y")])
    signed = x * (2 * frame["y"].to_numpy() - 1)[:, None]
    done = optimize.linprog(-signed.sum(0), A_ub=-signed, b_ub=np.zeros(len(x)), bounds=[(-1, 1)] * x.shape[1])
    return -done.fun > 1e-7


def measure(setting: Setting, seed: int = SEED, replications: int = REPLICATIONS) -> dict[str, Any]:
    """Coverage of the slopes by the table's intervals and by those of an expansion at the posterior's own mode."""
    truth = setting.scale * TRUTH[1:]
    hits: dict[str, list[np.ndarray]] = {"ml": [], "posterior": [], "laplace": []}
    found = {"separated": 0, "told": 0, "wrongly told": 0, "refused": 0, "not converged": 0, "rounds": [0] * 9}
    for number in range(replications):
        frame = draw(setting, np.random.default_rng([seed, SETTINGS.index(setting), number]))
        cuts = np.round(np.cumsum(SHARES)[:-1] * len(frame)).astype(int)
        sites = {f"site {k + 1}": frame.iloc[rows] for k, rows in enumerate(np.split(np.arange(len(frame)), cuts))}
        exists = setting.family != "binomial" or not separated(frame)
        found["separated"] += not exists
        try:
            done = fit(FORMULA, sites, setting.family)
            mode = fit(FORMULA, sites, setting.family, estimate="posterior")
        except FedualError:
            found["refused"] += 1
            continue
        found["told"] += not exists and done.separation is not None
        found["wrongly told"] += exists and done.separation is not None
        found["not converged"] += not done.convergence.converged
        found["rounds"][done.convergence.rounds] += 1
        slopes, own = done.table.iloc[1:], mode.table.iloc[1:]
        held = lambda table, kind: np.array([table[name] for name in COLUMNS[kind]])
        inside = lambda bounds: (bounds[0] <= truth) & (truth <= bounds[1])
        if exists and done.ml is not None:
            hits["ml"].append(inside(held(slopes, "ml")))
        hits["posterior"].append(inside(held(slopes, "posterior")))
        hits["laplace"].append(inside(held(own, "posterior")))
    rates = {kind: {"number": len(some), "slopes": np.mean(some, 0).tolist()} for kind, some in hits.items()}
    return {
        "setting": setting.name, "target": setting.target, "replications": replications, **found, "coverage": rates,
        "seed": seed,
    }  # fmt: skip
