"""What a run's folder keeps for those who look at it later: who the clients are, and what q_g says of the test set.

    clients.json       the shape and type of an input; every client's examples, in all and by class
    test.safetensors   labels, class probabilities under q_g, their entropy and mutual information, and the inputs of
                       which q_g is least sure
    diverged.txt       why a run could not go on

A report and a threshold for "unsure" then need neither the data nor another pass of the network.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.errors import DataError
from fedual.posterior import Posterior, Prediction
from fedual.runs.files import replace, writing
from fedual.solvers import Clients

SHOWN = 24
"""Test examples that are kept whole."""
CLIENTS, TEST, END = "clients.json", "test.safetensors", "diverged.txt"


class Evidence(NamedTuple):
    """q_g's predictions for the N examples of the test set."""

    labels: Tensor  # (N,)
    probabilities: Tensor  # (N, C)
    entropy: Tensor  # (N,)
    mutual_information: Tensor  # (N,)
    shown: Tensor  # the examples that are kept whole, those with most entropy first
    inputs: Tensor  # their inputs as they are stored, (len(shown), ...)


def write_clients(folder: Path, clients: Clients, classes: bool) -> None:
    """Keep what the clients' data look like; `classes` says that targets are class numbers."""
    parts = [clients.y[part] for part in clients.parts]
    kept: dict[str, Any] = {
        "shape": list(clients.x.shape[1:]),
        "dtype": str(clients.x.dtype).removeprefix("torch."),
        "sizes": [len(part) for part in parts],
    }
    if classes:
        count = int(max(part.max() for part in parts)) + 1
        kept["labels"] = [torch.bincount(part.flatten(), minlength=count).tolist() for part in parts]
    _put(folder / CLIENTS, json.dumps(kept).encode())


def read_clients(folder: Path) -> dict[str, Any] | None:
    """What `write_clients` kept; None where a run has none."""
    path = folder / CLIENTS
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}): delete it, and what it says is left out.") from None


def write_test(folder: Path, posterior: Posterior, test: tuple[Tensor, Tensor], samples: int, seed: int) -> None:
    """Keep a classifier's predictions for the test set; of a regression nothing is kept."""
    from safetensors.torch import save

    x, y = test
    found = posterior.predict(x, samples, seed)
    if not isinstance(found, Prediction):
        return
    shown = found.entropy.argsort(descending=True, stable=True)[:SHOWN]
    kept = Evidence(y, *found, shown, x[shown.to(x.device)])
    content = save({name: value.cpu().contiguous() for name, value in kept._asdict().items()})
    _put(folder / TEST, content)


def read_test(folder: Path) -> Evidence | None:
    """What `write_test` kept; None where a run has none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / TEST
    if not path.exists():
        return None
    try:
        return Evidence(**load_file(path))
    except (OSError, SafetensorError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}): delete it, and what it says is left out.") from None


def write_end(folder: Path, why: str) -> None:
    """Keep why a run could not go on."""
    _put(folder / END, why.encode())


def read_end(folder: Path) -> str | None:
    """Why a run could not go on; None where it could."""
    path = folder / END
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def _put(path: Path, content: bytes) -> None:
    with writing(path, len(content), "the run itself is intact"):
        replace(path, content)
