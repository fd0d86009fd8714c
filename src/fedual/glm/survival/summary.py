"""What the summary shows of a survival model besides its coefficients."""

import math
from typing import TYPE_CHECKING

import numpy as np

from fedual.glm.layout import Block, Grid, number, p_value, p_words
from fedual.glm.survival.figures import Survival, Test, piece_names
from fedual.glm.survival.proportionality import chi2_test

if TYPE_CHECKING:
    from fedual.glm.figures import Figures

TIES = {"efron": "tied times as Efron", "breslow": "tied times as Breslow"}
FEW_EVENTS = 10
"""Events for each coefficient below which estimates are said to be rough (Peduzzi and others 1995)."""


def model(survival: Survival) -> str:
    """The model in a line."""
    if survival.baseline == "piecewise":
        return f"proportional hazards, common baseline constant in {len(survival.cuts) + 1} pieces of time"
    strata = " and ".join(["site", *survival.strata])
    return f"Cox regression stratified by {strata}, {TIES[survival.ties]}"


def wald(fit: "Figures") -> Test | None:
    """The Wald test of all coefficients; with robust errors, if these are in use."""
    if fit.ml is None:
        return None
    beta, covariance = fit.ml.coefficients[fit.kept], fit.ml.covariance[np.ix_(fit.kept, fit.kept)]
    if np.linalg.matrix_rank(covariance, hermitian=True) < len(beta):  # of few sites, by which errors are clustered
        return None
    return chi2_test(float(beta @ np.linalg.solve(covariance, beta)), len(beta))


def figures(fit: "Figures", survival: Survival) -> list[tuple[str, str]]:
    """The figures of fit."""
    facts = [("Log-likelihood", f"{number(fit.loglik)} (null {number(fit.null_loglik)})")]
    if fit.ml is not None:
        words = lambda test: f"χ² = {number(test.chi2)} on {test.df} df, {p_words(test.p)}"
        tests = {
            "Likelihood ratio": chi2_test(2 * (fit.loglik - fit.null_loglik), fit.df_model),
            "Wald": wald(fit),
            "Score": survival.null_score,
        }
        facts += [(name, words(test)) for name, test in tests.items() if test is not None]
        facts.append(("AIC, BIC", f"{number(fit.aic)}, {number(fit.bic)}"))
    if not math.isnan(survival.c):
        facts.append(("Concordance", f"{survival.c:.4f}, of pairs within sites and strata"))
    return facts


def blocks(fit: "Figures", survival: Survival) -> list[Block]:
    """The test of proportional hazards, and the pieces of a common baseline."""
    found: list[Block] = []
    if survival.trends:
        time = {"identity": "time", "log": "log(time)"}[survival.transform]
        rows = [
            [name, number(test.chi2), str(test.df), p_value(test.p)]
            for name, test in zip((*fit.terms, "all together"), survival.trends, strict=True)
        ]
        title = f"Proportional hazards: score tests of effects that change with {time}"
        found.append(Grid(title, ["", "χ²", "df", "p"], rows))
    if survival.log_hazards is not None and survival.events_by_piece is not None:
        rates = np.exp(survival.log_hazards)
        rows = [
            [name, f"{rate:.4g}", number(events)]
            for name, rate, events in zip(piece_names(survival.cuts), rates, survival.events_by_piece, strict=True)
        ]
        found.append(Grid("Baseline hazard, at the means of all columns", ["time", "hazard", "events"], rows))
    return found


def notes(fit: "Figures", survival: Survival) -> list[str]:
    """What to beware of."""
    found = []
    if silent := [site.name for site in fit.sites if not site.events]:
        part = "the estimates" if survival.baseline == "stratified" else "the times at risk alone"
        verb = "has no part in" if survival.baseline == "stratified" else "counts by"
        found.append(f"No event at {', '.join(silent)}, which {verb} {part}.")
    if survival.events < FEW_EVENTS * len(fit.terms):
        found.append(f"{survival.events} events for {len(fit.terms)} coefficients are few: intervals are rough.")
    return found
