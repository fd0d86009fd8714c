"""Callbacks that log a run to TensorBoard, MLflow or Weights & Biases; each imports its package when it is created.

A resumed run continues where the package's record of it ends; earlier rounds that were not tracked are logged first.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedual.errors import InputError, hint, import_optional
from fedual.run import Record, Run
from fedual.rundir.artifacts import read_json, write_json

Figures = dict[str, float]
FILE = "trackers.json"


class Backend(NamedTuple):
    """A run as a tracking package stores it."""

    last: int  # the last round that the package has; no earlier one is logged again
    log: Callable[[Figures, int], None]  # called with the figures and the number of a round
    close: Callable[[bool], None]  # called with True if the run failed


class Tracker:
    """A callback that logs a run's config and the figures of every round to a tracking package.

    `fit` enters it before the first round and leaves it when the run ends, normally or by an error. `open` creates the
    package's record of a run, or finds the existing one.
    """

    def __init__(self, open: Callable[[Run], Backend]):
        self.open: Callable[[Run], Backend] = open
        self.backend: Backend | None = None

    def __call__(self, run: Run, record: Record | None) -> None:
        """Log the rounds that the package does not have yet."""
        self.backend = self.backend or self.open(run)
        for each in run.history if record is None else [record]:
            if (round := each["round"]) > self.backend.last:
                numbers = {key: value for key, value in each.items() if isinstance(value, int | float)}
                self.backend.log({key: float(value) for key, value in numbers.items() if key != "round"}, round)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self.backend:
            self.backend.close(kind is not None)
        self.backend = None


def inside(folder: Path, name: str) -> Tracker:
    """Create a tracker by name that writes into a run's folder: FOLDER/tensorboard, FOLDER/mlruns or FOLDER/wandb."""
    database = (folder / "mlruns" / "mlflow.db").absolute()
    trackers = {
        "tensorboard": lambda: tensorboard(folder / "tensorboard"),
        "mlflow": lambda: mlflow(uri=f"sqlite:///{database}"),
        "wandb": wandb,
    }
    if name not in trackers:
        raise InputError(f"{name!r} is no tracker: {hint(name, trackers)}")
    return trackers[name]()


def tensorboard(folder: str | os.PathLike[str]) -> Tracker:
    """Write a run's figures for TensorBoard, and its config as the text "config", into a folder of its own."""
    package = import_optional("fedual.trackers.tensorboard", "torch.utils.tensorboard", "tensorboard")

    def open(run: Run) -> Backend:
        resumed = _has_events(Path(folder))
        # a run that crashed repeats the rounds since its checkpoint: TensorBoard drops their first version
        writer = package.SummaryWriter(str(folder), purge_step=run.server.round + 1 if resumed else None)
        if not resumed:
            rows = [f"| {key} | {value} |" for key, value in _parameters(run.config).items()]
            writer.add_text("config", "\n".join(["| setting | value |", "|---|---|", *rows]))

        def log(figures: Figures, round: int) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, round)
            writer.flush()

        return Backend(run.server.round if resumed else 0, log, lambda failed: writer.close())

    return Tracker(open)


def _has_events(folder: Path) -> bool:
    """Check for event files; if the latest is of the current second, wait for the next one.

    TensorBoard reads files in the order of their names, which hold whole seconds: of two files of one second the newer
    may come first, and its purge step would purge nothing.
    """
    if any(folder.glob(f"events.out.tfevents.{int(time.time())}.*")):
        time.sleep(1 - time.time() % 1)
    return any(folder.glob("events.out.tfevents.*"))


def mlflow(experiment: str = "fedual", uri: str | None = None) -> Tracker:
    """Log a run's config as parameters and its figures as metrics of an MLflow experiment, which is created if needed.

    `uri` is a server or a database (sqlite:///runs.db); by default MLflow's own setting.
    """
    package = import_optional("fedual.trackers.mlflow", "mlflow", "mlflow")

    def open(run: Run) -> Backend:
        try:
            client = package.MlflowClient(tracking_uri=uri)
            existing = client.get_experiment_by_name(experiment)
            experiment_id = existing.experiment_id if existing else client.create_experiment(experiment)
        except package.MlflowException as error:
            raise InputError(f"MLflow cannot use uri = {uri!r} ({error}): try sqlite:///mlflow.db.") from None
        id, last = _ids(run).get("mlflow"), 0
        try:
            if id:
                client.update_run(id, status="RUNNING")
        except package.MlflowException:
            id = None  # the run was tracked in another database
        if id:
            last = max((metric.step for metric in client.get_metric_history(id, "norm")), default=0)
        else:
            id = client.create_run(experiment_id, run_name=run.path.name if run.path else None).info.run_id
            config = [package.entities.Param(key, str(value)) for key, value in _parameters(run.config).items()]
            client.log_batch(id, params=config)
            _remember(run, "mlflow", id)

        def log(figures: Figures, round: int) -> None:
            now = int(1000 * time.time())
            metrics = [package.entities.Metric(key, value, now, round) for key, value in figures.items()]
            client.log_batch(id, metrics=metrics)

        return Backend(last, log, lambda failed: client.set_terminated(id, "FAILED" if failed else "FINISHED"))

    return Tracker(open)


def wandb(project: str = "fedual", mode: Literal["offline", "online"] = "offline") -> Tracker:
    """Log a run's config and figures to a project of Weights & Biases.

    With "offline" nothing is sent: files stay in the run's folder (or the current one) until `wandb sync`.
    """
    package = import_optional("fedual.trackers.wandb", "wandb", "wandb")

    def open(run: Run) -> Backend:
        id, config = _ids(run).get("wandb"), _parameters(run.config)
        folder, name = (run.path.absolute(), run.path.name) if run.path else (None, None)
        resume = "allow" if id and mode == "online" else None
        logged = package.init(project=project, mode=mode, dir=folder, name=name, config=config, id=id, resume=resume)
        _remember(run, "wandb", logged.id)
        # offline, wandb does not know which rounds it has: use the checkpoint's
        last = max(run.server.round, logged.starting_step - 1) if id else 0
        log = lambda figures, round: logged.log(figures, step=round)
        return Backend(last, log, lambda failed: logged.finish(exit_code=int(failed)))

    return Tracker(open)


def _parameters(config: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool | None]:
    """Flatten the config: {"model": {"settings": …}} gets the key model.settings; lists become JSON."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _parameters(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str | int | float | None) else json.dumps(value)
    return flat


def _ids(run: Run) -> dict[str, str]:
    """The ids that packages have given to a run, from trackers.json in its folder."""
    return (run.path and read_json(run.path / FILE)) or {}


def _remember(run: Run, package: str, id: str) -> None:
    if run.path:
        write_json(run.path / FILE, _ids(run) | {package: id}, "nothing was trained since")
