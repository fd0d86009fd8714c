"""A run as its folder shows it: config, environment, records, and what `fedual.runs.evidence` kept."""

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedual.errors import DataError, InputError
from fedual.runs import RunDirectory, evidence
from fedual.runs.evidence import Evidence

Record = dict[str, Any]

FIGURES = {"accuracy": "Accuracy", "nll": "NLL", "ece": "ECE", "brier": "Brier", "rmse": "RMSE", "loss": "Loss"}
PLACES = {
    "": "at the mean",
    "_mc": "under q_g",
    "_clients": "on clients' data, at the mean",
    "_mc_clients": "on clients' data, under q_g",
}
"""The ends of the names of figures in a record, and what they mean."""


@dataclass(frozen=True)
class Seen:
    """What is known of a run."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    history: list[Record]
    clients: dict[str, Any] | None = None
    test: Evidence | None = None
    posterior: bool = False  # there is one in the folder
    diverged: str | None = None  # why it could not go on

    @property
    def scenario(self) -> dict[str, Any]:
        """What `fedual run` was asked for; empty for other runs."""
        found = self.config.get("scenario")
        return found if isinstance(found, dict) else {}

    @property
    def parts(self) -> dict[str, Any]:
        """The method's parts and settings."""
        return method_parts(str(self.config.get("method", "")))

    @property
    def method(self) -> str:
        """The method's name, or its parts where it has none."""
        if name := self.scenario.get("method"):
            return str(name)
        solver, dual = self.parts.get("solver"), self.parts.get("dual")
        return f"{solver} with {dual} duals" if solver and dual else "unknown method"

    @property
    def is_point(self) -> bool:
        """True where only a mean is learned."""
        return self.parts.get("family") in ("Isotropic", "FixedPrecision")

    @property
    def rounds(self) -> int:
        """How many were asked for."""
        return int(number(self.config, "rounds") or len(self.history))

    @property
    def done(self) -> int:
        """The last round that has a record."""
        return self.history[-1]["round"] if self.history else 0

    @property
    def classes(self) -> int | None:
        """How many there are, where targets are classes."""
        if self.config.get("loss", "cross_entropy") != "cross_entropy":
            return None
        if self.test is not None:
            return self.test.probabilities.shape[1]
        model = self.config.get("model")
        settings = model.get("settings") if isinstance(model, dict) else None
        found = number(settings, "outputs") if isinstance(settings, dict) else None
        return None if found is None else int(found)

    def listed(self, key: str, count: int, word: str = "") -> list[str]:
        """The names that the config has of `classes` or `sites`; numbers after a word where it has none."""
        found = self.config.get(key)
        if isinstance(found, list) and len(found) >= count:
            return [str(name) for name in found[:count]]
        return [f"{word}{place}" for place in range(count)]

    def column(self, key: str) -> list[tuple[int, float]]:
        """A figure in the rounds that have it, as (round, value)."""
        found = ((record["round"], number(record, key)) for record in self.history)
        return [(round, value) for round, value in found if value is not None]

    def traffic(self) -> dict[int, float]:
        """Bytes sent and received up to the end of each round."""
        sums = accumulate((number(r, "bytes_up") or 0) + (number(r, "bytes_down") or 0) for r in self.history)
        return {record["round"]: total for record, total in zip(self.history, sums, strict=True) if total}

    def figures(self) -> list[str]:
        """The names of figures that some round has, with their ends, in order."""
        have = {key for record in self.history for key in record if number(record, key) is not None}
        return [f"{name}{place}" for name in FIGURES for place in PLACES if f"{name}{place}" in have]


def read(path: Path) -> Seen:
    """Look at a run's folder.

    Raises:
        InputError: There is no run.
        DataError: A file that cannot be read.
    """
    if not (path / "config.json").is_file():
        raise InputError(f"{path} holds no run (no config.json): give the folder that `fedual run` made.")
    run, clients = RunDirectory.open(path), evidence.read_clients(path)
    if clients is not None and not (isinstance(clients, dict) and isinstance(clients.get("sizes"), list)):
        raise DataError(f"{path / 'clients.json'} has no sizes: delete it, and what it says is left out.")
    return Seen(
        path,
        run.config,
        _environment(path / "environment.json"),
        run.history(),
        clients,
        evidence.read_test(path),
        (path / "posterior.safetensors").exists(),
        evidence.read_end(path),
    )


def _environment(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): delete it, and what it says is left out.") from None


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a record; None where there is none."""
    value = record.get(key)
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if sound else None


def method_parts(text: str) -> dict[str, Any]:
    """A method's parts and settings from how it is written down: {"solver": "IVON", "solver.lr": 0.03, "tau": 1.0}.

    The text is parsed, not run; what is no plain value is left out.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return _keywords(tree, "") if isinstance(tree, ast.Call) else {}


def _keywords(call: ast.Call, prefix: str) -> dict[str, Any]:
    found = {}
    for keyword in call.keywords:
        name = f"{prefix}{keyword.arg}"
        if isinstance(keyword.value, ast.Call):
            found[name] = getattr(keyword.value.func, "id", "?")
            found |= _keywords(keyword.value, f"{name}.")
        elif isinstance(keyword.value, ast.Constant):
            found[name] = keyword.value.value
    return found


def names(runs: Sequence[Seen]) -> list[str]:
    """What tells runs apart, as short as it can be."""
    for name in (
        lambda run: run.method,
        lambda run: f"{run.method}, seed {run.config.get('seed')}",
        lambda run: f"{run.method} on {run.scenario.get('name', 'its data')}",
        lambda run: run.path.name,
    ):
        found = [name(run) for run in runs]
        if len(set(found)) == len(runs):
            return found
    return [str(run.path) for run in runs]
