"""Metrics over rounds and bytes, and residuals over rounds, with all runs in one plot."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedual.report.elements import Axis, Key, Line, Plot, Section, Table, axis, short
from fedual.report.run_data import METRICS, PLACES, RunData, number
from fedual.report.verdict import STILL

UNITS = ("B", "kB", "MB", "GB", "TB")
PLOTTED = ["accuracy", "nll", "ece", "rmse", "loss"]
DASHES = {"": None, "_mc": "5 3", "_clients": "1.5 2.5", "_mc_clients": "8 3 1.5 3"}  # by the kind of evaluation
RESIDUALS = {"primal": "", "dual": "_mc"}  # and the kind of evaluation whose colour and dash their lines take
LOG_RATIO = 20  # a loss whose largest value is more than so many times its smallest has a logarithmic axis


def curves(runs: Sequence[RunData]) -> Section:
    """Metrics over rounds and over bytes; a switch on the page chooses between the two."""
    keys = {key for run in runs for key in run.last()}
    if not keys:
        return Section("No round was evaluated.")
    plots = {"rounds": _plots(runs, "round", "round", least=1.0)}
    if largest := max((total for run in runs for total in run.column("sent")), default=0.0):
        power = min(int(math.log10(largest) / 3), len(UNITS) - 1)
        label, show = f"{UNITS[power]} sent, both ways", lambda value: short(value / 1000**power)
        plots["bytes"] = _plots(runs, "sent", label, zero=True, show=show)
    columns = {f"{METRICS[name]} {PLACES[end]}": name + end for name in METRICS for end in PLACES if name + end in keys}
    tables = [_table(f"Metrics of every round, {run.name}", run, {"bytes sent": "sent", **columns}) for run in runs]
    kinds = [(meaning, end) for end, meaning in PLACES.items() if any(name + end in keys for name in METRICS)]
    return Section(legend=_legend(runs, kinds), plots=plots, tables=tables)


def residuals(runs: Sequence[RunData]) -> Section:
    """‖λ_k − λ_g‖ and ‖change of λ_g‖ as fractions of ‖λ_g‖, on a logarithmic scale."""
    lines = []
    for run in runs:
        norms = dict(run.points("round", "norm"))
        for name, end in RESIDUALS.items():
            column = run.points("round", name)
            if points := [(place, value / norms[place]) for place, value in column if value > 0 < norms.get(place, 0)]:
                lines.append(Line(run.label(name, runs), points, run.colours[end], DASHES[end]))
    if not lines:
        return Section("No round has residuals.")
    x = axis("round", [a for line in lines for a, _ in line.points], least=1.0)
    heights = [STILL, *(b for line in lines for _, b in line.points)]
    y = axis("", heights, log=True, show=lambda value: f"{100 * value:g}%")
    limit = Line("converged", [(x.low, STILL), (x.high, STILL)], "var(--faint)", "2 3", False)
    plot = Plot("", f"Residuals over rounds, logarithmic. {_summary(lines, y)}.", x, y, [limit, *lines])
    aside = (
        "Primal: how far clients are from the server, ‖λ_k − λ_g‖. Dual: how far the server moved in the round. Both "
        f"are fractions of ‖λ_g‖. Below the dotted line, {STILL:.0%}, a run counts as converged. Minibatches keep most "
        "networks above it."
    )
    columns = {key: key for key in (*RESIDUALS, "norm")}
    tables = [_table(f"Residuals of every round, {run.name}", run, columns) for run in runs]
    return Section("", _legend(runs, list(RESIDUALS.items())), {"rounds": [plot]}, aside, tables=tables)


def _plots(runs: Sequence[RunData], across: str, label: str, **settings: Any) -> list[Plot]:
    """One plot for each metric over the key `across`; `settings` are those of its axis."""
    plots = []
    for metric in PLOTTED:
        lines = [
            Line(run.label(meaning, runs), points, run.colours[end], DASHES[end])
            for run in runs
            for end, meaning in PLACES.items()
            if (points := run.points(across, metric + end))
        ]
        if lines:
            x = axis(label, [a for line in lines for a, _ in line.points], **settings)
            y = _metric_axis(metric, [b for line in lines for _, b in line.points])
            title = METRICS[metric] + (", log scale" if y.log else "")
            plots.append(Plot(title, f"{METRICS[metric]} over {label}. {_summary(lines, y)}.", x, y, lines))
    return plots


def _metric_axis(metric: str, values: list[float]) -> Axis:
    """Accuracies are percentages; losses that fall a lot have a logarithmic axis."""
    if metric == "accuracy":
        return axis("", values, show=lambda value: f"{short(round(100 * value, 4))}%")
    log = metric != "ece" and min(values) > 0 and max(values) / min(values) > LOG_RATIO
    return axis("", values, log=log, zero=not log and min(values) > 0)


def _table(caption: str, run: RunData, columns: Mapping[str, str]) -> Table:
    """The records of a run; `columns` pairs a heading with a key."""
    rows = [[r["round"], *(number(r, key) for key in columns.values())] for r in run.history]
    return Table(caption, ["round", *columns], rows)


def _legend(runs: Sequence[RunData], kinds: Sequence[tuple[str, str]]) -> list[Key]:
    """What colours and dashes mean; `kinds` pairs a label with the kind of evaluation that it looks like."""
    if len(runs) == 1:
        return [(label, runs[0].colours[end], DASHES[end]) for label, end in kinds]
    names = [(run.name, run.colours[""], None) for run in runs]
    return [*names, *((label, "currentColor", DASHES[end]) for label, end in kinds)]


def _summary(lines: Sequence[Line], y: Axis) -> str:
    """The first and the last value of every line, in words."""
    ends = ((line.name, *(y.show(float(f"{line.points[place][1]:.3g}")) for place in (0, -1))) for line in lines)
    return "; ".join(f"{name}: from {first} to {last}" for name, first, last in ends)
