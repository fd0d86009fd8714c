"""How runs went: their figures over rounds and bytes, and their residuals, all runs in one plot."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from fedual.report.markup import Safe, folded, join, table, tag
from fedual.report.seen import FIGURES, PLACES, Seen, number
from fedual.report.svg import Axis, Line, axis, chart, colours, line, short, swatch
from fedual.report.verdict import STILL

DASHES = {"": None, "_mc": "5 3", "_clients": "1.5 2.5", "_mc_clients": "8 3 1.5 3"}
PLOTTED = ["accuracy", "nll", "ece", "rmse", "loss"]


class Looks(NamedTuple):
    """A run with its name, and the colour of each of its lines by the end of the figure's name."""

    run: Seen
    name: str
    colour: dict[str, str]


def looks(runs: Sequence[Seen], names: Sequence[str]) -> list[Looks]:
    """Several runs differ in colour; the lines of a single one do."""
    if len(runs) == 1:
        return [Looks(runs[0], names[0], dict(zip(PLACES, ("var(--c1)", "var(--c0)") * 2, strict=True)))]
    hues = colours(len(runs))
    return [Looks(run, name, dict.fromkeys(PLACES, hue)) for run, name, hue in zip(runs, names, hues, strict=True)]


def curves(shown: Sequence[Looks]) -> Safe | None:
    """Figures over rounds and over bytes, of which a switch shows one; None where no run has figures."""
    having = {key for one in shown for key in one.run.figures()}
    if not having:
        return None
    rounds = lambda run: {record["round"]: float(record["round"]) for record in run.history}
    largest = max((total for one in shown for total in one.run.traffic().values()), default=0.0)
    unit, size = _unit(largest)
    sent = lambda run: {round: total / size for round, total in run.traffic().items()}
    parts = [("rounds", "round", 1.0, rounds)]
    if largest:
        parts.append(("bytes", f"{unit} sent, both ways", 0.0, sent))
    panels, switch = [], []
    for key, label, least, place in parts:
        plots = [_plot(name, shown, label, least, place) for name in PLOTTED]
        panels.append(tag("div", *plots, class_=f"charts by-{key}"))
        chosen = "" if key == "rounds" else None
        switch.append(tag("input", type="radio", name="over", id=f"over-{key}", checked=chosen))
        switch.append(tag("label", f"over {key}", for_=f"over-{key}"))
    numbers = folded("The numbers", *(_table(one, unit, size) for one in shown))
    return join(_legend(shown), *(switch if len(parts) > 1 else []), *panels, numbers)


def residuals(shown: Sequence[Looks]) -> Safe | None:
    """‖λ_k − λ_g‖ and ‖change of λ_g‖ as parts of ‖λ_g‖, on a logarithmic scale; None where no run has them."""
    lines, tables = [], []
    for one in shown:
        norms = dict(one.run.column("norm"))
        for name, dash in _RESIDUALS.items():
            column = one.run.column(name)
            if points := [(float(r), value / norms[r]) for r, value in column if value > 0 and norms.get(r, 0) > 0]:
                lines.append(Line(_of(name, one, shown), points, one.colour[_LIKE[name]], dash))
        rows = [[r["round"], *(number(r, key) for key in ("primal", "dual", "norm"))] for r in one.run.history]
        cells = [[str(row[0]), *("–" if value is None else short(value) for value in row[1:])] for row in rows]
        tables.append(table(["round", "primal", "dual", "norm"], cells, f"Residuals of every round, {one.name}"))
    if not lines:
        return None
    x = axis("round", [a for drawn in lines for a, _ in drawn.points], least=1.0)
    y = axis("", [STILL, *(b for drawn in lines for _, b in drawn.points)], log=True, show=lambda v: f"{100 * v:g}%")
    rule = line(x, y, Line("converged", [(x.low, STILL), (x.high, STILL)], "var(--faint)", "2 3", False))
    said = f"Residuals over rounds, logarithmic. {_ends(lines, y.show)}."
    plot = tag("figure", chart(said, x, y, rule, *(line(x, y, drawn) for drawn in lines)), class_="chart")
    words = tag(
        "p",
        "Primal: how far clients are from the server, ‖λ_k − λ_g‖. Dual: how far the server moved in the round. Both "
        f"as parts of ‖λ_g‖; at the dotted line, {STILL:.0%}, a run counts as converged. Minibatches keep most "
        "networks above it.",
        class_="aside",
    )
    keys = [(name, _RESIDUALS[name]) for name in _RESIDUALS]
    return join(_legend(shown, keys), tag("div", plot, words, class_="charts"), folded("The numbers", *tables))


_RESIDUALS = {"primal": None, "dual": "5 3"}
_LIKE = {"primal": "", "dual": "_mc"}  # the place whose colour a residual takes


def _plot(
    name: str, shown: Sequence[Looks], label: str, least: float, place: Callable[[Seen], dict[int, float]]
) -> Safe | None:
    """One figure of all runs; `place` says where each round lies."""
    lines = []
    for one in shown:
        where = place(one.run)
        for end, meaning in PLACES.items():
            if points := [(where[r], value) for r, value in one.run.column(name + end) if r in where]:
                lines.append(Line(_of(meaning, one, shown), points, one.colour[end], DASHES[end]))
    if not lines:
        return None
    x = axis(label, [a for drawn in lines for a, _ in drawn.points], least=least, zero=not least)
    y = _height(name, [b for drawn in lines for _, b in drawn.points])
    said = f"{FIGURES[name]} over {label}. {_ends(lines, y.show)}."
    plot = chart(said, x, y, *(line(x, y, drawn) for drawn in lines))
    return tag("figure", tag("figcaption", FIGURES[name] + (", log scale" if y.log else "")), plot, class_="chart")


def _height(name: str, values: list[float]) -> Axis:
    """Shares in percent; losses on a logarithmic scale where they fall a lot."""
    if name == "accuracy":
        return axis("", values, show=lambda value: f"{short(round(100 * value, 4))}%")
    log = name != "ece" and min(values) > 0 and max(values) / min(values) > 20
    return axis("", values, log=log, zero=not log and min(values) > 0)


def _legend(shown: Sequence[Looks], keys: Sequence[tuple[str, str | None]] | None = None) -> Safe:
    """What colours and dashes mean."""
    ends = {key.removeprefix(name) for one in shown for key in one.run.figures() for name in FIGURES}
    if keys is None:
        keys = [(meaning, DASHES[end]) for end, meaning in PLACES.items() if end in ends]
    if len(shown) == 1:
        hues = [shown[0].colour["" if dash is None or dash == DASHES["_clients"] else "_mc"] for _, dash in keys]
        items = [(meaning, hue, dash) for (meaning, dash), hue in zip(keys, hues, strict=True)]
    else:
        items = [(one.name, one.colour[""], None) for one in shown]
        items += [(meaning, "currentColor", dash) for meaning, dash in keys]
    return tag("ul", *(tag("li", swatch(hue, dash), name) for name, hue, dash in items), class_="legend")


def _table(one: Looks, unit: str, size: float) -> Safe:
    keys, traffic = one.run.figures(), one.run.traffic()
    rows = []
    for record in one.run.history:
        values = [number(record, key) for key in keys]
        sent = traffic.get(record["round"])
        rows.append(
            [str(record["round"]), "–" if sent is None else f"{sent / size:.4g}"]
            + ["–" if value is None else f"{value:.4f}" for value in values]
        )
    heads = [_heading(key) for key in keys]
    return table(["round", f"{unit} sent", *heads], rows, f"Figures of every round, {one.name}")


def _heading(key: str) -> str:
    name, _, end = key.partition("_")
    return f"{FIGURES[name]} {PLACES[f'_{end}' if end else '']}"


def _of(what: str, one: Looks, shown: Sequence[Looks]) -> str:
    return what if len(shown) == 1 else f"{what}, {one.name}"


def _ends(lines: Sequence[Line], show: Callable[[float], str]) -> str:
    """What lines say, in words."""
    neat = lambda value: show(float(f"{value:.3g}"))
    return "; ".join(f"{drawn.name}: from {neat(drawn.points[0][1])} to {neat(drawn.points[-1][1])}" for drawn in lines)


def _unit(largest: float) -> tuple[str, float]:
    """The unit in which numbers of bytes are short."""
    for power, unit in zip(count(), ("B", "kB", "MB", "GB", "TB"), strict=False):
        if largest < 1000.0 ** (power + 1) or unit == "TB":
            return unit, 1000.0**power
    raise AssertionError


def in_bytes(total: float) -> str:
    """19.3 MB."""
    unit, size = _unit(total)
    return f"{total / size:.3g} {unit}"
