"""The time of a round of each method, in units of FedAvg's."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from fedual.errors import InputError
from studies.figures.common import GREY, Drawing, paint
from studies.figures.convergence import Line, Record, lines_of, short


def draw(records: Sequence[Record]) -> Drawing:
    """Draw each method's median time of a round, without the first round, for every scenario.

    A variant is compared with the same variant of FedAvg if there is one. Times are not corrected for settings: a
    method with more local epochs than FedAvg has a longer bar.
    """
    names = dict.fromkeys(record["scenario"] for record in records)
    found = {name: lines_of([r for r in records if r["scenario"] == name]) for name in names}
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
        numbers[name][line.label] = {"seconds": short(line.seconds), "of_fedavg": short(ratio)}
    findings = [
        f"{line.label} takes {line.seconds / partner.seconds:.1f} times {partner.label}'s time on {name}."
        for method, unit in (("fedlap-cov", "fedlap"), ("ivon-admm", "fedavg"))
        for name, line, _ in bars
        if line.method == method and (partner := _partner(line.variant, unit, groups[name]))
    ]
    findings += [f"{name} is left out: it has no FedAvg run of two rounds." for name in found if name not in groups]
    height = 0.7 + 0.19 * (len(bars) + 2 * len(groups))
    return Drawing(lambda: paint(6.4, height, lambda figure: _bars(figure.subplots(), bars)), numbers, findings)


def _bars(axis: Any, bars: list[tuple[str, Line, float]]) -> None:
    """Draw the bars below each other, with a heading for every scenario."""
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
    """Return the method's line of the same variant, or its first line if there is none."""
    own = [line for line in lines if line.method == method]
    return next((line for line in own if line.variant == variant), own[0] if own else None)
