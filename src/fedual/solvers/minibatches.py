"""The clients' losses as networks see them: minibatch gradients of all clients in one batched pass.

Client k goes through its N_k examples in batches of B, ⌈N_k/B⌉ an epoch, the last one smaller, in an order that its
`Draws` say. A short batch is padded with weight zero, so that batches of different clients stack. With example weights
w the loss is ℓ_k = Σ_i w_i ℓ_i, N_k is replaced by Σ_i w_i, and a batch estimates ∇ℓ_k/Σw without bias.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from fedual.errors import require_count, require_positive
from fedual.solvers.clients import Clients
from fedual.solvers.criteria import Criterion, criterion
from fedual.solvers.curvature import ggn_diagonal
from fedual.solvers.draws import Draws
from fedual.solvers.network import Network


class Batch(NamedTuple):
    """A minibatch of each of n clients."""

    x: Tensor  # (n, B, ...), what the network sees
    y: Tensor  # (n, B, ...)
    weight: Tensor  # (n, B), sums to 1 for a client with unit weights; 0 for padding


@dataclass(frozen=True, eq=False)
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
    round: int = 0
    ids: tuple[int, ...] | None = None

    def __post_init__(self):
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

    def __getitem__(self, clients: Any) -> "Minibatches":
        clients = clients.cpu() if isinstance(clients, Tensor) else clients
        return replace(self, ids=tuple(torch.tensor(self.clients)[clients].reshape(-1).tolist()))

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
        return [self.local_steps or self.local_epochs * self._per_epoch(k) for k in self.clients]

    def noise(self, step: int, sample: int, like: Tensor) -> Tensor:
        """Standard-normal noise for the first n clients' means `(n, P)`."""
        return self.draws.normal(self.round, step, sample, list(self.clients[: len(like)]), like)

    def gradient(self, theta: Tensor, step: int) -> Tensor:
        """∇ of the minibatch mean at θ `(n, P)` of the first n clients, all in one pass."""
        batch = self.batch(step, len(theta))
        with torch.enable_grad():
            parts = {name: part.detach().requires_grad_() for name, part in self.network.split(theta).items()}
            loss = vmap(self._loss)(parts, *batch, self.uniforms(step, len(theta)))
            gradients = torch.autograd.grad(loss.sum(), list(parts.values()), materialize_grads=True)
        return self.network.join(dict(zip(parts, gradients, strict=True)))

    def batch(self, step: int, n: int) -> Batch:
        """The batches of the first n clients at a step."""
        index, weight = (table[:n, step] for table in self._plan)
        return Batch(self.inputs(self.data.x[index]), self.data.y[index], weight)

    def inputs(self, x: Tensor) -> Tensor:
        """Stored inputs as the network sees them."""
        return self.network.inputs(x, self.scale)

    def uniforms(self, step: int, n: int) -> list[Tensor]:
        """What the first n clients' dropout layers draw, one tensor `(n, B, ...)` for each; empty without dropout.

        A step has one draw, whatever the number of its Monte-Carlo samples.
        """
        shapes = self.network.dropout_shapes(
            self.inputs(self.data.x[:1]).expand(self.batch_size, *self.data.x.shape[1:])
        )
        if not shapes:
            return []
        sizes = [shape.numel() for shape in shapes]
        draw = lambda client: self.draws.uniform(self.round, step, client, sum(sizes), self.network.initial())
        flat = torch.stack([draw(client) for client in self.clients[:n]]).split(sizes, -1)
        return [part.reshape(n, *shape) for part, shape in zip(flat, shapes, strict=True)]

    def curvature(self, theta: Tensor) -> Tensor:
        """diag Σ_i w_i J_iᵀ H_i J_i of each client's whole loss at θ `(K, P)`, in one pass over its data."""
        parts, total = self.network.split(theta), torch.zeros_like(theta)
        index, weight = self._tables([self._cut(torch.arange(self.data.sizes[k])) for k in self.clients])
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

    def _loss(self, parts: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor, uniforms: list[Tensor]) -> Tensor:
        return (weight * self.criterion(self.network.forward(parts, x, uniforms), y)).sum()

    def _per_epoch(self, client: int) -> int:
        return -(-self.data.sizes[client] // self.batch_size)

    def _cut(self, order: Tensor) -> Tensor:
        """An order of examples `(N,)` as batches `(⌈N/B⌉, B)`, the last one padded with −1."""
        return F.pad(order, (0, -len(order) % self.batch_size), value=-1).reshape(-1, self.batch_size)

    @cached_property
    def _plan(self) -> tuple[Tensor, Tensor]:
        """Rows of the data and their weights in a mean over the batch, for every client and step: `(K, T, B)` each."""
        orders = []
        for client, steps in zip(self.clients, self.steps, strict=True):
            epochs = range(-(-steps // self._per_epoch(client)))
            size = self.data.sizes[client]
            cut = [self._cut(self.draws.permutation(self.round, epoch, client, size)) for epoch in epochs]
            orders.append(torch.cat(cut)[:steps])
        index, weight = self._tables(orders)
        number = (weight > 0).sum(-1, keepdim=True).clamp(min=1)
        sizes = torch.tensor([self.data.sizes[k] for k in self.clients]).to(weight)
        return index, weight / number * (sizes / self.num_examples.to(weight))[:, None, None]

    def _tables(self, orders: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Batches of positions within each client's data as rows of the data and example weights, on the device."""
        position = pad_sequence(orders, batch_first=True, padding_value=-1)
        valid, position = position >= 0, position.clamp(min=0)
        index = torch.stack([self.data.parts[k][at] for k, at in zip(self.clients, position, strict=True)])
        weight = valid.to(self.network.dtype)
        if self.data.weights is not None:
            own = [self.data.weights[k][at] for k, at in zip(self.clients, position, strict=True)]
            weight = weight * torch.stack(own).to(weight)
        return index.to(self.network.device), weight.to(self.network.device)
