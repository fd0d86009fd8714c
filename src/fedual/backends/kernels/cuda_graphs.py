"""A step of many clients as a CUDA graph: recorded once, replayed for every step of every round.

A step of a small network is some forty kernels of a few microseconds each, and Python needs longer to launch them than
the GPU takes to run them. A `Tape` therefore holds everything that a step reads and writes at fixed addresses on the
GPU, including the number of the step; a round copies its tables in, replays the graph, and copies the result out.
Clients that have finished are dropped a few at a time: there is one graph for each of a handful of client counts.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedual.backends.kernels import fused_updates
from fedual.backends.kernels.fused_updates import window
from fedual.networks import philox
from fedual.networks.minibatches import Minibatches
from fedual.networks.network import Network
from fedual.solvers.stepper import Gradients, Stepper, Variables, aligned, segments, take

SHRINK = 0.8
"""A graph for n clients serves down to about 0.8 n of them."""


def descend(stepper: Stepper, losses: Minibatches, variables: Variables) -> Variables:
    """Run the clients of `losses`, those with most steps first, from their variables."""
    tapes = losses.network.tapes
    key = (replace(stepper, lr=1.0), len(losses), losses.batch_size, losses.draws, losses.longest)
    if key not in tapes:
        tapes[key] = Tape(stepper, losses, variables)
    return tapes[key].run(losses, variables)


def outputs(network: Network, x: Tensor, transform: Callable[[Tensor], Tensor], many: int) -> Callable:
    """A function from up to `many` networks θ `(n, P)` to their outputs `(n, N, ...)` for x, which must not move.

    The next call overwrites the outputs.
    """
    key = (x.data_ptr(), x.shape, x.dtype, many)
    if key not in network.tapes:
        inputs, theta = transform(x), network.initial().repeat(many, 1)
        if network.images is not None:
            images = network.images
            graph, found = record(lambda: images.outputs(network, theta, inputs.clone()))
        else:
            graph, found = record(lambda: network(theta[0], inputs.clone())[None])  # it may write into its inputs

        def apply(new: Tensor) -> Tensor:
            theta[: len(new)].copy_(new)
            graph.replay()
            return found[: len(new)]

        network.tapes[key] = apply, x, inputs  # kept alive: the graph reads their addresses
    return network.tapes[key][0]


def record(work: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record the graph of some work, which also runs once before; return the graph and what the work returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # compiles, and lets the libraries choose their algorithms
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # memory that is freed during recording would spoil the graph
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        found = work()
    return graph, found


class Tape(Gradients):
    """The variables of K clients at fixed addresses, and the graphs that update them."""

    def __init__(self, stepper: Stepper, losses: Minibatches, variables: Variables):
        mean, clients = variables["mean"], len(losses)
        self.stepper, self.losses = stepper, losses
        self.advance = fused_updates.compiled(replace(stepper, lr=1.0), "cuda")
        self.variables = {name: value.clone() for name, value in variables.items()}
        self.memory = {name: aligned(mean) for name in ("gradient", "theta")[: 1 + (stepper.draws == 1)]}
        index, weight = losses.plan
        shape = (clients, losses.longest, losses.batch_size)
        self.index, self.weight = index.new_zeros(shape), weight.new_zeros(shape)
        whole = lambda *values: torch.tensor(values, device=mean.device)
        self.steps = whole(0, 1)  # this step and the next
        self.clients = whole(*range(clients))
        self.noise_key, self.dropout_key = whole(0), whole(0)
        self.noise_rows = self.clients if losses.draws.noise == "independent" else whole(0)
        self.noise_now = mean.new_zeros(len(self.noise_rows), mean.shape[-1]) if stepper.draws == 1 else None
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, losses: Minibatches, variables: Variables) -> Variables:
        """Run one round; return the clients' variables at its end."""
        lanes = [(self._lanes(n), n, steps) for n, steps in segments(losses.steps)]
        for width, _, _ in lanes:
            if width not in self.graphs:
                self.graphs[width] = self._record(width)
        self._load(losses, variables)
        done = {name: torch.empty_like(value) for name, value in self.variables.items()}
        below = [n for _, n, _ in lanes[1:]] + [0]
        for (width, n, steps), left in zip(lanes, below, strict=True):
            for _ in steps:
                self.graphs[width].replay()
            for name, value in self.variables.items():  # those of clients that finish here
                done[name][left:n] = value[left:n]
        return done

    def noise(self, step: int, sample: int, like: Tensor) -> Tensor:
        """ε, `step` steps from now."""
        rows = self.noise_rows[: len(like)]
        out = like.new_empty(len(rows), like.shape[-1])
        return philox.normal(out, self.noise_key, self.steps[step : step + 1], rows, sample)

    def gradient(self, theta: Tensor, step: int, out: Tensor | None = None) -> Tensor:
        """∇ of the minibatch mean of the first n clients, `step` steps from now."""
        out = torch.empty_like(theta) if out is None else out
        n, now = len(theta), self.steps[step : step + 1]
        index, weight = (table[:n].index_select(1, now)[:, 0] for table in (self.index, self.weight))
        batch = self.losses.rows(index, weight)
        uniforms: list[Tensor] = []
        if size := sum(shape.numel() for shape in self.losses.dropout_shapes):
            flat = philox.uniform(aligned(theta.new_empty(n, size)), self.dropout_key, now, self.clients[:n])
            uniforms = self.losses.masks(flat)
        self.losses.differentiate(theta, batch, uniforms, out)
        return out

    def _lanes(self, n: int) -> int:
        """The width of the graph for n clients."""
        width = len(self.clients)
        while (narrower := min(width - 1, int(width * SHRINK))) >= n:
            width = narrower
        return width

    def _load(self, losses: Minibatches, variables: Variables) -> None:
        """Copy a round's variables and tables to their fixed addresses."""
        for name, value in variables.items():
            self.variables[name].copy_(value)
        for table, own in zip((self.index, self.weight), losses.plan, strict=True):
            table[:, : own.shape[1]].copy_(own)
        self.clients.copy_(torch.tensor(losses.clients))
        self.noise_key.fill_(losses.draws.noise_key(losses.round))
        self.dropout_key.fill_(losses.draws.dropout_key(losses.round))
        self.steps.copy_(torch.tensor([0, 1]))
        if self.noise_now is not None:
            self.noise_now.copy_(self.noise(0, 0, self.variables["mean"]))
            self.memory["theta"].copy_(self.stepper.place(self.variables, self.noise_now))

    def _record(self, n: int) -> torch.cuda.CUDAGraph:
        """The graph of one step of the first n clients."""
        self._load(self.losses, self.variables)
        return record(lambda: self._step(n), self.pool)[0]

    def _step(self, n: int) -> None:
        tensors = self.variables, self.memory
        mine, memory = ({name: window(value, n) for name, value in all.items()} for all in tensors)
        now = ahead = None
        if self.noise_now is not None:
            now, ahead = window(self.noise_now, n), self.noise(1, 0, mine["mean"])
        take(self.stepper, self, self.advance, mine, memory, 0, now, ahead)
        if now is not None and ahead is not None:
            now.copy_(ahead)
        self.steps.add_(1)
