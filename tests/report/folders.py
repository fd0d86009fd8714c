"""Run folders in the form of config.json that nests the method, training, execution and evaluation."""

import json
import math
from pathlib import Path
from typing import Any

METHOD = {
    "version": 1,
    "name": "ivon-admm",
    "family": {"type": "Diagonal"},
    "solver": {"type": "IVON", "lr": {"type": "RoundRate", "first": 0.03, "decay": 0.5}, "samples": 1, "clip": None},
    "dual": {"type": "Natural", "gamma": 0.03},
    "server": {"type": "Blend", "alpha": None},
    "rho": 0.3,
    "tau": 1.0,
    "mean_loss": False,
    "delta": 1.0,
}
POINT = {**METHOD, "name": "fedavg", "family": {"type": "Isotropic", "delta": 1.0}, "tau": 0.01}
MODEL = {"model": "mlp", "settings": {"outputs": 4}}
SETTINGS = {
    "training": {"batch_size": 32, "local_epochs": 5, "local_steps": None, "schedule": "harmonic", "decay": 1.0},
    "execution": {"engine": "vectorised", "chunk": 5, "compile": False, "precision": "highest", "client_state": "ram"},
    "evaluation": {"every": 1, "samples": 64},
}


def record(round: int, nll: float | None = None, /, **more: Any) -> dict[str, Any]:
    """The record of a round in which every client counted; its residuals are a tenth of the norm."""
    facts = {"active": 5, "counted": 5, "refused": 0, "shortened": 1.0, "bytes_up": 1000, "bytes_down": 500}
    figures = {} if nll is None else {"nll": nll, "accuracy": math.exp(-nll), "ece": 0.1, "brier": 0.2}
    return {"round": round, **facts, "primal": 1.0, "dual": 1.0, "norm": 10.0, "seconds": 0.5, **figures, **more}


def written(folder: Path, history: list[dict[str, Any]], **config: Any) -> Path:
    """A run's folder with these records; `config` changes or adds keys of config.json."""
    folder.mkdir(parents=True)
    known = {"version": 2, "method": METHOD, "rounds": len(history), "seed": 0, "clients": 5, "loss": "cross_entropy"}
    (folder / "config.json").write_text(json.dumps(known | {"model": MODEL} | SETTINGS | config))
    (folder / "environment.json").write_text(json.dumps({"fedual": "0.1.0", "device": "cpu", "threads": 1}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in history))
    return folder
