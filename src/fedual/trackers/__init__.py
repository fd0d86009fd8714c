"""Callbacks that log a run elsewhere: `tensorboard`, `mlflow`, `wandb`; each loads its package when it is made."""

from pathlib import Path

from fedual.errors import InputError, hint
from fedual.trackers.base import Tracker
from fedual.trackers.mlflow import mlflow
from fedual.trackers.tensorboard import tensorboard
from fedual.trackers.wandb import wandb

__all__ = ["Tracker", "inside", "mlflow", "tensorboard", "wandb"]


def inside(folder: Path, name: str) -> Tracker:
    """The tracker of a name, writing into a run's folder: FOLDER/tensorboard, FOLDER/mlruns or FOLDER/wandb."""
    database = (folder / "mlruns" / "mlflow.db").absolute()
    known = {
        "tensorboard": lambda: tensorboard(folder / "tensorboard"),
        "mlflow": lambda: mlflow(uri=f"sqlite:///{database}"),
        "wandb": wandb,
    }
    if name not in known:
        raise InputError(f"{name!r} is no tracker: {hint(name, known)}")
    return known[name]()
