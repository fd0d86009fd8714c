"""The figures of the reported tables as Markdown: each method, and the default beside the best of the others."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from studies.small.cells import METHODS
from studies.small.tables import REPORTED

Record = dict[str, Any]
DEFAULT = "ivon-admm"
OTHERS = [name for name in METHODS if not name.startswith(DEFAULT)]


class Spread(NamedTuple):
    """A mean over seeds and its standard error."""

    mean: float
    error: float


def spread(values: Sequence[float]) -> Spread:
    """The mean and its standard error; NaN for a single value."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return Spread(statistics.fmean(values), error)


def by_seed(lines: Sequence[Record], table: str, name: str, key: str) -> dict[int, float]:
    """A figure of a method on a table by seed; of several records the last, which has the numbers of today's rules."""
    method, settings = METHODS[name]
    mine = [line for line in lines if (line["table"], line["method"], line["settings"]) == (table, method, settings)]
    return {line["seed"]: line[key] for line in mine if key in line}


def best(lines: Sequence[Record], table: str, key: str = "nll") -> str:
    """The one of the other methods with the least mean."""
    means = {name: statistics.fmean(found) for name in OTHERS if (found := by_seed(lines, table, name, key).values())}
    return min(means, key=means.__getitem__)


def paired(lines: Sequence[Record], table: str, key: str = "nll_mc") -> Spread:
    """The default's NLL minus that of the best other method, over the seeds that both have."""
    ours, theirs = by_seed(lines, table, DEFAULT, key), by_seed(lines, table, best(lines, table), "nll")
    return spread([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def text(lines: Sequence[Record]) -> str:
    """One table of all methods' NLL, and one of the comparison."""
    measured = [name for name in REPORTED if any(line["table"] == name for line in lines)]
    rows = [["NLL", *measured]]
    for name in METHODS:
        for key, under in (("nll", ""), ("nll_mc", ", under q_g")):
            if not under or name.startswith(DEFAULT):
                rows.append([name + under, *(_cell(by_seed(lines, table, name, key)) for table in measured)])
    rows.append(["best of the others", *(best(lines, table) for table in measured)])
    for key, under in (("nll", "at the mean"), ("nll_mc", "under q_g")):
        differences = [paired(lines, table, key) for table in measured]
        rows.append([f"default − best, {under}", *(f"{d.mean:+.4f} ± {d.error:.4f}" for d in differences)])
    for name in METHODS:
        figures = [
            by_seed(lines, table, name, "accuracy") or by_seed(lines, table, name, "rmse") for table in measured
        ]
        rows.append([f"accuracy or RMSE: {name}", *map(_cell, figures)])
    shown = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([shown[0], "|---" * len(rows[0]) + "|", *shown[1:]]) + "\n"


def _cell(values: dict[int, float]) -> str:
    if not values:
        return ""
    found = spread(list(values.values()))
    return f"{found.mean:.3f} ± {found.error:.3f} ({len(values)})"
