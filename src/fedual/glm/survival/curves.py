"""Predicted survival with bands: S(t | x) = exp(−Λ(t) exp((x − x̄)ᵀβ)), for a site's baseline or a common one.

Of a site's baseline, the variance of the cumulative hazard is R's: that of Λ by itself, and that of β through
x − M_l. Of a common one it follows from the joint covariance of β and the log hazards. Bands are symmetric for log S.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from fedual.errors import InputError, import_optional
from fedual.glm.inference import Reference, check_level, chosen
from fedual.glm.schema import design
from fedual.glm.survival.baseline import Baseline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedual.glm.figures import Figures

Array = NDArray[np.float64]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Told apart by colour-blind readers."""
MOST_CURVES = 12
POINTS = 200
"""Times of a common baseline's curves, if none are given."""


@dataclass(frozen=True, eq=False)
class Curves:
    """Survival of new rows.

    Args:
        rows: The labels of the rows.
        times: `(T,)`.
        survival: `(N, T)`; NaN where a row has a missing value.
        se: Its standard error, to first order.
        lower: The lower band.
        upper: The upper band.
        level: Coverage, at each time.
        steps: True if the curves are steps.
    """

    rows: pd.Index
    times: Array
    survival: Array
    se: Array
    lower: Array
    upper: Array
    level: float
    steps: bool

    def frame(self) -> pd.DataFrame:
        """A row for each row and time: `survival`, `se`, `lower` and `upper`."""
        index = pd.MultiIndex.from_product([self.rows, self.times], names=["row", "time"])
        columns = {name: getattr(self, name).ravel() for name in ("survival", "se", "lower", "upper")}
        return pd.DataFrame(columns, index=index)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the curves and their bands with matplotlib, and return the axes."""
        if len(self.rows) > MOST_CURVES:
            raise InputError(f"A plot of {len(self.rows)} curves cannot be read: give at most {MOST_CURVES} rows.")
        pyplot = import_optional("Curves.plot", "matplotlib.pyplot", "'fedual[plots]'")
        on = ax if ax is not None else pyplot.subplots(figsize=(6.5, 4.4), layout="constrained")[1]
        first = lambda one: np.append(1.0, one)
        times = np.append(0.0, self.times)
        style, step = ("steps-post", "post") if self.steps else ("default", None)
        for i, label in enumerate(self.rows):
            colour = COLOURS[i % len(COLOURS)]
            name = str(label).replace("$", r"\$")
            on.plot(times, first(self.survival[i]), color=colour, lw=1.6, label=name, drawstyle=style)
            on.fill_between(
                times, first(self.lower[i]), first(self.upper[i]), step=step, color=colour, alpha=0.15, lw=0
            )
        on.set(xlabel="time", ylabel="survival", ylim=(0, 1.02))
        on.set_xlim(left=0)
        if len(self.rows) > 1:
            on.legend(frameon=False, fontsize=9)
        on.spines[["top", "right"]].set_visible(False)
        return on


def relative(fit: "Figures", frame: pd.DataFrame) -> tuple[Array, Array, NDArray[np.int64]]:
    """x − x̄ `(n, p)`, offsets `(n,)` and places of the complete ones among new rows."""
    assert fit.survival is not None
    rows = design(frame, "new rows", fit.schema, response=False)
    columns = [fit.schema.terms.index(term) for term in fit.terms]
    return rows.x[:, columns].numpy() - fit.survival.means, rows.offset.numpy(), rows.kept


def curves(
    fit: "Figures", frame: pd.DataFrame, baseline: Baseline | None, times: ArrayLike | None, level: float
) -> Curves:
    """See `Fit.curves`."""
    survival = fit.survival
    if survival is None:
        raise InputError(f"curves() of {fit.formula!r}, which is no survival model: use predict().")
    check_level(level)
    if survival.baseline == "stratified" and baseline is None:
        cause = "each site has a baseline hazard of its own, which stays there"
        raise InputError(f"curves() of a fit in which {cause}: give baseline=fit.baseline(table) with a site's table.")
    if survival.baseline == "piecewise" and baseline is not None:
        raise InputError("baseline= in a fit that has a common one: leave it out.")
    at = None if times is None else np.atleast_1d(np.asarray(times, float))
    if at is not None and not (at.ndim == 1 and np.isfinite(at).all() and (at >= 0).all() and (np.diff(at) >= 0).all()):
        raise InputError(f"times = {times!r}: give times of at least 0, in order.")
    x, offset, kept = relative(fit, frame)
    estimate, _ = chosen(fit, None)
    if baseline is not None:
        at = baseline.times if at is None else at
        hazard, variance = _of_site(baseline, x, estimate.covariance, at)
    else:
        if at is None:
            end = survival.cuts[-1] * (1 + 1 / len(survival.cuts)) if survival.cuts else 1.0
            at = np.linspace(0, end, POINTS + 1)[1:]
        hazard, variance = _common(fit, x, at)
    ratio = np.exp(x @ estimate.coefficients + offset)[:, None]
    expected, spread = hazard * ratio, np.sqrt(variance) * ratio
    width = Reference().width(level) * spread
    found = np.exp(-expected)
    bounds = np.exp(-expected - width), np.minimum(np.exp(-expected + width), 1.0)

    def of_all(values: Array) -> Array:
        whole = np.full((len(frame), len(at)), np.nan)
        whole[kept] = values
        return whole

    shown = (of_all(values) for values in (found, found * spread, *bounds))
    return Curves(frame.index, at, *shown, level=level, steps=baseline is not None)


def _of_site(baseline: Baseline, x: Array, covariance: Array, at: Array) -> tuple[Array, Array]:
    """The cumulative hazard of a row at the means, and what is the variance of each row's, both `(n, T)`."""
    place = np.searchsorted(baseline.times, at, "right")
    step = lambda each: np.concatenate([np.zeros_like(each[:1]), each])[place]
    hazard, own, drift = step(baseline.hazard), step(baseline.variance), step(baseline.drift)
    away = drift[None] - hazard[None, :, None] * x[:, None, :]  # (n, T, p)
    return np.broadcast_to(hazard, (len(x), len(at))), own + np.einsum("ntp,pq,ntq->nt", away, covariance, away)


def _common(fit: "Figures", x: Array, at: Array) -> tuple[Array, Array]:
    """The same for a common baseline."""
    survival = fit.survival
    assert survival is not None
    assert survival.log_hazards is not None
    assert survival.joint is not None
    ends = np.array([0.0, *survival.cuts, np.inf])
    exposure = np.clip(at[:, None] - ends[:-1], 0, np.diff(ends))  # (T, J)
    parts = exposure * np.exp(survival.log_hazards)
    hazard = parts.sum(1)
    slopes = np.concatenate([hazard[None, :, None] * x[:, None, :], np.broadcast_to(parts, (len(x), *parts.shape))], 2)
    variance = np.einsum("ntp,pq,ntq->nt", slopes, survival.joint, slopes)
    return np.broadcast_to(hazard, (len(x), len(at))), variance
