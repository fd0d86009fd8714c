"""What the files of a run must hold, so that reading them can trust every value: types, limits and sizes."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedual.errors import DataError
from fedual.forms import ANY, POSITIVE, Number, Row, Whole, require

AGAIN, DELETE, RESTORE = "save it again", "delete it to go on without it", "restore the file, or start anew"
SHARE = Number(0.0, 1.0)
CALIBRATION = {
    "tau": Number(0.0),
    "temperature": POSITIVE,
    "examples": Whole(),
    "clients": Whole(),
    "nll": Number(),
    "nll_mean": Number(),
    "folds?": Whole(),
    "missing": [str],
}
TARGETS = {"mean": ([Number()], Number()), "sd": ([POSITIVE], POSITIVE)}
LAYOUT = Row(str, [Whole()], str, bool)
POSTERIOR = {
    "family": str,
    "arguments": {...: Number()},
    "tau": POSITIVE,
    "loss": str,
    "scale": (None, POSITIVE),
    "targets?": (None, TARGETS),
    "noise?": (None, [POSITIVE]),
    "noise_in_q?": bool,
    "calibration?": (None, CALIBRATION),
    "config": (None, {"model?": str, "settings?": {...: ANY}}),
    "parameters": [LAYOUT],
}
FLOATS = (torch.float32, torch.float64)
"""The types of λ."""


def require_posterior(path: Path, about: Any, tensors: Mapping[str, Tensor]) -> None:
    """Refuse metadata of a posterior that is not what `Posterior.save` writes, or does not belong to the tensors.

    The network that the metadata describe then has as many parameters as the file holds, before it is made.
    """
    require(path, about, POSTERIOR, AGAIN)
    if (lam := tensors.get("lam")) is None or lam.dim() != 2 or lam.dtype not in FLOATS:
        has = "no λ" if lam is None else f"λ of {lam.dtype} {tuple(lam.shape)}"
        raise DataError(f"{path} has {has}, not a matrix of numbers: {AGAIN}.")
    count = 0
    for name, shape, dtype, trained in about["parameters"]:
        if trained:
            count += math.prod(shape)
            continue
        frozen = tensors.get(f"frozen.{name}")
        if frozen is None or [list(frozen.shape), str(frozen.dtype)] != [shape, dtype]:
            raise DataError(f"{path} names {name!r}, {dtype} {shape}, which it does not hold: {AGAIN}.")
    if count != lam.shape[1]:
        raise DataError(f"{path} names {count} trained parameters and holds {lam.shape[1]}: {AGAIN}.")
    for name, values in tensors.items():
        if values.is_floating_point() and not values.isfinite().all():
            raise DataError(f"{path} has NaN or infinity in {name!r}: {AGAIN}.")
    sizes = {} if about.get("noise") is None else {"noise": len(about["noise"])}
    if (targets := about.get("targets")) is not None:
        sizes |= {f"targets.{key}": len(value) if isinstance(value, list) else 1 for key, value in targets.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        told = ", ".join(f"{key} of {size}" for key, size in sizes.items())
        raise DataError(f"{path} has {told}: {AGAIN}.")
