"""Tables as Markdown and CSV, made from records: our results beside the paper's.

Our result is the mean ± standard deviation over seeds of the metrics that `records.logged` returns. Beside the paper's
it is marked ≈ (within 2σ of the paper's mean, plus half a unit of its last digit), ▲ (better) or ▼ (worse).
"""

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedual.scenarios.scenario import read
from studies.figures.common import METHODS
from studies.records import Cell, Record, logged
from studies.tables import TITLES, WITHOUT, Part, parts

METRICS = {"accuracy": (100.0, 1, True), "nll": (1.0, 3, False)}
"""For each metric: its scale, the digits shown, and whether more is better."""
LEGEND = (
    "Ours (the paper's in brackets): ≈ within 2σ of the paper's, ▲ better, ▼ worse; **bold**: the best of ours, or not "
    "to be told from it (difference of means up to twice its standard error; with one seed, none)."
)
ABLATED = {setting: f"without {what}" for what, setting in WITHOUT.items()}

Figures = dict[str, dict[tuple[str, int], tuple[float, float]]]
"""The paper's results: for each row, mean and standard deviation by (metric, round)."""


class Row(NamedTuple):
    """A row of a table."""

    method: str
    variant: str
    under: bool  # metrics under q_g rather than at its mean

    @property
    def key(self) -> str:
        """The row's name in paper.json; both presets are compared with the same row of the paper."""
        variant = "" if self.variant in ("paper", "default") else self.variant
        return " ".join(filter(None, (self.method, variant, "under q_g" if self.under else "")))

    @property
    def label(self) -> str:
        """The row's name in the table."""
        if self.variant == "central":
            return "all data in one place"
        first, *more = [word for word in self.variant.split(",") if not word.startswith("train.rounds=")]
        if first == "default":
            more = [ABLATED.get(word, word) for word in more]
        known = {"paper": "the paper’s" if more else "settings of the paper", "default": "no setting"}
        about = ", ".join([known.get(first, first), *more])
        name = METHODS[self.method][0] + (f" ({about})" if about else "")
        return name + (", under q_g" if self.under else "")


class Spread(NamedTuple):
    """Mean and standard deviation (with n − 1; None for a single run) over n runs."""

    mean: float
    sd: float | None
    runs: int

    def show(self, digits: int) -> str:
        """Format as `82.5 ± 0.2`."""
        return f"{self.mean:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")


class Block(NamedTuple):
    """One scenario of a table: our results and the paper's, by row and (metric, round)."""

    part: Part
    ours: dict[Row, dict[tuple[str, int], Spread]]
    paper: Figures
    seeds: dict[Row, list[int]]
    diverged: dict[Row, list[str]]

    def digits(self, metric: str) -> int:
        """Return the paper's number of decimals: the largest of any of its results."""
        pairs = [pair for figures in self.paper.values() for (m, _), pair in figures.items() if m == metric]
        return max((len(f"{value:g}".partition(".")[2]) for pair in pairs for value in pair), default=1)


@cache
def published(name: str) -> dict[str, Any]:
    """Return the paper's results of a table, by scenario, row and metric@round."""
    found = json.loads((Path(__file__).parent / "paper.json").read_text(encoding="utf-8"))
    if name == "defaults":  # its scenarios are those of these tables
        return {key: value for table in ("table1", "table2", "table3") for key, value in found[table].items()}
    return found.get(name, {})


def records_of(part: Part, found: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Return the records of a part by method and variant, sorted by seed."""
    by_run = {}
    for method, variant in part.runs:
        own = part.scenario, method, Cell(part.scenario, method, 0, variant).own().variant
        mine = [record for record in found if (record["scenario"], record["method"], record["variant"]) == own]
        by_run[method, variant] = sorted(mine, key=lambda record: record["seed"])
    return by_run


def blocks(name: str, found: Sequence[Record]) -> list[Block]:
    """Return the results of every scenario of a table."""
    return [_block(part, records_of(part, found), _paper(name, part.scenario)) for part in parts(name)]


def _block(part: Part, by_run: Mapping[tuple[str, str], Sequence[Record]], paper: Figures) -> Block:
    ours, seeds, diverged = {}, {}, {}
    for (method, variant), mine in by_run.items():
        for under in (False, True):
            row = Row(method, variant, under)
            if under and row.key not in paper and not any(record["history"].get("nll_mc") for record in mine):
                continue
            seeds[row] = [record["seed"] for record in mine]
            diverged[row] = [f"seed {r['seed']}: {r['diverged']}" for r in mine if r["diverged"]]
            ours[row] = {
                (metric, round): found
                for metric, (scale, _, _) in METRICS.items()
                for round in part.rounds
                if (found := _metric(mine, metric + "_mc" * under, round, scale))
            }
    return Block(part, ours, paper, seeds, diverged)


def verdict(metric: str, ours: float, paper: tuple[float, float], digits: int) -> str:
    """Compare with the paper: ≈, ▲ or ▼; `digits` is the paper's number of decimals."""
    better = (ours - paper[0]) * (1 if METRICS[metric][2] else -1)
    return "≈" if abs(better) <= 2 * paper[1] + 10.0**-digits / 2 + 1e-9 else "▲" if better > 0 else "▼"


def best(found: Block, metric: str, round: int) -> list[Row]:
    """Return the best row, then those not significantly worse; `central` and diverged runs are excluded."""
    rows = {
        row: figures[metric, round]
        for row, figures in found.ours.items()
        if (metric, round) in figures and row.variant != "central" and not found.diverged[row]
    }
    sign = -1 if METRICS[metric][2] else 1
    order = sorted(rows, key=lambda row: sign * rows[row].mean)
    return [row for row in order if row == order[0] or _same(rows[order[0]], rows[row])]


def markdown(name: str, found: Sequence[Block]) -> str:
    """Format a table as Markdown."""
    lines = [f"## {TITLES[name]}", "", LEGEND, ""]
    for block in found:
        lines += [f"### `{block.part.scenario}`: {read(block.part.scenario)[1]['title']}", "", *_lines(block)]
    return "\n".join(lines)


def comma_separated(found: Sequence[Block]) -> str:
    """Format a table as CSV, one result a line."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(
        ["scenario", "method", "variant", "at", "metric", "round", "mean", "sd", "runs", "paper", "paper_sd",
         "difference", "verdict"]
    )  # fmt: skip
    for block in found:
        for row, figures in block.ours.items():
            for (metric, round), ours in figures.items():
                paper = block.paper.get(row.key, {}).get((metric, round))
                rest: list[Any] = ["", "", "", ""]
                if paper:
                    judged = verdict(metric, ours.mean, paper, block.digits(metric))
                    rest = [*paper, f"{ours.mean - paper[0]:.4f}", {"≈": "within", "▲": "better", "▼": "worse"}[judged]]
                own = [f"{ours.mean:.4f}", "" if ours.sd is None else f"{ours.sd:.4f}", ours.runs]
                at = "q_g" if row.under else "mean"
                out.writerow([block.part.scenario, row.method, row.variant, at, metric, round, *own, *rest])
    return text.getvalue()


def _lines(found: Block) -> list[str]:
    """Format a scenario as a Markdown table, followed by its diverged runs and best rows."""
    columns = [(metric, round) for metric in METRICS for round in found.part.rounds]
    first = {column: best(found, *column) for column in columns}
    heads = [f"{what} at {round}" for what in ("accuracy %", "NLL") for round in found.part.rounds]
    lines = [f"| method | {' | '.join(heads)} | seeds |", "|---" * (len(heads) + 2) + "|"]
    for row, figures in found.ours.items():
        paper = found.paper.get(row.key, {})
        shown = [
            _cell(column[0], figures.get(column), paper.get(column), found.digits(column[0]), row in first[column])
            for column in columns
        ]
        lines.append(f"| {row.label} | {' | '.join(shown)} | {', '.join(map(str, found.seeds[row])) or 'not run'} |")
    for row, reasons in found.diverged.items():
        lines += [f"\n{row.label} diverged: {'; '.join(reasons)}"] if reasons and not row.under else []
    last = found.part.rounds[-1]
    for metric in METRICS:
        if rows := first[metric, last]:
            what = "Accuracy" if metric == "accuracy" else "NLL"
            others = ", ".join(row.label for row in rows[1:])
            tied = f"; not to be told from it: {others}" if others else ""
            lines.append(f"\n{what} after {last} rounds: best is {rows[0].label}{tied}.")
    return [*lines, ""]


def _cell(metric: str, ours: Spread | None, paper: tuple[float, float] | None, digits: int, bold: bool) -> str:
    text = "–" if ours is None else ours.show(METRICS[metric][1])
    text = f"**{text}**" if bold else text
    if paper is None:
        return text
    mark = verdict(metric, ours.mean, paper, digits) if ours else ""
    return f"{text} ({paper[0]:.{digits}f} ± {paper[1]:.{digits}f}) {mark}".strip()


def _paper(name: str, scenario: str) -> Figures:
    """Return the paper's results of a scenario, without those that it calls diverged."""
    rows, key = published(name).get(scenario, {}), lambda text: (text.split("@")[0], int(text.split("@")[1]))
    return {row: {key(text): tuple(pair) for text, pair in some.items() if pair} for row, some in rows.items()}


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return the mean and standard deviation of the values that are there, None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def _same(a: Spread, b: Spread) -> bool:
    """Return whether two means differ by at most twice the standard error of their difference."""
    if a.sd is None or b.sd is None:
        return a.mean == b.mean
    return abs(a.mean - b.mean) <= 2 * math.sqrt(a.sd**2 / a.runs + b.sd**2 / b.runs)


def _metric(mine: Sequence[Record], key: str, round: int, scale: float) -> Spread | None:
    values = [logged(record, key, round) for record in mine]
    return spread([None if value is None else scale * value for value in values])
