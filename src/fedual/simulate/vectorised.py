"""A round of all clients at once, in chunks of clients where memory or the cache is short."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fedual import admm
from fedual.admm import Info, Update
from fedual.contracts import Method, Totals
from fedual.rounds import ServerState, finish, problem_of, rows_of
from fedual.simulate.state import free_memory
from fedual.simulate.store import Store
from fedual.solvers import Minibatches
from fedual.solvers.stochastic import segments

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
    totals = Totals()
    chunks = active[sizes.argsort(descending=True, stable=True)].split(chunk)

    def train(clients: Tensor) -> tuple[Update, Totals]:
        rows = store.read(clients)
        problem = problem_of(method, server, losses[clients], rows)
        update = admm.client_update(method, problem)
        return update, admm.total(method, problem, update, rows.get("lam"))

    for clients, (update, sums) in zip(chunks, side_by_side(train, chunks, losses), strict=True):
        totals = totals.plus(sums)
        kept = clients[update.ok.cpu()]
        counted[kept] = True
        store.write(kept, rows_of(update, store.names))
    return finish(method, server, totals, active, counted)


def side_by_side(
    train: Callable[[Tensor], tuple[Update, Totals]], chunks: Sequence[Tensor], losses: Minibatches
) -> Iterator[tuple[Update, Totals]]:
    """The chunks' results in their order; on a CPU, compiled, as many chunks at a time as there are threads.

    A core for each chunk wastes less than all cores together on one small operation after the other, and the result
    does not depend on their number. Numbers below 10⁻³⁸, which saturated networks make and which are slow, count as
    zero there.
    """
    if losses.network.device.type != "cpu" or not losses.compile:
        yield from map(train, chunks)
        return

    def prepare() -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)

    for n in {n for clients in chunks for n, _ in segments(sorted(losses[clients].steps, reverse=True))}:
        losses.trace(n)
    threads, waiting = torch.get_num_threads(), deque[Future]()
    try:
        with ThreadPoolExecutor(threads, initializer=prepare) as pool:
            try:
                for clients in chunks:
                    waiting.append(pool.submit(train, clients))
                    if len(waiting) > threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
    finally:
        torch.set_num_threads(threads)  # new threads take the number that was set last


def choose_chunk(losses: Minibatches, most: int) -> int:
    """How many clients to train at once: what fits half of the free memory, and the cache of a CPU.

    Where each thread trains a chunk of its own, they share the cache, and there is a chunk for each.
    """
    network = losses.network
    variable = network.dim * network.dtype.itemsize
    fits = free_memory(network.device) // 2 // (24 * variable + _activations(losses))
    if network.device.type == "cpu":
        threads = torch.get_num_threads() if losses.compile else 1
        fits = max(1, min(fits, CACHE // variable) // threads)
        if losses.compile:  # chunks of about the same size, as many for one thread as for the other
            most = -(-most // (threads * -(-most // (threads * fits))))
    return max(1, min(most, fits))


def worth_compiling(losses: Minibatches, rounds: int) -> bool:
    """Whether a run is long enough to win back some ten seconds of compilation.

    On a CPU compiled updates save about 10 ns a parameter, client and step; on a GPU graphs save about 2 ms a step.
    """
    if losses.network.device.type == "cpu":
        return rounds * sum(losses.steps) * losses.dim > 3e9
    return rounds * losses.longest > 5e3


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
