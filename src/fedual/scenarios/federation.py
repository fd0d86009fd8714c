"""Make a scenario's clients (data, subset, split and network, all drawn from the run's seed), and run it."""

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedual import data, models, settings
from fedual.calibration import require_mode
from fedual.data import partition, user_files
from fedual.errors import InputError
from fedual.fitting import fit
from fedual.networks import Clients, Network
from fedual.run import Run
from fedual.scenarios import user_model
from fedual.scenarios.scenario import Scenario, Table
from fedual.settings import Engine, Execution

if TYPE_CHECKING:
    from fedual.flower.simulation import Simulated

KINDS = {"dirichlet": partition.dirichlet, "homogeneous": partition.homogeneous, "two-class": partition.two_class}


class Federation(NamedTuple):
    """What `fedual.fit` is given."""

    model: Network
    clients: Clients
    test: tuple[Tensor, Tensor]  # as stored: x (N, …), y (N,)


class Source(NamedTuple):
    """Examples, not yet split: a data set of fedual's, or the user's."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    scale: float | None
    groups: Tensor | None  # (N,), the client of every training example, if the data define it
    description: Table  # what a run's config stores about them


def materialise(
    scenario: Scenario, seed: int, root: str | os.PathLike[str] | None = None, validation: float = 0.0
) -> Federation:
    """Load the data from the folder `root` of the data sets, and draw network, subset and split from the seed.

    A `fraction` below 1 keeps round(fraction · N) of the N training examples, drawn uniformly and without replacement
    from the seed, whatever their class; the paper publishes no rule for its "10 %". With `validation` above 0, this
    fraction of every client's examples (see `hold_out`) replaces the test set, which is not used.
    """
    if not 0 <= validation < 1:
        raise InputError(f"validation = {validation}: it must be at least 0 and below 1.")
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also set the generators of accelerators, which are not restored
        torch.default_generator.manual_seed(seed)
        model = _model(scenario)
    source = _source(scenario, root)
    kept = subset(len(source.y_train), scenario.data.get("fraction", 1.0), seed)
    parts = [kept[part] for part in _split(scenario.split, source, kept, seed)]
    test = source.x_test, source.y_test
    if validation > 0:
        parts, held = hold_out(parts, validation, seed)
        test = source.x_train[held], source.y_train[held]
    description = {"scenario": {**scenario.describe(), "validation": validation}, **source.description}
    network = Network(model, scale=source.scale, recipe=_recipe(scenario.model))
    return Federation(network, Clients(source.x_train, source.y_train, parts, description=description), test)


def execute(
    scenario: Scenario,
    seed: int,
    *,
    root: str | os.PathLike[str] | None = None,
    validation: float = 0.0,
    device: str = "auto",
    engine: Engine = "vectorised",
    **options: Any,
) -> Run:
    """Run a scenario with one seed, from which initialisation, subset, split and training follow.

    `root` and `validation` are those of `materialise`, device and engine those of `fedual.settings.Execution`;
    `options` are further arguments of `fedual.fit`: out, resume, callbacks, or a posterior other than the scenario's.
    """
    problem, how = _arguments(scenario, seed, root, validation, device=device, engine=engine)
    return fit(*problem, **{**how, **options})


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
    if odd := scenario.train.keys() & {field.name for field in fields(Execution)}:
        raise InputError(f"engine = flower has no {', '.join(sorted(odd))}: leave it out, or choose another engine.")
    problem, how = _arguments(scenario, seed, root)
    del how["execution"]
    return simulate(*problem, **how, out=out)


def _arguments(
    scenario: Scenario, seed: int, root: str | os.PathLike[str] | None, validation: float = 0.0, **execution: Any
) -> tuple[tuple[Any, ...], Table]:
    """The positional arguments of `fedual.fit`, and those by name."""
    method, sections = scenario.spec(), settings.split(scenario.train)  # settings out of range are refused first
    how = {"loss": _loss(scenario), "seed": seed, "local": sections["training"], "evaluation": sections["evaluation"]}
    how["posterior"] = require_mode(scenario.train.get("posterior", "calibrated"))
    how["execution"] = replace(sections["execution"], **execution)
    model, clients, test = materialise(scenario, seed, root, validation)
    return (model, clients, method, scenario.train["rounds"]), {**how, "test": test}


def _loss(scenario: Scenario) -> str:
    return scenario.train.get("loss", "cross_entropy")


def _model(scenario: Scenario) -> nn.Module:
    found = _recipe(scenario.model)
    if "function" in scenario.model:
        return user_model.build(found["model"], scenario.folder, found["settings"])
    return models.build(found["model"], **found["settings"])


def _recipe(model: Table) -> Table:
    """How a loaded posterior finds its network (`fedual.posterior`); a function is named there, not stored."""
    settings = {key: value for key, value in model.items() if key not in ("name", "function")}
    return {"model": model.get("name", model.get("function")), "settings": settings}


def _source(scenario: Scenario, root: str | os.PathLike[str] | None) -> Source:
    if "name" in scenario.data:
        dataset = data.load(scenario.data["name"], root)
        return Source(dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test, dataset.scale, None, {})
    classes = _loss(scenario) == "cross_entropy"
    found = user_files.load(scenario.folder, scenario.data, column=scenario.split.get("column"), classes=classes)
    described = {key: value for key in ("classes", "inputs", "sites") if (value := getattr(found, key)) is not None}
    return Source(*found[:4], scenario.data.get("scale"), found.groups, described)


def _split(split: Table, source: Source, kept: Tensor, seed: int) -> list[Tensor]:
    """Each client's part of the examples that are kept."""
    if source.groups is not None:
        return partition.by_group(source.groups[kept], [(group,) for group in range(int(source.groups.max()) + 1)])
    # a regression has no classes to mix: its examples are dealt out as if all were of one
    labels = torch.zeros(len(kept), dtype=torch.int64) if source.y_train.is_floating_point() else source.y_train[kept]
    told = {key: value for key, value in split.items() if key not in ("kind", "clients")}
    return KINDS[split["kind"]](labels, split["clients"], seed, **told)


def subset(num_examples: int, fraction: float, seed: int) -> Tensor:
    """Sorted indices of round(fraction · num_examples) examples, at least one, uniform without replacement."""
    size = max(1, round(fraction * num_examples))
    if size == num_examples:
        return torch.arange(num_examples)
    rng = np.random.default_rng((seed, 1))  # a stream of its own, apart from the split's
    return torch.from_numpy(np.sort(rng.choice(num_examples, size, replace=False)))


def hold_out(parts: Sequence[Tensor], validation: float, seed: int) -> tuple[list[Tensor], Tensor]:
    """Hold out round(validation · n) of every client's n examples, at least 1 and at most n − 1; none where n = 1.

    Each example has one random rank in the whole federation, and a client holds out those of lowest rank. Clients that
    share examples thus mostly hold out the same ones, and no client trains on an example that another holds out.

    Returns:
        The indices on which each client still trains, and the union of those that are held out; all sorted.

    Raises:
        InputError: Clients share so many examples that one is left without any, or nothing can be held out.
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
