"""Tests of nested fits, against statsmodels and R's formulas."""

from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from pooled import ALL, FORMULA, pooled, simulated
from scipy import stats

from fedual.errors import InputError
from fedual.glm.anova import anova
from fedual.glm.figures import Estimate
from fedual.glm.result import Fit


def fits(family: str = "gaussian") -> tuple[Fit, Fit]:
    table = simulated(family)
    return pooled("y ~ age", table, family).fit, pooled(FORMULA, table, family).fit


@pytest.mark.parametrize("family", ALL)
def test_anova_is_the_likelihood_ratio_or_f_test(family: str):
    small, large = fits(family)
    found = anova(large, small)
    assert (found.small, found.large, found.df) == (small, large, 2)
    if family in ("gaussian", "gamma"):
        f = (small.deviance - large.deviance) / 2 / large.dispersion
        assert (found.test, found.statistic) == ("F", pytest.approx(f))
        assert found.p == pytest.approx(stats.f.sf(f, 2, 236))
    else:
        ratio = 2 * (large.loglik - small.loglik)
        assert (found.test, found.statistic) == ("LR χ²", pytest.approx(ratio))
        assert found.p == pytest.approx(stats.chi2.sf(ratio, 2))
    assert anova(small, large).p == found.p


def test_anova_of_linear_models_is_that_of_statsmodels():
    table = simulated("gaussian")
    small, large = pooled("y ~ age", table, "gaussian"), pooled(FORMULA, table, "gaussian")
    f, p, df = sm.OLS(large.y, large.x).fit().compare_f_test(sm.OLS(small.y, small.x).fit())
    found = anova(small.fit, large.fit)
    assert (found.statistic, found.p, found.df) == pytest.approx((f, p, df))


def test_anova_is_shown_and_in_a_frame():
    small, large = fits("poisson")
    found = anova(small, large)
    shown = repr(found)
    assert "Likelihood-ratio test of C(group)[T.b], C(group)[T.c]" in shown
    assert f"{found.statistic:.2f}" in shown
    assert shown.count("y ~ age") == 2
    assert "<table" in found._repr_html_()
    frame = found.frame()
    assert list(frame.parameters) == [2, 4]
    assert frame.p[2] == found.p
    assert np.isnan(frame.p[1])
    assert "robust" in repr(anova(small, large.robust("cluster")))


def test_site_effects_can_be_tested():
    """`site="fixed"` has K − 1 more parameters and no intercept among its terms."""
    table = simulated("poisson")
    small, within = pooled("y ~ age", table, "poisson").fit, pooled("y ~ age + C(site)", table, "poisson").fit
    assert within.ml is not None
    ml = Estimate(within.ml.coefficients[[-1]], within.ml.covariance[-1:, -1:])
    large = replace(within, ml=ml, schema=small.schema, site_effects="fixed", sites=tuple(
        replace(site, gradient=None, hessian=None) for site in within.sites))  # fmt: skip
    found = anova(small, large)
    assert found.df == 3
    assert found.added == ["an intercept for each site"]
    assert "Fit 2               y ~ age, and an intercept for each site" in repr(found)
    assert found.statistic == pytest.approx(2 * (within.loglik - small.loglik))


def test_fits_that_are_not_comparable_are_refused():
    small, large = fits("poisson")
    other = pooled("y ~ group_b", simulated("poisson").assign(group_b=lambda t: (t.group == "b") * 1.0), "poisson").fit
    refused = {
        "different family": (fits("gamma")[0], large),
        "different sites": (replace(small, sites=small.sites[:2]), large),
        r"different offset \(None and t\)": (small, replace(large, schema=replace(large.schema, offset="t"))),
        r"different rows \(.* at site 3\), because values are missing": (
            replace(small, sites=(replace(small.sites[0], n=9), *small.sites[1:])), large),
        "different response": (replace(small, schema=replace(small.schema, formula="z ~ age")), large),
        "different responses": (replace(small, null_deviance=small.null_deviance * 1.01), large),
        "no maximum-likelihood": (replace(small, ml=None, posterior=small.ml), large),
        r"not nested: the larger one lacks group_b": (other, large),
        "the same 2 parameters": (small, small),
    }  # fmt: skip
    for message, pair in refused.items():
        with pytest.raises(InputError, match=message):
            anova(*pair)
