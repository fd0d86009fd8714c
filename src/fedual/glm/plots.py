"""Plots of a fit with matplotlib: a forest by site, coefficients, calibration and residuals."""

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from fedual.errors import InputError, hint, import_optional
from fedual.glm.figures import Estimate, Figures
from fedual.glm.heterogeneity import Heterogeneity, heterogeneity
from fedual.glm.inference import Reference, available, check_level, chosen, interval, ratio_name
from fedual.glm.layout import p_words, percent, ratio, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#7a7a7a"  # told apart by colour-blind readers
STYLES = {"ml": ("maximum likelihood", "o", BLUE), "posterior": ("posterior", "s", ORANGE)}
FAR = 4  # median widths from the pooled estimate at which the axis of a forest ends


def plot(fit: Figures, kind: str, term: str | None, level: float, ax: "Axes | None") -> "Axes":
    """Draw on `ax`, or on a new figure."""
    if kind not in KINDS:
        raise InputError(f"plot({kind!r}): {hint(kind, KINDS)}")
    if term is not None and kind != "forest":
        raise InputError(f"plot({kind!r}, term={term!r}): only 'forest' shows one term; leave it out.")
    check_level(level)
    pyplot = import_optional("Fit.plot", "matplotlib.pyplot", "'fedual[plots]'")
    on = ax
    if on is None:
        rows = {"forest": len(fit.sites) + 1, "coefficients": 1.6 * len(fit.terms)}.get(kind)
        size = (5.2, 4.4) if rows is None else (7.5, 1.5 + 0.3 * rows)
        on = pyplot.subplots(figsize=size, layout="constrained")[1]
    try:
        KINDS[kind](fit, term, level, on)
    except InputError:
        if ax is None:
            pyplot.close(on.figure)
        raise
    on.spines[["top", "right"]].set_visible(False)
    return on


def _forest(fit: Figures, term: str | None, level: float, ax: "Axes") -> None:
    """Each site's estimate of one coefficient and its interval, above the pooled one."""
    if fit.components is not None:
        raise InputError("plot('forest') shows estimates by site, which in a mixed model stay there: use another kind.")
    compared = heterogeneity(fit)
    term = _one_term(term, compared)
    place, pooled = list(compared.by_term.index).index(term), fit.terms.index(term)
    one = lambda estimate, i: Estimate(estimate.coefficients[[i]], estimate.covariance[np.ix_([i], [i])])
    sites = {name: one(estimate, place) for name, estimate in compared.sites.items()}
    estimate, of = chosen(fit, "ml")
    whole = one(estimate, pooled)
    show, label = _scale(fit, ax)
    bounds = np.array([np.concatenate(interval(site, Reference(), level)) for site in sites.values()])
    centre = whole.coefficients[0]
    far = FAR * np.median(np.append(bounds[:, 1] - bounds[:, 0], np.diff(interval(whole, of, level), axis=0))) / 2
    inner = [site.coefficients[0] for site in sites.values()]
    low = max(np.append(bounds[:, 0], centre - whole.se).min(), min(centre - far, *inner))
    high = min(np.append(bounds[:, 1], centre + whole.se).max(), max(centre + far, *inner))
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin
    weights = np.array([1 / site.se[0] ** 2 for site in sites.values()])
    sizes = dict(zip(sites, 20 + 110 * weights / weights.max(), strict=True))
    for row, figures in enumerate(fit.sites):
        if (site := sites.get(figures.name)) is None:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            ax.text(show(centre), row, "not estimable", color=GREY, ha="center", va="center", fontsize=9, bbox=box)
            continue
        lower, upper = (float(bound[0]) for bound in interval(site, Reference(), level))
        ax.plot(show([max(lower, low), min(upper, high)]), [row, row], color=BLUE, lw=1.4, solid_capstyle="butt")
        for bound, edge, marker in ((lower, low, "<"), (upper, high, ">")):
            if (bound < low) if edge == low else (bound > high):
                ax.plot(show(edge), row, marker, color=BLUE, ms=6)
        ax.scatter(show(site.coefficients[0]), row, s=sizes[figures.name], marker="s", color=BLUE, zorder=3)
        _figures_beside(ax, row, fit, site, Reference(), level)
    bottom = len(fit.sites) + 0.3
    lower, upper = (float(bound[0]) for bound in interval(whole, of, level))
    corners = show([lower, centre, upper, centre]), bottom + np.array([0, -0.3, 0, 0.3])
    ax.fill(*corners, color=ORANGE, zorder=3)
    _figures_beside(ax, bottom, fit, whole, of, level)
    ax.axvline(show(centre), color=ORANGE, lw=0.8, ls=":", zorder=0)
    if low <= 0 <= high:
        ax.axvline(show(0.0), color=GREY, lw=0.8, zorder=0)
    ax.set_xlim(show(low), show(high))
    _round_ticks(ax)
    ax.set_ylim(bottom + 0.8, -0.8)
    ax.set_yticks([*range(len(fit.sites)), bottom])
    ax.set_yticklabels([*(f"{_plain(site.name)}  (n = {site.n:,})" for site in fit.sites), f"pooled  (n = {fit.n:,})"])
    ax.tick_params(axis="y", length=0)
    row = compared.by_term.iloc[place]
    tested = f"Q = {row['q']:.1f} on {int(row['df'])} df, {p_words(row['p'])}, I² = {percent(round(row['i2'], 2))}"
    step = "" if compared.exact else "; sites: one step from the pooled fit"
    ax.set_title(f"{_plain(term)}\n", loc="left", fontsize=11)
    ax.text(0, 1.02, f"{tested}{step}", transform=ax.transAxes, fontsize=8.5, color=GREY)
    ax.set_xlabel(f"{label}, {percent(level)} interval")


def _one_term(term: str | None, compared: Heterogeneity) -> str:
    """The term to show, which need not be named if there is one slope only."""
    if not compared.sites:
        cause = "no site has a gradient and a Hessian that can be inverted at the maximum-likelihood estimate"
        raise InputError(f"plot('forest') shows estimates by site, but {cause}: use plot('coefficients').")
    terms = [str(name) for name in compared.by_term.index]
    slopes = [name for name in terms if name != "Intercept"]
    if term is None and len(slopes) == 1:
        return slopes[0]
    if term not in terms:
        raise InputError(f"plot('forest', term={term!r}): {hint(term, terms) if term else f'name one of {terms}.'}")
    return term


def _figures_beside(ax: "Axes", row: float, fit: Figures, estimate: Estimate, of: Reference, level: float) -> None:
    """Estimate and interval in figures, to the right of the axes."""
    value, bounds = estimate.coefficients[0], [float(bound[0]) for bound in interval(estimate, of, level)]
    if ratio_name(fit):
        with np.errstate(over="ignore"):
            shown = [ratio(float(np.exp(one)), estimate.se[0]) for one in (value, *bounds)]
    else:
        shown = [rounded(one, estimate.se[0]) for one in (value, *bounds)]
    words = f"{shown[0]}  [{shown[1]}, {shown[2]}]"
    ax.text(1.02, row, words, transform=ax.get_yaxis_transform(), va="center", fontsize=9)


def _coefficients(fit: Figures, term: str | None, level: float, ax: "Axes") -> None:
    """All slopes with their intervals: maximum likelihood and posterior."""
    slopes = [i for i, name in enumerate(fit.terms) if name != "Intercept"]
    if not slopes:
        raise InputError("plot('coefficients') shows all terms but the intercept, and there are none: add terms.")
    show, label = _scale(fit, ax)
    uses = available(fit)
    for place, use in enumerate(uses):
        name, marker, colour = STYLES[use]
        estimate, of = chosen(fit, use)
        lower, upper = interval(estimate, of, level)
        rows = np.arange(len(slopes)) + (place - (len(uses) - 1) / 2) * 0.28
        ax.hlines(rows, show(lower[slopes]), show(upper[slopes]), color=colour, lw=1.6)
        ax.plot(show(estimate.coefficients[slopes]), rows, marker, color=colour, ms=5, label=name)
    ax.axvline(show(0.0), color=GREY, lw=0.8, zorder=0)
    ax.set_yticks(range(len(slopes)), [_plain(fit.terms[i]) for i in slopes])
    ax.set_ylim(len(slopes) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(f"{label}, {percent(level)} interval")
    ax.set_title(textwrap.fill(_plain(fit.formula), 80), loc="left", fontsize=11, pad=24)
    ax.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2)
    _round_ticks(ax)


def _calibration(fit: Figures, term: str | None, level: float, ax: "Axes") -> None:
    """Mean response against mean prediction in bins, with Wilson's intervals for proportions."""
    bins = [row for row in fit.calibration or () if row["n"] > 0]
    if not bins:
        cause = (
            "no site has the 200 rows from which on one tells it"
            if fit.family == "binomial"
            else "only binomial has it"
        )
        raise InputError(f"plot('calibration'): the sites sent no calibration ({cause}): use plot('coefficients').")
    predicted, observed, n = (np.array([row[key] for row in bins], float) for key in ("predicted", "observed", "n"))
    if fit.family == "binomial":
        z = Reference().width(level)
        centre = (observed + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * np.sqrt(observed * (1 - observed) / n + z**2 / (4 * n**2))
        ax.vlines(predicted, centre - half, centre + half, color=BLUE, lw=1.4)
        low, high = 0.0, 1.0
    else:
        low, high = float(min(predicted.min(), observed.min())), float(max(predicted.max(), observed.max()))
    ax.plot([low, high], [low, high], color=GREY, lw=0.9, ls="--", zorder=0, label="perfectly calibrated")
    ax.scatter(predicted, observed, s=15 + 120 * n / n.max(), color=BLUE, zorder=3, label="bins; area: rows")
    margin = 0.03 * (high - low)
    ax.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin), aspect="equal")
    ax.set(xlabel="mean prediction", ylabel="mean response")
    ax.set_title(f"Calibration of {_plain(fit.response)}", loc="left", fontsize=11)
    ax.legend(frameon=False, fontsize=8.5, loc="upper left")


def _residuals(fit: Figures, term: str | None, level: float, ax: "Axes") -> None:
    """The histogram of Pearson residuals; for the gaussian family with the normal distribution."""
    if not fit.residuals or not sum(fit.residuals["counts"]):
        more = (
            "fit at sites with more rows" if fit.survival is None else "survival has none; use the tests in the summary"
        )
        raise InputError(f"plot('residuals'): the sites sent no histogram of residuals; {more}.")
    edges, counts = np.array(fit.residuals["edges"], float), np.array(fit.residuals["counts"], float)
    ax.bar(edges[:-1], counts, np.diff(edges), align="edge", color=BLUE, edgecolor="white", lw=0.8)
    if fit.family == "gaussian":
        bounds = stats.norm.cdf(edges)
        bounds[0], bounds[-1] = 0, 1
        middle = (edges[:-1] + edges[1:]) / 2
        ax.plot(middle, counts.sum() * np.diff(bounds), "o-", color=ORANGE, ms=3.5, lw=1, label="expected if normal")
        ax.legend(frameon=False, fontsize=9)
    ax.axvline(0, color=GREY, lw=0.8)
    ax.set(xlabel="Pearson residual, in standard deviations\n(outermost bars: all beyond, too)", ylabel="rows")
    ax.set_title("Residuals", loc="left", fontsize=11)


def _scale(fit: Figures, ax: "Axes") -> tuple[Callable[[Any], Any], str]:
    """How coefficients are shown, and the axis' label: ratios on a logarithmic axis where exp(β) is one."""
    name = ratio_name(fit)
    if name is None:
        return np.asarray, "coefficient"
    ax.set_xscale("log")
    return lambda beta: np.exp(np.clip(beta, -500, 500)), name


def _round_ticks(ax: "Axes") -> None:
    """Round numbers on a logarithmic axis, however narrow it is."""
    if ax.get_xscale() != "log":
        return
    ticker = import_optional("Fit.plot", "matplotlib.ticker", "'fedual[plots]'")
    low, high = ax.get_xlim()
    locator = ticker.MaxNLocator(8, steps=[1, 2, 2.5, 5, 10])
    if high / low > 8:
        locator = ticker.LogLocator(subs=(1, 2, 5) if high / low < 2000 else (1,), numticks=9)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(ticker.NullLocator())


def _plain(name: str) -> str:
    """A name that matplotlib does not read as mathematics."""
    return name.replace("$", r"\$")


KINDS = {"forest": _forest, "coefficients": _coefficients, "calibration": _calibration, "residuals": _residuals}
