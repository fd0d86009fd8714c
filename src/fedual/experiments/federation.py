"""Make a scenario's clients (data, subset, split and network, all drawn from the run's seed), and run it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedual import data, models
from fedual.data import partition
from fedual.errors import InputError
from fedual.experiments.scenario import Scenario, Table
from fedual.solvers.clients import Clients
from fedual.training import Run, fit

if TYPE_CHECKING:
    from fedual.flower.simulation import Simulated

KINDS = {"dirichlet": partition.dirichlet, "homogeneous": partition.homogeneous, "two-class": partition.two_class}


class Federation(NamedTuple):
    """What `fedual.training.fit` is given."""

    model: nn.Module
    clients: Clients
    test: tuple[Tensor, Tensor]  # as stored: x (N, …) uint8, y (N,)
    scale: int  # stored pixels divided by it are what networks see
    description: Table


def materialise(
    scenario: Scenario, seed: int, root: str | os.PathLike[str] | None = None, validation: float = 0.0
) -> Federation:
    """Load the data and draw network, subset and split from the seed.

    A `fraction` below 1 keeps round(fraction · N) of the N training examples, drawn uniformly and without replacement
    from the seed, whatever their class; the paper publishes no rule for its "10 %".

    Args:
        scenario: what to make.
        seed: the same seed makes the same federation.
        root: folder of the data sets.
        validation: above 0, that part of every client's examples (see `hold_out`) becomes the test part, and the true
            test set is left alone.
    """
    if not 0 <= validation < 1:
        raise InputError(f"validation = {validation}: it must be at least 0 and below 1.")
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also set the generators of accelerators, which are not restored
        torch.default_generator.manual_seed(seed)
        model = models.build(**scenario.model)
    dataset = data.load(scenario.data["name"], root)
    labels = dataset.y_train
    kept = subset(len(labels), scenario.data.get("fraction", 1.0), seed)
    told = {key: value for key, value in scenario.split.items() if key not in ("kind", "clients")}
    split = KINDS[scenario.split["kind"]](labels[kept], scenario.split["clients"], seed, **told)
    parts = [kept[part] for part in split]
    test = dataset.x_test, dataset.y_test
    if validation > 0:
        parts, held = hold_out(parts, validation, seed)
        test = dataset.x_train[held], labels[held]
    return Federation(
        model,
        Clients(dataset.x_train, labels, parts),
        test,
        dataset.scale,
        {"scenario": {**scenario.describe(), "validation": validation}, "model": _rebuild(scenario.model)},
    )


def execute(
    scenario: Scenario,
    seed: int,
    *,
    root: str | os.PathLike[str] | None = None,
    validation: float = 0.0,
    **options: Any,
) -> Run:
    """Run a scenario with one seed.

    Args:
        scenario: what to run.
        seed: of the network, the subset, the split and the run.
        root: folder of the data sets.
        validation: the part of every client's examples that takes the test set's place.
        options: further arguments of `fedual.training.fit`: device, engine, out, resume, callbacks.
    """
    method = scenario.build()  # before any work: it refuses settings out of range
    model, clients, test, scale, description = materialise(scenario, seed, root, validation)
    given: Table = {"test": test, "scale": scale, "description": description, "seed": seed}
    return fit(model, clients, method, **given, **scenario.train, **options)


def execute_on_flower(
    scenario: Scenario, seed: int, out: Path, resume: bool = False, root: str | os.PathLike[str] | None = None
) -> "Simulated":
    """Run a scenario on Flower's simulation engine, which shows its own progress and keeps clients' state in `out`."""
    try:
        from fedual.flower.simulation import simulate
    except ModuleNotFoundError as error:
        raise InputError(f"engine = flower needs {error.name}: pip install 'flwr[simulation]>=1.41,<1.42'.") from None
    if not resume and (out / "config.json").exists():
        raise InputError(f"{out} holds a run: resume it (--resume) or choose another folder.")
    if odd := scenario.train.keys() & {"evaluate_every", "chunk", "compile", "precision", "client_state"}:
        raise InputError(f"engine = flower has no {', '.join(sorted(odd))}: leave it out, or choose another engine.")
    method = scenario.build()
    model, clients, test, scale, description = materialise(scenario, seed, root)
    given: Table = {"test": test, "scale": scale, "description": description, "seed": seed, "out": out}
    return simulate(model, clients, method, **given, **scenario.train)


def _rebuild(model: Table) -> Table:
    """How a posterior that is loaded finds its network: see `fedual.posterior`."""
    return {"model": model["name"], "settings": {key: value for key, value in model.items() if key != "name"}}


def subset(num_examples: int, fraction: float, seed: int) -> Tensor:
    """Sorted indices of round(fraction · num_examples) examples, at least one, uniform without replacement."""
    size = max(1, round(fraction * num_examples))
    if size == num_examples:
        return torch.arange(num_examples)
    rng = np.random.default_rng((seed, 1))  # a stream of its own, apart from the split's
    return torch.from_numpy(np.sort(rng.choice(num_examples, size, replace=False)))


def hold_out(parts: Sequence[Tensor], validation: float, seed: int) -> tuple[list[Tensor], Tensor]:
    """Hold out round(validation · n) of every client's n examples, at least 1 and at most n − 1; none where n = 1.

    Each example has one random rank in the whole federation, and a client holds out those of lowest rank. Where
    clients share examples they thus agree as far as they can, and what one holds out, none trains on.

    Args:
        parts: indices of each client's examples.
        validation: in (0, 1).
        seed: of the ranks.

    Returns:
        What each client still trains on, and the union of what is held out; all sorted.

    Raises:
        InputError: clients share so many examples that one is left without any, or nothing can be held out.
    """
    size = 1 + max(int(part.max()) for part in parts)
    rank = torch.from_numpy(np.random.default_rng((seed, 2)).permutation(size))
    taken = torch.zeros(size, dtype=torch.bool)
    for part in parts:
        count = min(max(1, round(validation * len(part))), len(part) - 1)
        taken[part[rank[part].argsort()[:count]]] = True
    left = [part[~taken[part]] for part in parts]
    if not taken.any():
        raise InputError("Every client has one example: there is nothing to validate on.")
    for client, part in enumerate(left):
        if not len(part):
            raise InputError(f"Validation on other clients' parts leaves client {client} no example: lower validation.")
    return left, taken.nonzero()[:, 0]
