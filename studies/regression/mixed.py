"""How often the 95 % intervals of a mixed model hold the truth, at few sites.

The slope of z, which is one number a site, and the intercept are as uncertain as the sites are few; x varies within
them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedual.errors import FedualError
from fedual.glm import fit

SEED, REPLICATIONS = 2901, 150
TRUTH = {"Intercept": -0.5, "x": 0.6, "z": 0.3}
FORMULA = "y ~ x + z + (1 | site)"
ROWS = 60
"""Of each site, at least; at most nearly twice as many."""
LEVEL = 0.95
TARGET = (0.92, 0.98)
"""Coverage of the site-level slope by the default intervals, at four and at ten sites."""


@dataclass(frozen=True)
class Setting:
    """What is drawn and fitted."""

    family: str
    sites: int
    sigma: float

    @property
    def name(self) -> str:
        """In records and pages."""
        return f"{self.family}, K = {self.sites}, σ = {self.sigma:g}"


SETTINGS = [Setting(family, sites, 0.5) for family in ("binomial", "gaussian") for sites in (4, 10)]


def draw(setting: Setting, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    """The sites' tables."""
    found = {}
    for k in range(setting.sites):
        n = int(rng.integers(ROWS, 2 * ROWS))
        x, z, own = rng.normal(size=n), rng.normal(), setting.sigma * rng.normal()
        f = TRUTH["Intercept"] + TRUTH["x"] * x + TRUTH["z"] * z + own
        classes = lambda f=f, n=n: (rng.random(n) < 1 / (1 + np.exp(-f))).astype(float)
        y = classes() if setting.family == "binomial" else f + rng.normal(size=n)
        found[f"site {k + 1}"] = pd.DataFrame({"y": y, "x": x, "z": z})
    return found


def measure(setting: Setting, seed: int = SEED, replications: int = REPLICATIONS) -> dict[str, Any]:
    """Coverage by the default intervals, and by those of (restricted) maximum likelihood."""
    truth = np.array(list(TRUTH.values()))
    hits: dict[str, list[np.ndarray]] = {"default": [], "ml": []}
    failed, zero, rounds = 0, 0, list[int]()
    for number in range(replications):
        rng = np.random.default_rng([seed, SETTINGS.index(setting), number])
        try:
            done = fit(FORMULA, draw(setting, rng), setting.family)
        except FedualError:
            failed += 1
            continue
        assert done.components is not None
        zero += bool(done.components.sd[0] == 0)
        rounds.append(done.convergence.rounds)
        for kind, bounds in (("default", done.confint(LEVEL)), ("ml", done.confint(LEVEL, use="ml"))):
            hits[kind].append((bounds["lower"].to_numpy() <= truth) & (truth <= bounds["upper"].to_numpy()))
    rates = {kind: dict(zip(TRUTH, np.mean(some, 0).tolist(), strict=True)) for kind, some in hits.items()}
    return {
        "setting": setting.name, "replications": replications, "failed": failed, "sigma zero": zero,
        "median rounds": float(np.median(rounds)), "most rounds": max(rounds), "coverage": rates, "seed": seed,
    }  # fmt: skip
