"""A round of all clients at once, in chunks of clients where memory or the cache is short."""

import os

import torch
from torch import Tensor

from fedual import admm
from fedual.admm import Info, Method
from fedual.simulate.state import NOTHING, ServerState, finish, problem_of, rows_of
from fedual.simulate.store import Store
from fedual.solvers import Minibatches

CACHE = 16 * 2**20
"""Bytes of one variable of a chunk's clients on a CPU: about 20 clients of the paper's MLP, measured the fastest."""


def round(
    method: Method, server: ServerState, store: Store, losses: Minibatches, active: Tensor, chunk: int
) -> tuple[ServerState, Info]:
    """One round with the clients `active`; their rows in the store are replaced.

    A chunk holds clients of similar size, so that they finish at about the same time.
    """
    sizes = torch.tensor(losses.data.sizes)[active]
    counted = torch.zeros(len(losses.data), dtype=torch.bool)
    totals = NOTHING
    for clients in active[sizes.argsort(descending=True, stable=True)].split(chunk):
        rows = store.read(clients)
        problem = problem_of(method, server, losses[clients], rows)
        update = admm.client_update(method, problem)
        totals = totals.plus(admm.total(method, problem, update, rows.get("lam")))
        kept = clients[update.ok.cpu()]
        counted[kept] = True
        store.write(kept, rows_of(update, store.names))
    return finish(method, server, totals, active, counted)


def choose_chunk(losses: Minibatches, most: int) -> int:
    """How many clients to train at once: what fits the cache of a CPU, or half of the free memory of a GPU."""
    network = losses.network
    variable = network.dim * network.dtype.itemsize
    if network.device.type != "cpu":
        free = torch.cuda.mem_get_info(network.device)[0] // 2
        return max(1, min(most, free // (24 * variable + _activations(losses))))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return max(1, min(most, CACHE // variable, free // (24 * variable + _activations(losses))))


def _activations(losses: Minibatches) -> int:
    """Bytes that a client's batch keeps for the backward pass."""
    kept = 0

    def count(value: Tensor) -> Tensor:
        nonlocal kept
        kept += value.nbytes
        return value

    with torch.autograd.graph.saved_tensors_hooks(count, lambda value: value):
        losses[:1].gradient(losses.network.initial()[None], 0)
    return 2 * kept
