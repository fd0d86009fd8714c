"""The figures of the reported tables as Markdown: each method, and the default beside the best of the others."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedual.rundir.jsonable import plain
from studies.small.cells import METHODS, resolved
from studies.small.tables import REPORTED

Record = dict[str, Any]
DEFAULT = "ivon-admm"
BEFORE = "earlier: "
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
    """A figure of a method by seed, from records with the numbers of today's rules or, for `BEFORE`, of others."""
    method, settings = METHODS[name.removeprefix(BEFORE)]
    mine = [line for line in lines if (line["table"], line["method"], line["settings"]) == (table, method, settings)]
    return {line["seed"]: line[key] for line in mine if key in line and current(line) != name.startswith(BEFORE)}


def current(line: Record) -> bool:
    """Whether a record has the numbers that its method's rules have now."""
    return line["resolved"] == plain(resolved(line["method"], line["settings"], line["sizes"]).to_dict())


def best(lines: Sequence[Record], table: str, key: str = "nll") -> str:
    """The one of the other methods with the least mean."""
    means = {name: statistics.fmean(found) for name in OTHERS if (found := by_seed(lines, table, name, key).values())}
    return min(means, key=means.__getitem__)


def paired(lines: Sequence[Record], table: str, key: str = "nll_mc") -> Spread | None:
    """The default's NLL minus that of the best other method, over the seeds that both have; None if there are none."""
    ours, theirs = by_seed(lines, table, DEFAULT, key), by_seed(lines, table, best(lines, table), "nll")
    both = sorted(ours.keys() & theirs.keys())
    return spread([ours[seed] - theirs[seed] for seed in both]) if both else None


def text(lines: Sequence[Record]) -> str:
    """One table of all methods' NLL, and one of the comparison."""
    measured = [name for name in REPORTED if any(line["table"] == name for line in lines)]
    rows = [["NLL", *measured]]
    for name in [BEFORE + DEFAULT, *METHODS]:
        for key, under in (("nll", ""), ("nll_mc", ", under q_g")):
            if not under or DEFAULT in name:
                rows.append([name + under, *(_cell(by_seed(lines, table, name, key)) for table in measured)])
    rows.append(["best of the others", *(best(lines, table) for table in measured)])
    for key, under in (("nll", "at the mean"), ("nll_mc", "under q_g")):
        differences = [paired(lines, table, key) for table in measured]
        shown = ["" if d is None else f"{d.mean:+.4f} ± {d.error:.4f}" for d in differences]
        rows.append([f"default − best, {under}", *shown])
    for name in [BEFORE + DEFAULT, *METHODS]:
        of = lambda table, key, name=name: by_seed(lines, table, name, key)
        rows.append([f"{name}, accuracy or RMSE", *(_cell(of(t, "accuracy") or of(t, "rmse")) for t in measured)])
    shown = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([shown[0], "|---" * len(rows[0]) + "|", *shown[1:]]) + "\n"


def _cell(values: dict[int, float]) -> str:
    if not values:
        return ""
    found = spread(list(values.values()))
    return f"{found.mean:.3f} ± {found.error:.3f} ({len(values)})"
