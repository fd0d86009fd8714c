"""A table of the paper beside ours as a picture: accuracy and NLL of every method after the last round."""

from collections.abc import Sequence
from typing import Any

from fedual.figures.common import BLUE, FAINT, GREY, RED, Drawing, canvas


def draw(blocks: Sequence[Any], title: str) -> Drawing:
    """One row of panels a scenario: the paper's 2σ as a grey bar, our mean and standard deviation as a dot on it.

    Args:
        blocks: of `fedual.experiments.tables`.
        title: of the figure.
    """
    blocks = [block for block in blocks if any(block.ours.values())]
    # under q_g only where the paper has it too: FedLap-Cov's q_g is so wide that it would hide all else
    shown = lambda block, row: block.ours[row] and (not row.under or row.key in block.paper)
    rows = [[row for row in block.ours if shown(block, row)] for block in blocks]
    numbers: dict[str, Any] = {}
    with canvas(9.0, 0.9 + sum(0.24 * len(some) + 0.75 for some in rows)) as figure:
        axes = figure.subplots(len(blocks), 2, squeeze=False, height_ratios=[len(some) + 2 for some in rows])
        for pair, block, some in zip(axes, blocks, rows, strict=True):
            for axis, metric in zip(pair, ("accuracy", "nll"), strict=True):
                numbers[f"{block.part.scenario} {metric}"] = _panel(axis, block, some, metric)
            pair[0].set_title(block.part.scenario)
            pair[1].set_yticklabels([])
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return Drawing(figure, numbers, [])


def _panel(axis: Any, block: Any, rows: Sequence[Any], metric: str) -> dict[str, Any]:
    """Our dots, and the paper's bars."""
    last, found = block.part.rounds[-1], {}
    for place, row in enumerate(rows):
        ours, paper = block.ours[row].get((metric, last)), block.paper.get(row.key, {}).get((metric, last))
        if paper:
            axis.barh(place, 4 * paper[1], left=paper[0] - 2 * paper[1], height=0.7, color=FAINT)
            axis.plot([paper[0]] * 2, [place - 0.35, place + 0.35], color=GREY, lw=1.5)
        if ours:
            colour = RED if row.method == "ivon-admm" else BLUE
            axis.errorbar(ours.mean, place, xerr=ours.sd, color=colour, marker="o", ms=4, lw=1.2)
        found[row.label] = {"ours": ours, "paper": paper}  # its key is that of the preset `paper` too
    axis.set(yticks=range(len(rows)), yticklabels=[row.label for row in rows], ylim=(len(rows) - 0.4, -0.6))
    axis.set_xlabel(f"accuracy % after {last} rounds" if metric == "accuracy" else f"NLL after {last} rounds")
    return found
