"""`Surv(…)` finds what R's `coxph(strata(site))` finds on the pooled table; oracles/survival.R writes the figures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedual import glm
from fedual.glm.fitting import simulate
from fedual.glm.settings import Settings
from fedual.glm.survival import data

ORACLES = Path(__file__).parent / "oracles"
R = json.loads((ORACLES / "survival.json").read_text())
TABLE = pd.read_csv(ORACLES / "survival.csv")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Surv(time, status) ~ age + dose + sex + stage", {}),
    "breslow": ("Surv(time, status) ~ age + dose + sex + stage", {"ties": "breslow"}),
    "strata": ("Surv(time, status) ~ age + dose + stage + strata(sex)", {}),
    "truncated": ("Surv(entry, time, status) ~ age + dose + stage", {}),
    "truncated_breslow": ("Surv(entry, time, status) ~ age + dose + stage", {"ties": "breslow"}),
    "weights": ("Surv(time, status) ~ age + dose", {"weights": "weight"}),
    "weights_breslow": ("Surv(time, status) ~ age + dose", {"weights": "weight", "ties": "breslow"}),
    "offset": ("Surv(time, status) ~ age + dose", {"offset": "shift"}),
    "missing": ("Surv(time, status) ~ age + height", {}),
    "code": ("Surv(time, code) ~ age * sex", {}),
    "tutorial": ("Surv(week, arrest) ~ fin + age + wexp + prio", {}),
    "rossi": ("Surv(week, arrest) ~ fin + age + race + wexp + mar + paro + prio", {}),
}


def sites(name: str = "") -> dict[str, pd.DataFrame]:
    table = TABLE
    if name in ("rossi", "tutorial"):
        table = data.rossi()
        table["site"] = np.arange(len(table)) % 4 if name == "rossi" else np.repeat([0, 1, 2], [190, 140, 102])
    return {str(site): rows.reset_index(drop=True) for site, rows in table.groupby("site")}


def fitted(formula: str, tables: dict[str, pd.DataFrame], **options: Any) -> glm.Fit:
    return simulate(Settings(formula, prior="flat", **options), tables)


def test_there_is_a_case_for_each_fit_of_r():
    assert CASES.keys() == R["fits"].keys()


@pytest.mark.parametrize("name", CASES)
def test_the_figures_of_coxph(name: str):
    formula, options = CASES[name]
    fit, r = fitted(formula, sites(name), tol=1e-9, **options), R["fits"][name]
    survival, se = fit.survival, np.sqrt(np.diagonal(r["covariance"]))
    assert survival is not None
    outer = np.outer(se, se)
    assert (np.abs(fit.coefficients.to_numpy() - r["coefficients"]) / se).max() < 1e-8
    assert (np.abs(fit.covariance.to_numpy() - r["covariance"]) / outer).max() < 1e-8
    assert (fit.n, survival.events) == (r["n"], r["events"])
    assert (np.abs(fit.robust().covariance.to_numpy() - r["hc0"]) / outer).max() < 1e-8
    for figure in ("loglik", "null_loglik", "aic", "bic"):
        assert getattr(fit, figure) == pytest.approx(r[figure], rel=1e-10), figure
    assert survival.null_score.chi2 == pytest.approx(r["score"], rel=1e-8)
    assert survival.c == pytest.approx(r["concordance"], abs=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transform", ["identity", "log"])
def test_the_test_of_proportional_hazards(name: str, transform: str):
    """cox.zph(fit, transform, terms = FALSE) of survival 3.5."""
    formula, options = CASES[name]
    fit, r = fitted(formula, sites(name), transform=transform, tol=1e-9, **options), R["fits"][name][transform]
    assert fit.survival is not None
    np.testing.assert_allclose([(test.chi2, test.df, test.p) for test in fit.survival.trends], r, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_four_rounds_are_enough(name: str):
    formula, options = CASES[name]
    fit, r = fitted(formula, sites(name), max_rounds=4, tol=1e-12, **options), R["fits"][name]
    assert fit.convergence.rounds == 4
    se = np.sqrt(np.diagonal(r["covariance"]))
    assert (np.abs(fit.coefficients.to_numpy() - r["coefficients"]) / se).max() < 1e-6


def test_errors_clustered_by_site():
    """As R's `cluster(site)`, but for the factor that GLMs have, too."""
    fit = fitted("Surv(time, status) ~ age + dose", sites(), tol=1e-9).robust("cluster")
    factor = 3 / 2 * (fit.n - 1) / (fit.n - 2)
    np.testing.assert_allclose(fit.covariance, factor * np.array(R["cluster"]), rtol=1e-5)


NEW = pd.DataFrame({"age": [50, 60, 70], "dose": [0.5, 2, 4]})
CURVES = {
    "efron": ("Surv(time, status) ~ age + dose", {}),
    "breslow": ("Surv(time, status) ~ age + dose", {"ties": "breslow"}),
    "truncated": ("Surv(entry, time, status) ~ age + dose", {}),
}


@pytest.mark.parametrize("name", CURVES)
def test_survival_with_a_sites_own_baseline(name: str):
    """survfit(fit, newdata, conf.type = "log"), in a stratum."""
    formula, options = CURVES[name]
    fit, r = fitted(formula, sites(), tol=1e-9, **options), R["curves"][name]
    found = fit.curves(NEW, fit.baseline(sites()["north"]), times=[5, 15, 30])
    for figure, shown in (("survival", "survival"), ("se", "se"), ("lower", "lower"), ("upper", "upper")):
        np.testing.assert_allclose(getattr(found, figure).ravel(), r[shown], rtol=1e-7)


def test_hazard_ratios_of_new_rows():
    """predict(fit, type = "lp") of two rows differ as these logarithms do; R's own reference differs by stratum."""
    fit, r = fitted("Surv(time, status) ~ age + dose", sites(), tol=1e-9), R["curves"]["efron"]
    link = fit.predict(NEW, kind="link")
    np.testing.assert_allclose(np.diff(link["fit"]), np.diff(r["lp"]), rtol=1e-8)
    np.testing.assert_allclose(fit.predict(NEW)[["fit", "lower", "upper"]], np.exp(link[["fit", "lower", "upper"]]))
    means = TABLE[["age", "dose"]].mean().to_frame().T
    np.testing.assert_allclose(fit.predict(means)["fit"], 1.0, rtol=1e-12)
