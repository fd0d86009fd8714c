"""How methods converge on a scenario: accuracy and NLL against rounds, bytes and seconds, drawn from records.

A line is a method with a variant. It shows the mean over the seeds that did not diverge, because a mean that loses a
seed in some round would jump.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from math import inf, isfinite, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedual.errors import InputError
from studies.figures.common import FAINT, GREY, METHODS, Drawing, paint

Record = Mapping[str, Any]
Curve = NDArray[np.float64]
"""`(5, T)`: one row for each of `ROUND` … `NLL`, one column for each evaluated round."""

ROUND, GIGABYTES, SECONDS, ACCURACY, NLL = range(5)
NAMES = ("round", "gigabytes", "seconds", "accuracy", "nll")
ACROSS = {ROUND: "communication rounds", GIGABYTES: "GB sent, up and down", SECONDS: "seconds of training"}
UPRIGHT = {ACCURACY: "test accuracy, %", NLL: "test NLL"}
VIEW = 2.5  # the axes end at this multiple of the best method's loss or of the median method's length

STROKES = ("-", "--", ":", "-.")
RAMP = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (216, 204, 48)]) / 255
"""A sequential colour map: viridis with a darker end, because its yellow would vanish on white."""


class Line(NamedTuple):
    """A method with a variant: its runs, and how it is drawn."""

    method: str
    variant: str
    looks: dict[str, Any]
    sampled: bool  # evaluated under q_g rather than at its mean
    runs: list[Curve]  # the runs that did not diverge, at the rounds that all of them have
    diverged: list[tuple[Record, Curve]]
    seconds: float  # the median time of a round; nan if no run has two rounds

    @property
    def label(self) -> str:
        """The method's name, followed by the variant in brackets."""
        name = METHODS.get(self.method, (self.method,))[0]
        return f"{name} ({self.variant})" if self.variant else name

    def mean(self) -> Curve:
        """Return the mean over the runs that did not diverge; there must be one."""
        return np.mean(self.runs, axis=0)


def draw(records: Sequence[Record], title: str) -> Drawing:
    """Draw runs of one scenario in six panels, as the paper's Figures 2 and 5c.

    Bands show the minimum and maximum over seeds, crosses the ends of diverged runs. IVON methods are shown under q_g
    if their records have such metrics, all others at the mean.
    """
    scenarios = sorted({record["scenario"] for record in records})
    if len(scenarios) != 1:
        raise InputError(f"Convergence is drawn from runs of one scenario, not of {scenarios}: choose one.")
    lines = lines_of(records)
    runs = [run for line in lines for run in line.runs] or [
        curve for line in lines for _, curve in line.diverged if curve.size
    ]
    if not runs:
        raise InputError(f"No run of {scenarios[0]} has a round with accuracy and NLL: evaluate on a test set.")
    curves = [line.mean() for line in lines if line.runs] or runs
    limits = {row: _length_limits(row, curves) for row in ACROSS}
    limits |= {row: _loss_limits(row, curves, runs) for row in UPRIGHT}
    numbers = {"scenario": scenarios[0], "lines": {line.label: _numbers(line) for line in lines}}
    findings = [*_quality(lines), *_cost(lines), *_trouble(lines, limits)]
    plot = partial(_panels, lines=lines, limits=limits, title=title)
    return Drawing(lambda: paint(10.2, 5.2, plot), numbers, findings)


def _panels(figure: Any, lines: list[Line], limits: dict[int, tuple[float, float]], title: str) -> None:
    axes = figure.subplots(2, 3, sharex="col", sharey="row")
    for panels, y in zip(axes, UPRIGHT, strict=True):
        for axis, x in zip(panels, ACROSS, strict=True):
            axis.set(xlim=limits[x], ylim=limits[y])
            axis.grid(color=FAINT, lw=0.5)
            for line in lines:
                _plot(axis, x, y, line)
        panels[0].set_ylabel(UPRIGHT[y])
    for axis, x in zip(axes[-1], ACROSS, strict=True):
        axis.set_xlabel(ACROSS[x])
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    _legend(figure, lines)


def lines_of(records: Sequence[Record]) -> list[Line]:
    """Group records by method, in the legend's order, and by variant, in the order of their values."""
    methods = sorted(
        dict.fromkeys(record["method"] for record in records), key=lambda name: [*METHODS, name].index(name)
    )
    lines = []
    for method in methods:
        own = [record for record in records if record["method"] == method]
        variants = sorted(dict.fromkeys(record["variant"] for record in own), key=_value)
        for variant, looks in zip(variants, _looks(method, len(variants), alone=len(methods) == 1), strict=True):
            lines.append(_line(method, variant, looks, [record for record in own if record["variant"] == variant]))
    return lines


def _value(variant: str) -> float:
    """Return the number in `tau=0.03`; variants without one come first."""
    try:
        return float(variant.rpartition("=")[2])
    except ValueError:
        return -inf


def _looks(method: str, variants: int, alone: bool) -> list[dict[str, Any]]:
    """Give a method's variants the same colour and different strokes, or different colours if it is alone."""
    heavy = method == "ivon-admm" and not alone
    shared = {"lw": 2.6 if heavy else 1.5, "zorder": 3 if heavy else 2}
    if variants > len(STROKES) or (alone and variants > 1):
        places, knots = np.linspace(0, 1, variants), np.linspace(0, 1, len(RAMP))
        colours = np.stack([np.interp(places, knots, channel) for channel in RAMP.T], 1)
        return [{**shared, "color": tuple(colour), "ls": "-"} for colour in colours.tolist()]
    colour = METHODS.get(method, ("", GREY))[1]
    return [{**shared, "color": colour, "ls": stroke} for stroke in STROKES[:variants]]


def _line(method: str, variant: str, looks: dict[str, Any], records: list[Record]) -> Line:
    histories = [record["history"] for record in records]
    sampled = method.startswith("ivon-") and any(v is not None for h in histories for v in h.get("nll_mc", ()))
    curves = [(record, _curve(record["history"], "_mc" if sampled else "")) for record in records]
    runs = [curve for record, curve in curves if not record["diverged"] and curve.size]
    shared = reduce(np.intersect1d, [run[ROUND] for run in runs]) if runs else np.empty(0)
    if runs and not shared.size:
        raise InputError(f"Seeds of {method} {variant} share no evaluated round: evaluate them in the same rounds.")
    later = [seconds for history in histories for seconds in history["seconds"][1:]]
    return Line(
        method,
        variant,
        looks,
        sampled,
        [run[:, np.isin(run[ROUND], shared)] for run in runs],
        [(record, curve) for record, curve in curves if record["diverged"]],
        float(np.median(later)) if later else nan,
    )


def _curve(history: Mapping[str, Sequence[Any]], suffix: str) -> Curve:
    """Return a run's evaluated rounds whose metrics are finite, with the bytes and seconds spent until then."""
    number = len(history["round"])
    column = lambda name: np.array(history.get(name, [None] * number), dtype=float)
    seconds = column("seconds")
    # the first round may compile: count it like the second, or short runs would look slower than long ones
    seconds[:1] = seconds[1:2] if number > 1 else seconds[:1]
    sent = np.cumsum(column("bytes_up") + column("bytes_down")) / 1e9
    quality = 100 * column("accuracy" + suffix), column("nll" + suffix)
    curve = np.stack([column("round"), sent, np.cumsum(seconds), *quality])
    return curve[:, np.isfinite(curve).all(0)]


def _loss_limits(row: int, curves: list[Curve], runs: list[Curve]) -> tuple[float, float]:
    """Return limits that show the late rounds of the best curve, and others up to `VIEW` times its last loss.

    A method that overfits therefore does not compress the others. For the accuracy the loss is the error.
    """
    loss = lambda values: 100 - values if row == ACCURACY else values
    tenth = max(curve[ROUND, -1] for curve in curves) / 10
    late = [values for curve in curves if (values := loss(curve[row, curve[ROUND] > tenth])).size]
    best = min(late, key=lambda values: values[-1])
    top = min(max(np.quantile(best, 0.9), VIEW * best[-1]), max(values.max() for values in late))
    bottom = min(loss(run[row]).min() for run in runs)
    margin = 0.05 * (top - bottom) or 0.5
    bottom, top = float(max(bottom - margin, 0)), float(top + margin)
    return (100 - top, 100 - bottom) if row == ACCURACY else (bottom, top)


def _length_limits(row: int, curves: list[Curve]) -> tuple[float, float]:
    """Return limits from 0 to the end of the longest curve, at most `VIEW` times the median curve's."""
    ends = [curve[row, -1] for curve in curves if curve[row, -1] > 0] or [1.0]
    return 0.0, 1.02 * float(min(max(ends), VIEW * np.median(ends)))


def _plot(axis: Any, x: int, y: int, line: Line) -> None:
    if line.runs:
        mean, values = line.mean(), np.stack([run[y] for run in line.runs])
        axis.plot(mean[x], mean[y], marker="o" if len(mean[x]) == 1 else None, label=line.label, **line.looks)
        if len(line.runs) > 1:
            axis.fill_between(mean[x], values.min(0), values.max(0), color=line.looks["color"], alpha=0.2, lw=0)
    for _, curve in line.diverged:
        if curve.size:
            axis.plot(curve[x], curve[y], label=line.label, **{**line.looks, "lw": 1})
            end = np.clip(curve[x, -1], *axis.get_xlim()), np.clip(curve[y, -1], *axis.get_ylim())
            axis.plot(*end, "x", color=line.looks["color"], ms=7, mew=2, zorder=4, clip_on=False)


def _legend(figure: Any, lines: list[Line]) -> None:
    """Draw one legend for all panels."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=line.label, **line.looks) for line in lines]
    if any(line.diverged for line in lines):
        handles.append(Line2D([], [], color=GREY, marker="x", ms=7, mew=2, ls="", label="diverged"))
    figure.legend(handles=handles, loc="outside right upper")


def short(value: float) -> float | None:
    """Round to four digits; None for a number that is not finite."""
    return float(f"{value:.4g}") if isfinite(value) else None


def _numbers(line: Line) -> dict[str, Any]:
    rows = lambda curve: {name: [short(v) for v in row] for name, row in zip(NAMES, curve.tolist(), strict=True)}
    found = {"at": "q_g" if line.sampled else "mean", "seeds": len(line.runs), "seconds_a_round": short(line.seconds)}
    if line.runs:
        found |= rows(line.mean())
    if line.diverged:
        found["diverged"] = [{"seed": record["seed"], **rows(curve)} for record, curve in line.diverged]
    return found


def _quality(lines: list[Line]) -> Iterator[str]:
    """Say where every line ends, and in which round IVON-ADMM reaches that."""
    means = [(line, line.mean()) for line in lines if line.runs]
    for line, mean in means:
        seeds = f"mean of {len(line.runs)} seeds" if len(line.runs) > 1 else "one seed"
        end = f"{mean[ACCURACY, -1]:.1f} % and an NLL of {mean[NLL, -1]:.3f} after round {mean[ROUND, -1]:.0f}"
        yield f"{line.label} ends at {end} ({seeds})."
    for ours, mean in means:
        for other, rival in means:
            if ours.method == "ivon-admm" != other.method:
                accuracy, nll = rival[ACCURACY, -1], rival[NLL, -1]
                first = _when(mean, mean[ACCURACY] >= accuracy, f"{other.label}'s last accuracy ({accuracy:.1f} %)")
                second = _when(mean, mean[NLL] <= nll, f"{other.label}'s last NLL ({nll:.3f})")
                yield f"{ours.label} {first}, and {second}."


def _when(mean: Curve, there: NDArray[np.bool_], what: str) -> str:
    rounds, last = mean[ROUND][there], f"{mean[ROUND, -1]:.0f}"
    reached = f"reaches {what} in round {rounds[0]:.0f} of {last}" if len(rounds) else ""
    return reached or f"does not reach {what} in {last} rounds"


def _cost(lines: list[Line]) -> Iterator[str]:
    timed = [f"{line.label} {line.seconds:.3g}" for line in lines if isfinite(line.seconds)]
    if timed:
        yield f"Seconds a round: {', '.join(timed)}."
    means = [(line, line.mean()) for line in lines if line.runs]
    if means:
        sent = [f"{line.label} {mean[GIGABYTES, -1] / mean[ROUND, -1]:.3g}" for line, mean in means]
        yield f"GB sent a round: {', '.join(sent)}."


def _trouble(lines: list[Line], limits: dict[int, tuple[float, float]]) -> Iterator[str]:
    """Name the runs that diverged and the lines that end outside the picture."""
    for line in lines:
        for record, _ in line.diverged:
            last = [0, *record["history"]["round"]][-1]
            yield f"{line.label} with seed {record['seed']} diverged after round {last}: {record['diverged']}"
        for row, name in enumerate(NAMES) if line.runs else ():
            value = line.mean()[row, -1]
            if not limits[row][0] <= value <= limits[row][1]:
                yield f"{line.label} ends outside the picture: {name} {value:.3g}."
