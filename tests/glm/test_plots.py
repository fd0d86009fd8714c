"""Plots: what is drawn where."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from pooled import ALL, FORMULA, pooled, simulated

from fedual.errors import InputError
from fedual.glm.prior import Prior
from fedual.glm.result import Fit


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def made(family: str = "binomial") -> Fit:
    fit = pooled(FORMULA, simulated(family), family, prior=Prior()).fit
    edges = [-2.0, -1.0, 0.0, 1.0, 2.0]
    bins = [{"predicted": 0.2, "observed": 0.25, "n": 80}, {"predicted": 0.6, "observed": 0.5, "n": 160}]
    bins.append({"predicted": 0.0, "observed": 0.0, "n": 0})
    return replace(fit, residuals={"edges": edges, "counts": [10, 110, 100, 20]}, calibration=bins)


def words(ax: Axes) -> str:
    shown = [*ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels(), ax.title, ax.xaxis.label]
    legend = ax.get_legend()
    shown += legend.get_texts() if legend else []
    return "\n".join([*(text.get_text() for text in shown), ax.get_title("left")])


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("kind", ["forest", "coefficients", "calibration", "residuals"])
def test_every_plot_is_drawn(family: str, kind: str):
    fit = made(family)
    ax = fit.plot(kind, term="age" if kind == "forest" else None)  # pyright: ignore[reportArgumentType]
    ax.figure.canvas.draw()
    assert words(ax)


def test_a_forest_shows_sites_and_the_pooled_estimate():
    fit = made()
    ax = fit.plot("forest", term="age", level=0.9)
    shown = words(ax)
    for site in fit.sites:
        assert f"{site.name}  (n = {site.n})" in shown
    assert "pooled  (n = 240)" in shown
    assert "odds ratio, 90 % interval" in shown
    assert "one step from the pooled fit" in shown
    row = fit.heterogeneity.by_term.loc["age"]
    assert f"Q = {row.q:.1f} on 3 df" in shown
    assert ax.get_xscale() == "log"
    squares = [np.asarray(each.get_offsets()) for each in ax.collections]
    expected = [np.exp(fit.heterogeneity.sites[site.name].coefficients[1]) for site in fit.sites]
    np.testing.assert_allclose([square[0, 0] for square in squares], expected)
    corners = np.asarray(ax.patches[0].get_path().vertices)[:, 0]
    np.testing.assert_allclose([corners.min(), corners.max()], np.exp(fit.confint(0.9).loc["age"]))


def test_a_forest_of_a_linear_model_has_coefficients_and_names_sites_without_one():
    table = simulated("gaussian")
    table.loc[table.site == "site 2", "age"] = 50.0
    fit = pooled("y ~ age", table, "gaussian").fit
    ax = fit.plot("forest")  # the only slope
    assert ax.get_xscale() == "linear"
    assert "not estimable" in words(ax)
    assert "one step" not in words(ax)
    assert "Intercept" in words(fit.plot("forest", term="Intercept"))


def test_a_wild_site_does_not_squeeze_the_others():
    table = simulated("gaussian")
    wild = table.site == "site 1"
    table.loc[wild, "age"] = 50 + (table.age[wild] - 50) * 1e-4
    fit = pooled("y ~ age", table, "gaussian").fit
    assert fit.heterogeneity.sites["site 1"].se[1] > 100
    ax = fit.plot("forest")
    inner = fit.heterogeneity.sites["site 1"].coefficients[1]
    low, high = ax.get_xlim()
    assert high - low < 3 * abs(inner) + 1


def test_names_are_not_read_as_mathematics():
    fit = made()
    fit = replace(fit, schema=replace(fit.schema, formula="$y$ ~ x", terms=(*fit.schema.terms[:3], "$\\frac{$")))
    fit.plot("coefficients").figure.canvas.draw()
    fit.plot("forest", term="$\\frac{$").figure.canvas.draw()
    fit.plot("calibration").figure.canvas.draw()


def test_coefficients_show_maximum_likelihood_and_posterior():
    fit = made("gaussian")
    shown = words(fit.plot())
    assert "maximum likelihood" in shown
    assert "posterior" in shown
    assert "Intercept" not in shown
    assert "C(group)[T.b]" in shown
    alone = words(replace(fit, ml=None).plot("coefficients"))
    assert "maximum likelihood" not in alone


def test_calibration_and_residuals_show_what_the_sites_sent():
    fit = made()
    ax = fit.plot("calibration")
    points = ax.collections[-1].get_offsets()
    np.testing.assert_allclose(np.asarray(points), [[0.2, 0.25], [0.6, 0.5]])
    ax = made("gaussian").plot("residuals")
    assert [bar.get_bbox().height for bar in ax.patches if isinstance(bar, Rectangle)] == [10, 110, 100, 20]
    assert np.asarray(ax.lines[0].get_ydata()).sum() == pytest.approx(240)


def test_axes_can_be_given():
    axes = pyplot.subplots(1, 2)[1]
    assert made().plot("coefficients", ax=axes[1]) is axes[1]
    assert not axes[0].lines


def test_errors_name_the_remedy_and_leave_no_figure():
    fit = made()
    refused = {
        r"plot\('forrest'\): did you mean 'forest'": {"kind": "forrest"},
        r"term='ag'\): did you mean 'age'": {"kind": "forest", "term": "ag"},
        r"name one of \['Intercept', 'age'": {"kind": "forest"},
        "only 'forest' shows one term": {"kind": "residuals", "term": "age"},
        "level = 95": {"kind": "residuals", "level": 95},
    }
    for message, arguments in refused.items():
        with pytest.raises(InputError, match=message):
            fit.plot(**arguments)  # pyright: ignore[reportArgumentType]
    bare = pooled("y ~ 1", simulated("poisson"), "poisson").fit
    for kind in ("coefficients", "calibration", "residuals"):
        with pytest.raises(InputError, match=kind):
            bare.plot(kind)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="no site has a gradient"):
        replace(fit, ml=None).plot("forest", term="age")
    assert not pyplot.get_fignums()
