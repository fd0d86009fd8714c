"""What the tests of the methods for networks share."""

import numpy as np
import torch
from problems import normal, rng
from torch import nn

from fedual.networks import Clients, Minibatches, Network

NUM = 5


def networks() -> Minibatches:
    """A small classifier on five unequal clients."""
    pairs = [
        (normal((n, 3), 10 + k) + k, torch.randint(2, (n,), generator=rng(20 + k)))
        for k, n in enumerate([5, 9, 14, 2, 1])
    ]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(parameter.shape, 30 + seed) / 2)
    return Minibatches(Network(model), Clients.from_pairs(pairs), batch_size=4, local_epochs=2)


def last(iterable):
    *_, item = iterable
    return item


def near(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-8)


def near_all(ours, theirs):
    for mine, its in zip(ours, theirs, strict=True):
        near(mine, its)
