"""What one would write first: a plain loop over clients and batches, in float32, with a published optimiser.

IVON is `ivon-opt`'s. It has no multipliers, so that this loop does a little less than IVON-ADMM's local training.
The server takes the mean of the clients' parameters.
"""

import time
from collections.abc import Callable, Generator, Iterable
from copy import deepcopy
from functools import cache
from itertools import count
from typing import Any

import ivon
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bench.work import SCENARIO, Work
from fedual.scenarios import load

Train = Callable[[nn.Module, Tensor, Tensor, Iterable[Tensor]], None]


@cache  # reading a file for every client would count as training
def settings(method: str) -> dict[str, Any]:
    """Those of a method in the scenario."""
    return load(SCENARIO, method=method).settings


def train_ivon(model: nn.Module, x: Tensor, y: Tensor, batches: Iterable[Tensor]) -> None:
    """One client's local training with the scenario's settings of IVON-ADMM."""
    told = settings("ivon-admm")
    ess = len(x) / (told["rho"] * told["tau"])
    optimiser = ivon.IVON(
        model.parameters(),
        lr=told["lr"],
        ess=ess,
        hess_init=told["h0"],
        beta2=told["beta2"],
        weight_decay=told["delta"] / ess,
        rescale_lr=False,
    )
    for rows in batches:
        with optimiser.sampled_params(train=True):
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()


def train_adam(model: nn.Module, x: Tensor, y: Tensor, batches: Iterable[Tensor]) -> None:
    """One client's local training in FedAvg."""
    optimiser = torch.optim.Adam(model.parameters(), lr=settings("fedavg")["lr"])
    for rows in batches:
        optimiser.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()


def rounds(work: Work, train: Train) -> Generator[float]:
    """Seconds of each round."""
    examples = [work.examples(client) for client in range(len(work.clients))]
    server = deepcopy(work.model)
    for round in count():
        began, total = time.perf_counter(), torch.zeros(sum(value.numel() for value in server.parameters()))
        for client, (x, y) in enumerate(examples):
            model = deepcopy(server)
            train(model, x, y, work.batches(round, client))
            total += parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(total / len(examples), server.parameters())
        yield time.perf_counter() - began
