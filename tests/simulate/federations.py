"""Small federations of unequal clients, and rounds of both engines on them."""

import torch
from problems import normal, rng
from torch import nn

from fedual.admm import Info
from fedual.relative import settled
from fedual.simulate import sequential, state, vectorised
from fedual.solvers import Clients, Draws, Minibatches, Network

SEED = Draws(3)
SIZES = [5, 17, 33, 8, 1]
ENGINES = {"vectorised": vectorised.round, "sequential": sequential.round}


def clients(weights: bool = False, sizes: list[int] = SIZES, classes: int = 3) -> Clients:
    pairs = [
        (normal((n, 6), 10 + k) + k, torch.randint(classes, (n,), generator=rng(20 + k))) for k, n in enumerate(sizes)
    ]
    return Clients.from_pairs(
        pairs, [torch.rand(n, generator=rng(30 + k)) + 0.5 for k, n in enumerate(sizes)] if weights else None
    )


def mlp(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def losses(model: nn.Module | None = None, data: Clients | None = None, draws: Draws = SEED, **options) -> Minibatches:
    return Minibatches(
        Network(model or mlp()), data or clients(), draws=draws, **{"batch_size": 4, "local_epochs": 3, **options}
    )


def play(method, losses, rounds, engine="vectorised", chunk=99, fraction=1.0, client_state: state.Place = "memory"):
    """The server after some rounds, the store, and what happened in the last one."""
    method = settled(method, len(losses.data), float(losses.data.total_weights.sum()))
    server, store = state.begin(method, losses.network.initial(), len(losses.data), client_state)
    info = Info(*[None] * 5)  # type: ignore[arg-type]
    for number in range(rounds):
        active = losses.draws.participants(number, len(losses.data), fraction)
        server, info = ENGINES[engine](method, server, store, losses.at(number), active, chunk)
    return server, store, info
