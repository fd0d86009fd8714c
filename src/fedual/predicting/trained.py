"""What a run left for predictions: its posterior, how its inputs were stored, and when it is unsure.

An input is *unsure* where the entropy of its class probabilities is above a threshold. At the coverage c that is the
c-quantile of the entropies on the test set, so that about c of all inputs like those of the test set are sure.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedual.errors import DataError, InputError, require_positive
from fedual.posterior import Posterior
from fedual.runs import RunDirectory, evidence
from fedual.solvers import Draws

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
"""Types that stored inputs may have."""


class Trained(NamedTuple):
    """A posterior, and what its run says of inputs; None for all that it does not say."""

    posterior: Posterior
    shape: tuple[int, ...] | None  # of one input
    dtype: torch.dtype | None
    columns: dict[str, Any] | None  # how tables became inputs, see `fedual.data.own.encode`
    classes: list[str] | None  # their names
    test: evidence.Evidence | None
    samples: int = 32  # draws for the predictions of the test set
    seed: int = 0  # of these draws: with others a posterior's entropies are all a little higher, or lower


class Rule(NamedTuple):
    """Entropies above `threshold` are unsure."""

    coverage: float
    threshold: float
    examples: int  # of the test set that it comes from; 0 for the inputs themselves
    accuracy: float | None  # on the test set
    accuracy_sure: float | None  # on its sure part


def open_run(
    path: str | os.PathLike[str],
    model: nn.Module | Callable[..., nn.Module] | None = None,
    device: torch.device | str | None = None,
) -> Trained:
    """Read a finished run, or a posterior alone.

    Args:
        path: A run's folder, or a file that `Posterior.save` wrote.
        model: See `Posterior.load`.
        device: See there.

    Raises:
        InputError: No run, one that has not ended, or a model that is missing or another.
        DataError: A file that is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path} is not there: give the folder of a run, or a posterior file.")
        return Trained(Posterior.load(path, model, device), None, None, None, None, None)
    if not (file := path / "posterior.safetensors").exists():
        raise InputError(f"{path} has no posterior.safetensors: give the folder of a run that has ended.")
    config, draws = {}, ()
    if (path / "config.json").exists():
        folder = RunDirectory.open(path)
        config, history = folder.config, folder.history()
        if {"samples", "seed"} <= config.keys() and history:
            draws = config["samples"], Draws(config["seed"]).evaluation(history[-1]["round"])
    clients = evidence.read_clients(path)
    shape = dtype = None
    if clients:
        try:
            shape, dtype = tuple(map(int, clients["shape"])), DTYPES[clients["dtype"]]
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{path / 'clients.json'} says no shape and type of inputs: delete it.") from None
    posterior = Posterior.load(file, model, device)
    told = config.get("inputs"), config.get("classes")
    return Trained(posterior, shape, dtype, *told, evidence.read_test(path), *draws)


def rule(entropy: Tensor, test: evidence.Evidence | None, coverage: float) -> Rule:
    """When a prediction is unsure.

    Args:
        entropy: Of the inputs `(N,)`; used where no test set was kept.
        test: What the run kept of its test set.
        coverage: The share of inputs like those of the test set that is to be sure, in (0, 1].
    """
    require_positive("coverage", coverage, most=1.0)
    if test is None:
        return Rule(coverage, _quantile(entropy, coverage), 0, None, None)
    threshold = _quantile(test.entropy, coverage)
    right = (test.probabilities.argmax(-1) == test.labels).double()
    sure = test.entropy <= threshold
    return Rule(coverage, threshold, len(right), float(right.mean()), float(right[sure].mean()))


def _quantile(values: Tensor, share: float) -> float:
    """The least value with at least this share at or below it; NaNs, of which there are none, would come last."""
    # 0.7 · 10 must not count as more than 7
    return float(values.sort().values[math.ceil(share * len(values) - 1e-9) - 1])
