"""What is kept of a run for the paper's tables: one small JSON file, with all that made it and every round's figures.

A cell is a scenario, a method, a seed, and a variant, which says in a few words what differs from the scenario's own
settings: `paper` (a preset), `tau=0.03` (a setting), `central` (all examples in one place), or several with a comma.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedual.contracts import Method
from fedual.errors import DataError, InputError
from fedual.experiments.scenario import Scenario, load
from fedual.relative import average_steps, settled
from fedual.runs import files
from fedual.runs.values import plain, without_nan
from fedual.training import written

Record = dict[str, Any]
CENTRAL = ("split.kind=homogeneous", "split.clients=1", "train.local_epochs=1", "lr=3e-4")
"""All examples in one place, an epoch a round, with one learning rate for all scenarios."""
COLUMNS = (
    "round", "accuracy", "nll", "brier", "ece", "accuracy_mc", "nll_mc", "brier_mc", "ece_mc",
    "refused", "shortened", "limited", "held", "seconds", "evaluation_seconds", "bytes_up", "bytes_down",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    scenario: str
    method: str
    seed: int
    variant: str = ""

    def load(self) -> Scenario:
        """The scenario with the variant's settings."""
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
        """Itself, or, where the variant only says what the scenario says anyway, the cell without one."""
        bare = replace(self, variant="")
        return bare if self.load() == bare.load() else self

    def path(self, results: Path) -> Path:
        """Where its record is."""
        name = "-".join(filter(None, (self.method, self.variant, str(self.seed))))
        return results / "records" / self.scenario / f"{name}.json"

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.scenario, self.method, self.variant, f"seed {self.seed}")))


def write(cell: Cell, results: Path, content: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Record:
    """Keep a run: `content` beside the columns of its history, in six digits."""
    known = [key for key in COLUMNS if not history or any(key in row for row in history)]  # all, of no rounds
    columns = {key: [_short(row.get(key)) for row in history] for key in known}
    about = {"scenario": cell.scenario, "method": cell.method, "variant": cell.variant, "seed": cell.seed}
    record = plain(without_nan({**about, **content, "history": columns}))
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items() if key != "history"]
    rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record["history"].items()]
    text = "{\n" + ",\n".join([*lines, ' "history": {\n' + ",\n".join(rows) + "\n }"]) + "\n}\n"
    path = cell.path(results)
    with files.writing(path, len(text), "the other records are intact"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text.encode())
    return record


def read(path: Path) -> Record:
    """A record, checked as far as tables depend on it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is no record of a run ({error}): delete it, and it will be run again.") from None
    if not _whole(record):
        raise DataError(f"{path} is not whole: delete it, and it will be run again.")
    if (own := cell_of(record).path(path.parents[2])) != path:  # a copy would count twice
        raise DataError(f"{path} is the record of {cell_of(record)}: move it to {own}, or delete it.")
    return record


def read_all(results: Path) -> list[Record]:
    """Every record of a results folder."""
    return [read(path) for path in sorted((results / "records").glob("*/*.json"))]


def cell_of(record: Record) -> Cell:
    """The cell that a record is of."""
    return Cell(record["scenario"], record["method"], record["seed"], record["variant"])


def current(record: Record) -> bool:
    """Whether a record was made with the settings that its cell has now."""
    try:
        scenario = cell_of(record).load()
    except InputError:  # a scenario, preset or setting that is no more
        return False
    config = record["config"]
    same = plain({**scenario.describe(), "validation": 0.0}) == config["scenario"]
    same = same and config["method"] == written(_settled(scenario.build(), config))
    return same and config["rounds"] == scenario.train["rounds"]


def logged(record: Record, key: str, round: int) -> float | None:
    """A figure at a round as the paper logs it: the mean of this round and the two before.

    None where the run did not get there, or the method has no such figure.
    """
    history = record["history"]
    values = dict(zip(history["round"], history.get(key, ()), strict=False))
    window = [values.get(r) for r in range(max(1, round - 2), round + 1)]
    known = [value for value in window if value is not None]
    return statistics.fmean(known) if values.get(round) is not None else None


def _settled(method: Method, config: Mapping[str, Any]) -> Method:
    """The method with the numbers that its rules have in a record's federation."""
    clients, examples = config["clients"], config.get("examples", 1.0)  # which older ones do not say
    local = {key: config[key] for key in ("batch_size", "local_epochs", "local_steps")}
    steps = average_steps(clients, examples, **local)
    return settled(method, clients, examples, config["participation"], steps)


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
