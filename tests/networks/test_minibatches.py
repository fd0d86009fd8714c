"""Plans of batches, noise that chunks share, traced gradients, and the compiled gradient of one client."""

import logging
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from federations import losses, mlp  # pyright: ignore[reportMissingImports]
from hypothesis import given
from hypothesis import strategies as st
from problems import normal, rng
from torch import nn
from torch.overrides import TorchFunctionMode

from fedual.backends.kernels import single_client
from fedual.networks import Clients, Draws, Minibatches, Network, minibatches
from fedual.networks.randomness import MODES
from fedual.solvers.stepper import aligned, segments


@given(steps=st.lists(st.integers(0, 12), max_size=9).map(lambda steps: sorted(steps, reverse=True)))
def test_segments_are_the_steps_of_each_client_in_their_order(steps):
    taken = [[] for _ in steps]
    widths = []
    for n, part in segments(steps):
        widths.append(n)
        assert len(part)
        for client in taken[:n]:
            client.extend(part)
    assert taken == [list(range(number)) for number in steps]
    assert widths == sorted(set(widths), reverse=True)


class TestPlan:
    @given(
        sizes=st.lists(st.integers(1, 13), min_size=1, max_size=5),
        batch_size=st.integers(1, 6),
        epochs=st.integers(1, 3),
        order=st.sampled_from(MODES),
        weighted=st.booleans(),
        seed=st.integers(0, 99),
    )
    def test_each_example_once_an_epoch_with_its_weight(self, sizes, batch_size, epochs, order, weighted, seed):
        """In batches of one the weights of an epoch sum to N_k; a batch is a mean, and padding weighs nothing."""
        rows = torch.randperm(sum(sizes), generator=rng(seed)).split(sizes)
        weights = [torch.rand(n, generator=rng(k)) + 0.5 for k, n in enumerate(sizes)] if weighted else None
        data = Clients(torch.zeros(sum(sizes), 6), torch.zeros(sum(sizes), dtype=torch.long), rows, weights)
        draws = Draws(seed, order=order)
        stack = losses(data=data, draws=draws, batch_size=batch_size, local_epochs=epochs)
        index, weight = stack.plan
        for k, size in enumerate(sizes):
            batches = -(-size // batch_size)
            assert stack.steps[k] == epochs * batches
            own = dict(zip(rows[k].tolist(), [1.0] * size if weights is None else weights[k].tolist(), strict=True))
            total = sum(own.values())
            for epoch in range(epochs):
                seen = []
                for step in range(epoch * batches, (epoch + 1) * batches):
                    real = weight[k, step] > 0
                    number = int(real.sum())
                    assert number == min(batch_size, size - (step % batches) * batch_size)
                    expected = [own[row] * size / total / number for row in index[k, step, real].tolist()]
                    torch.testing.assert_close(weight[k, step, real], torch.tensor(expected))
                    seen += index[k, step, real].tolist()
                assert sorted(seen) == sorted(own)
            assert (weight[k, stack.steps[k] :] == 0).all()

    @pytest.mark.parametrize("order", MODES)
    def test_clients_of_the_same_size_share_the_order_unless_it_is_their_own(self, order):
        sizes = [20, 20, 7, 20]
        data = Clients(torch.zeros(67, 6), torch.zeros(67, dtype=torch.long), torch.arange(67).split(sizes))
        index, _ = losses(data=data, draws=Draws(2, order=order)).plan
        first = torch.tensor([0, 20, 27, 47])
        orders = {tuple((index[k] - first[k]).flatten().tolist()) for k in (0, 1, 3)}
        assert len(orders) == (3 if order == "independent" else 1)

    def test_inputs_prepared_once_are_those_prepared_batch_by_batch(self):
        x = torch.randint(256, (30, 6), generator=rng(0), dtype=torch.uint8)
        data = Clients(x, torch.arange(30) % 3, torch.arange(30).split([7, 23]))
        plain = losses(data=data, scale=255.0)
        ready = losses(data=data, scale=255.0, prepared=plain.network.inputs(x))
        for step in range(6):
            assert torch.equal(plain.batch(step, 2).x, ready.batch(step, 2).x)


class TestKeptNoise:
    def drawn(self, monkeypatch, stack: Minibatches, steps: int) -> list[int]:
        """The steps whose noise was drawn while two chunks walked through them."""
        asked, draw = [], Draws.normal

        def normal(self, round, step, *rest):
            asked.append(step)
            return draw(self, round, step, *rest)

        monkeypatch.setattr(Draws, "normal", normal)
        for chunk in (stack[:2], stack[2:]):
            for step in range(steps):
                chunk.noise(step, 0, torch.zeros(len(chunk), stack.dim))
        return asked

    @pytest.mark.parametrize("mode", MODES)
    def test_noise_that_all_share_is_drawn_once_a_round(self, monkeypatch, mode):
        times = 2 if mode == "independent" else 1
        assert self.drawn(monkeypatch, losses(draws=Draws(1, mode)), 3) == [0, 1, 2] * times

    def test_not_more_is_kept_than_there_is_room_for(self, monkeypatch):
        stack = losses()
        row = stack.network.initial().nbytes
        monkeypatch.setattr(minibatches, "KEPT", 2 * row)
        self.drawn(monkeypatch, stack, 6)
        assert sum(noise.nbytes for noise in stack.kept.values()) <= 3 * row

    def test_another_round_has_its_own(self):
        stack = losses()
        like = torch.zeros(1, stack.dim)
        assert not torch.equal(stack.noise(0, 0, like), stack.at(1).noise(0, 0, like))


class TestTrace:
    def test_a_traced_gradient_takes_new_parameters_batches_and_masks(self, monkeypatch):
        plain, traced = losses(mlp(0.4)), losses(mlp(0.4), compile=True)
        for n in (1, 3):
            traced.trace(n)
        assert len(traced.network.tapes) == 2
        theta = traced.network.initial() + normal((5, traced.dim), 1)
        cases = [(n, step) for n in (1, 3) for step in range(3)]
        expected = [plain.gradient(theta[:n], step) for n, step in cases]
        untraced = plain.gradient(theta[:2], 0)
        assert torch.equal(traced.gradient(theta[:2], 0), untraced)  # a number of clients that was not traced
        monkeypatch.setattr(Minibatches, "_differentiate", None)
        for (n, step), gradient in zip(cases, expected, strict=True):
            torch.testing.assert_close(traced.gradient(theta[:n], step), gradient, rtol=1e-12, atol=1e-14)

    def test_a_shape_is_traced_once(self):
        stack = losses(compile=True)
        stack.trace(2)
        (tape,) = stack.network.tapes.values()
        stack.trace(2)
        assert list(stack.network.tapes.values()) == [tape]


def images(model: nn.Module, batch_size: int = 5) -> Minibatches:
    x, y = normal((9, 3, 8, 8), 0), torch.randint(3, (9,), generator=rng(1))
    return Minibatches(Network(model), Clients.from_pairs([(x, y)]), draws=Draws(1), batch_size=batch_size)


def head(channels: int) -> list[nn.Module]:
    return [nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 3)]


CONVOLUTIONS = {
    "bias": lambda: [nn.Conv2d(3, 4, 3)],
    "no bias": lambda: [nn.Conv2d(3, 4, 3, bias=False)],
    "stride and padding": lambda: [nn.Conv2d(3, 4, 3, stride=2, padding=1)],
    "padding by name": lambda: [nn.Conv2d(3, 4, 3, padding="same")],
    "circular": lambda: [nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")],
    "grouped": lambda: [nn.Conv2d(3, 3, 3, groups=3), nn.Conv2d(3, 4, 1)],
    "five channels": lambda: [nn.Conv2d(3, 5, 1), nn.Conv2d(5, 4, 3, bias=False)],
    "dropout": lambda: [nn.Conv2d(3, 4, 3), nn.Dropout2d(0.4), nn.Dropout(0.2)],
}


def arguments(stack: Minibatches, step: int, seed: int) -> tuple:
    """What the gradient of the one client takes at a step: θ, x, y, weights and uniforms."""
    batch, theta = stack.batch(step, 1), stack.network.initial() + 0.3 * normal((stack.dim,), seed)
    return theta, batch.x[0], batch.y[0], batch.weight[0], [uniform[0] for uniform in stack.uniforms(step, 1)]


def agrees(stack: Minibatches, slope: single_client.Slope) -> None:
    """At three steps of two epochs, the second batch padded, against the gradient of the stack of one."""
    for step in range(3):
        theta, x, y, weight, uniforms = arguments(stack, step, seed=10 + step)
        expected = torch.empty(1, stack.dim)
        batch = minibatches.Batch(x[None], y[None], weight[None])
        stack.differentiate(theta[None], batch, [uniform[None] for uniform in uniforms], expected)
        torch.testing.assert_close(slope(theta, x, y, weight, uniforms), expected[0], rtol=1e-10, atol=1e-12)


class TestSingle:
    @pytest.mark.parametrize("name", CONVOLUTIONS)
    def test_traced_as_it_is(self, monkeypatch, caplog, name):
        """All but the compiler."""
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
        stack = images(nn.Sequential(*CONVOLUTIONS[name](), *head(4)))
        agrees(stack, single_client.compiled(stack, arguments(stack, 0, seed=1)))
        assert not [record for record in caplog.records if record.name == "fedual"]

    @pytest.mark.slow
    @pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, while it compiles
    def test_compiled(self, caplog):
        layers = [nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Dropout2d(0.4), nn.Conv2d(4, 3, 2, bias=False)]
        stack = images(nn.Sequential(*layers, *head(3)))
        agrees(stack, single_client.compiled(stack, arguments(stack, 0, seed=1)))
        assert not [record for record in caplog.records if record.name == "fedual"]

    def test_without_a_compiler_it_says_so_and_runs_as_it_is(self, monkeypatch, caplog):
        def broken(function, **options):
            raise RuntimeError("no compiler\nand much more")

        monkeypatch.setattr(torch, "compile", broken)
        stack = images(nn.Sequential(*CONVOLUTIONS["dropout"](), *head(4)))
        with caplog.at_level(logging.INFO, "fedual"):
            agrees(stack, single_client.compiled(stack, arguments(stack, 0, seed=1)))
        (line,) = [record.getMessage() for record in caplog.records if record.name == "fedual"]
        assert re.fullmatch(r"The network runs .* slower: RuntimeError: no compiler and much more", line)


class Seen(TorchFunctionMode):
    """The channels of the images that convolutions see."""

    def __init__(self):
        self.channels = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.conv2d:
            self.channels.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


class TestFourChannels:
    @pytest.mark.parametrize(
        ("channels", "weight", "groups", "seen"),
        [(3, (5, 3, 3, 3), 1, 4), (1, (5, 1, 3, 3), 1, 4), (4, (5, 4, 3, 3), 1, 4), (3, (6, 1, 3, 3), 3, 3)],
        ids=["three", "one", "four", "grouped"],
    )
    def test_what_a_convolution_sees_and_what_it_comes_to(self, channels, weight, groups, seen):
        x, kernel, bias = normal((2, channels, 6, 6), 0), normal(weight, 1), normal(weight[:1], 2)
        expected = F.conv2d(x, kernel, bias, 2, 1, 1, groups)
        with Seen() as below, single_client.FourChannels():
            found = F.conv2d(x, kernel, bias, 2, 1, 1, groups)
        torch.testing.assert_close(found, expected)
        assert below.channels == [seen]


class OneParameter(nn.Module):
    """A network that is a single weight, so that its gradient is a whole row of ∇θ."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal((3, 1, 3, 3), 1))

    def forward(self, x):
        return torch.conv2d(x.reshape(-1, 1, 2, 3), self.weight, padding=1).mean((2, 3))


def test_traced_gradients_take_rows_that_are_padded():
    traced, plain = losses(OneParameter(), compile=True), losses(OneParameter())
    traced.trace(3)
    theta = aligned(torch.zeros(3, traced.dim)).copy_(normal((3, traced.dim), 0))
    torch.testing.assert_close(traced.gradient(theta, 0, aligned(theta)), plain.gradient(theta, 0))
