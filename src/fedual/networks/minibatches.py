# ruff: noqa: D102 (`Batches` and its bases document these methods)
"""The clients' losses for networks: minibatch gradients of all clients in one batched pass.

Client k goes through its N_k examples in batches of B, ⌈N_k/B⌉ an epoch, the last one smaller, in an order that
`Draws` decides. A short batch is padded with weight zero, so that batches of different clients stack. With example
weights w the loss is ℓ_k = Σ_i w_i ℓ_i, N_k is replaced by Σ_i w_i, and a batch estimates ∇ℓ_k/Σw without bias.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pad_sequence

from fedual.errors import InputError, require_count
from fedual.families import Curvature, Gaussian, Rule
from fedual.networks.affine import Affine
from fedual.networks.client_data import Clients
from fedual.networks.curvature import ggn_diagonal
from fedual.networks.linear_layers import Slot, Stacked
from fedual.networks.losses import Criterion, criterion
from fedual.networks.network import Network
from fedual.networks.randomness import Draws
from fedual.solvers.base import Moments
from fedual.solvers.stepper import Batches, aligned

KEPT = 2**27
"""Bytes of noise that a round caches for the next chunk of clients, where all clients share it."""
WIDE = 1024
"""Examples of a client that a GPU processes at a time for the curvature: with 64 the GPU waits for Python."""


class Batch(NamedTuple):
    """A minibatch of each of n clients."""

    x: Tensor  # (n, B, ...), what the network sees
    y: Tensor  # (n, B, ...)
    weight: Tensor  # (n, B), sums to 1 for a client with unit weights; 0 for padding


@dataclass(frozen=True, eq=False, repr=False)
class Minibatches(Batches):
    """A stack of clients with their data, a network and a plan of batches."""

    network: Network
    data: Clients  # the examples of all clients
    loss: str | Criterion = "cross_entropy"
    draws: Draws = Draws()
    batch_size: int = 32
    local_epochs: int = 10  # passes over a client's data in a round
    local_steps: int | None = None  # in a round for every client, whatever its size, instead of `local_epochs`
    prepared: Tensor | None = None  # all inputs as the network sees them, if they fit
    prepared_y: Tensor | None = None  # all targets as the loss sees them; made from `data`
    affine: Affine | None = None  # the whole losses of a network whose outputs are affine in θ
    compile: bool = False  # the elementwise work of a step; on a GPU, record steps as CUDA graphs
    round: int = 0
    ids: tuple[int, ...] | None = None  # the clients of this stack; None means all
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("batch_size", "local_epochs", "local_steps"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        most = max(WIDE, max(self.data.sizes))  # a batch holds all of a client's examples at most
        object.__setattr__(self, "batch_size", min(self.batch_size, most))
        if self.prepared_y is None:
            object.__setattr__(self, "prepared_y", self.network.standardised(self.data.y))

    @property
    def y(self) -> Tensor:
        """The targets of all examples as the loss sees them, `(N, ...)`."""
        assert self.prepared_y is not None
        return self.prepared_y

    @cached_property
    def clients(self) -> tuple[int, ...]:
        """The numbers of the clients in this stack."""
        return tuple(range(len(self.data))) if self.ids is None else self.ids

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        long = f"{self.local_steps} steps" if self.local_steps else f"{self.local_epochs} epochs"
        model = type(self.network.model).__name__
        return f"Minibatches({len(self)} of {self.data}, {model}, {self.loss}, {long} of batches of {self.batch_size})"

    def __getitem__(self, clients: Any) -> "Minibatches":
        clients = clients.cpu() if isinstance(clients, Tensor) else clients
        part = replace(self, ids=tuple(torch.tensor(self.clients)[clients].reshape(-1).tolist()))
        object.__setattr__(part, "kept", self.kept)  # chunks of one round share its noise
        return part

    def at(self, round: int) -> "Minibatches":
        """The losses of another round, with the same data and other draws."""
        return replace(self, round=round)

    @property
    def dim(self) -> int:
        return self.network.dim

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    @property
    def num_examples(self) -> Tensor:
        return self.data.total_weights[list(self.clients)]

    @cached_property
    def steps(self) -> list[int]:  # type: ignore[override]
        return [self._number_of_steps(client) for client in self.clients]

    @property
    def longest(self) -> int:
        """The steps of the largest client of the federation, in this stack or not."""
        return self._number_of_steps(max(range(len(self.data)), key=self.data.sizes.__getitem__))

    def _number_of_steps(self, client: int) -> int:
        return self.local_steps or self.local_epochs * self._per_epoch(client)

    def noise(self, step: int, sample: int, like: Tensor) -> Tensor:
        if (step, sample) in self.kept:
            return self.kept[step, sample]
        noise = self.draws.normal(self.round, step, sample, list(self.clients[: len(like)]), like)
        if self.draws.noise != "independent" and noise.nbytes * len(self.kept) < KEPT:
            self.kept[step, sample] = noise
        return noise

    def gradient(self, theta: Tensor, step: int, out: Tensor | None = None) -> Tensor:
        n = len(theta)
        out = torch.empty_like(theta) if out is None else out
        self.differentiate(theta, self.batch(step, n), self.uniforms(step, n), out)
        return out

    def differentiate(self, theta: Tensor, batch: Batch, uniforms: list[Tensor], out: Tensor) -> None:
        """Write ∇ of the mean over a batch of n clients, `(n, P)`, all in one pass."""
        traced = self.network.tapes.get(self._shape(batch)) if self.compile else None
        if traced is None:
            self._differentiate(theta, batch, uniforms, out)
        else:
            traced(theta, *batch, out, *uniforms)

    def trace(self, n: int, improve: Callable[[GraphModule], None] | None = None) -> None:
        """Trace the gradient of n clients once, and `improve` the trace.

        Without a trace, `vmap`, autograd and the module's own Python take longer than a small network.
        """
        some = self[torch.zeros(n, dtype=torch.long)]
        theta, batch = self.network.initial().expand(n, -1), some.batch(0, n)
        if self._shape(batch) not in self.network.tapes:
            arguments = (aligned(theta).copy_(theta), *batch, aligned(theta), *some.uniforms(0, n))
            work = lambda theta, x, y, weight, out, *rest: self._differentiate(theta, Batch(x, y, weight), [*rest], out)
            tape = make_fx(work)(*arguments)
            if improve is not None:
                improve(tape)
            self.network.tapes[self._shape(batch)] = tape.forward  # a module's call asks for hooks

    def _shape(self, batch: Batch) -> tuple:
        return batch.x.shape, batch.y.shape

    def _differentiate(self, theta: Tensor, batch: Batch, uniforms: list[Tensor], out: Tensor) -> None:
        images = self.network.images
        layers, module = (Stacked, None) if images is None else (images.of(theta), images.model)
        slots = {name: Slot(place) for name, place in self.network.split(out).items()}

        def outputs(parts: dict[str, Tensor], x: Tensor, uniforms: list[Tensor]) -> Tensor:
            with layers(parts, slots):
                return self.network.forward(parts, x, uniforms, module)

        with torch.enable_grad():
            parts = {name: part.detach().requires_grad_() for name, part in self.network.split(theta).items()}
            if len(theta) > 1 or images is not None:
                found = vmap(outputs)(parts, batch.x, uniforms).flatten(0, 1)
            else:
                mine = {name: part[0] for name, part in parts.items()}
                found = outputs(mine, batch.x[0], [uniform[0] for uniform in uniforms])
            losses = self.criterion(found, batch.y.flatten(0, 1))
            rest = torch.autograd.grad(losses, list(parts.values()), batch.weight.flatten(), allow_unused=True)
        if images is not None:
            images.join()
        for slot, gradient in zip(slots.values(), rest, strict=True):
            slot.finish(gradient)

    def batch(self, step: int, n: int) -> Batch:
        """The batches of the first n clients at a step."""
        return self.rows(*(table[:n, step] for table in self.plan))

    def rows(self, index: Tensor, weight: Tensor) -> Batch:
        """Some rows of the data `(n, B)` as batches."""
        take = lambda values: values.index_select(0, index.flatten()).unflatten(0, index.shape)
        x = self.network.inputs(take(self.data.x)) if self.prepared is None else take(self.prepared)
        return Batch(x, take(self.y), weight.contiguous())

    def some_inputs(self, count: int) -> Tensor:
        """The first `count` examples of each client as the network sees them, repeated where it has fewer."""
        data = self.data
        rows = [data.parts[k][torch.arange(count) % data.sizes[k]] for k in self.clients]
        return self.network.inputs(data.x[torch.cat(rows).to(self.network.device)])

    def uniforms(self, step: int, n: int) -> list[Tensor]:
        """The uniforms of the first n clients' dropout layers, one tensor `(n, B, ...)` a layer; empty without dropout.

        All Monte-Carlo samples of a step share one draw of masks.
        """
        size = sum(shape.numel() for shape in self.dropout_shapes)
        if not size:
            return []
        draw = lambda client: self.draws.uniform(self.round, step, client, size, self.network.initial())
        return self.masks(torch.stack([draw(client) for client in self.clients[:n]]))

    def masks(self, flat: Tensor) -> list[Tensor]:
        """Uniforms `(n, size)` cut to the shapes that dropout layers take."""
        parts = flat.split([shape.numel() for shape in self.dropout_shapes], -1)
        return [part.reshape(len(flat), *shape) for part, shape in zip(parts, self.dropout_shapes, strict=True)]

    @cached_property
    def dropout_shapes(self) -> list[torch.Size]:
        """The shapes of the uniforms of a batch."""
        one = self.network.inputs(self.data.x[:1])
        return self.network.dropout_shapes(one.expand(self.batch_size, *one.shape[1:]))

    def curvature(self, theta: Tensor) -> Tensor:
        """diag Σ_i w_i J_iᵀ H_i J_i of each client's whole loss at θ `(K, P)`, in one pass over its data."""
        network, total = self.network, torch.zeros_like(theta)
        parts = network.split(theta)
        size = self.batch_size if theta.device.type == "cpu" else max(self.batch_size, WIDE)
        index, weight = self._tables([None] * len(self), lambda k: _cut(torch.arange(self.data.sizes[k]), size))
        for step in range(index.shape[1]):
            rows = weight[:, step].sum(-1).nonzero()[:, 0]  # clients that have examples left
            x, y = network.inputs(self.data.x[index[rows, step]]), self.y[index[rows, step]]
            mine = {name: part[rows] for name, part in parts.items()}
            total[rows] += network.join(ggn_diagonal(network.forward, mine, x, y, weight[rows, step], self.loss))
        return total

    def moments(
        self, family: Gaussian, lam: Tensor, rule: Rule, step: int = 0, curvature: Curvature | None = None
    ) -> Moments:
        """ℓ_k, ∇ℓ_k and ∇²ℓ_k of each client at the mean of `lam` `(K, R, P)`, where outputs are affine in θ."""
        if self.affine is None:
            raise InputError(f"{self.network} has minibatches only: give `affine`, or choose IVON, SGD or Laplace.")
        return self.affine.moments(self.clients, family.mean(lam))

    @cached_property
    def criterion(self) -> Criterion:
        """The loss of each example."""
        return criterion(self.loss)

    def _per_epoch(self, client: int) -> int:
        return -(-self.data.sizes[client] // self.batch_size)

    @cached_property
    def plan(self) -> tuple[Tensor, Tensor]:
        """Rows of the data and their weights in a mean over the batch, for every client and step: `(K, T, B)` each."""
        own = self.draws.order == "independent"
        index, weight = self._tables([client if own else None for client in self.clients], self._order)
        number = (weight > 0).sum(-1, keepdim=True).clamp(min=1)
        sizes = torch.tensor([self.data.sizes[k] for k in self.clients]).to(weight)
        return index, weight / number * (sizes / self.num_examples.to(weight))[:, None, None]

    def _order(self, client: int) -> Tensor:
        """The positions of a client's examples in the order of its steps, `(T, B)`, padded with −1."""
        size, steps = self.data.sizes[client], self._number_of_steps(client)
        epochs = range(-(-steps // self._per_epoch(client)))
        cut = [_cut(self.draws.permutation(self.round, epoch, client, size), self.batch_size) for epoch in epochs]
        return torch.cat(cut)[:steps]

    def _tables(self, kinds: Sequence[Any], order: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        """Rows of the data and example weights `(K, T, B)`, on the device, in the order of positions `(T, B)`.

        Clients with the same size and kind go through their examples in the same order.
        """
        orders: dict[Any, Tensor] = {}
        sorts = [(self.data.sizes[client], kind) for client, kind in zip(self.clients, kinds, strict=True)]
        for client, sort in zip(self.clients, sorts, strict=True):
            if sort not in orders:
                orders[sort] = order(client)
        number = {sort: i for i, sort in enumerate(orders)}
        device = self.network.device
        which = torch.tensor([number[sort] for sort in sorts]).to(device)
        position = pad_sequence(list(orders.values()), batch_first=True, padding_value=-1).to(device)[which]
        rows, weights, first = self.data.flat
        at = first[torch.tensor(self.clients)].to(device)[:, None, None] + position.clamp(min=0)
        weight = (position >= 0).to(self.network.dtype)
        return rows[at], weight if weights is None else weight * weights[at].to(weight)


def _cut(order: Tensor, size: int) -> Tensor:
    """An order of examples `(N,)` as batches `(⌈N/B⌉, B)`, the last one padded with −1."""
    return F.pad(order, (0, -len(order) % size), value=-1).reshape(-1, size)
