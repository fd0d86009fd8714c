"""Tiny runs to track, which end well, are interrupted, or diverge."""

import json
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from flat import fit
from problems import normal
from torch import nn

from fedual import methods
from fedual.networks import Clients
from fedual.run import Run
from fedual.solvers import SGD

DIVERGING = methods.fedavg(solver=SGD(lr=1e30))


class CrashError(Exception):
    pass


def train(*callbacks: Any, method: Any = "ivon-admm", rounds: int = 2, out: Path | None = None, **options: Any) -> Run:
    sites = [(normal((n, 3), n), torch.arange(n) % 2) for n in (4, 6)]
    clients = replace(Clients.from_pairs(sites), description=options.pop("description", None))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
    given = {"test": sites[0], "local_epochs": 1, "samples": 2, "device": "cpu", "out": out, "resume": out is not None}
    return fit(model, clients, method, rounds, callbacks=callbacks, **given, **options)


def crash_after(round: int) -> Any:
    """A callback that kills the run after a round was tracked, and before its folder has it."""

    def crash(run: Run, record: Any) -> None:
        if record and record["round"] == round:
            raise CrashError

    return crash


def stop_after(round: int) -> Any:
    def stop(run: Run, record: Any) -> None:
        run.stop = bool(record) and record["round"] == round

    return stop


def same_config(found: dict[str, Any], run: Run) -> bool:
    """Whether a tracker has every value of a run's config as text, under its path with dots."""

    def leaves(config: Any) -> int:
        return sum(map(leaves, config.values())) if isinstance(config, dict) else 1

    def value(path: str) -> Any:
        return reduce(lambda config, key: config[key], path.split("."), run.config)

    texts = {key: value(key) if isinstance(value(key), str) else json.dumps(value(key)) for key in found}
    plain = {"null": "None", "true": "True", "false": "False"}  # as Python writes them
    return len(found) == leaves(run.config) and all(
        str(found[key]) == plain.get(text, text) for key, text in texts.items()
    )


def numbers(run: Run) -> dict[str, list[tuple[int, float]]]:
    """What a tracker must have of a run: for each figure, round and value."""
    names = {name for record in run.history for name, value in record.items() if not isinstance(value, list)}
    return {
        name: [(record["round"], record[name]) for record in run.history if name in record]
        for name in names - {"round"}
    }
