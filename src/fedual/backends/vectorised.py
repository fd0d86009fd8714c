"""A round of all clients at once, or in chunks of clients if memory or the cache is too small for all."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TypeVar, cast

import torch
from torch import Tensor

from fedual.algorithm import ClientState, Info, Method, ServerState, Totals, Upload, client_step, server_step, total
from fedual.backends.client_store import Store, free_memory
from fedual.backends.kernels.traces import improve
from fedual.networks import Minibatches, Network
from fedual.networks.linear_layers import Layers
from fedual.networks.randomness import counted
from fedual.settings import Precision
from fedual.solvers.stepper import Batches, Stepper, Variables, segments, solve, walk

CACHE = 16 * 2**20
"""Bytes of one variable of a chunk's clients on a CPU: about 20 clients of the paper's MLP, measured the fastest."""
Result = TypeVar("Result")


def run_round(
    method: Method, server: ServerState, store: Store, losses: Minibatches, active: Tensor, chunk: int
) -> tuple[ServerState, Info]:
    """One round with the clients `active`; their rows in the store are replaced.

    A chunk holds clients of similar size, so that they finish at about the same time.
    """
    solve_all = partial(solve, cast(Stepper, method.solver), run=compiled_walk if losses.compile else walk)
    sizes = torch.tensor(losses.data.sizes)[active]
    chunks = active[sizes.argsort(descending=True, stable=True)].split(chunk)
    broadcast, totals = server.broadcast(method.dual, len(losses.data)), Totals.none(len(losses.data))

    def train(clients: Tensor) -> tuple[Upload, ClientState, Totals]:
        rows = {name: value.to(server.lam_g.device) for name, value in store.read(clients).items()}
        state = ClientState.from_rows(rows)
        upload, state = client_step(method, broadcast, state, losses[clients], solve=solve_all)
        return upload, state, total(method, broadcast, upload, clients, len(losses.data))

    for clients, (upload, state, sums) in zip(chunks, side_by_side(train, chunks, losses), strict=True):
        totals = totals.plus(sums)
        if not upload.ok.all():
            kept = upload.ok.cpu().nonzero()[:, 0]
            clients, state = clients[kept], state.select(kept.to(upload.ok.device))
        store.write(clients, state.rows())
    return server_step(method, server, totals)


def compiled_walk(stepper: Stepper, losses: Batches, variables: Variables) -> Variables:
    """`walk` with compiled elementwise work, or with steps recorded as CUDA graphs."""
    from fedual.backends.kernels import fused_updates

    device = variables["mean"].device
    if counted(device):
        from fedual.backends.kernels import cuda_graphs

        return cuda_graphs.descend(stepper, cast(Minibatches, losses), variables)
    advance = fused_updates.compiled(replace(stepper, lr=1.0), device.type)
    return walk(stepper, losses, variables, advance, fused_updates.window)


def image_layers(network: Network, precision: Precision) -> Layers | None:
    """Kernels for the convolutions of many clients; None where there are none for the network or the device."""
    convolutional = network.dtype == torch.float32 and any(len(shape) == 4 for shape in network.shapes)
    if not convolutional or network.device.type != "cuda" or find_spec("triton") is None:
        return None
    from fedual.backends.kernels.image_layers import ImageLayers

    return ImageLayers(network, torch.float32 if precision in ("float32", "tf32") else torch.bfloat16)


def side_by_side(train: Callable[[Tensor], Result], chunks: Sequence[Tensor], losses: Minibatches) -> Iterator[Result]:
    """Yield the results of chunks in their order; compiled code on a CPU trains as many chunks at a time as threads.

    One core for each chunk wastes less time than all cores on one small operation after another, and the result does
    not depend on the number of cores. These threads flush numbers below 10⁻³⁸ to zero, because saturated networks
    produce them and they are slow.
    """
    if losses.network.device.type != "cpu" or not losses.compile:
        yield from map(train, chunks)
        return

    def prepare() -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)

    for n in {n for clients in chunks for n, _ in segments(sorted(losses[clients].steps, reverse=True))}:
        losses.trace(n, improve)
    threads, waiting = torch.get_num_threads(), deque[Future]()
    pool = ThreadPoolExecutor(threads, initializer=prepare)
    try:
        for clients in chunks:
            waiting.append(pool.submit(train, clients))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # new threads take the number that was set last


def choose_chunk(losses: Minibatches, most: int) -> int:
    """How many clients to train at once: what fits half of the free memory, and the cache of a CPU.

    If each thread trains a chunk of its own, the chunks share the cache, and every thread gets a chunk.
    """
    network = losses.network
    variable = network.dim * network.dtype.itemsize
    fits = free_memory(network.device) // 2 // (24 * variable + _activations(losses))
    if network.device.type == "cpu":
        threads = torch.get_num_threads() if losses.compile else 1
        fits = max(1, min(fits, CACHE // variable) // threads)
        if losses.compile:  # chunks of about the same size, and equally many for each thread
            most = -(-most // (threads * -(-most // (threads * fits))))
    return max(1, min(most, fits))


def worth_compiling(losses: Minibatches, rounds: int) -> bool:
    """True if a run is long enough to recover about ten seconds of compilation.

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
