"""The table, intervals, sandwich errors and the comparison of sites, against statsmodels on the pooled table."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from pooled import ALL, FORMULA, dataset, pooled, simulated
from scipy import stats
from statsmodels.stats.meta_analysis import combine_effects

from fedual.errors import InputError
from fedual.glm.prior import Prior

KNOWN = ("binomial", "poisson", "negative-binomial")


def fair() -> pd.DataFrame:
    """A real table: marriages with and without affairs, at sites of uneven size."""
    table = dataset("fair").iloc[::4].reset_index(drop=True)
    table["y"] = (table.affairs > 0).astype(float)
    return table.assign(site=np.digitize(np.arange(len(table)), [100, 400, 900]))


def spector() -> pd.DataFrame:
    return dataset("spector").assign(site=np.arange(32) % 4)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("level", [0.95, 0.8])
def test_the_table_is_that_of_statsmodels(family: str, level: float):
    made = pooled(FORMULA, simulated(family), family)
    x, y = made.x, made.y
    if family in KNOWN:
        oracle = made.oracle
    else:
        kind = made.oracle.model.family
        oracle = sm.GLM(y, x, kind).fit(tol=1e-13, use_t=True)
    frame = made.fit.summary(level).frame()
    np.testing.assert_allclose(frame.estimate, oracle.params, rtol=1e-9)
    np.testing.assert_allclose(frame.se, oracle.bse, rtol=1e-9)
    np.testing.assert_allclose(frame.z, oracle.tvalues, rtol=1e-8)
    np.testing.assert_allclose(frame.p, oracle.pvalues, rtol=1e-6)
    np.testing.assert_allclose(frame[["lower", "upper"]], oracle.conf_int(1 - level), rtol=1e-8)
    np.testing.assert_array_equal(made.fit.confint(level), frame[["lower", "upper"]])
    assert list(frame.index) == list(x.columns)
    assert frame.attrs == {"estimate": "ml", "statistic": "z" if family in KNOWN else "t", "level": level}


@pytest.mark.parametrize("family", ALL)
def test_information_criteria_and_pseudo_r2(family: str):
    made = pooled(FORMULA, simulated(family), family)
    fit, n = made.fit, len(made.y)
    extra = 0 if family in ("binomial", "poisson") else 1  # R counts φ and α
    k = made.x.shape[1] + extra
    assert fit.aic == pytest.approx(2 * k - 2 * fit.loglik)
    assert fit.bic == pytest.approx(np.log(n) * k - 2 * fit.loglik)
    if not extra:
        assert fit.aic == pytest.approx(made.oracle.aic)
        assert fit.bic == pytest.approx(made.oracle.bic_llf)
        assert fit.pseudo_r2 == pytest.approx(made.oracle.pseudo_rsquared("mcf"))
    if family == "gaussian":
        ols = sm.OLS(made.y, made.x).fit()
        assert fit.loglik == pytest.approx(ols.llf)
        assert (fit.pseudo_r2, fit.adjusted_r2) == pytest.approx((ols.rsquared, ols.rsquared_adj))
    else:
        assert np.isnan(fit.adjusted_r2)


def test_without_an_intercept_there_is_no_r2():
    fit = pooled("y ~ 0 + age", simulated("gaussian"), "gaussian").fit
    assert np.isnan(fit.pseudo_r2)
    assert np.isnan(fit.adjusted_r2)


def test_fixed_site_effects_have_no_common_intercept():
    table = simulated("gaussian")
    slopes = pooled("y ~ age", table, "gaussian").fit
    assert slopes.ml is not None
    ml = type(slopes.ml)(slopes.ml.coefficients[1:], slopes.ml.covariance[1:, 1:])
    fit = replace(slopes, site_effects="fixed", ml=ml, sites=(), parameters=5, df_resid=235)
    assert fit.terms == ("age",)
    assert list(fit.table.index) == ["age"]
    assert fit.has_intercept


def test_posterior_stands_beside_the_maximum_likelihood():
    prior = Prior(0.3)
    fit = pooled("GRADE ~ GPA + TUCE + PSI", spector(), "binomial", prior=prior).fit
    assert fit.posterior is not None
    frame, z = fit.table, stats.norm.ppf(0.975)
    assert (frame.posterior_sd < frame.se).all()
    np.testing.assert_allclose(frame.posterior_lower, frame.posterior - z * frame.posterior_sd)
    np.testing.assert_allclose(fit.confint(use="posterior").upper, frame.posterior_upper)
    assert fit.confint(use="ml").lower.equals(fit.confint().lower)


def test_without_a_maximum_likelihood_the_table_is_the_posteriors():
    both = pooled("GRADE ~ GPA + TUCE + PSI", spector(), "binomial", prior=Prior()).fit
    fit = replace(both, ml=None, separation="There is no maximum: 'PSI' separates the responses. It is penalised.")
    frame = fit.table
    assert frame.attrs["estimate"] == "posterior"
    assert frame.estimate.equals(both.table.posterior.rename("estimate"))
    assert frame.lower.equals(both.table.posterior_lower.rename("lower"))
    assert np.isnan(frame[["z", "p"]].to_numpy()).all()
    assert np.isnan(fit.aic)
    with pytest.raises(InputError, match=r"'PSI' separates the responses.*use 'posterior'"):
        fit.confint(use="ml")
    with pytest.raises(InputError, match="separates"):
        fit.robust("hc0")
    assert np.isnan(fit.heterogeneity.q)


def test_a_flat_prior_has_no_posterior():
    fit = pooled(FORMULA, simulated("poisson"), "poisson").fit
    assert fit.table.posterior.isna().all()
    with pytest.raises(InputError, match=r"use = 'posterior'.*prior is flat.*use 'ml'"):
        fit.confint(use="posterior")
    with pytest.raises(InputError, match="level = 95"):
        fit.confint(95)
    with pytest.raises(InputError, match="did you mean"):
        fit.confint(use="mle")  # pyright: ignore[reportArgumentType]


def test_a_fit_needs_an_estimate_and_fitting_shapes():
    fit = pooled(FORMULA, simulated("poisson"), "poisson").fit
    with pytest.raises(InputError, match="neither"):
        replace(fit, ml=None)
    with pytest.raises(InputError, match=r"shape \(4,\) in a fit of 3 terms"):
        replace(fit, site_effects="fixed")


def test_coefficients_covariance_and_sites_are_labelled():
    made = pooled(FORMULA, simulated("poisson"), "poisson")
    fit = made.fit
    pd.testing.assert_series_equal(fit.coefficients, made.oracle.params, check_names=False)
    pd.testing.assert_frame_equal(fit.covariance, made.oracle.cov_params(), check_names=False)
    sites = tuple(replace(site, missing={"age": 2} if i else {"dose": 1}) for i, site in enumerate(fit.sites))
    frame = replace(fit, sites=sites).site_table
    assert list(frame["missing age"]) == [0, 2, 2, 2]
    assert frame.n.sum() == fit.n
    counts = made.table.groupby("site").y.mean()
    np.testing.assert_allclose(frame.mean_response, counts[frame.index])


@pytest.mark.parametrize("family", ALL)
def test_sandwich_covariances_are_those_of_statsmodels(family: str):
    made = pooled(FORMULA, simulated(family, sites=12), family)
    model, groups = made.oracle.model, pd.factorize(made.sites)[0]
    white = model.fit(tol=1e-13, cov_type="HC0")
    fit = replace(made.fit, hc0=np.asarray(white.cov_params())).robust("hc0")
    np.testing.assert_allclose(fit.table.se, white.bse, rtol=1e-9)
    oracle = model.fit(tol=1e-13, cov_type="cluster", cov_kwds={"groups": groups})
    clustered = made.fit.robust("cluster")
    np.testing.assert_allclose(clustered.table.se, oracle.bse, rtol=1e-7)
    np.testing.assert_allclose(clustered.covariance, oracle.cov_params(), rtol=1e-6, atol=1e-12)
    assert clustered.covariance_kind == "cluster"
    of = stats.t(11)
    np.testing.assert_allclose(clustered.table.p, 2 * of.sf(np.abs(clustered.table.z)))
    np.testing.assert_allclose(clustered.confint(0.9).upper, clustered.coefficients + of.ppf(0.95) * oracle.bse)
    assert made.fit.covariance_kind == "model"


def test_sandwich_errors_name_what_is_missing():
    fit = pooled(FORMULA, simulated("poisson"), "poisson").fit
    with pytest.raises(InputError, match="did you mean 'hc0'"):
        fit.robust("hc3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"robust\('hc0'\) needs"):
        fit.robust("hc0")
    with pytest.raises(InputError, match="one only"):
        replace(fit, sites=fit.sites[:1]).robust("cluster")
    sites = (*fit.sites[:3], replace(fit.sites[3], name="north", gradient=None))
    with pytest.raises(InputError, match="'north' is not known"):
        replace(fit, sites=sites).robust("cluster")
    with pytest.raises(InputError, match="more than 240 rows"):
        replace(fit, df_resid=0).robust("cluster")


@pytest.mark.parametrize("family", ["binomial", "poisson"])
def test_heterogeneity_is_the_score_test_of_interactions_with_sites(family: str):
    made = pooled(FORMULA, simulated(family, n=400, spread=0.02), family)
    x, found = made.x.to_numpy(), made.fit.heterogeneity
    dummies = [x * (made.sites == site.name)[:, None] for site in made.fit.sites[1:]]
    statistic, p, df = made.oracle.model.score_test(made.oracle.params, exog_extra=np.hstack(dummies))
    assert found.q == pytest.approx(float(np.squeeze(statistic)), rel=1e-7)
    assert (found.df, found.p) == (df, pytest.approx(float(np.squeeze(p)), rel=1e-6))
    assert found.i2 == pytest.approx(max(0, 1 - df / found.q))
    assert found.left_out == ()
    assert not found.exact


def test_heterogeneity_of_the_linear_model_is_that_of_separate_fits():
    made = pooled(FORMULA, simulated("gaussian", spread=0.02), "gaussian")
    found, rest = made.fit.heterogeneity, 0.0
    fits = {}
    for name in np.unique(made.sites):
        rows = made.sites == name
        fits[name] = sm.OLS(made.y[rows], made.x[rows]).fit()
        rest += fits[name].ssr
    assert found.q == pytest.approx((made.oracle.deviance - rest) / made.fit.dispersion)
    assert found.exact
    for name, own in fits.items():
        np.testing.assert_allclose(found.sites[name].coefficients, own.params, rtol=1e-9)
        np.testing.assert_allclose(found.sites[name].covariance, own.normalized_cov_params * made.fit.dispersion)
    b = np.array([found.sites[name].coefficients[1] for name in fits])
    v = np.array([found.sites[name].covariance[1, 1] for name in fits])
    oracle: Any = combine_effects(b, v)
    assert found.by_term.q["age"] == pytest.approx(oracle.q)
    assert found.by_term.i2["age"] == pytest.approx(max(0, oracle.i2))
    frame = found.frame(0.9).loc[("site 2", "age")]
    assert frame["lower"] == pytest.approx(frame.estimate - stats.norm.ppf(0.95) * frame.se)


def test_a_site_with_a_constant_column_is_left_out_and_the_others_compared_among_themselves():
    table = simulated("gaussian", spread=0.02)
    table.loc[table.site == "site 2", "age"] = 50.0
    made = pooled(FORMULA, table, "gaussian")
    found = made.fit.heterogeneity
    assert found.left_out == ("site 2",)
    others = made.sites != "site 2"
    whole = sm.OLS(made.y[others], made.x[others]).fit().ssr
    names = np.unique(made.sites[others])
    parts = sum(sm.OLS(made.y[rows], made.x[rows]).fit().ssr for rows in (made.sites == name for name in names))
    assert found.q == pytest.approx((whole - parts) / made.fit.dispersion)
    assert found.df == 2 * made.x.shape[1]
    assert "Left out" in repr(found)
    assert "site 2" in repr(found)


def test_heterogeneity_does_not_depend_on_units():
    table = simulated("poisson")
    one = pooled("y ~ age", table, "poisson").fit.heterogeneity
    other = pooled("y ~ age", table.assign(age=table.age * 1e7), "poisson").fit.heterogeneity
    assert other.left_out == ()
    assert other.q == pytest.approx(one.q, rel=1e-5)


def test_heterogeneity_without_gradients_is_not_tested():
    fit = pooled(FORMULA, simulated("poisson"), "poisson").fit
    silent = tuple(replace(site, gradient=None, hessian=None) for site in fit.sites)
    found = replace(fit, sites=silent).heterogeneity
    assert np.isnan([found.q, found.p, found.i2]).all()
    assert len(found.left_out) == 4
    assert found.frame().empty
    assert "not tested" in repr(found)
    one = replace(fit, sites=fit.sites[:1]).heterogeneity
    assert np.isnan(one.q)
    assert list(one.sites) == ["site 3"]


def test_an_aliased_term_is_nan_and_nowhere_in_the_way():
    made = pooled("y ~ age", simulated("gaussian"), "gaussian", prior=Prior())
    fit = made.fit
    assert fit.ml is not None
    wide = lambda matrix, fill: np.pad(matrix, ((0, 1), (0, 1)), constant_values=fill)
    ml = type(fit.ml)(np.append(fit.ml.coefficients, np.nan), wide(fit.ml.covariance, np.nan))
    sites = tuple(
        replace(site, gradient=np.append(site.gradient, 0.0), hessian=wide(site.hessian, 0.0))
        for site in fit.sites
        if site.gradient is not None and site.hessian is not None
    )
    schema = replace(fit.schema, terms=(*fit.terms, "age2"))
    aliased = replace(fit, ml=ml, posterior=None, sites=sites, schema=schema, aliased=("age2",))
    assert aliased.table.loc["age2"].isna().all()
    assert aliased.heterogeneity.q == pytest.approx(fit.heterogeneity.q)
    np.testing.assert_allclose(aliased.robust("cluster").table.se.iloc[:2], fit.robust("cluster").table.se)
    assert "age2" in str(aliased.summary())


def test_fair_has_the_numbers_of_glm():
    formula = "y ~ rate_marriage + age + yrs_married + religious"
    made = pooled(formula, fair(), "binomial")
    np.testing.assert_allclose(made.fit.table.z, made.oracle.tvalues, rtol=1e-8)
    assert [site.n for site in made.fit.sites] == [100, 300, 500, len(made.y) - 900]


def test_counts_of_trials():
    table = dataset("star98").assign(site=np.arange(303) % 5)
    table["trials"] = table.NABOVE + table.NBELOW
    made = pooled("NABOVE ~ LOWINC + PERASIAN", table, "binomial", trials="trials")
    assert made.fit.pseudo_r2 == pytest.approx(made.oracle.pseudo_rsquared("mcf"))
    np.testing.assert_allclose(made.fit.robust("cluster").table.estimate, made.oracle.params)
    assert "robust('hc0')" in str(made.fit.summary())
