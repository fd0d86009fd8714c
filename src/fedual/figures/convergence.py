"""How methods converge on a scenario, and what a round costs: drawn from the records of `fedual reproduce` alone.

A record has `scenario`, `method`, `variant`, `seed`, `diverged` (None, or a sentence) and `history`, whose columns have
one value a round: round, accuracy, nll (with the suffix _mc under q_g), seconds of training, bytes_up and bytes_down.
Records of one method and variant are one line. Runs that diverged are no part of its mean: a mean that loses a seed on
the way would jump.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from math import inf, isfinite, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedual.errors import InputError
from fedual.figures.common import FAINT, GREY, INK, Drawing, canvas

Record = Mapping[str, Any]
Curve = NDArray[np.float64]
"""`(5, T)`: the rows are `ROUND` … `NLL`, the columns the rounds that were evaluated."""

ROUND, GIGABYTES, SECONDS, ACCURACY, NLL = range(5)
NAMES = ("round", "gigabytes", "seconds", "accuracy", "nll")
ACROSS = {ROUND: "communication rounds", GIGABYTES: "GB sent, up and down", SECONDS: "seconds of training"}
UPRIGHT = {ACCURACY: "test accuracy, %", NLL: "test NLL"}
VIEW = 2.5  # how many times the best method's loss, or the median method's length, is still inside the picture

# In the order of the legend. Any two colours are 25 or more apart in CIELAB, with normal vision and without one of the
# three cones (Machado et al. 2009).
METHODS = {
    "ivon-admm": ("IVON-ADMM", "#d02408"),
    "ivon-pvi": ("IVON-PVI", "#efb424"),
    "fedavg": ("FedAvg", INK),
    "fedprox": ("FedProx", "#b0b0b0"),
    "feddyn": ("FedDyn", "#002da0"),
    "fedadmm": ("FedADMM", "#60bff2"),
    "fedlap": ("FedLap", "#1b805c"),
    "fedlap-cov": ("FedLap-Cov", "#78548f"),
}
STROKES = ("-", "--", ":", "-.")
RAMP = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (216, 204, 48)]) / 255
"""A sequential map, viridis but for its end: the yellow there would vanish on white."""


class Line(NamedTuple):
    """One method and variant: its runs, and how it is drawn."""

    method: str
    variant: str
    looks: dict[str, Any]
    sampled: bool  # evaluated under q_g, not at its mean
    runs: list[Curve]  # those that did not diverge, in the rounds that they share
    diverged: list[tuple[Record, Curve]]
    seconds: float  # a round's median; nan where no run has two rounds

    @property
    def label(self) -> str:
        """The method's name, with the variant in brackets."""
        name = METHODS.get(self.method, (self.method,))[0]
        return f"{name} ({self.variant})" if self.variant else name

    def mean(self) -> Curve:
        """Over the runs that did not diverge; there must be one."""
        return np.mean(self.runs, axis=0)


def draw(records: Sequence[Record], title: str) -> Drawing:
    """Accuracy and NLL against rounds, bytes and seconds: the paper's Figures 2 and 5c, and ablations.

    A line is the mean over seeds, its band their minimum and maximum, a cross the end of a run that diverged. Figures
    of IVON methods are under q_g where records have them, all others at the mean.

    Args:
        records: Runs of one scenario.
        title: Of the picture.
    """
    scenarios = sorted({record["scenario"] for record in records})
    if len(scenarios) != 1:
        raise InputError(f"Convergence is drawn from runs of one scenario, not of {scenarios}: choose one.")
    lines = _lines(records)
    runs = [run for line in lines for run in line.runs] or [
        curve for line in lines for _, curve in line.diverged if curve.size
    ]
    if not runs:
        raise InputError(f"No run of {scenarios[0]} has a round with accuracy and NLL: evaluate on a test set.")
    curves = [line.mean() for line in lines if line.runs] or runs
    limits = {row: _length_limits(row, curves) for row in ACROSS}
    limits |= {row: _loss_limits(row, curves, runs) for row in UPRIGHT}
    with canvas(10.2, 5.2) as figure:
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
    numbers = {"scenario": scenarios[0], "lines": {line.label: _numbers(line) for line in lines}}
    return Drawing(figure, numbers, [*_quality(lines), *_cost(lines), *_trouble(lines, limits)])


def runtimes(records: Sequence[Record]) -> Drawing:
    """A method's median time of a round (the first left out) in units of FedAvg's, scenario by scenario.

    A variant is compared with the same variant of FedAvg where there is one. A round is what the scenario makes of it:
    a method with more local epochs than FedAvg has a longer bar for it.
    """
    found = {name: _lines([r for r in records if r["scenario"] == name]) for name in _unique(records, "scenario")}
    found = {name: [line for line in lines if isfinite(line.seconds)] for name, lines in found.items()}
    groups = {name: lines for name, lines in found.items() if _partner("", "fedavg", lines)}
    if not groups:
        raise InputError("No scenario has a FedAvg run of two rounds, the unit of the others' times: run one.")
    bars = [
        (name, line, line.seconds / partner.seconds)
        for name, lines in groups.items()
        for line in lines
        if (partner := _partner(line.variant, "fedavg", lines))
    ]
    numbers: dict[str, dict[str, Any]] = {name: {} for name in groups}
    for name, line, ratio in bars:
        numbers[name][line.label] = {"seconds": _short(line.seconds), "of_fedavg": _short(ratio)}
    findings = [
        f"{line.label} takes {line.seconds / partner.seconds:.1f} times {partner.label}'s time on {name}."
        for method, unit in (("fedlap-cov", "fedlap"), ("ivon-admm", "fedavg"))
        for name, line, _ in bars
        if line.method == method and (partner := _partner(line.variant, unit, groups[name]))
    ]
    findings += [f"{name} is left out: it has no FedAvg run of two rounds." for name in found if name not in groups]
    with canvas(6.4, 0.7 + 0.19 * (len(bars) + 2 * len(groups))) as figure:
        _bars(figure.subplots(), bars)
    return Drawing(figure, numbers, findings)


def _unique(records: Sequence[Record], key: str) -> list[str]:
    return list(dict.fromkeys(record[key] for record in records))


def _lines(records: Sequence[Record]) -> list[Line]:
    """The records by method, in the legend's order, and variant, by the value behind its equals sign."""
    methods = sorted(_unique(records, "method"), key=lambda name: [*METHODS, name].index(name))
    lines = []
    for method in methods:
        own = [record for record in records if record["method"] == method]
        variants = sorted(_unique(own, "variant"), key=_value)
        for variant, looks in zip(variants, _looks(method, len(variants), alone=len(methods) == 1), strict=True):
            lines.append(_line(method, variant, looks, [record for record in own if record["variant"] == variant]))
    return lines


def _value(variant: str) -> float:
    """The number in `tau=0.03`; words come before all numbers."""
    try:
        return float(variant.rpartition("=")[2])
    except ValueError:
        return -inf


def _looks(method: str, variants: int, alone: bool) -> list[dict[str, Any]]:
    """A method has a colour and its variants strokes; variants of one method alone, or many of them, have colours."""
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
    """A run's rounds that were evaluated and gave numbers, with the bytes and seconds of all rounds until then."""
    number = len(history["round"])
    column = lambda name: np.array(history.get(name, [None] * number), dtype=float)
    seconds = column("seconds")
    # the first round compiles: it counts as much as the second, or short runs would look slower than long ones
    seconds[:1] = seconds[1:2] if number > 1 else seconds[:1]
    sent = np.cumsum(column("bytes_up") + column("bytes_down")) / 1e9
    quality = 100 * column("accuracy" + suffix), column("nll" + suffix)
    curve = np.stack([column("round"), sent, np.cumsum(seconds), *quality])
    return curve[:, np.isfinite(curve).all(0)]


def _loss_limits(row: int, curves: list[Curve], runs: list[Curve]) -> tuple[float, float]:
    """From the best value to what most of the best curve and all that comes near it need, after a tenth of the rounds.

    Near is `VIEW` times the best curve's last loss, so that one method that overfits does not squash the others. The
    loss of the accuracy is the error.
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
    """From 0 to the end of the longest curve, or `VIEW` times the median's where a few are much longer."""
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
    """Once for all panels, at their right."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=line.label, **line.looks) for line in lines]
    if any(line.diverged for line in lines):
        handles.append(Line2D([], [], color=GREY, marker="x", ms=7, mew=2, ls="", label="diverged"))
    figure.legend(handles=handles, loc="outside right upper")


def _bars(axis: Any, bars: list[tuple[str, Line, float]]) -> None:
    """One bar below the other, with a heading and a gap for every scenario."""
    position, scenario, ticks = 0, None, []
    for name, line, ratio in bars:
        if name != scenario:
            position, scenario = position + 2, name
            ticks.append((position - 1, name))
        axis.barh(position, ratio, height=0.8, color=line.looks["color"], label=line.label)
        axis.text(ratio, position, f" {ratio:.2f}  ({line.seconds:.3g} s)", va="center", fontsize=7.5)
        ticks.append((position, line.label))
        position += 1
    axis.set_yticks(*zip(*ticks, strict=True), fontsize=8)
    headings = {name for name, _, _ in bars}
    for text in axis.get_yticklabels():
        text.set_fontweight("bold" if text.get_text() in headings else "normal")
    axis.axvline(1, color=GREY, lw=0.8, ls=":", zorder=0)
    axis.set(ylim=(position, 0.2), xlim=(0, 1.2 * max(ratio for _, _, ratio in bars)))
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("seconds a round, FedAvg = 1")


def _partner(variant: str, method: str, lines: list[Line]) -> Line | None:
    """The method's line of the same variant, or else its first."""
    own = [line for line in lines if line.method == method]
    return next((line for line in own if line.variant == variant), own[0] if own else None)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if isfinite(value) else None


def _numbers(line: Line) -> dict[str, Any]:
    rows = lambda curve: {name: [_short(v) for v in row] for name, row in zip(NAMES, curve.tolist(), strict=True)}
    found = {"at": "q_g" if line.sampled else "mean", "seeds": len(line.runs), "seconds_a_round": _short(line.seconds)}
    if line.runs:
        found |= rows(line.mean())
    if line.diverged:
        found["diverged"] = [{"seed": record["seed"], **rows(curve)} for record, curve in line.diverged]
    return found


def _quality(lines: list[Line]) -> Iterator[str]:
    """Where every line ends, and when IVON-ADMM is there."""
    means = [(line, line.mean()) for line in lines if line.runs]
    for line, mean in means:
        seeds = f"mean of {len(line.runs)} seeds" if len(line.runs) > 1 else "one seed"
        yield (
            f"{line.label} ends at {mean[ACCURACY, -1]:.1f} % and an NLL of {mean[NLL, -1]:.3f} after round "
            f"{mean[ROUND, -1]:.0f} ({seeds})."
        )
    for ours, mean in means:
        for other, rival in means:
            if ours.method == "ivon-admm" != other.method:
                accuracy, nll = rival[ACCURACY, -1], rival[NLL, -1]
                first = _when(mean, mean[ACCURACY] >= accuracy, f"{other.label}'s last accuracy ({accuracy:.1f} %)")
                second = _when(mean, mean[NLL] <= nll, f"{other.label}'s last NLL ({nll:.3f})")
                yield f"{ours.label} {first}, and {second}."


def _when(mean: Curve, there: NDArray[np.bool_], what: str) -> str:
    last = f"{mean[ROUND, -1]:.0f}"
    return (
        f"reaches {what} in round {mean[ROUND][there][0]:.0f} of {last}"
        if there.any()
        else f"does not reach {what} in {last} rounds"
    )


def _cost(lines: list[Line]) -> Iterator[str]:
    timed = [f"{line.label} {line.seconds:.3g}" for line in lines if isfinite(line.seconds)]
    if timed:
        yield f"Seconds a round: {', '.join(timed)}."
    means = [(line, line.mean()) for line in lines if line.runs]
    if means:
        sent = [f"{line.label} {mean[GIGABYTES, -1] / mean[ROUND, -1]:.3g}" for line, mean in means]
        yield f"GB sent a round: {', '.join(sent)}."


def _trouble(lines: list[Line], limits: dict[int, tuple[float, float]]) -> Iterator[str]:
    """Runs that diverged, and ends of lines that the picture does not show."""
    for line in lines:
        for record, _ in line.diverged:
            last = [0, *record["history"]["round"]][-1]
            yield f"{line.label} with seed {record['seed']} diverged after round {last}: {record['diverged']}"
        for row, name in enumerate(NAMES) if line.runs else ():
            value = line.mean()[row, -1]
            if not limits[row][0] <= value <= limits[row][1]:
                yield f"{line.label} ends outside the picture: {name} {value:.3g}."
