"""What a run's folder keeps for reports and predictions.

clients.json       shape and type of an input, mean and standard deviation over all clients (`fedual.networks.moments`);
                   the number of examples of each client, in total and by class
regression.json    of a regression: σ, and on the test set the NLL with it and how many targets its 95 % intervals cover
calibration.json   of a calibrated run: `fedual.calibration.Calibration`
test.safetensors   labels of the test set, class probabilities of the posterior that is handed over, their entropy and
                   mutual information, and the inputs with the highest entropy
diverged.txt       why the run stopped early

All but the last are sealed (`fedual.rundir.checksum`) with the digest of the config. Those that a run writes when it
ends, and its posterior, also say of which round they are.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedual import stored
from fedual.calibration import Calibration
from fedual.errors import DataError
from fedual.forms import Whole, require
from fedual.metrics import Prediction, RegressionPrediction
from fedual.networks import Clients
from fedual.networks.moments import Moments
from fedual.parsing import DOCUMENT, loads, parsing, read_bytes, reason
from fedual.rundir import posterior_file
from fedual.rundir.atomic import store
from fedual.rundir.checksum import seal, seal_json, unseal, unseal_json
from fedual.rundir.folder import read_config

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
    write_json(folder / CLIENTS, summary)


def read_clients(folder: Path) -> dict[str, Any] | None:
    """Read what `write_clients` wrote; None if the file does not exist."""
    if (found := read_json(folder / CLIENTS)) is not None:
        stored.require_clients(folder / CLIENTS, found)
    return found


def write_json(path: Path, value: Mapping[str, Any], remains: str = REMAINS) -> None:
    """Write a JSON object of a run's folder, with its seal."""
    store(path, seal_json(value, _digest(path.parent)), remains)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read what `write_json` wrote; None if the file does not exist."""
    try:
        return unseal_json(path.read_bytes(), _digest(path.parent)) if path.exists() else None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({reason(error)}): delete it to go on without it.") from None


def _digest(folder: Path) -> str | None:
    """The digest of the run's config; None if the folder has no config, or that of an earlier version."""
    return read_config(folder)[1] if (folder / "config.json").exists() else None


def write_test(
    folder: Path, round: int, posterior: "Posterior", test: tuple[Tensor, Tensor], samples: int, seed: int
) -> None:
    """Write a classifier's predictions for the test set, or how a regression's noise fits it, if it was learnt."""
    x, y = test
    prediction = posterior.predict(x, samples, seed)
    if not isinstance(prediction, Prediction):
        if posterior.noise is not None:
            write_json(folder / REGRESSION, {**_fit_of_noise(posterior, prediction, test), "round": round})
        return
    shown = prediction.entropy.argsort(descending=True, stable=True)[:SHOWN]
    evidence = Evidence(y, *prediction, shown, x[shown.to(x.device)])
    tensors = {name: value.cpu().contiguous() for name, value in evidence._asdict().items()}
    store(folder / TEST, seal(tensors, _about(folder, round)), REMAINS)


def _about(folder: Path, round: int) -> dict[str, str]:
    """The metadata that ties a safetensors file to its run; as JSON, like all that a posterior says about itself."""
    digest = _digest(folder)
    return {"round": json.dumps(round), **({} if digest is None else {"run": digest})}


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
    if (found := read_json(folder / REGRESSION)) is not None:
        require(folder / REGRESSION, found, stored.REGRESSION, stored.DELETE)
    return found


def read_test(folder: Path) -> Evidence | None:
    """Read what `write_test` wrote; None if the file does not exist."""
    path = folder / TEST
    if not path.exists():
        return None
    digest = _digest(folder)
    with parsing(path, "is damaged", stored.DELETE):
        tensors = unseal(read_bytes(path), digest)[1]
        stored.require_evidence(path, tensors)
        return Evidence(**tensors)


def write_posterior(folder: Path, round: int, posterior: "Posterior") -> None:
    """Write the posterior that is handed over, and its calibration for those who only want to know of it."""
    store(folder / POSTERIOR, posterior.to_bytes(_about(folder, round)), REMAINS)
    if posterior.calibration is not None:
        write_json(folder / CALIBRATION, {**posterior.calibration.to_dict(), "round": round})


def round_of_posterior(folder: Path) -> int | None:
    """The round of the folder's posterior; None if an earlier version, or a user, has saved it.

    Raises:
        DataError: It belongs to another run, or its test set's predictions to another round.
    """
    path, digest = folder / POSTERIOR, _digest(folder)
    about = posterior_file.header(path)
    if digest is not None and about.get("run", digest) != digest:
        raise DataError(f"{path} belongs to a run with another config: restore the file, or name the other folder.")
    round = _round(path, about)
    if (folder / TEST).exists() and round is not None:
        of_test = _round(folder / TEST, posterior_file.header(folder / TEST))
        if of_test not in (None, round):
            why = f"{path} is of round {round}, {TEST} of round {of_test}"
            raise DataError(f"{why}: restore them together, or resume the run.")
    return round


def _round(path: Path, about: Mapping[str, str]) -> int | None:
    with parsing(path, "names no round", "restore the file"):
        round = loads(about.get("round", "null"))
    require(path, round, (None, Whole(0)), "restore the file")
    return round


def read_calibration(folder: Path) -> Calibration | None:
    """The calibration that `write_posterior` wrote; None if there is none."""
    if (content := read_json(folder / CALIBRATION)) is None:
        return None
    require(folder / CALIBRATION, content, stored.CALIBRATION, stored.DELETE)
    with parsing(folder / CALIBRATION, "has other figures than fedual writes", stored.DELETE):
        return Calibration.from_dict({key: value for key, value in content.items() if key != "round"})


def write_end(folder: Path, reason: str) -> None:
    """Write why the run stopped early."""
    store(folder / END, reason.encode(), REMAINS)


def read_end(folder: Path) -> str | None:
    """Why the run stopped early; None if it did not."""
    path = folder / END
    if not path.exists():
        return None
    with parsing(path, "cannot be read", stored.DELETE):
        return read_bytes(path, DOCUMENT).decode("utf-8", "replace")
