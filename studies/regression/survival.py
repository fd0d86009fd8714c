"""Survival across sites against a Cox regression of the pooled table, on three textbook tables.

The oracle is Newton's method on the score and Hessian of statsmodels' `PHReg`, with Efron's ties. Errors are the
largest over the coefficients, in standard errors of the oracle. The tables are files of lifelines' `datasets`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import statsmodels.api as sm
from formulaic import model_matrix

from fedual.errors import InputError
from fedual.glm.fitting import simulate
from fedual.glm.settings import Settings

SITES, PIECES, SEEDS = (3, 4, 10, 20), (5, 10, 20, 50), (62, 63, 64)
ROUNDS = 4
EXACT = 1e-12
"""Newton's steps of the oracle end when no coefficient moves by more standard errors."""


@dataclass(frozen=True)
class Table:
    """A table of lifelines."""

    name: str
    time: str
    event: str
    terms: str
    rename: tuple[tuple[str, str], ...] = ()

    def read(self, folder: Path) -> pd.DataFrame:
        """Its rows without missing values."""
        path = folder / f"{self.name}.csv"
        if not path.exists():
            raise InputError(f"{path} is not there: name the folder lifelines/datasets of an installed lifelines.")
        frame = pd.read_csv(path).rename(columns=dict(self.rename))
        return frame.dropna(subset=[self.time, self.event, *self.terms.split(" + ")]).reset_index(drop=True)

    @property
    def formula(self) -> str:
        """What is fitted."""
        return f"Surv({self.time}, {self.event}) ~ {self.terms}"


TABLES = (
    Table("rossi", "week", "arrest", "fin + age + race + wexp + mar + paro + prio"),
    Table("lung", "time", "status", "age + sex + ecog + loss", (("ph.ecog", "ecog"), ("wt.loss", "loss"))),
    Table("gbsg2", "time", "cens", "horTh + age + menostat + tsize + tgrade + pnodes + progrec + estrec"),
)


def oracle(table: Table, frame: pd.DataFrame, strata: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and standard errors of the pooled Cox regression."""
    x = np.asarray(model_matrix(table.terms, frame), float)[:, 1:]
    x = (x - x.mean(0)) / (scale := x.std(0))
    event = (frame[table.event] == frame[table.event].max()).to_numpy(float)
    model = sm.PHReg(frame[table.time].to_numpy(float), x, status=event, strata=strata, ties="efron")
    beta, se, step = (np.zeros(x.shape[1]), np.ones(x.shape[1]), np.ones(x.shape[1]))
    while (np.abs(step) / se).max() > EXACT:
        inverse = np.linalg.inv(-model.hessian(beta))
        se, step = np.sqrt(np.diagonal(inverse)), inverse @ np.asarray(model.score(beta))
        beta = beta + step
    return beta / scale, se / scale


def measure(table: Table, folder: Path, seed: int) -> dict[str, Any]:
    """Errors of one table, split at random."""
    frame, rng = table.read(folder), np.random.default_rng(seed)
    stratified, common = {}, {}
    error = lambda fit, truth, se: float((np.abs(fit.coefficients.to_numpy() - truth) / se).max())
    for number in SITES:
        site = rng.integers(0, number, len(frame))
        sites = {f"site {k}": frame.iloc[np.flatnonzero(site == k)] for k in range(number)}
        fit = simulate(Settings(table.formula, prior="flat", max_rounds=ROUNDS, tol=1e-12), sites)
        stratified[str(number)] = error(fit, *oracle(table, frame, site))
    sites = {f"site {k}": frame.iloc[k::3] for k in range(3)}
    truth, se = oracle(table, frame, None)
    for pieces in PIECES:
        settings = Settings(table.formula, prior="flat", baseline="piecewise", pieces=pieces)
        fit = simulate(settings, sites)
        widths = float(np.abs(fit.table["se"].to_numpy() / se - 1).max())
        common[str(pieces)] = {"error": error(fit, truth, se), "se": widths}
    rows = {"table": table.name, "rows": len(frame), "rounds": ROUNDS, "seed": seed}
    return {**rows, "stratified": stratified, "pieces": common}
