"""Linear layers that write their gradients into ∇θ, against each client's module alone under plain autograd."""

import copy

import pytest
import torch
import torch.nn.functional as F
from problems import normal, rng
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedual.networks import Clients, Minibatches, Network
from fedual.networks.linear_layers import Slot

SIZES = [4, 3, 4, 1]
"""Of clients that see all their examples in one batch of four: the loss of a step is the mean over their data."""


class Tied(nn.Module):
    """One layer twice: its gradients add up."""

    def __init__(self, bias: bool):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=bias), nn.Linear(6, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.first(x).tanh()))


class Shared(nn.Linear):
    """Weight and bias within the layer and outside of it: part of their gradients is autograd's own."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.bias is not None
        return super().forward(input) * self.bias.cos() + self.weight.square().sum() * torch.arange(3.0)


class Transposed(nn.Module):
    """The decoder is the encoder's weight transposed, which is no parameter of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.last = nn.Linear(6, 5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(self.encoder(x).tanh(), self.encoder.weight.t()))


class Tokens(nn.Module):
    """Inputs (B, S, I) of its layers."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(2, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x.unflatten(-1, (3, 2))).tanh()).sum(1)


class Idle(nn.Linear):
    """A layer whose output goes nowhere, and a parameter that is in no layer."""

    def __init__(self):
        super().__init__(6, 3)
        self.unused, self.dropped = nn.Parameter(torch.ones(2, 2)), nn.Linear(6, 2)

    def forward(self, input: Tensor) -> Tensor:
        self.dropped(input)
        return super().forward(input)


class InnerVmap(nn.Module):
    """A `vmap` of the model's own around a layer, over an axis (3) of its inputs."""

    def __init__(self, bias: bool):
        super().__init__()
        self.layer, self.last = nn.Linear(2, 4, bias=bias), nn.Linear(4, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = vmap(lambda token: self.layer(token).tanh(), in_dims=1, out_dims=1)(x.unflatten(-1, (3, 2)))
        return self.last(tokens.sum(1))


class Constant(nn.Module):
    """A layer that does not see the examples: its input has no client axis."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 3), nn.Linear(6, 3)
        self.register_buffer("queries", normal((2, 4), 5))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.queries, Tensor)
        return self.last(x) * self.layer(self.queries).sum(0) + F.linear(self.queries[0], self.layer.weight)


def frozen_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    return model


MODELS = {
    "bias": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
    "no bias": lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)),
    "bias frozen": frozen_bias,
    "tied": lambda: Tied(bias=True),
    "tied, no bias": lambda: Tied(bias=False),
    "shared": lambda: Shared(6, 3),
    "transposed": Transposed,
    "tokens": Tokens,
    "idle": Idle,
    "inner vmap": lambda: InnerVmap(bias=True),
    "inner vmap, no bias": lambda: InnerVmap(bias=False),
    "constant": Constant,
}


def pairs(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(normal((n, 6), 10 + k), torch.randint(3, (n,), generator=rng(20 + k))) for k, n in enumerate(sizes)]


def alone(model: nn.Module, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """∇ of the mean loss of one client, by the module itself."""
    model = copy.deepcopy(model)
    trained = [value for value in model.parameters() if value.requires_grad]
    vector_to_parameters(theta, trained)
    F.cross_entropy(model(x), y).backward()
    return parameters_to_vector([torch.zeros_like(v) if v.grad is None else v.grad for v in trained])


@pytest.mark.parametrize("traced", [False, True], ids=["as it is", "traced"])
@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1]], ids=["four clients", "one client"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_that_of_each_client_alone(name, sizes, traced):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name]()
    data = pairs(sizes)
    stack = Minibatches(Network(model), Clients.from_pairs(data), batch_size=4, compile=traced)
    if traced:
        stack.trace(len(sizes))
        assert stack.network.tapes
    theta = stack.network.initial() + normal((len(sizes), stack.dim), 3)
    expected = torch.stack([alone(model, row, x, y) for row, (x, y) in zip(theta, data, strict=True)])
    torch.testing.assert_close(stack.gradient(theta, 0), expected, rtol=1e-12, atol=1e-14)
    memory = torch.full((len(sizes), stack.dim + 3), torch.nan)  # whatever was there counts for nothing
    assert stack.gradient(theta, 1, memory[:, : stack.dim]) is not None
    torch.testing.assert_close(memory[:, : stack.dim], expected, rtol=1e-12, atol=1e-14)
    assert memory[:, stack.dim :].isnan().all()


def test_slot_adds_gradients_of_every_kind():
    a, b, rows, rest = normal((2, 4, 3), 0), normal((2, 3, 5), 1), normal((2, 7, 4, 5), 2), normal((2, 4, 5), 3)
    product = torch.einsum("kij,kjl->kil", a, b)
    for first in range(3):
        slot = Slot(torch.full((2, 4, 5), torch.nan))
        ways = [lambda: slot.add_product(a, b), lambda: slot.add_sum(rows), lambda: slot.add(rest)]  # noqa: B023
        for way in ways[first:] + ways[:first]:
            way()
        slot.finish(rest)
        torch.testing.assert_close(slot.place, product + rows.sum(1) + 2 * rest)
    empty = Slot(torch.full((2, 4, 5), torch.nan))
    empty.finish(None)
    assert (empty.place == 0).all()
