"""Records of runs that never were, with figures that can be told by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedual.experiments.records import Cell, Record
from fedual.relative import average_steps, settled
from fedual.training import written

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
    """A run with the present settings of its cell; `under` has its accuracy and NLL under q_g.

    Figures are functions of the round, or constants; a round takes 2 seconds and sends 1 byte up and 1 down.
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
    federation = {"clients": 10, "examples": 6000.0, "participation": 1.0}
    local = {"batch_size": 32, "local_epochs": 10, "local_steps": None}
    settings = settled(loaded.build(), 10, 6000.0, 1.0, average_steps(10, 6000.0, **local))
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
            "method": written(settings),
            **federation,
            **local,
        },
        **more,
        "history": history,
    }


def keep(record: Record, results: Path) -> Path:
    """Put a record where `fedual reproduce` looks for it."""
    words = [record["method"], record["variant"], str(record["seed"])]
    path = results / "records" / record["scenario"] / f"{'-'.join(word for word in words if word)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return path
