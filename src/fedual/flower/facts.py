"""What the server and all sites of a federation must agree on before the first round."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedual._version import __version__
from fedual.errors import InputError
from fedual.networks import Network


def standardises(network: Network | None, loss: str | Callable[..., Any]) -> bool:
    """True if sites give sums of their targets when they join."""
    return loss == "mse" and network is not None and network.targets is None


def shared_facts(
    network: Network | None, loss: str | Callable[..., Any], about: Mapping[str, str] | None
) -> dict[str, str]:
    """What the server and all sites must agree on, by name."""
    facts = {**{key: str(value) for key, value in (about or {}).items()}, "fedual": __version__}
    if network is not None:
        layout = [(name, tuple(shape)) for name, shape in zip(network.names, network.shapes, strict=True)]
        frozen = network.state_dict(network.initial())
        digest = hashlib.sha256(f"{layout} {network.dtype} {network.model}".encode())
        for key in sorted(frozen.keys() - set(network.names)):
            digest.update(key.encode() + frozen[key].cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        facts["model"] = digest.hexdigest()[:16]
        facts["loss"] = loss if isinstance(loss, str) else getattr(loss, "__qualname__", type(loss).__name__)
        facts["scale"] = str(None if network.scale is None else float(network.scale))
        if network.targets is not None:
            facts["targets"] = json.dumps(network.targets.to_dict())
    return facts


def require_fit(network: Network, lam: Tensor) -> None:
    """Raise unless the server's λ `(R, P)` has the parameters and the type of a network."""
    if (lam.shape[-1], lam.dtype) != (network.dim, network.dtype):
        theirs, own = f"{lam.shape[-1]} parameters of {lam.dtype}", f"{network.dim} of {network.dtype}"
        raise InputError(f"The server's λ has {theirs}, the model {own}: give all sites and the server the same model.")
