"""The paper's tables beside ours, from records alone.

A figure of ours is the mean ± standard deviation over seeds of what `records.logged` says. Against the paper's it is
≈ (within 2σ of the paper's, and half a unit of its last digit), ▲ better or ▼ worse.
"""

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from fedual.experiments.records import Cell, Record, logged
from fedual.experiments.reproduce import TITLES, WITHOUT, Part, parts
from fedual.experiments.scenario import read
from fedual.figures.convergence import METHODS

METRICS = {"accuracy": (100.0, 1, True), "nll": (1.0, 3, False)}
"""Scale, digits shown, and whether more is better."""
LEGEND = (
    "Ours (the paper's in brackets): ≈ within 2σ of the paper's, ▲ better, ▼ worse; **bold**: the best of ours, or not "
    "to be told from it (difference of means up to twice its standard error; with one seed, none)."
)
TAKEN = {setting: f"without {what}" for what, setting in WITHOUT.items()}

Figures = dict[str, dict[tuple[str, int], tuple[float, float]]]
"""Of the paper, by row: mean and standard deviation by (metric, round)."""


class Row(NamedTuple):
    """A line of a table."""

    method: str
    variant: str
    under: bool  # figures under q_g rather than at the mean

    @property
    def key(self) -> str:
        """Its name among the paper's figures, beside which both presets stand, too."""
        variant = "" if self.variant in ("paper", "default") else self.variant
        return " ".join(filter(None, (self.method, variant, "under q_g" if self.under else "")))

    @property
    def label(self) -> str:
        """Its name for people."""
        if self.variant == "central":
            return "all data in one place"
        first, *more = [word for word in self.variant.split(",") if not word.startswith("train.rounds=")]
        if first == "default":
            more = [TAKEN.get(word, word) for word in more]
        known = {"paper": "the paper’s" if more else "settings of the paper", "default": "no setting"}
        about = ", ".join([known.get(first, first), *more])
        name = METHODS[self.method][0] + (f" ({about})" if about else "")
        return name + (", under q_g" if self.under else "")


class Spread(NamedTuple):
    """Mean and standard deviation (n − 1; None for one) of n runs."""

    mean: float
    sd: float | None
    runs: int

    def show(self, digits: int) -> str:
        """`82.5 ± 0.2`."""
        return f"{self.mean:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")


class Block(NamedTuple):
    """One scenario of a table: for every row what we found and what the paper says, by (metric, round)."""

    part: Part
    ours: dict[Row, dict[tuple[str, int], Spread]]
    paper: Figures
    seeds: dict[Row, list[int]]
    diverged: dict[Row, list[str]]

    def digits(self, metric: str) -> int:
        """How many the paper prints after the point: the most of any of its figures."""
        pairs = [pair for figures in self.paper.values() for (m, _), pair in figures.items() if m == metric]
        return max((len(f"{value:g}".partition(".")[2]) for pair in pairs for value in pair), default=1)


@cache
def published(name: str) -> dict[str, Any]:
    """The paper's figures of a table, by scenario, row and metric@round."""
    text = (files("fedual.experiments") / "paper.json").read_text(encoding="utf-8")
    found = json.loads(text)
    if name == "defaults":  # the same scenarios
        return {key: value for table in ("table1", "table2", "table3") for key, value in found[table].items()}
    return found.get(name, {})


def records_of(part: Part, found: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """The records of every run of a part, by method and variant, in the order of their seeds."""
    by_run = {}
    for method, variant in part.runs:
        own = part.scenario, method, Cell(part.scenario, method, 0, variant).own().variant
        mine = [record for record in found if (record["scenario"], record["method"], record["variant"]) == own]
        by_run[method, variant] = sorted(mine, key=lambda record: record["seed"])
    return by_run


def blocks(name: str, found: Sequence[Record]) -> list[Block]:
    """What the records say about every scenario of a table."""
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
                (metric, round): spread
                for metric, (scale, _, _) in METRICS.items()
                for round in part.rounds
                if (spread := _spread(mine, metric + "_mc" * under, round, scale))
            }
    return Block(part, ours, paper, seeds, diverged)


def verdict(metric: str, ours: float, paper: tuple[float, float], digits: int) -> str:
    """≈, ▲ or ▼; `digits` is how many the paper prints after the point."""
    better = (ours - paper[0]) * (1 if METRICS[metric][2] else -1)
    return "≈" if abs(better) <= 2 * paper[1] + 10.0**-digits / 2 + 1e-9 else "▲" if better > 0 else "▼"


def best(found: Block, metric: str, round: int) -> list[Row]:
    """The best row first, then those that cannot be told from it; the ceiling and rows with diverged runs are apart."""
    rows = {
        row: figures[metric, round]
        for row, figures in found.ours.items()
        if (metric, round) in figures and row.variant != "central" and not found.diverged[row]
    }
    sign = -1 if METRICS[metric][2] else 1
    order = sorted(rows, key=lambda row: sign * rows[row].mean)
    return [row for row in order if row == order[0] or _same(rows[order[0]], rows[row])]


def markdown(name: str, found: Sequence[Block]) -> str:
    """A table as Markdown."""
    lines = [f"## {TITLES[name]}", "", LEGEND, ""]
    for block in found:
        lines += [f"### `{block.part.scenario}`: {read(block.part.scenario)[1]['title']}", "", *_lines(block)]
    return "\n".join(lines)


def comma_separated(found: Sequence[Block]) -> str:
    """A table as CSV, one figure a line."""
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
    """One scenario as a Markdown table, with what stood out below."""
    columns = [(metric, round) for metric in METRICS for round in found.part.rounds]
    first = {column: best(found, *column) for column in columns}
    lines = _head(found.part.rounds)
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


def _head(rounds: Sequence[int]) -> list[str]:
    names = [f"{what} at {round}" for what in ("accuracy %", "NLL") for round in rounds]
    return [f"| method | {' | '.join(names)} | seeds |", "|---" * (len(names) + 2) + "|"]


def _cell(metric: str, ours: Spread | None, paper: tuple[float, float] | None, digits: int, bold: bool) -> str:
    text = "–" if ours is None else ours.show(METRICS[metric][1])
    text = f"**{text}**" if bold else text
    if paper is None:
        return text
    mark = verdict(metric, ours.mean, paper, digits) if ours else ""
    return f"{text} ({paper[0]:.{digits}f} ± {paper[1]:.{digits}f}) {mark}".strip()


def _paper(name: str, scenario: str) -> Figures:
    def split(figures: Mapping[str, Any]) -> dict[tuple[str, int], tuple[float, float]]:
        known = {}
        for key, value in figures.items():
            metric, round = key.split("@")
            if value is not None:  # the paper says "diverged"
                known[metric, int(round)] = tuple(value)
        return known

    return {key: split(figures) for key, figures in published(name).get(scenario, {}).items()}


def _spread(mine: Sequence[Record], key: str, round: int, scale: float) -> Spread | None:
    values = [scale * value for record in mine if (value := logged(record, key, round)) is not None]
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def _same(a: Spread, b: Spread) -> bool:
    """Whether two means differ by no more than twice the standard error of their difference."""
    if a.sd is None or b.sd is None:
        return a.mean == b.mean
    return abs(a.mean - b.mean) <= 2 * math.sqrt(a.sd**2 / a.runs + b.sd**2 / b.runs)
