"""What a run's folder keeps for reports and predictions.

clients.json       shape and type of an input, mean and standard deviation over all clients (`fedual.networks.moments`);
                   the number of examples of each client, in total and by class
regression.json    of a regression: σ, and on the test set the NLL with it and how many targets its 95 % intervals cover
calibration.json   of a calibrated run: `fedual.calibration.Calibration`
test.safetensors   labels of the test set, class probabilities of the posterior that is handed over, their entropy and
                   mutual information, and the inputs with the highest entropy
diverged.txt       why the run stopped early
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedual.calibration import Calibration
from fedual.errors import DataError, InputError
from fedual.metrics import Prediction, RegressionPrediction
from fedual.networks import Clients
from fedual.networks.moments import Moments
from fedual.rundir.atomic import store

if TYPE_CHECKING:
    from fedual.posterior import Posterior

SHOWN = 24  # test inputs that are kept
CLIENTS, TEST, REGRESSION, END = "clients.json", "test.safetensors", "regression.json", "diverged.txt"
CALIBRATION, POSTERIOR = "calibration.json", "posterior.safetensors"
OF_THE_END = TEST, REGRESSION, CALIBRATION, END
"""Files that a run writes when it ends."""
INTERVAL = 0.95
"""The probability of the intervals whose coverage is kept."""
REMAINS = "the run itself is intact"


class Evidence(NamedTuple):
    """Predictions of q_g for the N examples of the test set."""

    labels: Tensor  # (N,)
    probabilities: Tensor  # (N, C)
    entropy: Tensor  # (N,)
    mutual_information: Tensor  # (N,)
    shown: Tensor  # indices of the examples whose inputs are kept, highest entropy first
    inputs: Tensor  # these inputs as they are stored, (len(shown), ...)


def write_clients(folder: Path, clients: Clients, classes: bool, scaled: bool = False) -> None:
    """Write a summary of the clients' data.

    Args:
        folder: Of the run.
        clients: Whose data are summarised.
        classes: The targets are class numbers.
        scaled: The network divides inputs by a scale. Integers are otherwise codes, such as words, without moments.
    """
    targets = [clients.y[part] for part in clients.parts]
    shape, dtype = list(clients.x.shape[1:]), str(clients.x.dtype).removeprefix("torch.")
    summary: dict[str, Any] = {"shape": shape, "dtype": dtype, "sizes": [len(y) for y in targets]}
    if classes:
        count = int(max(y.max() for y in targets)) + 1
        summary["labels"] = [torch.bincount(y.flatten(), minlength=count).tolist() for y in targets]
    if (clients.x.is_floating_point() or scaled) and (moments := Moments.of(clients)):
        summary["moments"] = moments.to_dict()
    store(folder / CLIENTS, json.dumps(summary).encode(), REMAINS)


def read_clients(folder: Path) -> dict[str, Any] | None:
    """Read what `write_clients` wrote; None if the file does not exist."""
    return read_json(folder / CLIENTS)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file does not exist."""
    try:
        return dict(json.loads(path.read_bytes())) if path.exists() else None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): delete it to go on without it.") from None


def write_test(folder: Path, posterior: "Posterior", test: tuple[Tensor, Tensor], samples: int, seed: int) -> None:
    """Write a classifier's predictions for the test set, or how a regression's noise fits it, if it was learnt."""
    from safetensors.torch import save

    x, y = test
    prediction = posterior.predict(x, samples, seed)
    if not isinstance(prediction, Prediction):
        if posterior.noise is not None:
            store(folder / REGRESSION, json.dumps(_fit_of_noise(posterior, prediction, test)).encode(), REMAINS)
        return
    shown = prediction.entropy.argsort(descending=True, stable=True)[:SHOWN]
    evidence = Evidence(y, *prediction, shown, x[shown.to(x.device)])
    content = save({name: value.cpu().contiguous() for name, value in evidence._asdict().items()})
    store(folder / TEST, content, REMAINS)


def _fit_of_noise(
    posterior: "Posterior", prediction: RegressionPrediction, test: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    assert posterior.noise is not None
    assert prediction.observation_sd is not None
    y = test[1].to(prediction.mean).reshape(prediction.mean.shape)
    low, high = prediction.quantiles([(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    errors = (y - prediction.mean) / prediction.observation_sd
    nll = (errors.square() / 2 + (math.sqrt(2 * math.pi) * prediction.observation_sd).log()).mean()
    unit = 1.0 if posterior.network.targets is None else posterior.network.targets.sd
    return {
        "noise_sd": (posterior.noise.sqrt() * unit).tolist(),
        "nll": float(nll),
        "interval": INTERVAL,
        "coverage": float(((y >= low) & (y <= high)).double().mean()),
        "examples": len(y),
    }


def read_regression(folder: Path) -> dict[str, Any] | None:
    """Read what `write_test` wrote of a regression; None if the file does not exist."""
    found = read_json(folder / REGRESSION)
    if found is not None and not {"noise_sd", "nll", "interval", "coverage", "examples"} <= found.keys():
        raise DataError(f"{folder / REGRESSION} lacks figures: delete it to go on without it.")
    return found


def read_test(folder: Path) -> Evidence | None:
    """Read what `write_test` wrote; None if the file does not exist."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / TEST
    if not path.exists():
        return None
    try:
        return Evidence(**load_file(path))
    except (OSError, SafetensorError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}): delete it to go on without it.") from None


def write_posterior(folder: Path, posterior: "Posterior") -> None:
    """Write the posterior that is handed over, and its calibration for those who only want to know of it."""
    posterior.save(folder / POSTERIOR)
    if posterior.calibration is not None:
        store(folder / CALIBRATION, json.dumps(posterior.calibration.to_dict()).encode(), REMAINS)


def read_calibration(folder: Path) -> Calibration | None:
    """The calibration that `write_posterior` wrote; None if there is none."""
    try:
        return Calibration.from_dict(read_json(folder / CALIBRATION))
    except (InputError, KeyError, TypeError) as error:
        raise DataError(f"{folder / CALIBRATION} lacks figures ({error}): delete it to go on without it.") from None


def write_end(folder: Path, reason: str) -> None:
    """Write why the run stopped early."""
    store(folder / END, reason.encode(), REMAINS)


def read_end(folder: Path) -> str | None:
    """Why the run stopped early; None if it did not."""
    path = folder / END
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
