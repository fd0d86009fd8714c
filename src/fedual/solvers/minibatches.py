"""The clients' losses as networks see them: minibatch gradients of all clients in one batched pass.

Client k goes through its N_k examples in batches of B, ⌈N_k/B⌉ an epoch, the last one smaller, in an order that its
`Draws` say. A short batch is padded with weight zero, so that batches of different clients stack. With example weights
w the loss is ℓ_k = Σ_i w_i ℓ_i, N_k is replaced by Σ_i w_i, and a batch estimates ∇ℓ_k/Σw without bias.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pad_sequence

from fedual.errors import require_count, require_positive
from fedual.relative import average_steps
from fedual.solvers.clients import Clients
from fedual.solvers.criteria import Criterion, criterion
from fedual.solvers.curvature import ggn_diagonal
from fedual.solvers.draws import Draws
from fedual.solvers.fused import aligned
from fedual.solvers.network import Network
from fedual.solvers.stacked import Slot, Stacked

KEPT = 2**27
"""Bytes of noise that a round keeps for the next chunk of clients, where all share it."""

WIDE = 1024
"""Examples of a client that a GPU takes at a time for the curvature: with batches of 64 it waits for Python."""


class Batch(NamedTuple):
    """A minibatch of each of n clients."""

    x: Tensor  # (n, B, ...), what the network sees
    y: Tensor  # (n, B, ...)
    weight: Tensor  # (n, B), sums to 1 for a client with unit weights; 0 for padding


@dataclass(frozen=True, eq=False, repr=False)
class Minibatches:
    """A stack of clients with their data, a network and a plan of batches.

    Args:
        network: What is trained.
        data: The examples of all clients.
        loss: A name or a function (outputs, targets) → `(B,)`, see `fedual.solvers.criteria`.
        draws: The randomness of the run.
        batch_size: B.
        local_epochs: Passes over a client's data in a round.
        local_steps: Steps in a round for every client, whatever its size, instead of `local_epochs`.
        scale: Inputs are divided by it, a batch at a time (255 for pixels stored as uint8).
        prepared: The inputs as the network sees them, all of them, where there is room; otherwise batch by batch.
        compile: Compile the elementwise work of a step, and record steps as CUDA graphs on a GPU.
        round: The round, for the draws.
        ids: The clients of this stack; None means all.
    """

    network: Network
    data: Clients
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy"
    draws: Draws = Draws()
    batch_size: int = 32
    local_epochs: int = 10
    local_steps: int | None = None
    scale: float | None = None
    prepared: Tensor | None = None
    compile: bool = False
    round: int = 0
    ids: tuple[int, ...] | None = None
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("batch_size", "local_epochs", "local_steps"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        if self.scale is not None:
            require_positive("scale", self.scale)

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
        object.__setattr__(part, "kept", self.kept)  # one round, one noise
        return part

    def at(self, round: int) -> "Minibatches":
        """The losses of another round: the same data, other draws."""
        return replace(self, round=round)

    @property
    def dim(self) -> int:
        """P."""
        return self.network.dim

    @property
    def dtype(self) -> torch.dtype:
        """The type that λ must have."""
        return self.network.dtype

    @property
    def num_examples(self) -> Tensor:
        """N_k, or the sum of the weights, `(K,)`."""
        return self.data.total_weights[list(self.clients)]

    @cached_property
    def steps(self) -> list[int]:
        """How many steps each client takes in a round."""
        return [self._number_of_steps(client) for client in self.clients]

    @property
    def average_steps(self) -> float:
        """Those of a client of average size, of all the federation."""
        local = {"batch_size": self.batch_size, "local_epochs": self.local_epochs, "local_steps": self.local_steps}
        return average_steps(len(self.data.sizes), sum(self.data.sizes), **local)

    @property
    def longest(self) -> int:
        """The steps of the largest client of the federation, in this stack or not."""
        return self._number_of_steps(max(range(len(self.data)), key=self.data.sizes.__getitem__))

    def _number_of_steps(self, client: int) -> int:
        return self.local_steps or self.local_epochs * self._per_epoch(client)

    def noise(self, step: int, sample: int, like: Tensor) -> Tensor:
        """Standard-normal noise for the first n clients' means `(n, P)`."""
        if (step, sample) in self.kept:
            return self.kept[step, sample]
        noise = self.draws.normal(self.round, step, sample, list(self.clients[: len(like)]), like)
        if self.draws.noise != "independent" and noise.nbytes * len(self.kept) < KEPT:
            self.kept[step, sample] = noise
        return noise

    def gradient(self, theta: Tensor, step: int, out: Tensor | None = None) -> Tensor:
        """∇ of the minibatch mean at θ `(n, P)` of the first n clients, written into `out` if given."""
        n = len(theta)
        out = torch.empty_like(theta) if out is None else out
        self.differentiate(theta, self.batch(step, n), self.uniforms(step, n), out)
        return out

    def differentiate(self, theta: Tensor, batch: Batch, uniforms: list[Tensor], out: Tensor) -> None:
        """Write ∇ of the mean over a batch of n clients, `(n, P)`, all in one pass."""
        traced = self.network.tapes.get(self._shape(batch)) if self.compile else None
        (traced or self._differentiate)(theta, batch, uniforms, out)

    def trace(self, n: int) -> None:
        """Write down once which operations the gradient of n clients comes to.

        `vmap`, autograd and the module's own Python take longer than a small network.
        """
        some = self[torch.zeros(n, dtype=torch.long)]
        theta, batch = self.network.initial().expand(n, -1), some.batch(0, n)
        if self._shape(batch) not in self.network.tapes:
            arguments = (aligned(theta).copy_(theta), batch, some.uniforms(0, n), aligned(theta))
            self.network.tapes[self._shape(batch)] = make_fx(lambda *args: self._differentiate(*args))(*arguments)

    def _shape(self, batch: Batch) -> tuple:
        return batch.x.shape, batch.y.shape

    def _differentiate(self, theta: Tensor, batch: Batch, uniforms: list[Tensor], out: Tensor) -> None:
        slots = {name: Slot(place) for name, place in self.network.split(out).items()}
        outputs = partial(self._outputs, slots)
        with torch.enable_grad():
            parts = {name: part.detach().requires_grad_() for name, part in self.network.split(theta).items()}
            if len(theta) > 1:
                found = vmap(outputs)(parts, batch.x, uniforms).flatten(0, 1)
            else:
                mine = {name: part[0] for name, part in parts.items()}
                found = outputs(mine, batch.x[0], [uniform[0] for uniform in uniforms])
            losses = self.criterion(found, batch.y.flatten(0, 1))
            rest = torch.autograd.grad(losses, list(parts.values()), batch.weight.flatten(), allow_unused=True)
        for slot, gradient in zip(slots.values(), rest, strict=True):
            slot.finish(gradient)

    def batch(self, step: int, n: int) -> Batch:
        """The batches of the first n clients at a step."""
        return self.rows(*(table[:n, step] for table in self.plan))

    def rows(self, index: Tensor, weight: Tensor) -> Batch:
        """Some rows of the data `(n, B)` as batches."""
        take = lambda values: values.index_select(0, index.flatten()).unflatten(0, index.shape)
        x = self.inputs(take(self.data.x)) if self.prepared is None else take(self.prepared)
        return Batch(x, take(self.data.y), weight.contiguous())

    def inputs(self, x: Tensor) -> Tensor:
        """Stored inputs as the network sees them."""
        return self.network.inputs(x, self.scale)

    def uniforms(self, step: int, n: int) -> list[Tensor]:
        """What the first n clients' dropout layers draw, one tensor `(n, B, ...)` for each; empty without dropout.

        A step has one draw, whatever the number of its Monte-Carlo samples.
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

    @property
    def dropout_shapes(self) -> list[torch.Size]:
        """The shapes of the uniforms that a batch takes."""
        one = self.inputs(self.data.x[:1])
        return self.network.dropout_shapes(one.expand(self.batch_size, *one.shape[1:]))

    def curvature(self, theta: Tensor) -> Tensor:
        """diag Σ_i w_i J_iᵀ H_i J_i of each client's whole loss at θ `(K, P)`, in one pass over its data."""
        parts, total = self.network.split(theta), torch.zeros_like(theta)
        size = self.batch_size if theta.device.type == "cpu" else max(self.batch_size, WIDE)
        index, weight = self._tables([None] * len(self), lambda k: _cut(torch.arange(self.data.sizes[k]), size))
        for step in range(index.shape[1]):
            rows = weight[:, step].sum(-1).nonzero()[:, 0]  # clients that have examples left
            x, y = self.inputs(self.data.x[index[rows, step]]), self.data.y[index[rows, step]]
            mine = {name: part[rows] for name, part in parts.items()}
            found = ggn_diagonal(self.network.forward, mine, x, y, weight[rows, step], self.loss)
            total[rows] += self.network.join(found)
        return total

    @cached_property
    def criterion(self) -> Criterion:
        """The loss of each example."""
        return criterion(self.loss)

    def _outputs(self, slots: dict[str, Slot], parts: dict[str, Tensor], x: Tensor, uniforms: list[Tensor]) -> Tensor:
        with Stacked(parts, slots):
            return self.network.forward(parts, x, uniforms)

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
        """Rows of the data and example weights `(K, T, B)`, on the device.

        Args:
            kinds: Clients with the same size and kind go through their examples in the same order.
            order: The positions of a client's examples, `(T, B)`.
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
