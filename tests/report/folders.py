"""Folders of runs, written by hand."""

import json
import math
from pathlib import Path
from typing import Any

METHOD = (
    "Method(family=Diagonal(), solver=IVON(lr=0.03, samples=1), dual=Natural(gamma=0.03), server=Blend(alpha=None), "
    "rho=0.3, tau=1.0, mean_loss=False, delta=1.0)"
)
POINT = METHOD.replace("Diagonal()", "Isotropic(delta=1.0)")
MODEL = {"model": "mlp", "settings": {"outputs": 4}}


def record(round: int, nll: float | None = None, /, **more: Any) -> dict[str, Any]:
    """A round without trouble; its residuals are a tenth of the norm."""
    facts = {"active": 5, "counted": 5, "refused": 0, "shortened": 1.0, "bytes_up": 1000, "bytes_down": 500}
    figures = {} if nll is None else {"nll": nll, "accuracy": math.exp(-nll), "ece": 0.1, "brier": 0.2}
    return {"round": round, **facts, "primal": 1.0, "dual": 1.0, "norm": 10.0, "seconds": 0.5, **figures, **more}


def written(folder: Path, history: list[dict[str, Any]], **config: Any) -> Path:
    """A run's folder with these records."""
    folder.mkdir(parents=True)
    told = {"method": METHOD, "rounds": len(history), "seed": 0, "clients": 5, "loss": "cross_entropy", "model": MODEL}
    (folder / "config.json").write_text(json.dumps(told | config))
    (folder / "environment.json").write_text(json.dumps({"fedual": "0.1.0", "device": "cpu", "threads": 1}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in history))
    return folder
