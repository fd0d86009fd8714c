"""Convolutions of many clients by kernels: what `vmap` computes, and each kernel what torch's own layer does.

Without a GPU the layers run with plain functions in place of the kernels, which a GPU compares with the kernels.
"""

import importlib
import sys
from collections import Counter

import plain_kernels
import pytest
import torch
import torch.nn.functional as F
from problems import normal, rng
from torch import Tensor, fx, nn
from torch.func import vmap

from fedual import models
from fedual.backends import kernels
from fedual.backends.kernels.grids import Geometry
from fedual.backends.kernels.joined import joined, norm_relu
from fedual.backends.precision import arithmetic
from fedual.networks import Clients, Draws, Minibatches, Network

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Block(nn.Module):
    """A residual block, its sum on either side."""

    def __init__(self, channels: int, swapped: bool = False):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(2, channels)
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return F.relu(x + y if self.swapped else y + x)


class Twice(nn.Module):
    """One convolution and one norm, each used twice, and a weight that is used outside, too."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(self.norm(self.conv(x)).relu()))
        return torch.relu(y * self.conv.weight.square().sum() + y)


class Inner(nn.Module):
    """A `vmap` of the model's own over two halves of an image."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return vmap(self.conv, in_dims=1, out_dims=1)(x.unflatten(2, (2, 4)).movedim(2, 1)).flatten(1, 2)[:, :4]


class Fickle(nn.Module):
    """Own code that does something else in training."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        return 2 * y if self.training else y


class Branching(nn.Module):
    """Control flow that depends on the data, which no tracer follows."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x if len(x) > 1 else 2 * x)


def frozen() -> list[nn.Module]:
    layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)]
    layers[1].requires_grad_(False)
    layers[2].bias.requires_grad_(False)
    return layers


NETWORKS = {
    "bias": lambda: [nn.Conv2d(3, 4, 3)],
    "no bias": lambda: [nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 4, 1, bias=False)],
    "stride, padding and dilation": lambda: [nn.Conv2d(3, 4, (3, 2), (2, 1), (2, 1), (2, 1)), nn.Conv2d(4, 4, 3, 2, 1)],
    "many channels": lambda: [nn.Conv2d(3, 40, 1), nn.Tanh(), nn.Conv2d(40, 70, 3), nn.Conv2d(70, 4, 1)],
    "padding by name": lambda: [nn.Conv2d(3, 4, 3, padding="same"), nn.Conv2d(4, 4, 3)],
    "circular": lambda: [nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")],
    "grouped": lambda: [nn.Conv2d(3, 3, 3, groups=3), nn.Conv2d(3, 4, 1)],
    "dropout": lambda: [nn.Conv2d(3, 4, 3), nn.Dropout2d(0.4), nn.Dropout(0.2)],
    "pools": lambda: [nn.Conv2d(3, 4, 3, 1, 1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 1), nn.MaxPool2d(2, 1, 0, 2)],
    "other pools": lambda: [nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(2)],
    "average": lambda: [nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Unflatten(1, (4, 2, 2))],
    "norms": lambda: [nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6), nn.ELU(), nn.Conv2d(6, 4, 1), nn.GroupNorm(1, 4)],
    "norm without weights": lambda: [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4, affine=False)],
    "blocks": lambda: [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), Block(4), Block(4, swapped=True)],
    "twice": lambda: [Twice(), nn.Conv2d(3, 4, 3)],
    "frozen": frozen,
    "inner vmap": lambda: [Inner()],
    "own code": lambda: [Fickle()],
    "branches": lambda: [Branching()],
}
LEFT = {
    "padding by name": Counter(correlate=1),
    "grouped": Counter(correlate=1),
    "frozen": Counter(correlate=1, normalise=1),
    "inner vmap": Counter(correlate=1),
    "other pools": Counter(pool=1),
    "norm without weights": Counter(normalise=1),
}
"""Layers that are left to torch."""


def network(name: str, dtype: torch.dtype = torch.float64) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "resnet20":
            model = models.build("resnet20", outputs=3)
        else:
            model = nn.Sequential(*NETWORKS[name](), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    return Network(model.to(dtype))


def stack(net: Network, clients: int = 3) -> Minibatches:
    """Clients with whole batches and the last with a padded one."""
    sizes = [5, 5, 5, 3][-clients:]
    pairs = [(normal((n, 3, 8, 8), k), torch.randint(3, (n,), generator=rng(k))) for k, n in enumerate(sizes)]
    return Minibatches(net, Clients.from_pairs(pairs).to(net.device), draws=Draws(1), batch_size=5)


def gradients(net: Network, images, clients: int = 3) -> tuple[Tensor, Tensor]:
    """By `vmap` and by the layers."""
    net.images = None
    losses = stack(net, clients)
    theta = net.initial() + (0.3 * normal((clients, net.dim), 3)).to(net.initial())
    plain = losses.gradient(theta, 0)
    net.images = images
    return plain, losses.gradient(theta, 0)


@pytest.fixture
def layers(monkeypatch):
    """`ImageLayers` with plain functions in place of the kernels, and how often they were called."""
    calls = Counter()

    def counted(name):
        kernel = getattr(plain_kernels, name)
        return lambda *args: calls.update([name]) or kernel(*args)

    for name in ("correlate", "normalise", "pool"):
        monkeypatch.setattr(plain_kernels, name, counted(name))
    for name in ("convolutions", "group_norms", "pools"):
        monkeypatch.setitem(sys.modules, f"{kernels.__name__}.{name}", plain_kernels)
        monkeypatch.setattr(kernels, name, plain_kernels, raising=False)
    monkeypatch.delitem(sys.modules, f"{kernels.__name__}.image_layers", raising=False)
    module = importlib.import_module(f"{kernels.__name__}.image_layers")
    yield module.ImageLayers, calls
    sys.modules.pop(f"{kernels.__name__}.image_layers")


@pytest.mark.parametrize("clients", [3, 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_vmap(layers, name, clients):
    make, calls = layers
    net = network(name)
    plain, found = gradients(net, make(net, torch.float64), clients)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)
    kinds = {"correlate": nn.Conv2d, "normalise": nn.GroupNorm, "pool": nn.MaxPool2d}
    count = lambda kind: sum(isinstance(layer, kind) for layer in net.model.modules())
    twice = Counter(correlate=1, normalise=1) if name == "twice" else Counter()
    assert calls == Counter({key: count(kind) for key, kind in kinds.items()}) + twice - LEFT.get(name, Counter())


@pytest.mark.parametrize("name", NETWORKS)
def test_many_networks_at_once_as_one_after_the_other(layers, name):
    make, _ = layers
    net = network(name)
    theta, x = net.initial() + 0.3 * normal((4, net.dim), 3), normal((6, 3, 8, 8), 4)
    expected = torch.stack([net(row, x) for row in theta])
    torch.testing.assert_close(make(net, torch.float64).outputs(net, theta, x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_short_images_stay_near(layers, name):
    """bfloat16 has 8 bits, and every function that also gets parameters must accept what images have become."""
    make, _ = layers
    net = network(name, torch.float32)
    plain, found = gradients(net, make(net, torch.bfloat16))
    assert found.dtype == torch.float32
    assert (found - plain).norm() < 0.1 * plain.norm()


class TestJoined:
    def layers(self, model: nn.Module) -> int:
        graph = joined(model)
        x = normal((2, 3, 8, 8), 1)
        torch.testing.assert_close(graph(x), model(x))
        return sum(node.target is norm_relu for node in graph.graph.nodes) if isinstance(graph, fx.GraphModule) else -1

    @pytest.mark.parametrize(
        ("name", "count"), [("blocks", 3), ("norms", 0), ("twice", 1), ("own code", -1), ("branches", -1)]
    )
    def test_norms_before_a_relu_are_one_layer_with_it(self, name, count):
        assert self.layers(nn.Sequential(*NETWORKS[name]())) == count

    def test_all_norms_of_resnet20(self):
        assert self.layers(models.build("resnet20", outputs=3)) == 19

    def test_a_norm_that_is_used_elsewhere_stays(self):
        class Kept(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.GroupNorm(1, 3)

            def forward(self, x: Tensor) -> Tensor:
                y = self.norm(x)
                return y.relu() + F.relu(y) + y

        assert self.layers(Kept()) == 0


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """To the rounding of a type, on the scale of the largest entry."""
    gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert gap < {torch.float32: 1e-5, torch.bfloat16: 0.01}[dtype]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestKernels:
    """Each against the plain function, in shapes that no block divides."""

    @pytest.fixture(autouse=True)
    def _exact(self):
        with arithmetic(torch.device("cuda"), "float32"):
            yield

    def some(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return normal(shape, sum(shape)).to("cuda", dtype)

    @pytest.mark.parametrize(
        ("channels", "geometry"),
        [
            ((3, 5), Geometry((3, 3), (2, 2), (1, 1), (1, 1))),
            ((16, 16), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
            ((40, 70), Geometry((1, 1), (1, 1), (0, 0), (1, 1))),
            ((7, 130), Geometry((5, 2), (1, 3), (2, 0), (2, 1))),
        ],
    )
    def test_convolution(self, dtype, channels, geometry):
        from fedual.backends.kernels import convolutions

        C, O = channels
        x, bias = self.some(dtype, 3, 4, 11, 9, C), self.some(torch.float32, 3, O)
        taps = self.some(dtype, 3, geometry.sides[0] * geometry.sides[1] * C, O)
        y = convolutions.correlate(x, taps, geometry, bias)
        close(y, plain_kernels.correlate(x, taps, geometry, bias), dtype)
        slope, mirrored = self.some(dtype, *y.shape), self.some(dtype, 3, taps.shape[1] // C * O, C)
        dx = convolutions.transposed(slope, mirrored, geometry, (11, 9))
        close(dx, plain_kernels.transposed(slope, mirrored, geometry, (11, 9)), dtype)
        for bias in (False, True):
            parts, again = (convolutions.outer(x, slope, geometry, bias) for _ in range(2))
            expected = plain_kernels.outer(x.float(), slope.float(), geometry, bias)
            close(parts.sum(1), expected.sum(1), torch.float32)
            assert torch.equal(parts, again)

    @pytest.mark.parametrize("parts", [1, 45])
    @pytest.mark.parametrize("taps", [1, 9])
    def test_collect(self, dtype, parts, taps):
        from fedual.backends.kernels import convolutions

        partial, place = self.some(torch.float32, 2, parts, taps * 5, 7), self.some(torch.float32, 2, 7 * 5 * taps + 3)
        for add in (False, True):
            found, expected = place.clone()[:, 3:], place.clone()[:, 3:]
            convolutions.collect(partial, found.unflatten(1, (7, 5, taps)), add, taps)
            plain_kernels.collect(partial, expected.unflatten(1, (7, 5, taps)), add, taps)
            close(found, expected, torch.float32)

    @pytest.mark.parametrize("geometry", [((2, 2), (2, 2), (0, 0), (1, 1)), ((3, 2), (1, 2), (1, 0), (2, 1))])
    def test_pools_with_ties(self, dtype, geometry):
        from fedual.backends.kernels import pools

        x, geometry = (3 * self.some(dtype, 2, 3, 8, 7, 5)).round(), Geometry(*geometry)
        (y, chosen), (expected, taps) = pools.pool(x, geometry), plain_kernels.pool(x, geometry)
        assert torch.equal(y, expected)
        assert torch.equal(chosen, taps)
        slope = self.some(dtype, *y.shape)
        dx = plain_kernels.unpool(slope.double(), chosen, geometry, (8, 7))
        close(pools.unpool(slope, chosen, geometry, (8, 7)), dx, dtype)

    @pytest.mark.parametrize("rest", [False, True])
    @pytest.mark.parametrize("relu", [False, True])
    @pytest.mark.parametrize(("channels", "groups", "side"), [(6, 3, 5), (16, 2, 32), (5, 1, 1)])
    def test_group_norm(self, dtype, channels, groups, side, rest, relu):
        from fedual.backends.kernels import group_norms

        x = self.some(dtype, 2, 3, side, side, channels) + 1
        more, slope = (self.some(dtype, *x.shape) * scale for scale in (0.5, 2)) if rest else (None, x.cos())
        weight, bias = (self.some(torch.float32, 2, channels + 1 + i)[:, 1 : 1 + channels] for i in (1, 1))
        y, means, scales = group_norms.normalise(x, weight, bias, groups, 1e-5, more, relu)
        expected = plain_kernels.normalise(x, weight, bias, groups, 1e-5, more, relu)
        for one, other in zip((y, means, scales), expected, strict=True):
            close(one, other, dtype)
        own = x, y, slope, weight, means, scales, rest, relu
        for one, other in zip(group_norms.denormalise(*own), plain_kernels.denormalise(*own), strict=True):
            if one is None or other is None:
                assert one is other
            else:
                close(one, other, dtype)


@on_gpu
@pytest.mark.parametrize("name", ["stride, padding and dilation", "pools", "dropout", "twice", "resnet20"])
def test_on_a_gpu_as_in_double_precision_and_again(name):
    """Float32 products; the same bits twice."""
    from fedual.backends.kernels.image_layers import ImageLayers

    single, double = network(name, torch.float32).to("cuda"), network(name).to("cuda")
    with arithmetic(torch.device("cuda"), "float32"):
        theta = (single.initial() + 0.3 * normal((3, single.dim), 3).to(single.initial())).contiguous()
        single.images = ImageLayers(single, torch.float32)
        found, again = (stack(single).gradient(theta, 0) for _ in range(2))
        expected = stack(double).gradient(theta.double(), 0)
    assert torch.equal(found, again)
    assert (found - expected).norm() < 1e-4 * expected.norm()
