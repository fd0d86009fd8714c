"""A table as a picture: accuracy and NLL of every method after the last round, ours beside the paper's."""

from collections.abc import Sequence
from typing import Any

from studies.figures.common import BLUE, FAINT, GREY, RED, Drawing, paint

METRICS = {"accuracy": "accuracy %", "nll": "NLL"}


def draw(blocks: Sequence[Any], title: str) -> Drawing:
    """Draw a row of panels for each block: the paper's 2σ as grey bars, our mean and deviation as dots."""
    blocks = [block for block in blocks if any(block.ours.values())]
    # show results under q_g only where the paper has them: FedLap-Cov's q_g is so wide that it would hide the rest
    shown = lambda block, row: block.ours[row] and (not row.under or row.key in block.paper)
    rows = [[row for row in block.ours if shown(block, row)] for block in blocks]
    numbers: dict[str, Any] = {}
    for block, some in zip(blocks, rows, strict=True):
        paper = lambda row, key, block=block: block.paper.get(row.key, {}).get(key)
        for metric in METRICS:
            last = metric, block.part.rounds[-1]
            both = {row.label: {"ours": block.ours[row].get(last), "paper": paper(row, last)} for row in some}
            numbers[f"{block.part.scenario} {metric}"] = both

    def plot(figure: Any) -> None:
        axes = figure.subplots(len(blocks), 2, squeeze=False, height_ratios=[len(some) + 2 for some in rows])
        for pair, block, some in zip(axes, blocks, rows, strict=True):
            for axis, metric in zip(pair, METRICS, strict=True):
                _panel(axis, some, numbers[f"{block.part.scenario} {metric}"])
                axis.set_xlabel(f"{METRICS[metric]} after {block.part.rounds[-1]} rounds")
            pair[0].set_title(block.part.scenario)
            pair[1].set_yticklabels([])
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")

    height = 0.9 + sum(0.24 * len(some) + 0.75 for some in rows)
    return Drawing(lambda: paint(9.0, height, plot), numbers, [])


def _panel(axis: Any, rows: Sequence[Any], numbers: dict[str, dict[str, Any]]) -> None:
    for place, row in enumerate(rows):
        ours, paper = numbers[row.label]["ours"], numbers[row.label]["paper"]
        if paper:
            axis.barh(place, 4 * paper[1], left=paper[0] - 2 * paper[1], height=0.7, color=FAINT)
            axis.plot([paper[0]] * 2, [place - 0.35, place + 0.35], color=GREY, lw=1.5)
        if ours:
            colour = RED if row.method == "ivon-admm" else BLUE
            axis.errorbar(ours.mean, place, xerr=ours.sd, color=colour, marker="o", ms=4, lw=1.2)
    axis.set(yticks=range(len(rows)), yticklabels=[row.label for row in rows], ylim=(len(rows) - 0.4, -0.6))
