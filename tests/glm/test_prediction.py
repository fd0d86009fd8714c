"""Predictions and their intervals, against statsmodels and scipy."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from formulaic import model_matrix
from pooled import ALL, FORMULA, dataset, pooled, simulated
from scipy import stats
from scipy.special import gammaln

from fedual.errors import FedualError, InputError
from fedual.glm.prior import Prior

NEW = pd.DataFrame({"age": [30.0, 50.0, 71.5], "group": ["c", "a", "b"]}, index=["x", "y", "z"])


def design(frame: pd.DataFrame) -> np.ndarray:
    known = pd.DataFrame({"age": 0.0, "group": ["a", "b", "c"]})
    return np.asarray(model_matrix("age + C(group)", pd.concat([known, frame])), float)[3:]


@pytest.mark.parametrize("family", ALL)
def test_means_are_those_of_statsmodels(family: str):
    made = pooled(FORMULA, simulated(family), family)
    x = design(NEW)
    oracle = made.oracle.get_prediction(x).summary_frame(alpha=0.1)
    found = made.fit.predict(NEW, level=0.9)
    assert list(found.index) == ["x", "y", "z"]
    np.testing.assert_allclose(found["fit"], oracle["mean"], rtol=1e-9)
    np.testing.assert_allclose(found["se"], oracle["mean_se"], rtol=1e-9)
    if made.fit.known_dispersion:
        np.testing.assert_allclose(found[["lower", "upper"]], oracle[["mean_ci_lower", "mean_ci_upper"]], rtol=1e-9)
    link = made.fit.predict(NEW, kind="link")
    covariance = made.oracle.cov_params().to_numpy()
    of = stats.norm() if made.fit.known_dispersion else stats.t(236)
    np.testing.assert_allclose(link["se"], np.sqrt(np.diag(x @ covariance @ x.T)))
    np.testing.assert_allclose(link["upper"], link["fit"] + of.ppf(0.975) * link["se"])


def test_new_observations_of_a_linear_model_are_those_of_ols():
    made = pooled(FORMULA, simulated("gaussian"), "gaussian")
    oracle = sm.OLS(made.y, made.x).fit().get_prediction(design(NEW)).summary_frame(alpha=0.2)
    found = made.fit.predict(NEW, level=0.8, kind="observation")
    np.testing.assert_allclose(found[["lower", "upper"]], oracle[["obs_ci_lower", "obs_ci_upper"]])
    means = made.fit.predict(NEW, level=0.8)
    np.testing.assert_allclose(means[["lower", "upper"]], oracle[["mean_ci_lower", "mean_ci_upper"]])
    assert "t quantiles" in found.attrs["interval"]


@pytest.mark.parametrize("family", ["poisson", "gamma", "negative-binomial", "binomial"])
def test_new_observations_have_the_quantiles_of_their_family(family: str):
    made = pooled(FORMULA, simulated(family), family)
    fit, mean = made.fit, made.fit.predict(NEW)["fit"].to_numpy()
    variance = made.oracle.model.family.variance(mean) * fit.dispersion
    shape = 1 / fit.dispersion
    if family == "negative-binomial":
        assert fit.alpha is not None
        y, r = np.arange(500)[:, None], 1 / fit.alpha
        log_p = (
            gammaln(y + r) - gammaln(r) - gammaln(y + 1) + r * np.log(r / (r + mean)) + y * np.log(mean / (r + mean))
        )
        below = np.exp(log_p).cumsum(0)
        lower, upper = (below >= 0.05).argmax(0), (below >= 0.95).argmax(0)
    else:
        of = {
            "poisson": stats.poisson(mean),
            "gamma": stats.gamma(shape, scale=mean / shape),
            "binomial": stats.bernoulli(mean),
        }[family]
        lower, upper = of.ppf(0.05), of.ppf(0.95)
    found = fit.predict(NEW, level=0.9, kind="observation")
    np.testing.assert_allclose(found["lower"], lower)
    np.testing.assert_allclose(found["upper"], upper)
    np.testing.assert_allclose(found["se"], np.sqrt(variance + fit.predict(NEW)["se"] ** 2))
    assert "quantiles" in found.attrs["interval"]


def test_counts_of_trials_are_predicted_for_their_trials():
    table = dataset("star98").assign(site=np.arange(303) % 5)
    table["trials"] = table.NABOVE + table.NBELOW
    fit = pooled("NABOVE ~ LOWINC", table, "binomial", trials="trials").fit
    new = pd.DataFrame({"LOWINC": [20.0, 60.0], "trials": [10.0, 1000.0]})
    share, count = fit.predict(new), fit.predict(new, kind="observation")
    assert np.all(share["fit"] < 1)
    np.testing.assert_allclose(count["fit"], share["fit"] * new.trials)
    np.testing.assert_allclose(count["upper"], stats.binom.ppf(0.975, new.trials, share["fit"]))


def test_the_posterior_predicts_too():
    fit = pooled(FORMULA, simulated("binomial"), "binomial", prior=Prior(0.2)).fit
    assert fit.posterior is not None
    x = design(NEW)
    found = fit.predict(NEW, kind="link", use="posterior")
    np.testing.assert_allclose(found["fit"], x @ fit.posterior.coefficients)
    alone = replace(fit, ml=None)
    pd.testing.assert_frame_equal(alone.predict(NEW, kind="link"), found)


def test_bounds_are_in_order_where_the_mean_falls_and_at_the_end_of_the_domain():
    made = pooled("y ~ age", simulated("gamma"), "gamma")
    assert made.fit.ml is not None
    ml = type(made.fit.ml)(np.array([0.2, 0.0]), np.diag([0.01, 0.0]))
    inverse = replace(made.fit, link="inverse", ml=ml).predict(NEW, level=0.5)
    width = stats.t(238).ppf(0.75) * 0.1
    np.testing.assert_allclose(inverse[["lower", "upper"]], [[1 / (0.2 + width), 1 / (0.2 - width)]] * 3)
    assert np.isinf(replace(made.fit, link="inverse", ml=ml).predict(NEW, 0.99)["upper"]).all()
    np.testing.assert_allclose(inverse["se"], 0.1 / 0.2**2)
    counts = replace(pooled("y ~ age", simulated("poisson"), "poisson").fit, link="sqrt", ml=ml).predict(NEW, 0.999)
    np.testing.assert_array_equal(counts["lower"], 0)


def test_rows_with_missing_values_are_predicted_as_missing():
    fit = pooled(FORMULA, simulated("poisson"), "poisson").fit
    holes = NEW.assign(age=[30.0, np.nan, 71.5])
    found = fit.predict(holes)
    assert found.loc["y"].isna().all()
    pd.testing.assert_frame_equal(found.loc[["x", "z"]], fit.predict(NEW).loc[["x", "z"]])


def test_the_order_of_the_rows_and_repeated_labels_do_not_matter():
    fit = pooled(FORMULA, simulated("poisson"), "poisson").fit
    twice = pd.concat([NEW, NEW.iloc[::-1]])
    found = fit.predict(twice)
    assert list(found.index) == list(twice.index)
    np.testing.assert_allclose(found.iloc[:3], found.iloc[:2:-1])


def test_fixed_site_effects_ask_for_an_intercept():
    made = pooled(FORMULA, simulated("poisson"), "poisson")
    assert made.fit.ml is not None
    ml = type(made.fit.ml)(made.fit.ml.coefficients[1:], made.fit.ml.covariance[1:, 1:])
    fixed = replace(made.fit, site_effects="fixed", ml=ml, sites=())
    with pytest.raises(InputError, match=r"each site has an intercept of its own.*give intercept="):
        fixed.predict(NEW)
    common = made.fit.ml.coefficients[0]
    found = fixed.predict(NEW, kind="link", intercept=common)
    np.testing.assert_allclose(found["fit"], made.fit.predict(NEW, kind="link")["fit"])
    x = design(NEW)[:, 1:]
    np.testing.assert_allclose(found["se"], np.sqrt(np.diag(x @ ml.covariance @ x.T)))
    with pytest.raises(InputError, match=r"intercept = 1\.0 in a fit that has its own"):
        made.fit.predict(NEW, intercept=1.0)


def test_bad_frames_and_arguments_are_named():
    fit = pooled(FORMULA, simulated("poisson"), "poisson").fit
    with pytest.raises(FedualError, match="age"):
        fit.predict(NEW.drop(columns="age"))
    with pytest.raises(FedualError, match="group"):
        fit.predict(NEW.assign(group="other"))
    with pytest.raises(InputError, match="kind = 'response'"):
        fit.predict(NEW, kind="response")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"level = 1\.5"):
        fit.predict(NEW, level=1.5)
    with pytest.raises(InputError, match="two columns 'age'"):
        fit.predict(pd.concat([NEW, NEW.age], axis=1))
    with pytest.raises(InputError, match="frame = dict: give a pandas data frame"):
        fit.predict({"age": [1.0]})  # pyright: ignore[reportArgumentType]
