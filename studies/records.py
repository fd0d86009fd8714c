"""Records: what the study keeps of each run, one line of JSON in `results/SCENARIO.jsonl`.

A cell is a scenario, a method, a seed and a variant, and has one record. The variant names what differs from the
scenario's own settings: a preset (`paper`), a setting (`tau=0.03`), `central` (all examples in one place), or several
of these separated by commas. A record holds the settings, the environment, and every round's metrics in six digits.
"""

import fcntl
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedual.defaults import Federation, resolve
from fedual.errors import DataError, InputError
from fedual.rundir import atomic
from fedual.rundir.jsonable import plain, without_nan
from fedual.scenarios.scenario import Scenario, load
from fedual.settings import LocalTraining

Record = dict[str, Any]
CENTRAL = ("split.kind=homogeneous", "split.clients=1", "train.local_epochs=1", "lr=3e-4")
"""The settings of `central`: all examples in one place, one epoch a round, the same learning rate everywhere."""
COLUMNS = (
    "round", "accuracy", "nll", "brier", "ece", "accuracy_mc", "nll_mc", "brier_mc", "ece_mc",
    "refused", "shortened", "limited", "held", "seconds", "evaluation_seconds", "bytes_up", "bytes_down",
)  # fmt: skip
"""The metrics of a round that a record keeps."""


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    scenario: str
    method: str
    seed: int
    variant: str = ""

    def load(self) -> Scenario:
        """Return the scenario with the variant's settings."""
        preset, sets = None, list[str]()
        for word in filter(None, self.variant.split(",")):
            if word == "central":
                sets += CENTRAL
            elif "=" in word:
                sets.append(word)
            else:
                preset = word
        return load(self.scenario, preset=preset, sets=sets, method=self.method)

    def own(self) -> "Cell":
        """Drop a variant that changes nothing: return the cell whose settings are the scenario's own."""
        bare = replace(self, variant="")
        return bare if self.load() == bare.load() else self

    def path(self, results: Path) -> Path:
        """Return the file that holds the records of its scenario."""
        return results / f"{self.scenario}.jsonl"

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.scenario, self.method, self.variant, f"seed {self.seed}")))


def write(cell: Cell, results: Path, content: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Record:
    """Store a run as a line of its scenario's file, in the place of the cell's earlier record if there is one.

    `content` is everything but the metrics by round, which are in `history`. Returns the record as it is read back.
    """
    known = [key for key in COLUMNS if not history or any(key in row for row in history)]  # all if there is no round
    columns = {key: [_short(row.get(key)) for row in history] for key in known}
    about = {"scenario": cell.scenario, "method": cell.method, "variant": cell.variant, "seed": cell.seed}
    record = plain(without_nan({**about, **content, "history": columns}))
    path, line = cell.path(results), json.dumps(record)
    with atomic.writing(path, len(line), "the other records are intact"):
        results.mkdir(parents=True, exist_ok=True)
        with _locked(results):
            lines = path.read_bytes().splitlines() if path.exists() else []
            place = next((number for number, other in enumerate(lines) if _is_record_of(other, cell)), len(lines))
            lines[place : place + 1] = [line.encode()]
            atomic.replace(path, b"\n".join(lines) + b"\n")
    return record


def read(path: Path) -> list[Record]:
    """Read the records of a scenario, checked as far as tables depend on them; none if there is no such file."""
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}): restore it, or delete it and run its cells again.") from None
    found: dict[Cell, Record] = {}
    *whole, rest = text.split("\n")  # a line ends with "\n": `rest` is empty unless a writer was interrupted
    for number, line in enumerate([*whole, rest] if rest else whole, 1):
        where, remedy = f"line {number} of {path}", "delete the line, and its cell will be run again"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            what = "is torn" if number > len(whole) else "is no record of a run"
            raise DataError(f"{where} {what} ({error}): {remedy}.") from None
        if not _whole(record):
            raise DataError(f"{where} is not whole: {remedy}.")
        cell = cell_of(record)
        if cell.scenario != path.stem:
            own = cell.path(path.parent)
            raise DataError(f"{where} is the record of {cell}: move the line to {own}, or delete it.")
        if cell in found:  # it would count as one more seed
            raise DataError(f"{where} is a second record of {cell}: delete one of the two lines.")
        found[cell] = record
    return list(found.values())


def read_all(results: Path) -> list[Record]:
    """Read every record of a results folder."""
    return [record for path in sorted(results.glob("*.jsonl")) for record in read(path)]


def cell_of(record: Record) -> Cell:
    """Return the cell of a record."""
    return Cell(record["scenario"], record["method"], record["seed"], record["variant"])


def current(record: Record) -> bool:
    """Return whether a record was made with the settings that its cell has now."""
    try:
        scenario = cell_of(record).load()
    except InputError:  # the scenario, preset or setting no longer exists
        return False
    config = record["config"]
    same = plain({**scenario.describe(), "validation": 0.0}) == config["scenario"]
    same = same and config["method"] == plain(resolved(scenario, config))
    return same and config["rounds"] == scenario.train["rounds"]


def resolved(scenario: Scenario, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the method of a scenario as data, with the numbers that its rules give in a record's federation."""
    clients, examples = config["clients"], config.get("examples", 1.0)  # older records do not have it
    local = LocalTraining.from_dict(config["training"])
    steps = local.average_steps(clients, examples)
    return resolve(scenario.spec(), Federation(clients, examples, local.participation, steps)).to_dict()


def logged(record: Record, key: str, round: int) -> float | None:
    """Return a metric at a round as the paper logs it: the mean over this round and the two before it.

    None if the run ended earlier or the method has no such metric.
    """
    history = record["history"]
    values = dict(zip(history["round"], history.get(key, ()), strict=False))
    window = [values.get(r) for r in range(max(1, round - 2), round + 1)]
    known = [value for value in window if value is not None]
    return statistics.fmean(known) if values.get(round) is not None else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time rewrite the files of a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # releases the lock


def _is_record_of(line: bytes, cell: Cell) -> bool:
    try:
        return cell_of(json.loads(line)) == cell
    except (ValueError, TypeError, KeyError):  # a damaged line stays where it is: `read` names it
        return False


def _whole(record: Any) -> bool:
    try:
        history = record["history"]
        return (
            {"scenario", "method", "variant", "seed", "diverged", "outliers", "environment"} <= record.keys()
            and {"scenario", "rounds"} <= record["config"].keys()
            and {"round", "seconds"} <= history.keys()
            and len({len(column) for column in history.values()}) == 1
        )
    except (TypeError, KeyError, AttributeError):
        return False


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
