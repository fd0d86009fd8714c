"""The fast rules and the general path against explicit Jacobians and Hessians, example by example."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedual.errors import InputError
from fedual.networks import curvature
from fedual.networks.curvature import ggn_diagonal

K, B, C = 3, 4, 3


class Residual(nn.Module):
    """A graph with a sum and a layer without bias; in-place activations."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x), inplace=True)
        return self.last(h + self.second(h).tanh())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(self.shared(x).tanh()).tanh())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(6)), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.scale * x).tanh())


class Penalised(nn.Module):
    """A weight that is used once by a layer, and once more beside it."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) * self.last.weight.square().sum()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: Any) -> Any:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0]

    generate_vmap_rule = True


class Hidden(nn.Module):
    """A second use of a weight that no torch function shows."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) + Cube.apply(self.last.weight).sum()  # pyright: ignore[reportOptionalMemberAccess]


class Tokens(nn.Module):
    """Linear on (B, T, D), or on (B · T, D), where squares of sums are not sums of squares."""

    def __init__(self, flat: bool):
        super().__init__()
        self.flat, self.mix, self.last = flat, nn.Linear(2, 5), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 2) if self.flat else x.reshape(len(x), 3, 2)
        return self.last(self.mix(tokens).tanh().reshape(len(x), 3, 5).sum(1))


class Hyper(nn.Module):
    """Rows that all examples share: as many as there are examples, or one."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows, self.make = rows, nn.Linear(2, 6 * C // rows)

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(torch.linspace(-1, 1, 2 * self.rows, dtype=x.dtype).reshape(self.rows, 2))
        return x @ made.reshape(6, C).tanh()


class Swapped(nn.Module):
    """A parameter in the place of a layer's input."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(6, 5)), nn.Linear(5, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.two(self.one)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, C))


def cnn(groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(2, 1), groups=groups, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.GroupNorm(2, 16),
        nn.Linear(16, C),
    )


FAST = {"mlp": (mlp, (6,)), "cnn": (cnn, (2, 8, 8)), "residual": (Residual, (6,))}
GENERAL = {
    "tied": (Tied, (6,)),
    "scaled": (Scaled, (6,)),
    "penalised": (Penalised, (6,)),
    "hidden": (Hidden, (6,)),
    "tokens": (lambda: Tokens(False), (6,)),
    "flat tokens": (lambda: Tokens(True), (6,)),
    "three shared rows": (lambda: Hyper(3), (6,)),
    "one shared row": (lambda: Hyper(1), (6,)),
    "swapped": (Swapped, (6,)),
    "grouped": (lambda: cnn(2), (2, 8, 8)),
    "same": (lambda: nn.Sequential(nn.Conv2d(2, 1, 3, padding="same"), nn.Flatten(), nn.Linear(64, C)), (2, 8, 8)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, C)), (6,)),
}


def problem(net: nn.Module, shape: tuple, num: int = B, seed: int = 0):
    """A client's forward function, the clients' parameters, inputs, labels, and weights with padding."""
    rng = torch.Generator().manual_seed(seed)
    params = {n: 0.7 * torch.randn(K, *p.shape, generator=rng) for n, p in net.named_parameters() if p.requires_grad}
    x = torch.randn(K, num, *shape, generator=rng)
    y = torch.randint(C, (K, num), generator=rng)
    weight = 3 * torch.rand(K, num, generator=rng)
    weight[1, -1] = 0
    return lambda p, inputs: functional_call(net, p, (inputs,)), params, x, y, weight


def oracle(forward, params, x, y, weight, loss) -> dict[str, Tensor]:
    """Σ_i w_i diag(JᵀHJ) with J and H written out; `loss` maps the outputs and target of one example to a number."""
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for k in range(len(weight)):
        names, values = list(params), tuple(value[k] for value in params.values())
        for i in range(weight.shape[1]):

            def network(*parts, k=k, i=i, names=names):
                return forward(dict(zip(names, parts, strict=True)), x[k, i : i + 1])[0]

            outputs = network(*values)
            num = outputs.numel()
            jacobians = torch.autograd.functional.jacobian(network, values)
            h: Any = torch.autograd.functional.hessian(lambda o, k=k, i=i: loss(o, y[k, i]), outputs)
            for name, value, jacobian in zip(names, values, jacobians, strict=True):
                j = jacobian.reshape(num, -1)
                total[name][k] += weight[k, i] * torch.einsum("cp,cd,dp->p", j, h.reshape(num, num), j).reshape(
                    value.shape
                )
    return total


def softmax_loss(outputs: Tensor, label: Tensor) -> Tensor:
    return outputs.exp().sum().log() - outputs[label]


def only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args):
        raise AssertionError("the other path was taken")

    monkeypatch.setattr(curvature, {"fast": "_by_example", "general": "_by_layer"}[path], refuse)


@pytest.mark.parametrize("name", FAST)
def test_fast_rules_are_exact(name: str, monkeypatch):
    make, shape = FAST[name]
    given = problem(make(), shape)
    only("fast", monkeypatch)
    torch.testing.assert_close(ggn_diagonal(*given, "cross_entropy"), oracle(*given, softmax_loss))


@pytest.mark.parametrize("name", [*GENERAL, *FAST])
def test_general_path_is_exact_and_found_where_needed(name: str, monkeypatch):
    make, shape = {**GENERAL, **FAST}[name]
    given = problem(make(), shape, num=3)  # as many as Hyper(3) has rows, as Tokens has positions
    only("general", monkeypatch)
    if name in FAST:
        monkeypatch.setattr(curvature, "_rehearse", lambda *args: None)
    torch.testing.assert_close(ggn_diagonal(*given, "cross_entropy"), oracle(*given, softmax_loss))


@pytest.mark.parametrize("name", ["mlp", "cnn", "scaled"])
def test_clients_one_by_one_and_in_slices_are_the_same(name: str, monkeypatch):
    make, shape = {**GENERAL, **FAST}[name]
    forward, params, x, y, weight = problem(make(), shape)
    together = ggn_diagonal(forward, params, x, y, weight, "cross_entropy")
    monkeypatch.setattr(curvature, "_FLOATS_CPU", 1)
    for k in range(K):
        alone = {n: p[k : k + 1] for n, p in params.items()}
        part = ggn_diagonal(forward, alone, x[k : k + 1], y[k : k + 1], weight[k : k + 1], "cross_entropy")
        torch.testing.assert_close(part, {n: h[k : k + 1] for n, h in together.items()})


def test_padding_counts_for_nothing():
    forward, params, x, y, weight = problem(mlp(), (6,))
    full = ggn_diagonal(forward, params, x, y, weight, "cross_entropy")
    alone = {n: p[1:2] for n, p in params.items()}
    part = ggn_diagonal(forward, alone, x[1:2, :-1], y[1:2, :-1], weight[1:2, :-1], "cross_entropy")
    torch.testing.assert_close(part, {n: h[1:2] for n, h in full.items()})


@pytest.mark.parametrize("name", ["cnn", "scaled"])
@pytest.mark.parametrize(
    ("loss", "example"),
    [
        ("mse", lambda o, t: (o - t).square().sum() / 2),
        (lambda o, y: ((o - y[:, None]) ** 4).sum(1), lambda o, t: (o - t).pow(4).sum()),
        (lambda o, y: (o.prod(1) - y).cos(), lambda o, t: (o.prod() - t).cos()),  # not convex: H has two signs
    ],
)
def test_other_losses(name: str, loss, example):
    make, shape = {**GENERAL, **FAST}[name]
    given = problem(make(), shape, num=2)
    torch.testing.assert_close(ggn_diagonal(*given, loss), oracle(*given, example))


@pytest.mark.parametrize("head", [nn.Identity(), nn.Flatten(0)])
@pytest.mark.parametrize("name", ["mse", "binary_cross_entropy", "poisson"])
def test_ggn_of_a_linear_model_is_its_hessian(name: str, head: nn.Module):
    net = nn.Sequential(nn.Linear(5, 1), head)
    forward, params, x, y, weight = problem(net, (5,))
    found = ggn_diagonal(forward, params, x, y, weight, name)
    for k in range(K):

        def objective(w, b, k=k):
            f, t = (x[k] @ w.T + b)[:, 0], y[k]
            values = {"mse": (f - t) ** 2 / 2, "binary_cross_entropy": (1 + f.exp()).log() - t * f}
            return (weight[k] * values.get(name, f.exp() - t * f)).sum()

        h = torch.autograd.functional.hessian(objective, (params["0.weight"][k], params["0.bias"][k]))
        torch.testing.assert_close(found["0.weight"][k, 0], h[0][0].reshape(5, 5).diagonal())
        torch.testing.assert_close(found["0.bias"][k], h[1][1].reshape(1))


def test_frozen_and_unused_parameters(monkeypatch):
    net = Residual()
    net.first.weight.requires_grad_(False)
    net.second.weight.requires_grad_(False)
    given = problem(net, (6,))
    given[1]["first.spare"] = torch.ones(K, 2)
    forward = given[0]
    used = lambda p, x: forward({n: v for n, v in p.items() if n != "first.spare"}, x)
    only("fast", monkeypatch)
    found = ggn_diagonal(used, *given[1:], "cross_entropy")
    assert not found.pop("first.spare").any()
    del given[1]["first.spare"]
    assert set(found) == {"first.bias", "last.weight", "last.bias"}
    torch.testing.assert_close(found, oracle(*given, softmax_loss))


def test_outputs_without_parameters_have_no_curvature():
    _, params, x, y, weight = problem(mlp(), (6,))
    found = ggn_diagonal(lambda p, inputs: inputs, params, x, y, weight, "mse")
    torch.testing.assert_close(found, {n: torch.zeros_like(p) for n, p in params.items()})


@pytest.mark.parametrize("name", ["mlp", "scaled"])
def test_single_precision_networks_take_weights_of_any_type(name: str):
    make, shape = {**GENERAL, **FAST}[name]
    forward, params, x, y, weight = problem(make().float(), shape)
    weight = weight.round()
    exact = oracle(problem(make(), shape)[0], params, x, y, weight, softmax_loss)
    single = {n: p.float() for n, p in params.items()}
    for given in (weight, weight.long()):
        found = ggn_diagonal(forward, single, x.float(), y, given, "cross_entropy")
        torch.testing.assert_close(found, {n: h.float() for n, h in exact.items()}, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "scaled"])
def test_grad_mode_and_trained_parameters_do_not_matter(name: str):
    make, shape = {**GENERAL, **FAST}[name]
    forward, params, x, y, weight = problem(make(), shape)
    expected = ggn_diagonal(forward, params, x, y, weight, "cross_entropy")
    for value in params.values():
        value.requires_grad_()
    with torch.no_grad():
        found = ggn_diagonal(forward, params, x, y, weight, "cross_entropy")
    torch.testing.assert_close(found, expected)
    assert not any(h.requires_grad for h in found.values())


def test_shapes_that_disagree_are_refused():
    forward, params, x, y, weight = problem(mlp(), (6,))
    with pytest.raises(InputError, match=r"x has shape \(3, 3, 6\): it must begin with \(K, B\) = \(3, 4\)"):
        ggn_diagonal(forward, params, x[:, 1:], y, weight, "mse")
    with pytest.raises(InputError, match="y has shape"):
        ggn_diagonal(forward, params, x, y[1:], weight, "mse")
    with pytest.raises(InputError, match="at least one example"):
        ggn_diagonal(forward, params, x[:, :0], y[:, :0], weight[:, :0], "mse")
    with pytest.raises(InputError, match=r"parameter 0.bias has shape \(2, 5\): it must begin with K = 3"):
        ggn_diagonal(forward, params | {"0.bias": params["0.bias"][:2]}, x, y, weight, "mse")
    with pytest.raises(InputError, match="Unknown loss 'mce': did you mean 'mse'"):
        ggn_diagonal(forward, params, x, y, weight, "mce")
    with pytest.raises(InputError, match=r"returns \(3,\) for 2 examples"):
        ggn_diagonal(lambda p, x: forward(p, x).sum(0), params, x, y, weight, "mse")
