from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

from fedual.errors import InputError
from fedual.models import MODELS, acar_cnn, build, mlp, resnet20, zenke_cnn
from fedual.networks.network import Network


def conv(before: int, after: int, size: int) -> int:
    return after * (before * size**2 + 1)


def linear(*widths: int) -> int:
    return sum(after * (before + 1) for before, after in pairwise(widths))


def resnet(outputs: int) -> int:
    """Convolutions without biases, two numbers a channel for each norm."""
    stages = [(3, 16)] + [(16, 16)] * 6 + [(16, 32)] + [(32, 32)] * 5 + [(32, 64)] + [(64, 64)] * 5
    return sum(9 * a * b + 2 * b for a, b in stages) + linear(64, outputs)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (lambda: mlp(), 178_110),  # facts.md
        (lambda: mlp(64, (100, 50)), linear(64, 100, 50, 10)),
        (lambda: mlp(5, (), 1), 6),
        (
            lambda: zenke_cnn(7),
            conv(3, 32, 3) + conv(32, 32, 3) + conv(32, 64, 3) + conv(64, 64, 3) + linear(2304, 512, 7),
        ),
        (lambda: acar_cnn(7), conv(3, 64, 5) + conv(64, 64, 5) + linear(1600, 384, 192, 7)),
        (lambda: resnet20(), resnet(100)),
        (lambda: resnet20(10), resnet(10)),
    ],
)
def test_number_of_parameters(model: Callable[[], nn.Module], parameters: int):
    assert sum(p.numel() for p in model().parameters()) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_many_networks_at_once_are_each_of_them(name: str):
    torch.manual_seed(0)
    network = Network(build(name, outputs=6))
    x = torch.rand(2, *((28, 28) if name == "mlp" else (3, 32, 32)))
    theta = network.initial() * torch.tensor([[1.0], [0.5], [-1.0]])
    outputs = vmap(network.forward, in_dims=(0, None))(network.split(theta), x)
    assert outputs.shape == (3, 2, 6)
    for one, together in zip(theta, outputs, strict=True):
        torch.testing.assert_close(together, network(one, x))


def test_mlp_is_its_formula():
    torch.manual_seed(0)
    model = mlp(6, (4, 3), 2)
    x = np.random.default_rng(0).normal(size=(5, 2, 3))
    (w1, b1, w2, b2, w3, b3) = (p.detach().numpy() for p in model.parameters())
    sigmoid = lambda a: 1 / (1 + np.exp(-a))
    hidden = sigmoid(sigmoid(x.reshape(5, 6) @ w1.T + b1) @ w2.T + b2)
    np.testing.assert_allclose(model(torch.tensor(x)).detach().numpy(), hidden @ w3.T + b3)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_mlp_activations(activation: str):
    torch.manual_seed(0)
    model = mlp(3, (4,), 2, activation)
    first, last = model[1], model[3]
    x = torch.randn(5, 3)
    torch.testing.assert_close(model(x), last(getattr(torch, activation)(first(x))))


def test_resnet_shortcut_has_no_parameters():
    """With the residual's last norm at zero a block is relu of its shortcut: subsampled, padded with zero channels."""
    block = resnet20()[6]  # 16 → 32 channels
    assert isinstance(block, nn.Module)
    norm = next(m for m in reversed(list(block.modules())) if isinstance(m, nn.GroupNorm))
    nn.init.zeros_(norm.weight)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert out.shape == (2, 32, 4, 4)
    torch.testing.assert_close(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_resnet_norms_and_initial_weights():
    torch.manual_seed(0)
    model = resnet20()
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 19
    assert {m.num_groups for m in norms} == {2}
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 19
    for layer in convolutions[1:]:  # N(0, 2 / fan_in): the standard deviation of n draws is off by 1/√(2n)
        weight = layer.weight.detach()
        wanted = (2 / (layer.in_channels * 9)) ** 0.5
        assert abs(float(weight.std()) / wanted - 1) < 5 / (2 * weight.numel()) ** 0.5


def test_resnet_takes_other_channels_and_sizes():
    assert resnet20(4, in_channels=1)(torch.rand(2, 1, 20, 20)).shape == (2, 4)


def test_dropout_is_only_in_training():
    torch.manual_seed(0)
    model = zenke_cnn()
    x = torch.rand(2, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("resnet", {}, "did you mean 'resnet20'"),
        ("???", {}, "choose one of mlp, zenke-cnn"),
        ("mlp", {"hiden": (3,)}, "no setting 'hiden': did you mean 'hidden'"),
        ("acar-cnn", {"in_channels": 1}, "no setting 'in_channels'"),
        ("mlp", {"activation": "sigmod"}, "did you mean 'sigmoid'"),
        ("mlp", {"hidden": 200}, "hidden = 200"),
        ("mlp", {"hidden": (200, 0)}, r"hidden\[1\] = 0"),
        ("mlp", {"inputs": 2.5}, "inputs = 2.5"),
        ("resnet20", {"outputs": -1}, "outputs = -1"),
    ],
)
def test_bad_settings_are_refused(name: str, settings: dict[str, Any], complaint: str):
    with pytest.raises(InputError, match=complaint):
        build(name, **settings)
