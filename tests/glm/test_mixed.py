"""Mixed models over sites find what R's lme4 finds on the pooled table; oracles/mixed.R writes the figures."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import statsmodels.formula.api as smf
import torch
from mixed_tables import EIGHTEEN, LINEAR, LINEAR_SLOPES, SLOPES, Setting, digest, draw, pooled

from fedual import glm
from fedual.glm.fitting import asking, simulate
from fedual.glm.mixed.estimation import MixedEstimation
from fedual.glm.mixed.rounds import MixedRounds
from fedual.glm.settings import Settings
from fedual.glm.site import Site

R: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "oracles" / "mixed.json").read_text())
FEW = [setting for setting in EIGHTEEN if setting.sites < 50]
names = lambda setting: setting.name


@lru_cache
def fitted(setting: Setting, formula: str = "y ~ x + z + (1 | site)", **options: Any) -> glm.Fit:
    return simulate(Settings(formula, setting.family, tol=1e-7, **options), draw(setting))


def agrees(fit: glm.Fit, r: dict[str, Any], beta: float, sigma: float, se: float) -> None:
    assert fit.ml is not None
    assert fit.components is not None
    assert (np.abs(fit.ml.coefficients - r["estimate"]) / r["se"]).max() < beta
    np.testing.assert_allclose(fit.ml.se, r["se"], rtol=se)
    np.testing.assert_allclose(fit.components.sd[0], np.sqrt(r["covariance"][0]), atol=sigma)


def test_the_tables_are_those_that_r_had():
    for setting in (*EIGHTEEN, *LINEAR, *LINEAR_SLOPES, *SLOPES):
        assert digest(draw(setting)) == pytest.approx(R[f"{setting.name} ml"]["digest"], rel=1e-12)


@pytest.mark.parametrize("setting", FEW, ids=names)
def test_glmer_with_25_nodes(setting: Setting):
    agrees(fitted(setting), R[f"{setting.name} ml"], 1e-5, 1e-6, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [setting for setting in EIGHTEEN if setting not in FEW], ids=names)
def test_glmer_at_many_sites(setting: Setting):
    agrees(fitted(setting), R[f"{setting.name} ml"], 1e-5, 1e-6, 1e-5)


@pytest.mark.parametrize("setting", FEW[::4], ids=names)
def test_the_likelihood_ratio_of_two_fits_of_glmer(setting: Setting):
    """Not the log-likelihoods themselves: glmer's leaves out the saturated constant of counts."""
    small, large = fitted(setting, "y ~ x + (1 | site)"), fitted(setting)
    found = glm.anova(small, large)
    expected = 2 * (R[f"{setting.name} ml"]["loglik"] - R[f"{setting.name} small"]["loglik"])
    assert (found.df, found.statistic) == (1, pytest.approx(expected, abs=1e-8))


@pytest.mark.parametrize(
    ("kind", "options"), [("reml", {}), ("ml", {"estimate": "ml"}), ("weighted", {"weights": "w"})]
)
@pytest.mark.parametrize("setting", LINEAR, ids=names)
def test_lmer_in_one_round(setting: Setting, kind: str, options: dict[str, Any]):
    fit, r = fitted(setting, **options), R[f"{setting.name} {kind}"]
    agrees(fit, r, 1e-6, 1e-6, 1e-6)
    assert fit.convergence.rounds == 1
    assert fit.loglik == pytest.approx(r["loglik"], rel=1e-10)
    assert fit.dispersion == pytest.approx(r["sigma"] ** 2, rel=1e-6)


@pytest.mark.parametrize(("kind", "options"), [("reml", {}), ("ml", {"estimate": "ml"})])
def test_lmer_with_random_slopes(kind: str, options: dict[str, Any]):
    setting = LINEAR_SLOPES[0]
    fit, r = fitted(setting, "y ~ x + z + (1 + x | site)", **options), R[f"{setting.name} {kind}"]
    agrees(fit, r, 1e-6, 1e-6, 1e-6)
    assert fit.components is not None
    np.testing.assert_allclose(fit.components.covariance.ravel(), r["covariance"], atol=1e-6)
    assert fit.loglik == pytest.approx(r["loglik"], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SLOPES, ids=names)
def test_random_slopes_are_near_the_laplace_approximation_of_glmer(setting: Setting):
    """glmer has no quadrature for two effects; the tolerances are the difference that Laplace makes."""
    fit, r = fitted(setting, "y ~ x + z + (1 + x | site)"), R[f"{setting.name} ml"]
    agrees(fit, r, 2e-3, 2e-3, 6e-3)
    assert fit.components is not None
    np.testing.assert_allclose(fit.components.covariance.ravel(), r["covariance"], atol=4e-3)


def test_statsmodels_finds_no_better_likelihood():
    setting = LINEAR[0]
    oracle = smf.mixedlm("y ~ x + z", pooled(draw(setting)), groups="site").fit(reml=True)
    fit = fitted(setting)
    assert fit.ml is not None
    assert fit.loglik >= oracle.llf - 1e-9
    assert (np.abs(fit.ml.coefficients - oracle.fe_params) / oracle.bse_fe).max() < 1e-4
    assert fit.dispersion == pytest.approx(oracle.scale, rel=1e-4)


@pytest.mark.parametrize("kind", ["ml", "reml"])
@pytest.mark.parametrize("setting", [*FEW, *LINEAR], ids=names)
def test_a_site_finds_its_own_effect(setting: Setting, kind: str):
    """As R's `ranef` with its conditional variances; for a GLM these are Laplace's, at the same mode."""
    if f"{setting.name} {kind}" not in R:
        return
    options = {"estimate": kind} if setting in LINEAR else {}
    fit, r = fitted(setting, **options), R[f"{setting.name} {kind}"]
    found = glm.site_effects(fit, draw(setting)["site 00"])
    np.testing.assert_allclose(found["estimate"], r["own"], atol=1e-6)
    np.testing.assert_allclose(found["sd"], r["own_sd"], atol=2e-6)


def path(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The points (β, |σ|) of all rounds; the last one is the estimate."""
    points, exchange = [], MixedRounds._exchange

    def watched(self: MixedRounds, *args: Any) -> torch.Tensor:
        points.append(self.psi)
        return exchange(self, *args)

    monkeypatch.setattr(MixedRounds, "_exchange", watched)
    sites = [Site(name, table) for name, table in draw(setting).items()]
    settings = Settings("y ~ x + z", setting.family, site="random", tol=1e-9, max_rounds=20)
    MixedEstimation(asking(sites), settings).fit()
    return [torch.cat([point[:-1], point[-1:].abs()]) for point in points]


@pytest.mark.slow
def test_rounds_to_a_hundredth_of_a_standard_error_and_to_the_fifth_digit(monkeypatch: pytest.MonkeyPatch):
    """After r rounds, the first of which is a cavity round, the next point is sent."""
    near = exact = 0
    for setting in EIGHTEEN:
        points = path(setting, monkeypatch)
        se = torch.tensor([*R[f"{setting.name} ml"]["se"], 1.0])
        se[-1] = se[0]  # an error of σ counts in the intercept's
        errors = [float(((point - points[-1]) / se).abs().max()) for point in points]
        near += min(r for r, error in enumerate(errors, 1) if error < 0.01) <= 4
        exact += min(r for r, error in enumerate(errors, 1) if error < 1e-5) <= 6
    assert near >= 16
    assert exact >= 16
