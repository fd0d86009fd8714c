"""`fit` and `compare` with all settings in one flat list, as a scenario's [train] table has them: for short tests.

The posterior is q_g as trained unless a test asks for another, because calibration takes more runs than the one tested.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

import fedual
from fedual import settings
from fedual.comparison import Comparison
from fedual.networks import Clients, Network
from fedual.run import Run
from fedual.settings import Execution


def fit(model: nn.Module | Network, clients: Any, method: Any = "ivon-admm", rounds: int = 50, **flat: Any) -> Run:
    """`fedual.fit`; `scale` and `trainable` are those of `Network`, `weights` go with the clients' pairs."""
    return fedual.fit(network(model, flat), weighted(clients, flat), method, rounds, **nested(flat))


def compare(methods: Any, model: nn.Module | Network, clients: Any, **flat: Any) -> Comparison:
    """`fedual.compare`, where progress is off unless asked for."""
    flat = {"progress": False, **flat}
    return fedual.compare(methods, network(model, flat), weighted(clients, flat), **nested(flat))


def network(model: Any, flat: dict[str, Any]) -> Any:
    about = {key: flat.pop(key) for key in ("scale", "trainable") if key in flat}
    return Network(model, **about) if about else model


def weighted(clients: Any, flat: dict[str, Any]) -> Any:
    weights: Sequence[Any] | None = flat.pop("weights", None)
    if weights is None or isinstance(clients, Clients):
        return clients
    return [(x, y, weight) for (x, y), weight in zip(clients, weights, strict=True)]


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    sections = settings.split(flat)
    rest = {key: value for key, value in flat.items() if key not in settings.flat_kinds()}
    return {
        "posterior": "point",
        "local": sections["training"],
        "execution": sections.get("execution", Execution()),
        "evaluation": sections["evaluation"],
        **rest,
    }
