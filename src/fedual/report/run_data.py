"""A run as its folder records it: configuration, environment, one record a round, and the files of `artifacts`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedual.calibration import AT, HANDED_OVER, Calibration, tempered, whole
from fedual.errors import InputError
from fedual.families import Full
from fedual.forms import Number, require
from fedual.report.elements import colours
from fedual.rundir import RunDirectory, artifacts
from fedual.rundir.artifacts import Evidence
from fedual.stored import DELETE, ENVIRONMENT

METRICS = {
    "accuracy": "Accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "rmse": "RMSE",
    "r2": "R²",
    "loss": "Loss",
}
PLACES = {
    "": "at the mean",
    "_mc": "under q_g",
    "_clients": "on clients' data, at the mean",
    "_mc_clients": "on clients' data, under q_g",
}
"""Suffixes of metrics in a record: what was evaluated, and on which data."""
FINAL = {end: AT[end] for end in HANDED_OVER.values()}
"""Suffixes of the posterior that is handed over, which only the last record has."""

SMALLEST = 1e-100
"""Smaller numbers are drawn as 0: the steps of an axis that shows them would be below all that a float can be."""
TRAINING = ("batch_size", "local_epochs", "local_steps", "schedule", "decay", "participation", "noise", "order")
POINT_FAMILIES = ("Isotropic", "FixedPrecision")  # their precision is fixed: only a mean is learned


def setting(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A setting of training, execution or evaluation; older runs have them at the top of config.json."""
    for group in (config.get("training"), config.get("execution"), config.get("evaluation"), config):
        if isinstance(group, dict) and key in group:
            return group[key]
    return default


def number(values: Mapping[str, Any], key: str) -> float | None:
    """The value of a key if it is a finite number, else None."""
    value = values.get(key)
    if not Number().fits(value):
        return None
    return 0.0 if 0 < abs(value) < SMALLEST else value  # pyright: ignore[reportArgumentType, reportReturnType]


def flatten(part: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All settings of a method by their path: {"solver": "IVON", "solver.lr": 0.03, "tau": 1.0}; None is left out."""
    flat = {}
    for key, value in part.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= {path: value["type"]} if "type" in value else {}
            flat |= flatten({name: inner for name, inner in value.items() if name != "type"}, f"{path}.")
        elif value is not None:
            flat[path] = f"{len(value)} values" if isinstance(value, list) else value
    return flat


@dataclass(frozen=True)
class RunData:
    """A run's folder, read."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    history: list[dict[str, Any]]  # a record for each round; `sent` counts the bytes of both ways so far
    clients: dict[str, Any] | None = None
    test: Evidence | None = None
    regression: dict[str, Any] | None = None  # how its noise fits the test set
    calibration: Calibration | None = None
    posterior: bool = False  # the folder has one
    diverged: str | None = None  # why the run could not continue
    name: str = ""  # on the page
    colours: Mapping[str, str] = field(default_factory=dict)  # of its lines, by the suffix of the metric

    @property
    def scenario(self) -> dict[str, Any]:
        """The scenario and its settings as `fedual run` stores them; empty for other runs."""
        scenario = self.config.get("scenario")
        return scenario if isinstance(scenario, dict) else {}

    @property
    def title(self) -> str:
        """The title of the scenario or experiment."""
        names = (self.scenario.get("title"), self.scenario.get("name"), self.config.get("experiment"))
        return next((str(name) for name in names if name), "A federated run")

    @property
    def settings(self) -> dict[str, Any]:
        """The method's settings by their path, or what the scenario set where the method is unknown."""
        method, settings = self.config.get("method"), self.scenario.get("settings")
        if isinstance(method, dict):
            return flatten({key: value for key, value in method.items() if key not in ("version", "name")})
        return settings if isinstance(settings, dict) else {}

    @property
    def training(self) -> dict[str, Any]:
        """How clients train."""
        return {key: setting(self.config, key) for key in TRAINING}

    @property
    def method(self) -> str:
        """The method's name, or its solver and duals where it has none."""
        method = self.config.get("method")
        name = method.get("name") if isinstance(method, dict) else None
        if name := name or self.scenario.get("method") or (method if isinstance(method, str) else None):
            return str(name)
        parts = self.settings
        return f"{parts['solver']} with {parts['dual']} duals" if {"solver", "dual"} <= set(parts) else "unknown method"

    @property
    def is_point(self) -> bool:
        """True if only a mean is learned."""
        return self.settings.get("family") in POINT_FAMILIES

    @property
    def is_whole(self) -> bool:
        """True if the posterior has a full covariance and counts every example once."""
        return self.settings.get("family") == Full.__name__ and self.tau == 1

    @property
    def tau(self) -> float | None:
        """The temperature; None for a point, which has no spread, and where it is unknown."""
        tau = number(self.settings, "tau")
        return None if self.is_point or tau is None or tau <= 0 else tau

    @property
    def about(self) -> str:
        """What the uncertainties of its posterior rest on, in words; empty if there is nothing to know."""
        if self.calibration is not None:
            return str(self.calibration)
        if self.is_whole:
            return whole(self.config.get("parameters", 0))
        return "" if self.tau is None or self.config.get("posterior") == "bayes" else tempered(self.tau)

    @property
    def sites(self) -> list[str]:
        """The clients' names: those in the config, or those of deployed clients in the records."""
        if isinstance(names := self.config.get("sites"), list):
            return [str(name) for name in names]
        lists = (record.get(key) for record in self.history for key in ("clients", "left_out"))
        return sorted({str(name) for names in lists if isinstance(names, list | dict) for name in names})

    @property
    def rounds(self) -> int:
        """The number of rounds that were asked for."""
        return int(number(self.config, "rounds") or len(self.history))

    @property
    def done(self) -> int:
        """The last round that has a record."""
        return self.history[-1]["round"] if self.history else 0

    @property
    def classes(self) -> int | None:
        """The number of classes; None for regressions and where it is unknown."""
        if setting(self.config, "loss", "cross_entropy") != "cross_entropy":
            return None
        if self.test is not None:
            return self.test.probabilities.shape[1]
        outputs = number(flatten(self.config), "model.settings.outputs")
        return None if outputs is None else int(outputs)

    def names(self, key: str, count: int, word: str = "") -> list[str]:
        """The config's names of `classes` or `sites`, or `word` and a number where it has none."""
        names = self.config.get(key)
        if isinstance(names, list) and len(names) >= count:
            return [str(name) for name in names[:count]]
        return [f"{word}{place}" for place in range(count)]

    def label(self, text: str, runs: Sequence["RunData"]) -> str:
        """A text, with the run's name where there are several runs."""
        return text if len(runs) == 1 else f"{text}, {self.name}"

    def points(self, across: str, up: str) -> list[tuple[float, float]]:
        """The values of two keys, for the rounds that have both."""
        pairs = ((number(record, across), number(record, up)) for record in self.history)
        return [(x, y) for x, y in pairs if x is not None and y is not None]

    def column(self, key: str) -> list[float]:
        """The values of a key, for the rounds that have it."""
        return [value for _, value in self.points("round", key)]

    def last(self) -> dict[str, float]:
        """The last value of every metric that some round has."""
        columns = {f"{name}{place}": self.column(f"{name}{place}") for name in METRICS for place in PLACES}
        own = {name + end: number(self.history[-1], name + end) for name in METRICS for end in FINAL if self.history}
        found = {key: column[-1] for key, column in columns.items() if column}
        return found | {key: value for key, value in own.items() if value is not None}


def read(path: Path) -> RunData:
    """Read a run's folder."""
    if not (path / "config.json").is_file():
        raise InputError(f"{path} holds no run (no config.json): give the folder that `fedual run` made.")
    run, clients = RunDirectory.open(path), artifacts.read_clients(path)
    environment, records = artifacts.read_json(path / "environment.json") or {}, run.history()
    require(path / "environment.json", environment, ENVIRONMENT, DELETE)
    sent = accumulate(int((number(r, "bytes_up") or 0) + (number(r, "bytes_down") or 0)) for r in records)
    history = [{**record, "sent": total or None} for record, total in zip(records, sent, strict=True)]
    has_posterior = (path / "posterior.safetensors").exists()
    test, end = artifacts.read_test(path), artifacts.read_end(path)
    noise, calibration = artifacts.read_regression(path), artifacts.read_calibration(path)
    return RunData(path, run.config, environment, history, clients, test, noise, calibration, has_posterior, end)


def named(runs: Sequence[RunData]) -> list[RunData]:
    """Give each run the shortest kind of name that tells them apart, and colours: those of a run or of its lines."""
    if len(runs) == 1:
        hues = ("var(--c1)", "var(--c0)", "var(--c1)", "var(--c0)")
        return [replace(runs[0], name=runs[0].method, colours=dict(zip(PLACES, hues, strict=True)))]
    kinds = (
        lambda run: run.method,
        lambda run: f"{run.method}, seed {run.config.get('seed')}",
        lambda run: f"{run.method} on {run.scenario.get('name', 'its data')}",
        lambda run: run.path.name,
    )
    candidates = [[kind(run) for run in runs] for kind in kinds]
    names = next((names for names in candidates if len(set(names)) == len(runs)), [str(run.path) for run in runs])
    named = zip(runs, names, colours(len(runs)), strict=True)
    return [replace(run, name=name, colours=dict.fromkeys(PLACES, hue)) for run, name, hue in named]
