"""What the files of a run must hold, so that reading them can trust every value: types, limits and sizes."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedual.errors import DataError
from fedual.forms import ANY, POSITIVE, Number, Row, Whole, require
from fedual.settings import MOST_SAMPLES

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
SAMPLES = Whole(0, MOST_SAMPLES)
NUMBERS = ([Number()], Number(), [[Number()]], [[[Number()]]])
"""Moments of a column: of an array of images there is one for each pixel."""
INPUTS = {"columns": [str], "categories": {...: [str]}, "standardised": {...: Row(NUMBERS, NUMBERS)}}
CONFIG = {
    "targets?": (None, TARGETS),
    "training?": {...: ANY},
    "execution?": {"chunk?": (None, Whole(1)), "compile?": (None, bool)},
    "evaluation?": {"samples?": (None, SAMPLES)},
    "samples?": (None, SAMPLES),
    "sites?": (None, [str]),
    "classes?": (None, [str]),
    "inputs?": (None, INPUTS),
}
"""What a run is computed from; a report shows the rest as it is, and a resumed run compares it."""
SEED = {"seed?": Whole()}
ENVIRONMENT = {...: (None, bool, str, Number())}
TRACKERS = {...: str}
CLIENTS = {
    "shape": [Whole()],
    "dtype": str,
    "sizes": [Whole()],
    "labels?": [[Whole()]],
    "moments?": {"number": Whole(1), "mean": [Number()], "deviation": [Number(0.0)], "beyond": [Number(0.0)]},
}
REGRESSION = {
    "noise_sd": [Number(0.0)],
    "nll": Number(),
    "interval": SHARE,
    "coverage": SHARE,
    "examples": Whole(1),
}
RECORD = {"round": Whole(1), "seconds?": (None, Number()), "left_out?": (None, Number(), [ANY], {...: str})}
SNAPSHOT = {
    "round": Whole(),
    "num_clients": Whole(1),
    "rows": {...: str},
    "files": {...: {"bytes": Whole(), "sha256?": str, "crc32?": Whole()}},
    "meta": {...: ANY},
}
META = {
    "moved": bool,
    "refused": [Whole()],
    "calibration?": (None, CALIBRATION),
    "personal?": (None, CALIBRATION),
}
"""What a checkpoint holds of a run besides its tensors."""
LEDGER = {
    "round": Whole(),
    "moved": bool,
    "acks": {...: str},
    "numbers": {...: Whole()},
    "badges?": {...: Row(str, str)},
    "examples?": {...: Number(0.0)},
    "forgotten": [str],
    "sums?": {...: {...: ANY}},
    "targets?": (None, TARGETS),
    "noise?": (None, [POSITIVE]),
    "fold?": (None, Row(Whole(), Whole(2))),
    "calibration?": (None, CALIBRATION),
    "calibrated?": (None, Whole()),
    "sizes?": [[Row(Number(0.0), Number(0.0))]],
    "factors?": {...: SHARE},
    "keeps?": bool,
    "id": str,
    "starts": Whole(),
}
"""What the ledger of a server on Flower holds besides its tensors."""
VAULT = {"format": str, "experiment": str, "client": str, "committed": (None, str), "pending": (None, str)}
"""What a client's state on Flower says of its rows."""
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


def require_clients(path: Path, known: Any) -> None:
    """Refuse a clients.json whose parts do not belong together."""
    require(path, known, CLIENTS, DELETE)
    sizes, labels = known["sizes"], known.get("labels")
    if not sizes or (labels is not None and [sum(row) for row in labels] != sizes):
        raise DataError(f"{path} has no sizes, or other labels than sizes: {DELETE}.")
    if labels is not None and (len({len(row) for row in labels}) != 1 or not labels[0]):
        raise DataError(f"{path} has clients with different classes: {DELETE}.")
    moments = known.get("moments", {})
    if any(len(moments[name]) not in (1, math.prod(known["shape"])) for name in moments.keys() - {"number"}):
        raise DataError(f"{path} has moments of other inputs than {known['shape']}: {DELETE}.")


def require_evidence(path: Path, found: Mapping[str, Tensor]) -> None:
    """Refuse predictions of a test set whose tensors do not belong together."""
    names = {"labels", "probabilities", "entropy", "mutual_information", "shown", "inputs"}
    if missing := names - found.keys():
        raise DataError(f"{path} has no {min(missing)}: {DELETE}.")
    labels, probabilities, shown = found["labels"], found["probabilities"], found["shown"]
    number = len(labels) if labels.dim() == 1 else 0
    fits = {
        "labels": number > 0 and _are_places(labels, probabilities.shape[-1] if probabilities.dim() else 0),
        "probabilities": probabilities.dim() == 2
        and len(probabilities) == number
        and _are_finite(probabilities, 0, 1.01),
        "entropy": found["entropy"].shape == (number,) and _are_finite(found["entropy"], -1, 1e9),
        "mutual_information": found["mutual_information"].shape == (number,)
        and _are_finite(found["mutual_information"], -1e9, 1e9),
        "shown": shown.dim() == 1 and _are_places(shown, number),
        "inputs": found["inputs"].dim() > 0 and len(found["inputs"]) == len(shown) and not found["inputs"].is_complex(),
    }
    if wrong := [name for name, right in fits.items() if not right]:
        raise DataError(f"{path} has other {wrong[0]} than fedual writes, {_words(found[wrong[0]])}: {DELETE}.")


def _are_places(values: Tensor, number: int) -> bool:
    """True for indices below a number."""
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        return False
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < number)


def _are_finite(values: Tensor, least: float, most: float) -> bool:
    return values.dtype in FLOATS and bool(((values >= least) & (values <= most)).all())


def _words(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}"
