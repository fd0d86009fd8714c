"""Small federations of unequal clients, and rounds of both engines on them."""

import torch
from problems import normal, rng
from torch import Tensor, nn

from fedual.algorithm import Info, Method, ServerState, client_init, server_init
from fedual.backends.client_store import Place, Store, placed
from fedual.defaults import Federation, resolve
from fedual.methods import MethodSpec
from fedual.networks import Clients, Draws, Minibatches, Network
from fedual.run import ENGINES

SEED = Draws(3)
SIZES = [5, 17, 33, 8, 1]


def clients(weights: bool = False, sizes: list[int] = SIZES, classes: int = 3) -> Clients:
    data = []
    for k, n in enumerate(sizes):
        pair = normal((n, 6), 10 + k) + k, torch.randint(classes, (n,), generator=rng(20 + k))
        data.append((*pair, torch.rand(n, generator=rng(30 + k)) + 0.5) if weights else pair)
    return Clients.from_pairs(data)


def mlp(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def losses(
    model: nn.Module | None = None,
    data: Clients | None = None,
    draws: Draws = SEED,
    scale: float | None = None,
    **options,
) -> Minibatches:
    network = Network(model or mlp(), scale=scale)
    return Minibatches(network, data or clients(), draws=draws, **{"batch_size": 4, "local_epochs": 3, **options})


def begin(method: Method, start: Tensor, num_clients: int, place: Place = "memory") -> tuple[ServerState, Store]:
    """The state before the first round, as `fit` makes it."""
    server = server_init(method, start)
    row = {name: value[0] for name, value in client_init(method, server.lam_g).rows().items()}
    return server, placed(row, num_clients, place)


def resolved(method: str | MethodSpec | Method, losses: Minibatches) -> Method:
    """A method with the numbers that the rules give it for these clients."""
    return resolve(method, Federation(len(losses.data), float(losses.data.total_weights.sum())))


def play(
    method: str | MethodSpec | Method,
    losses: Minibatches,
    rounds: int,
    engine: str = "vectorised",
    chunk: int = 99,
    fraction: float = 1.0,
    place: Place = "memory",
) -> tuple[ServerState, Store, Info]:
    """The server after some rounds, the store, and what happened in the last one."""
    method = resolved(method, losses)
    server, store = begin(method, losses.network.initial(), len(losses.data), place)
    info = Info(*[None] * 5)  # type: ignore[arg-type]
    for number in range(rounds):
        active = losses.draws.participants(number, len(losses.data), fraction)
        server, info = ENGINES[engine](method, server, store, losses.at(number), active, chunk)
    return server, store, info
