"""Made-up records whose metrics can be computed by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedual import settings
from studies.records import Cell, Record, cell_of, resolved

Curve = Callable[[int], float | None]


def record(
    scenario: str = "fmnist-heterog-10",
    method: str = "fedavg",
    variant: str = "",
    seed: int = 62,
    *,
    accuracy: Curve | float = 0.5,
    nll: Curve | float = 1.0,
    under: tuple[Curve | float, Curve | float] | None = None,
    rounds: int | None = None,
    device: str = "cpu",
    **more: Any,
) -> Record:
    """Make a record with the present settings of its cell; `under` has its accuracy and NLL under q_g.

    Metrics are functions of the round or constants; a round takes 2 seconds and sends 1 byte up and 1 down.
    """
    loaded = Cell(scenario, method, seed, variant).load()
    planned = loaded.train["rounds"]
    numbers = range(1, (planned if rounds is None else rounds) + 1)
    curves: dict[str, Curve | float] = {"accuracy": accuracy, "nll": nll, "ece": more.pop("ece", 0.1)}
    if under is not None:
        curves |= {"accuracy_mc": under[0], "nll_mc": under[1], "ece_mc": more.pop("ece_mc", 0.1)}
    at = lambda curve, round: curve(round) if callable(curve) else curve
    history = {"round": list(numbers), "seconds": [2.0 for _ in numbers]}
    history |= {key: [1 for _ in numbers] for key in ("bytes_up", "bytes_down")}
    history |= {key: [at(curve, round) for round in numbers] for key, curve in curves.items()}
    described = {**json.loads(json.dumps(loaded.describe())), "validation": 0.0}
    federation = {"clients": 10, "examples": 6000.0, "training": settings.LocalTraining().to_dict()}
    return {
        "scenario": scenario,
        "method": method,
        "variant": variant,
        "seed": seed,
        "diverged": None,
        "outliers": {},
        "environment": {"device": device},
        "config": {
            "rounds": planned,
            "scenario": described,
            "method": resolved(loaded, federation),
            **federation,
        },
        **more,
        "history": history,
    }


def keep(record: Record, results: Path) -> Path:
    """Put a record where the study looks for it, in the place of an earlier one of its cell; return the file."""
    path = results / f"{record['scenario']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    others = [line for line in lines if cell_of(json.loads(line)) != cell_of(record)]
    path.write_text("\n".join([*others, json.dumps(record)]) + "\n")
    return path
