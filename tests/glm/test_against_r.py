"""`fedual.glm.fit` over sites finds what R's `glm()` finds on the pooled table; oracles/pooled.R writes the figures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedual import glm

ORACLES = Path(__file__).parent / "oracles"
R = json.loads((ORACLES / "pooled.json").read_text())
TABLE = pd.read_csv(ORACLES / "table.csv")
NEW = TABLE.dropna().head()
FIGURES = ("dispersion", "deviance", "null_deviance", "loglik", "aic", "bic")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gaussian": ("pressure ~ age + sex + stage", {}),
    "gaussian_weights": ("pressure ~ age + dose", {"weights": "weight"}),
    "gaussian_log": ("pressure ~ age + sex", {"link": "log"}),
    "gaussian_missing": ("pressure ~ age + height", {}),
    "logit_interaction": ("sick ~ age * sex + stage", {"family": "binomial"}),
    "logit_classes": ("sex ~ age + dose", {"family": "binomial"}),
    "logit_trials": ("successes ~ age + dose + sex", {"family": "binomial", "trials": "trials"}),
    "logit_weights": ("sick ~ age + dose", {"family": "binomial", "weights": "weight"}),
    "logit_number_factor": ("sick ~ age + grade", {"family": "binomial", "levels": {"grade": [2, 4, 10]}}),
    "logit_base": ("sick ~ age + stage", {"family": "binomial", "levels": {"stage": ["b", "a", "c"]}}),
    "logit_no_intercept": ("sick ~ 0 + stage + age", {"family": "binomial"}),
    "logit_nested": ("sick ~ sex / stage + dose", {"family": "binomial"}),
    "probit": ("sick ~ age + dose + sex", {"family": "binomial", "link": "probit"}),
    "cloglog": ("sick ~ age + dose + sex", {"family": "binomial", "link": "cloglog"}),
    "poisson_offset": ("visits ~ age + dose + sex", {"family": "poisson", "offset": "log(time)"}),
    "poisson_weights": ("visits ~ age + log(time)", {"family": "poisson", "weights": "weight"}),
    "poisson_sqrt": ("visits ~ age + I(dose**2)", {"family": "poisson", "link": "sqrt"}),
    "gamma_log": ("cost ~ age + dose + sex", {"family": "gamma", "link": "log"}),
    "gamma_inverse": ("cost ~ age + dose", {"family": "gamma", "link": "inverse"}),
    "negative_binomial": ("falls ~ age + dose + sex", {"family": "negative-binomial"}),
    "splines": ("sick ~ bs(age, knots=[45, 55], lower_bound=15, upper_bound=85) + sex", {"family": "binomial"}),
    "polynomial": ("sick ~ poly(age, 2) + scale(dose)", {"family": "binomial"}),
}


def fitted(formula: str, **options: Any) -> glm.Fit:
    sites = {str(name): rows for name, rows in TABLE.groupby("site")}
    return glm.fit(formula, sites, prior="flat", **options)


def test_there_is_a_case_for_each_fit_of_r():
    assert CASES.keys() == R["fits"].keys()


@pytest.mark.parametrize("name", CASES)
def test_the_figures_of_glm(name: str):
    formula, options = CASES[name]
    fit, r = fitted(formula, **options), R["fits"][name]
    se = np.sqrt(np.diagonal(r["covariance"]))
    assert (np.abs(fit.coefficients.to_numpy() - r["coefficients"]) / se).max() < 1e-5
    np.testing.assert_allclose(fit.predict(NEW)["fit"], r["predicted"], rtol=1e-6)
    assert (fit.n, fit.df_resid) == (r["n"], r["df_resid"])
    if name == "negative_binomial":
        return  # with α estimated, in the next test
    assert (np.abs(fit.covariance.to_numpy() - r["covariance"]) / np.outer(se, se)).max() < 1e-5
    for figure in FIGURES:
        assert getattr(fit, figure) == pytest.approx(r[figure], rel=1e-7), figure


def test_a_negative_binomial_fit():
    """glm.nb's standard errors take θ for known; fedual's are of β and α jointly, with the observed information."""
    formula, options = CASES["negative_binomial"]
    fit, r = fitted(formula, **options), R["fits"]["negative_binomial"]
    assert fit.alpha is not None
    assert fit.alpha_se is not None
    assert 1 / fit.alpha == pytest.approx(r["theta"], rel=1e-6)
    assert fit.alpha_se / fit.alpha**2 == pytest.approx(r["joint_se"][-1], rel=1e-3)
    np.testing.assert_allclose(fit.table["se"], r["joint_se"][:-1], rtol=1e-4)
    np.testing.assert_allclose(fit.table["se"], np.sqrt(np.diagonal(r["covariance"])), rtol=0.05)
    for figure in ("loglik", "aic", "bic"):
        assert getattr(fit, figure) == pytest.approx(r[figure], rel=1e-9), figure
    for figure in ("deviance", "null_deviance"):  # which move with α to first order
        assert getattr(fit, figure) == pytest.approx(r[figure], rel=1e-4), figure


def test_a_likelihood_ratio_test():
    smaller = fitted("sick ~ age", family="binomial")
    found, r = glm.anova(smaller, fitted("sick ~ age + dose + stage", family="binomial")), R["anova"]["likelihood"]
    assert (found.df, found.statistic, found.p) == pytest.approx((r["df"], r["statistic"], r["p"]), rel=1e-8)


def test_a_line_is_within_a_spline():
    curve = "bs(age, knots=[45, 55], lower_bound=15, upper_bound=85)"
    found = glm.anova(fitted("sick ~ age", family="binomial"), fitted(f"sick ~ {curve}", family="binomial"))
    r = R["anova"]["spline"]
    assert (found.df, found.statistic, found.p) == pytest.approx((r["df"], r["statistic"], r["p"]), rel=1e-7)


def test_an_f_test():
    smaller = fitted("cost ~ age", family="gamma")
    found, r = glm.anova(smaller, fitted("cost ~ age + dose + stage", family="gamma")), R["anova"]["f"]
    assert (found.df, found.statistic, found.p) == pytest.approx((r["df"], r["statistic"], r["p"]), rel=1e-6)


@pytest.mark.parametrize("kind", ["link", "mean"])
def test_predictions_of_a_classification(kind: Any):
    found, r = fitted("sick ~ age + dose + stage", family="binomial").predict(NEW, kind=kind), R["predict"][kind]
    np.testing.assert_allclose(found["fit"], r["fit"], rtol=1e-7)
    np.testing.assert_allclose(found["se"], r["se"], rtol=1e-6)


@pytest.mark.parametrize(("kind", "interval"), [("mean", "confidence"), ("observation", "prediction")])
def test_intervals_of_a_linear_model(kind: Any, interval: str):
    found = fitted("pressure ~ age + sex").predict(NEW, level=0.9, kind=kind)
    np.testing.assert_allclose(found[["fit", "lower", "upper"]], R["predict"][interval], rtol=1e-9)
