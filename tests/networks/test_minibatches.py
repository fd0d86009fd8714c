"""Plans of batches, noise that chunks share, and traced gradients."""

import pytest
import torch
from federations import losses, mlp  # pyright: ignore[reportMissingImports]
from hypothesis import given
from hypothesis import strategies as st
from problems import normal, rng
from torch import nn

from fedual.networks import Clients, Draws, Minibatches, minibatches
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
