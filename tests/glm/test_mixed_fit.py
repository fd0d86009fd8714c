"""What a mixed fit shows, predicts and refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mixed_tables import Setting, draw
from scipy import stats

from fedual import glm
from fedual.errors import DataError, FedualError, InputError, NotConvergedError
from fedual.glm.mixed import bars
from fedual.glm.mixed.components import Components
from fedual.glm.settings import Settings

FORMULA = "y ~ x + z + (1 | site)"
FOUR, TWELVE, SMALL = Setting("binomial", 4, 1.0), Setting("gaussian", 12, 1.0), Setting("gaussian", 5, 1.0, rows=12)


@pytest.fixture(scope="module")
def few() -> glm.Fit:
    return glm.fit(FORMULA, draw(FOUR), family="binomial")


@pytest.fixture(scope="module")
def linear() -> glm.Fit:
    return glm.fit(FORMULA, draw(TWELVE))


def parts(fit: glm.Fit) -> Components:
    assert fit.components is not None
    return fit.components


def same(one: glm.Fit, other: glm.Fit) -> None:
    pd.testing.assert_frame_equal(one.table, other.table)
    np.testing.assert_array_equal(parts(one).covariance, parts(other).covariance)


def test_the_formula_and_the_setting_say_the_same(few: glm.Fit):
    same(few, glm.fit("y ~ x + z", draw(FOUR), family="binomial", site="random"))
    same(few, glm.fit("y ~ (1 | site) + x + z", draw(FOUR), family="binomial"))


@pytest.mark.parametrize(
    ("text", "fixed", "random"),
    [
        ("y ~ x", "y ~ x", None),
        ("y ~ x + (1 | site)", "y ~ x", "1"),
        ("y ~ (1|site)", "y ~ 1", "1"),
        ("y ~ (1|site) + x", "y ~ x", "1"),
        ("y ~ x + (1 + x | site) - z", "y ~ x - z", "1 + x"),
        ("I(a | b) ~ (x + I(a | b)) + (I(a | b) | site)", "I(a | b) ~ (x + I(a | b))", "I(a | b)"),
        ("y ~ `a + (1 | site)`", "y ~ `a + (1 | site)`", None),
        ("y ~ `a b` + (0 + `a b` | site)", "y ~ `a b`", "0 + `a b`"),
    ],
)
def test_the_random_part_of_a_formula(text: str, fixed: str, random: str | None):
    found = bars.split(text)
    assert (" ".join(found.fixed.split()), found.random) == (fixed, random)
    assert len(found.fixed) == len(text)


@pytest.mark.parametrize(
    ("formula", "objection"),
    [
        ("y ~ x + (1 | ward)", "the groups are 'ward', but only the sites can be"),
        ("y ~ x + (1 || site)", "with one bar"),
        ("y ~ x + (| site)", "nothing before its bar"),
        ("y ~ x + (1 | site) + (x | site)", "2 random parts"),
        ("y ~ x * (1 | site)", "joined by +"),
        ("y ~ (1 | site) * x", "joined by +"),
        ("y ~ x - (1 | site)", "joined by +"),
        ("y ~ 0 + x + (1 | site)", "no intercept, about which"),
        ("y ~ x + (1 + z | site)", "differ in 'z', of which it has no common coefficient"),
        ("y ~ x + (1 + . | site)", "without a dot"),
        ("y ~ x + z + x:z + (1 + x*z | site)", "4 effects of each site: use at most 3"),
        ("y ~ x + (1 | site) + (1", "cannot be read"),
    ],
)
def test_random_parts_that_are_refused(formula: str, objection: str):
    with pytest.raises(InputError, match=objection.replace("(", r"\(").replace("+", r"\+").replace("|", r"\|")):
        glm.fit(formula, draw(FOUR), family="binomial")


@pytest.mark.parametrize(
    ("options", "objection"),
    [
        ({"site": "fixed"}, "random effects of sites, and site = 'fixed': choose one"),
        ({"family": "gamma"}, "family gamma and the link log"),
        ({"family": "gaussian", "link": "log"}, "family gaussian and the link log"),
        ({"family": "negative-binomial"}, "family negative-binomial"),
        ({"estimate": "posterior"}, "estimate = 'posterior' with random effects"),
        ({"estimate": "variational"}, "estimate = 'variational' with random effects"),
        ({"family": "binomial", "estimate": "reml"}, "'reml' is for gaussian models with random effects"),
        ({"prior": glm.Prior(site_sd=3)} | {"family": "gamma"}, "family gamma"),
    ],
)
def test_settings_that_mixed_models_do_not_have(options: dict[str, Any], objection: str):
    with pytest.raises(InputError, match=objection):
        Settings(FORMULA, **options)


def test_the_scale_of_sigmas_prior_is_checked():
    for value in (0.0, -1.0, float("inf"), "wide"):
        with pytest.raises(InputError, match="The prior's site_sd is"):
            glm.Prior(site_sd=value)  # type: ignore[arg-type]


def test_reml_is_the_default_of_linear_models_alone():
    assert Settings(FORMULA).estimate == "reml"
    assert Settings(FORMULA, "binomial").estimate == "ml"
    assert Settings("y ~ x").estimate == "ml"
    with pytest.raises(InputError, match="'reml' is for gaussian models with random"):
        Settings("y ~ x", estimate="reml")
    assert Settings.from_dict(Settings(FORMULA).to_dict()) == Settings(FORMULA)


def test_few_sites_have_intervals_of_the_posterior_and_a_warning(few: glm.Fit):
    assert few.posterior_kind == "integrated"
    assert few.warnings[0].startswith("4 sites tell little of how sites differ")
    assert few.posterior is not None
    assert few.ml is not None
    np.testing.assert_allclose(few.confint()["upper"], few.table["posterior_upper"])
    np.testing.assert_allclose(few.confint(use="ml")["upper"], few.table["upper"])
    assert few.posterior.se[2] > few.ml.se[2]  # z differs between sites only
    mean, sd = parts(few).posterior or (0, 0)
    assert 0 < sd < mean
    assert parts(few).prior_scale == 0.5


def test_a_narrow_prior_of_sigma_is_the_glm_and_a_wide_one_is_wider(few: glm.Fit):
    at = lambda scale: glm.fit(FORMULA, draw(FOUR), family="binomial", prior=glm.Prior(site_sd=scale)).posterior
    narrow, wide = at(1e-3), at(2.0)
    plain = glm.fit("y ~ x + z", draw(FOUR), family="binomial").posterior
    assert narrow is not None
    assert wide is not None
    assert plain is not None
    assert few.posterior is not None
    np.testing.assert_allclose(narrow.se, plain.se, rtol=0.02)
    assert (narrow.se[[0, 2]] < few.posterior.se[[0, 2]]).all()
    assert (few.posterior.se[[0, 2]] < wide.se[[0, 2]]).all()


def test_the_integrated_posterior_of_a_linear_model_is_that_of_a_fine_grid():
    """By an oracle of dense matrices, with φ as it was estimated."""
    tables = draw(SMALL)
    linear = glm.fit(FORMULA, tables)
    pooled = pd.concat([table.assign(site=name) for name, table in tables.items()])
    x = np.column_stack([np.ones(len(pooled)), pooled.x, pooled.z])
    y, site = pooled.y.to_numpy(), pd.get_dummies(pooled.site).to_numpy(float)
    unit, spread = y.std(ddof=1), x[:, 1:].std(axis=0, ddof=1)
    centre = x[:, 1:].mean(0)
    columns = np.column_stack([np.ones(len(x)), (x[:, 1:] - centre) / spread])
    prior = np.diag([10.0, 2.5, 2.5]) * unit
    logs, means, variances = [], [], []
    sigmas = np.linspace(0.01, 4.0, 200)
    for sigma in sigmas:
        covariance = sigma**2 * site @ site.T + linear.dispersion * np.eye(len(y))
        covariance += columns @ prior**2 @ columns.T
        gain = prior**2 @ columns.T @ np.linalg.inv(covariance)
        mean = np.array([y.mean(), 0, 0]) + gain @ (y - y.mean())
        logs.append(stats.multivariate_normal(np.full(len(y), y.mean()), covariance).logpdf(y))
        logs[-1] -= (sigma / (0.5 * unit)) ** 2 / 2
        means.append(mean / [1, *spread])
        variances.append(np.diag(prior**2 - gain @ columns @ prior**2) / np.array([1, *spread]) ** 2)
    share = np.exp(np.array(logs) - max(logs))
    share /= share.sum()
    mean = share @ np.array(means)
    sd = np.sqrt(share @ (np.array(variances) + (np.array(means) - mean) ** 2))
    assert linear.posterior is not None
    np.testing.assert_allclose(linear.posterior.coefficients[1:], mean[1:], atol=0.01 * sd[1:].min())
    np.testing.assert_allclose(linear.posterior.se[1:], sd[1:], rtol=0.01)
    assert parts(linear).posterior == pytest.approx(
        (share @ sigmas, np.sqrt(share @ (sigmas - share @ sigmas) ** 2)), rel=0.02
    )


def test_the_test_of_no_differences_halves_chi_squared():
    component = lambda statistic, df: Components(("Intercept",), np.eye(1), np.ones(1), statistic, df, 0.1, "latent")
    assert component(2.7, 1).p == pytest.approx(stats.chi2.sf(2.7, 1) / 2)
    assert component(0.0, 1).p == 1.0
    assert component(2.7, 3).p == pytest.approx(stats.chi2.sf(2.7, 3))


def test_the_statistic_is_that_of_the_glm_without_effects(few: glm.Fit):
    pooled = glm.fit("y ~ x + z", draw(FOUR), family="binomial")
    assert parts(few).statistic == pytest.approx(2 * (few.loglik - pooled.loglik), abs=1e-5)
    pooled = glm.fit("y ~ x + z", draw(TWELVE))
    ml = glm.fit(FORMULA, draw(TWELVE), estimate="ml")
    assert parts(ml).statistic == pytest.approx(2 * (ml.loglik - pooled.loglik), abs=1e-8)


@pytest.mark.parametrize(
    ("family", "link", "variance"),
    [("binomial", "logit", np.pi**2 / 3), ("binomial", "probit", 1.0), ("binomial", "cloglog", np.pi**2 / 6)],
)
def test_the_intraclass_correlation_of_classes(family: str, link: str, variance: float):
    fit = glm.fit(FORMULA, draw(FOUR), family=family, link=link)
    sigma = parts(fit).sd[0]
    assert parts(fit).icc == pytest.approx(sigma**2 / (sigma**2 + variance))
    assert parts(fit).scale == f"latent, {link}"


def test_the_summary_has_how_the_sites_differ(few: glm.Fit, linear: glm.Fit):
    text = str(few.summary())
    for words in ("random: Intercept", "Site effects: how", "ICC", "Test of σ = 0", "½χ²₀ + ½χ²₁", "Posterior of σ"):
        assert words in text
    assert "nan" not in text.lower()
    assert "Heterogeneity" not in text
    assert "REML criterion" in str(linear.summary())
    assert "Residual" in str(linear.summary())
    assert "random: Intercept" in few.summary().html()


def test_files_restore_the_components(few: glm.Fit, tmp_path: Path):
    few.save(tmp_path / "fit.json")
    back = glm.Fit.load(tmp_path / "fit.json")
    assert str(back.summary()) == str(few.summary())
    few.to_json(tmp_path / "figures.json")
    told = json.loads((tmp_path / "figures.json").read_text())["components"]
    assert told["sd"] == pytest.approx(parts(few).sd.tolist())
    assert told["p"] == pytest.approx(parts(few).p)
    few.to_csv(tmp_path / "table.csv")
    assert "posterior_sd" in (tmp_path / "table.csv").read_text()


def test_a_fit_of_an_earlier_version_has_no_components(tmp_path: Path, few: glm.Fit):
    pooled = glm.fit("y ~ x", draw(FOUR), family="binomial")
    pooled.save(tmp_path / "fit.json")
    whole = json.loads((tmp_path / "fit.json").read_text())
    inner = json.loads(whole["fit"])
    del inner["components"], inner["prior"]["site_sd"]
    text = json.dumps(inner, sort_keys=True)
    from hashlib import sha256

    whole |= {"fit": text, "sha256": sha256(text.encode()).hexdigest()}
    (tmp_path / "fit.json").write_text(json.dumps(whole))
    assert glm.Fit.load(tmp_path / "fit.json").components is None


def test_predictions_for_a_new_site_are_wider_and_average_over_sites(few: glm.Fit):
    new = draw(FOUR)["site 00"].head(3)
    link, other = few.predict(new, kind="link"), few.predict(new, kind="link", new_site=True)
    mean, sd = parts(few).posterior or (0, 0)
    np.testing.assert_allclose(other["se"] ** 2, link["se"] ** 2 + mean**2 + sd**2)
    np.testing.assert_allclose(other["fit"], link["fit"])
    drawn = np.random.default_rng(0).normal(size=400_000) * np.hypot(mean, sd)
    expected = [(1 / (1 + np.exp(-(f + drawn)))).mean() for f in link["fit"]]
    np.testing.assert_allclose(few.predict(new, new_site=True)["fit"], expected, atol=2e-3)
    with pytest.raises(InputError, match="new_site = True in a fit without random effects"):
        glm.fit("y ~ x", draw(FOUR), family="binomial").predict(new, new_site=True)
    with pytest.raises(InputError, match="'observation' in a mixed model of the family binomial"):
        few.predict(new, kind="observation")


def test_predictions_of_a_linear_model_have_three_variances(linear: glm.Fit):
    new = draw(TWELVE)["site 00"].head(3)
    link = linear.predict(new, kind="link", use="ml")
    found = linear.predict(new, kind="observation", use="ml", new_site=True)
    np.testing.assert_allclose(found["se"] ** 2, link["se"] ** 2 + parts(linear).sd[0] ** 2 + linear.dispersion)


def test_what_does_not_apply_says_so(few: glm.Fit, linear: glm.Fit):
    for call, words in (
        (lambda: few.robust("hc0"), "a mixed model has the dependence within sites in it"),
        (lambda: few.plot("forest"), "in a mixed model stay there"),
        (lambda: glm.anova(few, glm.fit("y ~ x + z", draw(FOUR), family="binomial")), "the test of σ = 0"),
        (lambda: glm.anova(linear, glm.fit("y ~ x + (1 | site)", draw(TWELVE))), "fit with estimate='ml'"),
        (lambda: few.predict(draw(FOUR)["site 00"], intercept=1.0), "leave it out"),
        (lambda: glm.site_effects(glm.fit("y ~ x", draw(FOUR), family="binomial"), draw(FOUR)["site 00"]), "random"),
    ):
        with pytest.raises(InputError, match=words):
            call()
    assert few.heterogeneity.words().startswith("not tested: how the sites differ is in the model")


def test_one_site_is_refused_and_two_are_fitted():
    tables = draw(FOUR)
    with pytest.raises(DataError, match="at least two sites"):
        glm.fit("y ~ x", {"one": tables["site 00"]}, family="binomial", site="random")
    with pytest.raises(DataError, match="at least two sites"):
        glm.fit("y ~ x + (1 | site)", {"one": tables["site 00"]})
    two = glm.fit("y ~ x + (1 | site)", dict(list(tables.items())[:2]), family="binomial")
    assert two.convergence.converged
    assert two.warnings[0].startswith("2 sites tell little")


@pytest.mark.parametrize("family", ["binomial", "gaussian"])
def test_sites_of_one_row_and_of_one_class(family: Any):
    tables = draw(FOUR)
    tables["single"] = tables["site 00"].head(1)
    tables["healthy"] = tables["site 01"].assign(y=0.0)
    fit = glm.fit("y ~ x + (1 | site)", tables, family=family, max_rounds=12)
    assert fit.convergence.converged
    assert parts(fit).sd[0] > 0
    assert np.isfinite(fit.table.to_numpy()).all()


def test_a_slope_of_a_column_that_is_constant_at_every_site():
    fit = glm.fit("y ~ x + z + (1 + z | site)", draw(Setting("gaussian", 12, 1.0)))
    assert np.isfinite(fit.table["se"]).all()


def test_a_slope_without_an_intercept_is_that_of_the_column_as_it_is():
    """Not about its mean: shifting the column changes the model."""
    tables = {name: table.assign(x=table.x + 2) for name, table in draw(Setting("gaussian", 15, 0.7, 0.5)).items()}
    fit = glm.fit("y ~ x + (0 + x | site)", tables, estimate="ml")
    sigma, x = parts(fit).sd[0], pd.concat(tables.values()).x.to_numpy()
    site = np.repeat(np.arange(len(tables)), [len(table) for table in tables.values()])
    own = (site[:, None] == site) * sigma**2 * np.outer(x, x) + fit.dispersion * np.eye(len(x))
    y = pd.concat(tables.values()).y.to_numpy()
    mean = np.column_stack([np.ones(len(x)), x]) @ fit.coefficients
    assert fit.loglik == pytest.approx(stats.multivariate_normal(mean, own).logpdf(y), rel=1e-10)


def test_units_of_the_columns_and_of_the_response_change_no_test():
    tables = draw(Setting("gaussian", 8, 0.0))
    scaled = {name: table.assign(y=1e6 * table.y, x=table.x * 1e-3 + 7) for name, table in tables.items()}
    one, other = (glm.fit("y ~ x + z + (1 + x | site)", each) for each in (tables, scaled))
    np.testing.assert_allclose(other.table["z"].iloc[1:], one.table["z"].iloc[1:], rtol=1e-4)
    assert parts(other).statistic == pytest.approx(parts(one).statistic, abs=1e-6)
    assert other.components is not None
    assert parts(other).sd[1] == pytest.approx(1e9 * parts(one).sd[1], rel=1e-4)


def test_separated_classes_are_an_error_of_one_sentence():
    tables = {name: table.assign(y=(table.x > 0).astype(float)) for name, table in draw(FOUR).items()}
    with pytest.raises(NotConvergedError, match="seem to be separated"):
        glm.fit("y ~ x + (1 | site)", tables, family="binomial")


def test_constant_columns_and_aliased_ones_are_named():
    tables = {name: table.assign(c=1.0, twice=2 * table.x) for name, table in draw(FOUR).items()}
    with pytest.raises(DataError, match="'c' is constant at all sites"):
        glm.fit("y ~ x + c + (1 | site)", tables, family="binomial")
    for family in ("binomial", "gaussian"):
        with pytest.raises(FedualError, match="cannot be told apart"):
            glm.fit("y ~ x + twice + (1 | site)", tables, family=family)


def test_offsets_and_trials():
    random = np.random.default_rng(5)
    tables = {}
    for k in range(12):
        own, n = 0.5 * random.normal(), 60
        days, x, m = random.integers(1, 9, n), random.normal(size=n), random.integers(3, 9, n)
        tables[f"s{k}"] = pd.DataFrame({"days": days, "x": x, "m": m})
        tables[f"s{k}"]["falls"] = random.poisson(days * np.exp(-1 + 0.4 * x + own))
        tables[f"s{k}"]["sick"] = random.binomial(m, 1 / (1 + np.exp(0.5 - 0.4 * x - own)))
    counts = glm.fit("falls ~ x + (1 | site)", tables, family="poisson", offset="log(days)")
    shares = glm.fit("sick ~ x + (1 | site)", tables, family="binomial", trials="m")
    for fit in (counts, shares):
        assert abs(fit.coefficients["x"] - 0.4) < 4 * fit.table.loc["x", "se"]
        assert 0.2 < parts(fit).sd[0] < 1.0
        own = glm.site_effects(fit, tables["s0"])
        assert own.loc["Intercept", "lower"] < own.loc["Intercept", "upper"]


def test_own_effects_of_all_sites_are_in_no_message_and_add_up_to_about_zero(few: glm.Fit):
    found = pd.concat([glm.site_effects(few, table) for table in draw(FOUR).values()])
    assert abs(found["estimate"].mean()) < parts(few).sd[0]
    with pytest.raises(InputError, match="level = 95"):
        glm.site_effects(few, draw(FOUR)["site 00"], level=95)
