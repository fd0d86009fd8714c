"""The tables whose regressions are compared with the fit to the pooled rows: simulated ones, and well-known ones.

Each is split into sites of uneven sizes. A table is a function of its name and a seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
from scipy import stats

SEEDS = (7043, 7044, 7045)
"""Of all splits and simulated tables; nothing was tuned on them."""
GAUSSIAN, WELL, PENALISED, HARD = "gaussian", "well-conditioned", "penalised", "hard"
"""Groups of tables: the targets hold for the first three."""

Rng = np.random.Generator


@dataclass(frozen=True)
class Table:
    """A regression and its sites.

    Args:
        name: In records and pages.
        group: Which targets it has.
        sites: The sites' rows.
        formula: Of the regression, whose columns are in all sites.
        family: As in `fedual.glm.Settings`, and so are `link` and `trials`.
        link: As there.
        trials: As there.
        penalised: If True, the posterior's mode under the prior N(0, 2.5/sd) is sought.
    """

    name: str
    group: str
    sites: dict[str, pd.DataFrame]
    formula: str
    family: str
    link: str | None = None
    trials: str | None = None
    penalised: bool = False

    @property
    def pooled(self) -> pd.DataFrame:
        """All rows."""
        return pd.concat(self.sites.values(), ignore_index=True)


def uneven(frame: pd.DataFrame, sites: int, rng: Rng, least: int, by: str | None = None) -> dict[str, pd.DataFrame]:
    """Split rows into sites of very different sizes, at random or in the order of a column; ties are at random."""
    spare = len(frame) - least * sites
    sizes = least + rng.multinomial(spare, rng.dirichlet(np.full(sites, 1.5)))
    rows = rng.permutation(len(frame))
    if by is not None:
        rows = rows[frame[by].to_numpy()[rows].argsort(kind="stable")]
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    return {f"site {k + 1}": frame.iloc[part].reset_index(drop=True) for k, part in enumerate(parts)}


SIMULATED = {
    "gaussian": ("gaussian", None, lambda rng, f: rng.normal(f, 0.7)),
    "logit": ("binomial", "logit", lambda rng, f: _event(rng, 1 / (1 + np.exp(-f)))),
    "probit": ("binomial", "probit", lambda rng, f: _event(rng, stats.norm.cdf(0.6 * f))),
    "cloglog": ("binomial", "cloglog", lambda rng, f: _event(rng, -np.expm1(-np.exp(0.8 * f - 0.5)))),
    "poisson": ("poisson", "log", lambda rng, f: rng.poisson(np.exp(0.6 * f + 0.7))),
    "negative binomial": ("negative-binomial", "log", lambda rng, f: _counts(rng, np.exp(0.6 * f + 0.7))),
    "gamma, log": ("gamma", "log", lambda rng, f: rng.gamma(2.0, np.exp(0.6 * f) / 2)),
    "gamma, inverse": ("gamma", "inverse", lambda rng, f: rng.gamma(2.0, 1 / (3 + 0.5 * np.clip(f, -4, 4)) / 2)),
}
"""Name → family, link and the response given the linear predictor."""


def simulated(name: str, sites: int, rng: Rng) -> Table:
    """Two numbers, a 0/1 column and a factor of three levels, whose distributions differ by site."""
    family, link, response = SIMULATED[name]
    n = 100 * sites
    shift = rng.normal(0, 0.5, (sites, 2))
    draft = pd.DataFrame({"site": np.sort(rng.choice(sites, n, p=rng.dirichlet(np.full(sites, 3.0))))})
    at = draft["site"].to_numpy()
    draft["age"] = 50 + 10 * (rng.normal(size=n) + shift[at, 0])
    draft["dose"] = rng.gamma(2.0, np.exp(shift[at, 1] / 2))
    draft["sex"] = rng.integers(0, 2, n).astype(float)
    draft["group"] = rng.choice(["a", "b", "c"], n, p=[0.5, 0.3, 0.2])
    f = -0.4 + 0.05 * (draft["age"] - 50) + 0.3 * (draft["dose"] - 2) + 0.5 * draft["sex"]
    f += 0.6 * (draft["group"] == "b") - 0.7 * (draft["group"] == "c")
    draft["y"] = response(rng, f.to_numpy()).astype(float)
    found = uneven(draft, sites, rng, least=20, by="site")
    group = GAUSSIAN if family == "gaussian" else WELL
    return Table(f"{name}, {sites} sites", group, found, "y ~ age + dose + sex + group", family, link)


def _event(rng: Rng, chance: np.ndarray) -> np.ndarray:
    return rng.random(len(chance)) < chance


def _counts(rng: Rng, mean: np.ndarray) -> np.ndarray:
    return rng.poisson(mean * rng.gamma(1.5, 1 / 1.5, len(mean)))


def _statsmodels(name: str) -> pd.DataFrame:
    import statsmodels.api as sm

    return getattr(sm.datasets, name).load_pandas().data.astype(float)


def _linear(columns: Sequence[str], response: str = "y") -> str:
    return f"{response} ~ {' + '.join(columns)}"


def fair(sites: int, by: str | None, rng: Rng) -> Table:
    """Extramarital affairs, 6366 rows: whether there was one."""
    frame = _statsmodels("fair")
    frame["y"] = (frame.pop("affairs") > 0).astype(float)
    how = f"sorted by {by}" if by else "random"
    formula = _linear([name for name in frame if name != "y"])
    return Table(f"fair, {how}, {sites} sites", WELL, uneven(frame, sites, rng, 30, by), formula, "binomial")


def one_class(rng: Rng) -> Table:
    """The same in the order of age, and of the response among rows of one age: some sites have a single class."""
    whole = fair(8, None, rng)
    frame = whole.pooled.sort_values(["age", "y"], ignore_index=True).assign(order=np.arange(6366.0))
    return replace(
        whole, name="fair, sorted by age and response, 8 sites", group=HARD, sites=uneven(frame, 8, rng, 30, "order")
    )


def randhie(family: str, sites: int, by: str | None, rng: Rng) -> Table:
    """The RAND health insurance experiment, 20,190 rows: visits of physicians."""
    frame = _statsmodels("randhie")
    how = f"sorted by {by}" if by else "random"
    name = f"randhie, {family.replace('-', ' ')}, {how}, {sites} sites"
    formula = _linear([each for each in frame if each != "mdvis"], "mdvis")
    return Table(name, WELL, uneven(frame, sites, rng, 60, by), formula, family)


def star98(rng: Rng) -> Table:
    """Schools of California, 303 rows: pupils above the national median, of all pupils tested."""
    frame = _statsmodels("star98")
    frame["n"] = frame["NABOVE"] + frame.pop("NBELOW")
    formula = _linear([name for name in frame if name not in ("NABOVE", "n")], "NABOVE")
    return Table("star98, 5 sites", WELL, uneven(frame, 5, rng, 30), formula, "binomial", trials="n")


def spector(rng: Rng) -> Table:
    """Grades of 32 students."""
    frame = _statsmodels("spector")
    return Table("spector, 4 sites of 8 rows", HARD, uneven(frame, 4, rng, 8), "GRADE ~ GPA + TUCE + PSI", "binomial")


def breast(columns: int, by: bool, rng: Rng) -> Table:
    """Tumours of the breast, 569 rows; 10 and 30 columns under the prior."""
    from sklearn.datasets import load_breast_cancer

    x, benign = load_breast_cancer(return_X_y=True)
    frame = _named(np.asarray(x)[:, :columns]).assign(y=1.0 - np.asarray(benign))
    names = list(frame.columns[:-1])
    how, group = "sorted" if by else "random", PENALISED if columns == 30 else HARD
    name = f"breast cancer, {columns} columns, {how}, 5 sites"
    found = uneven(frame, 5, rng, 30, names[0] if by else None)
    return Table(name, group, found, _linear(names), "binomial", penalised=columns > 6)


def wine(rng: Rng) -> Table:
    """178 wines: whether they are of the first of three sorts, which the columns tell without an error."""
    from sklearn.datasets import load_wine

    x, sort = load_wine(return_X_y=True)
    frame = _named(np.asarray(x)).assign(y=(np.asarray(sort) == 0) * 1.0)
    formula = _linear(list(frame.columns[:-1]))
    return Table("wine, 4 sites", PENALISED, uneven(frame, 4, rng, 20), formula, "binomial", penalised=True)


def tiny(rng: Rng) -> Table:
    """46 sites of 3 to 10 rows, in the order of the response."""
    sizes = rng.integers(3, 11, 46)
    frame = _columns(int(sizes.sum()), 3, rng)
    frame["y"] = _event(rng, _chance(frame, [0.8, -0.5, 0.3], 0.2)).astype(float)
    frame = frame.sort_values("y", ignore_index=True)
    parts = np.split(np.arange(len(frame)), np.cumsum(sizes)[:-1])
    found = {f"site {k + 1}": frame.iloc[part].reset_index(drop=True) for k, part in enumerate(parts)}
    return Table("46 sites of 3 to 10 rows", HARD, found, "y ~ x0 + x1 + x2", "binomial")


def rare_levels(rng: Rng) -> Table:
    """Two 0/1 columns with 0.3 % ones."""
    frame = _columns(12_000, 3, rng)
    frame["r0"], frame["r1"] = (_event(rng, np.full(len(frame), 0.003)).astype(float) for _ in range(2))
    chance = _chance(frame, [0.5, -0.5, 0.3, 1.0, -1.0], -0.5)
    found = uneven(frame.assign(y=_event(rng, chance).astype(float)), 20, rng, 60)
    return Table("rare levels, 20 sites", HARD, found, "y ~ x0 + x1 + x2 + r0 + r1", "binomial")


def rare_outcome(rng: Rng) -> Table:
    """An outcome of about 1 %."""
    frame = _columns(10_000, 4, rng)
    frame["y"] = _event(rng, _chance(frame, [0.7, -0.5, 0.4, 0.2], -5.1)).astype(float)
    found = uneven(frame, 10, rng, 200)
    return Table("outcome of 1 %, 10 sites", HARD, found, "y ~ x0 + x1 + x2 + x3", "binomial")


def collinear(rng: Rng) -> Table:
    """Two columns with a correlation of 0.9999."""
    frame = _columns(2000, 3, rng)
    frame["x1"] = 0.9999 * frame["x0"] + (1 - 0.9999**2) ** 0.5 * frame["x1"]
    frame["y"] = _event(rng, _chance(frame, [0.6, 0.3, -0.5], 0.1)).astype(float)
    return Table("collinear, r = 0.9999, 8 sites", HARD, uneven(frame, 8, rng, 60), "y ~ x0 + x1 + x2", "binomial")


def steep(rng: Rng) -> Table:
    """Coefficients up to 6, so that most responses are nearly certain."""
    frame = _columns(2000, 5, rng)
    frame["y"] = _event(rng, _chance(frame, [6.0, -4.0, 2.0, 1.0, -1.0], 1.0)).astype(float)
    found = uneven(frame, 8, rng, 60)
    return Table("logistic, coefficients up to 6, 8 sites", HARD, found, "y ~ x0 + x1 + x2 + x3 + x4", "binomial")


def wide_counts(rng: Rng) -> Table:
    """Counts from 0 to many thousands."""
    frame = _columns(2000, 3, rng)
    frame["y"] = rng.poisson(np.exp(frame.to_numpy() @ np.array([1.8, -1.2, 0.6]) + 1.0)).astype(float)
    found = uneven(frame, 10, rng, 60)
    return Table("poisson, wide range, 10 sites", HARD, found, "y ~ x0 + x1 + x2", "poisson")


def _columns(n: int, p: int, rng: Rng) -> pd.DataFrame:
    return _named(rng.normal(size=(n, p)))


def _named(x: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({f"x{j}": x[:, j] for j in range(x.shape[1])})


def _chance(frame: pd.DataFrame, slopes: Sequence[float], intercept: float) -> np.ndarray:
    return 1 / (1 + np.exp(-(frame.to_numpy() @ np.array(slopes) + intercept)))


MAKERS: list[Callable[[Rng], Table]] = [
    *(partial(simulated, name, sites) for name in SIMULATED for sites in (5, 10, 50)),
    partial(fair, 8, "age"),
    partial(fair, 50, None),
    partial(randhie, "poisson", 10, None),
    partial(randhie, "poisson", 50, "lpi"),
    partial(randhie, "negative-binomial", 10, None),
    star98,
    partial(breast, 30, False),
    partial(breast, 30, True),
    wine,
    partial(breast, 6, False),
    partial(breast, 10, False),
    spector,
    tiny,
    rare_levels,
    rare_outcome,
    collinear,
    steep,
    wide_counts,
    one_class,
]
"""What makes each table, in the order of the page."""


def tables(seed: int) -> list[Table]:
    """All tables."""
    return [maker(np.random.default_rng([seed, number])) for number, maker in enumerate(MAKERS)]
