"""Tables of sites that differ, for mixed models; `python tests/glm/mixed_tables.py FOLDER` writes them for R."""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd


class Setting(NamedTuple):
    """What is drawn: `sigma` is the sd of the sites' intercepts, `slope` that of their slopes of x."""

    family: str
    sites: int
    sigma: float
    slope: float = 0.0
    rows: int = 40

    @property
    def name(self) -> str:
        return f"{self.family}-{self.sites}-{self.sigma:g}" + (f"-{self.slope:g}" if self.slope else "")


EIGHTEEN = [
    Setting(family, sites, sigma)
    for family in ("binomial", "poisson")
    for sites in (4, 10, 50)
    for sigma in (0.0, 0.3, 1.0)
]
LINEAR = [Setting("gaussian", 4, 0.5), Setting("gaussian", 12, 1.0), Setting("gaussian", 8, 0.0)]
SLOPES = [Setting("binomial", 40, 0.7, 0.5, 60), Setting("poisson", 30, 0.5, 0.3)]
LINEAR_SLOPES = [Setting("gaussian", 15, 0.7, 0.5)]
ALL = [*EIGHTEEN, *LINEAR, *SLOPES, *LINEAR_SLOPES]


def draw(setting: Setting) -> dict[str, pd.DataFrame]:
    """Sites of 40 to 79 rows, a covariate x within them, and z, which is one number a site."""
    found = {}
    family = ("binomial", "poisson", "gaussian").index(setting.family)
    for k in range(setting.sites):
        rng = np.random.default_rng(
            [29, family, setting.sites, round(10 * setting.sigma), round(10 * setting.slope), k]
        )
        n = setting.rows + int(rng.integers(0, setting.rows))
        x, z = rng.normal(size=n).round(4), round(rng.normal(), 3)
        own = setting.sigma * rng.normal() + setting.slope * rng.normal() * x
        f = -0.5 + 0.6 * x + 0.3 * z + own
        if setting.family == "binomial":
            y = (rng.random(n) < 1 / (1 + np.exp(-f))).astype(float)
        else:
            y = (
                rng.poisson(np.exp(f)).astype(float)
                if setting.family == "poisson"
                else (f + rng.normal(size=n)).round(4)
            )
        found[f"site {k:02d}"] = pd.DataFrame({"y": y, "x": x, "z": z, "w": rng.integers(1, 4, n)})
    return found


def pooled(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """All rows, with a column `site`."""
    return pd.concat([table.assign(site=name) for name, table in tables.items()], ignore_index=True)


def digest(tables: dict[str, pd.DataFrame]) -> float:
    """A number that other tables would not have."""
    table = pooled(tables)
    return float((table["y"] * np.arange(1, len(table) + 1)).sum() + table["x"].sum())


if __name__ == "__main__":
    for each in ALL:
        pooled(draw(each)).to_csv(Path(sys.argv[1]) / f"{each.name}.csv", index=False)
