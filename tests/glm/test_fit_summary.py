"""What a statistician reads: the summary as text and HTML."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from pooled import ALL, FORMULA, pooled, simulated

from fedual import glm
from fedual.glm import layout
from fedual.glm.figures import Convergence
from fedual.glm.prior import Prior
from fedual.glm.result import Fit


def made(family: str = "binomial", **changes: Any) -> Fit:
    return pooled(FORMULA, simulated(family), family, prior=Prior(), **changes).fit


def rows(fit: Fit) -> dict[str, list[str]]:
    """The cells of the first row of the text that begins with each name."""
    found: dict[str, list[str]] = {}
    for line in str(fit.summary()).splitlines():
        name, *cells = re.split(r"\s{2,}", line.strip())
        found.setdefault(name, cells)
    return found


@pytest.mark.parametrize("family", ALL)
def test_the_summary_holds_what_glm_shows(family: str):
    fit = made(family)
    found, table = rows(fit), fit.table
    assert found["Formula"] == [FORMULA]
    assert found["Family"] == [f"{family}, link {fit.link}"]
    assert found["Convergence"] == ["converged: next step 3e-07 SE, 4 rounds"]
    assert found["Deviance"][0].endswith("on 236 df")
    assert found["Null deviance"][0].endswith("on 239 df")
    assert found["Log-likelihood"][0].startswith(f"{fit.loglik:.2f}")
    assert found["AIC, BIC"] == [f"{fit.aic:.2f}, {fit.bic:.2f}"]
    assert found["Heterogeneity"][0].startswith(f"score Q = {fit.heterogeneity.q:.2f} on 12 df, p = ")
    assert found["site 1"][0] == "56"
    for term, cells in ((term, found[term]) for term in fit.terms):
        row = table.loc[term]
        for column, cell in zip(("estimate", "se", "lower", "upper"), cells, strict=False):
            assert float(cell) == pytest.approx(row[column], abs=row.se / 100)
        assert float(cells[4]) == pytest.approx(row.z, abs=0.006)
        assert cells[5] == ("<0.001" if row.p < 0.001 else f"{row.p:.3f}")
        assert float(cells[6]) == pytest.approx(row.posterior, abs=row.se / 100)
    statistic = "z" if fit.known_dispersion else "t(236)"
    assert re.search(rf"estimate +SE +lower +upper +{re.escape(statistic)} +p +posterior +sd", str(fit.summary()))
    assert ("Dispersion" in found) == (not fit.known_dispersion)
    assert ("Pseudo-R²" in found) == fit.known_dispersion
    assert ("Alpha" in found) == (family == "negative-binomial")


@pytest.mark.parametrize(
    ("family", "title"),
    [("binomial", "Odds"), ("poisson", "Rate"), ("negative-binomial", "Rate"), ("gamma", "Ratios of means")],
)
def test_ratios_are_exponentials(family: str, title: str):
    fit = made(family)
    text = str(fit.summary(0.9)).split(f"\n{title}", 1)[1]
    assert "90 % intervals" in text.splitlines()[0]
    cells = re.split(r"\s{2,}", next(line for line in text.splitlines() if line.startswith("C(group)[T.b]")))
    expected = np.exp([fit.coefficients["C(group)[T.b]"], *fit.confint(0.9).loc["C(group)[T.b]"]])
    np.testing.assert_allclose([float(cell) for cell in cells[1:4]], expected, rtol=5e-3)
    posterior = np.exp([fit.table.posterior["C(group)[T.b]"], *fit.confint(0.9, "posterior").loc["C(group)[T.b]"]])
    np.testing.assert_allclose([float(cell) for cell in cells[4:]], posterior, rtol=5e-3)
    assert "Intercept" not in text.split("\n\n")[0]


def test_splines_have_no_ratios():
    """exp(β) of a spline's column is the ratio for nothing that can happen."""
    table = simulated("binomial")
    shown = str(glm.fit("y ~ bs(age, 4) + group", [table], family="binomial").summary())
    ratios = shown.partition("Odds ratios")[2].partition("\n\n")[0]
    assert "group[T.b]" in ratios
    assert "bs(" not in ratios
    assert "Odds" not in str(glm.fit("y ~ bs(age, 4)", [table], family="binomial").summary())


def test_a_linear_model_has_no_ratios_but_r2():
    fit = made("gaussian")
    text = str(fit.summary())
    assert "exp(β)" not in text
    assert f"R²                  {fit.pseudo_r2:.4f}, adjusted {fit.adjusted_r2:.4f}" in text
    assert f"residual SD {math.sqrt(fit.dispersion):.4f}" in text


def long_names(fit: Fit, name: str) -> Fit:
    return replace(fit, schema=replace(fit.schema, terms=(*fit.schema.terms[:3], name)))


@pytest.mark.parametrize("length", [10, 60, 130])
def test_text_is_at_most_100_columns_wide_and_shows_names_whole(length: int):
    name = "C(occupation)[T." + "x" * length + "]"
    sites = tuple(replace(site, missing={f"column {i}": 3 for i in range(40)}) for site in made().sites)
    fit = replace(long_names(made(), name), sites=sites, warnings=("word " * 50,))
    for shown in (str(fit.summary()), repr(fit.heterogeneity)):
        assert max(map(len, shown.splitlines())) <= layout.WIDTH
        assert name in shown.replace("\n", "")


def test_odd_numbers_stay_within_the_width():
    fit = made("gaussian")
    assert fit.ml is not None
    for scale in (1e-12, 1e12):
        ml = type(fit.ml)(fit.ml.coefficients * scale, fit.ml.covariance * scale**2)
        text = str(replace(fit, ml=ml, posterior=ml).summary())
        assert max(map(len, text.splitlines())) <= layout.WIDTH
        age = re.split(r"\s{2,}", next(line for line in text.splitlines() if line.startswith("age")))
        assert float(age[1]) == pytest.approx(ml.coefficients[1], rel=1e-2)
        assert float(age[2]) == pytest.approx(ml.se[1], rel=1e-2)


def test_html_is_complete_and_escaped():
    class Reader(HTMLParser):
        tags: list[str]

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.tags.append(tag)

    evil = "C(x)[T.<script>alert('&')</script>]"
    fit = replace(long_names(made(), evil), separation="<script>", warnings=("<script>",))
    page, reader = fit.summary().html(), Reader()
    reader.tags = []
    reader.feed(page)
    assert set(reader.tags) <= {"div", "p", "b", "table", "tr", "th", "td"}
    assert page.count("&lt;script&gt;") == 4  # coefficients, ratios, separation, warnings
    assert page == fit._repr_html_() == fit.summary()._repr_html_()
    assert "http" not in page
    for word in ("Formula", "Deviance", "Odds ratios", "site 4", "score Q"):
        assert word in page


def test_control_characters_do_not_reach_the_terminal():
    fit = long_names(made(), "C(x)[T.\x1b[2Jboo\nhoo]")
    text = str(fit.summary())
    assert "\x1b" not in text
    assert "C(x)[T.�[2Jboo hoo]" in text


def test_without_a_maximum_likelihood_it_says_so():
    fit = replace(made(), ml=None, posterior_kind="laplace", separation="There is no maximum: 'age' separates.")
    text = str(fit.summary())
    assert "Coefficients: posterior, 95 % intervals" in text
    assert "There is no maximum: 'age' separates." in text
    assert "there are no p-values" in " ".join(text.split())
    assert "not tested: there is no maximum-likelihood estimate" in text
    assert "AIC" not in text
    assert "mode and curvature" in text
    assert not re.search(r"\bp\b +posterior", text)
    assert "Only the posterior was asked for" in str(replace(fit, separation=None).summary())


def test_a_flat_prior_has_one_column_of_estimates():
    fit = pooled(FORMULA, simulated("poisson"), "poisson").fit
    text = str(fit.summary())
    assert "posterior" not in text
    assert re.search(r"^Prior +flat$", text, re.M)


def test_what_went_wrong_is_among_the_notes():
    failed = Convergence(False, 8, 0.21, 1e-4)
    fit = replace(
        made(),
        convergence=failed,
        separation="'age' separates nearly.",
        aliased=("twice",),
        warnings=("Site 3 would refuse.",),
    )
    text = str(fit.summary())
    assert "NOT converged: next step 0.2 SE after 8 rounds (tolerance 0.0001 SE)" in text
    for words in ("'age' separates nearly.", "determine them): twice.", "Site 3 would refuse."):
        assert f"\n- {words}" in text or words in text.split("Notes\n")[1]


def test_many_warnings_are_counted():
    text = str(replace(made(), warnings=tuple(f"Warning {i}." for i in range(40))).summary())
    assert "- Warning 11." in text
    assert "Warning 12." not in text
    assert "28 more warnings" in text


def test_overdispersed_counts_are_noted_unless_errors_are_robust():
    fit = pooled(FORMULA, simulated("negative-binomial"), "negative-binomial").fit
    poisson = pooled(FORMULA, simulated("negative-binomial"), "poisson").fit
    assert "negative-binomial or robust('hc0')" in str(poisson.summary())
    assert "vary more" not in str(fit.summary())
    clustered = str(poisson.robust("cluster").summary())
    assert "vary more" not in clustered
    assert "clustered by 4 sites are rough" in clustered
    assert "t(3)" in clustered
    assert "HC0" in str(replace(poisson, hc0=np.eye(4)).robust("hc0").summary())


def test_many_sites_are_counted():
    fit = pooled(FORMULA, simulated("poisson", n=1500, sites=30), "poisson").fit
    text = str(fit.summary())
    sizes = sorted(site.n for site in fit.sites)
    assert "Sites: 30" in text
    assert f"{sizes[0]} to {sizes[-1]} a site" in text
    assert "site 7" not in text


def test_missing_values_and_columns_by_role_are_named():
    fit = made()
    sites = tuple(replace(site, missing={"age": 3, "group": 1}) for site in fit.sites)
    schema = replace(fit.schema, weights="w", offset="log_time")
    found = rows(replace(fit, sites=sites, schema=schema, site_effects="pooled"))
    assert found["Rows"] == ["240 at 4 sites; 16 values are missing"]
    assert found["Missing values"] == ["age 12, group 4"]
    assert found["site 1"][-1] == "4"
    assert (found["Weights"], found["Offset"]) == (["w"], ["log_time"])


def test_the_frame_is_the_table():
    fit = made()
    assert fit.summary().frame().equals(fit.table)
    assert "Fit('y ~ age + C(group)', binomial, 240 rows at 4 sites, converged: next step" in repr(fit)


@pytest.mark.parametrize(
    ("value", "se", "shown"),
    [
        (1.23456, 0.0123, "1.2346"), (-0.5, 0.2, "-0.500"), (1234.5678, 120.0, "1235"), (12.0, math.nan, "12"),
        (1.5e-9, 2e-10, "1.500e-09"), (0.0, 1e-9, "0.0e+00"), (math.nan, 1.0, "–"), (3e8, 1e6, "3.0000e+08"),
        (5.0, 0.0, "5"), (1e300, math.inf, "1e+300"),
    ],
)  # fmt: skip
def test_coefficients_are_rounded_by_their_error(value: float, se: float, shown: str):
    assert layout.rounded(value, se) == shown


@pytest.mark.parametrize(
    ("value", "se", "shown"),
    [(1.02517, 0.0134, "1.025"), (0.583, 0.33, "0.583"), (2.379, 0.32, "2.38"), (1.00312, 0.0004, "1.00312"),
     (4.2e7, 9.0, "4.20e+07"), (math.inf, 1.0, "inf"), (math.nan, math.nan, "–"), (123.4, math.nan, "123")],
)  # fmt: skip
def test_ratios_show_two_digits_of_their_error(value: float, se: float, shown: str):
    assert layout.ratio(value, se) == shown


def test_p_values_and_figures():
    assert [layout.p_value(p) for p in (0.00099, 0.001, 0.04567, 1.0, math.nan)] == [
        "<0.001", "0.001", "0.046", "1.000", "–",
    ]  # fmt: skip
    assert (layout.p_words(1e-9), layout.p_words(0.5)) == ("p < 0.001", "p = 0.500")
    assert [layout.number(x) for x in (12345.678, 0.12345, 0.00123, 0.0, None, 3e12)] == [
        "12,345.68", "0.1235", "0.00123", "0", "–", "3e+12",
    ]  # fmt: skip


@pytest.mark.parametrize(("event", "shown"), [(None, "y = well"), ("sick", "y = sick")])
def test_the_class_that_counts_as_1_is_shown(event: str | None, shown: str):
    table = simulated("binomial").assign(y=lambda frame: np.where(frame.y == 1, "well", "sick"))
    fit = glm.fit("y ~ age", {"one": table}, family="binomial", event=event)
    assert f"Event               {shown}\n" in str(fit.summary())
    assert "Event" not in str(glm.fit("y ~ age", {"one": simulated("binomial")}, family="binomial").summary())


def test_the_null_model_of_a_negative_binomial_is_said_to_have_the_fits_alpha():
    sites = {"one": simulated("negative-binomial")}
    fit, null = (glm.fit(f"y ~ {right}", sites, family="negative-binomial") for right in ("age", "1"))
    assert "p < 0.001; alpha held, anova() finds it anew" in str(fit.summary())
    assert fit.null_loglik < null.loglik
    assert "Pseudo-R²" not in str(null.summary())
