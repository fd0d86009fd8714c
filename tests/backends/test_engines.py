"""All clients at once against one by one: every method, ragged clients, dropout, weights, chunks, who takes part."""

import pytest
import torch
import torch.nn.functional as F
from federations import SIZES, clients, losses, mlp, play
from problems import normal
from slow import rest_slow
from torch import nn

from fedual import methods
from fedual.backends.precision import arithmetic
from fedual.errors import InputError
from fedual.networks import Clients, Draws, Minibatches, Network
from fedual.networks.checks import check, rehearse
from fedual.networks.randomness import MODES
from fedual.solvers import SGD


def close(one, other):
    scale = one.abs().max()
    assert scale > 0
    assert float((one - other).abs().max() / scale) < 1e-9


@pytest.mark.parametrize(
    "name", rest_slow(methods.NETWORKS, "ivon-admm", "fedivon", "fedavg", "scaffold", "fedlap-cov")
)
@pytest.mark.parametrize("dropout", rest_slow([0.0, 0.4], 0.4))
def test_together_as_one_by_one(name, dropout):
    """More than 100 steps of the largest client, on clients of 1 to 33 examples, in any chunks."""
    stack = losses(mlp(dropout), clients(weights=True), local_epochs=4)
    rounds = 3
    assert rounds * max(stack.steps) > 100
    server, store, _ = play(name, stack, rounds, "sequential")
    for chunk in (99, 2):  # the last client is alone
        together, rows, _ = play(name, stack, rounds, chunk=chunk)
        close(server.lam_g, together.lam_g)
        close(server.eta_sum + 1e-30, together.eta_sum + 1e-30)
        for key, value in store.read(torch.arange(5)).items():
            close(value, rows.read(torch.arange(5))[key])


@pytest.mark.parametrize("noise", MODES)
@pytest.mark.parametrize("order", MODES)
def test_every_mode_of_noise_and_order(noise, order):
    stack = losses(draws=Draws(1, noise, order), local_epochs=1)
    method = methods.spec("ivon-admm", samples=2)
    close(play(method, stack, 3, "sequential")[0].lam_g, play(method, stack, 3, chunk=3)[0].lam_g)


@pytest.mark.parametrize("name", ["ivon-admm", "feddyn", "fedadmm", "fedavg"])
def test_partial_participation_and_local_steps(name):
    stack = losses(local_steps=7)
    assert stack.steps == [7] * 5
    one = play(name, stack, 6, "sequential", fraction=0.4)
    other = play(name, stack, 6, chunk=1, fraction=0.4)
    close(one[0].lam_g, other[0].lam_g)
    assert int(one[2].counted.sum()) == 2
    assert int(other[2].counted.sum()) == 2


def test_client_state_on_disk_changes_nothing():
    memory, disk = (play("ivon-admm", losses(), 3, chunk=2, place=place) for place in ("memory", "disk"))
    assert torch.equal(memory[0].lam_g, disk[0].lam_g)
    assert type(memory[1]) is not type(disk[1])


def test_convolutions_with_dropout2d_and_uint8_inputs():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    x = (normal((40, 1, 8, 8), 0).abs() * 80).clamp(max=255).to(torch.uint8)
    data = Clients(x, torch.arange(40) % 3, [torch.arange(7), torch.arange(5, 40)])
    stack = losses(model, data, scale=255.0, local_epochs=1)
    close(play("ivon-admm", stack, 2, "sequential")[0].lam_g, play("ivon-admm", stack, 2)[0].lam_g)


def test_a_parameter_that_the_network_does_not_use():
    class Idle(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.idle = nn.Parameter(torch.ones(2))

    stack, method = losses(Idle()), methods.fedavg(SGD(lr=0.1))
    one, other = play(method, stack, 2, "sequential")[0], play(method, stack, 2)[0]
    close(one.lam_g, other.lam_g)
    assert (stack.network.split(other.lam_g[0])["idle"] == 1).all()


class TestSteps:
    """No client does more or fewer steps than its own data ask for."""

    def test_each_client_sees_each_example_once_an_epoch(self):
        stack = losses(local_epochs=2)
        assert stack.steps == [2 * -(-n // 4) for n in SIZES]
        for k, n in enumerate(SIZES):
            mine, half = stack[k : k + 1], stack.steps[k] // 2
            for epoch in range(2):
                seen = []
                for step in range(epoch * half, (epoch + 1) * half):
                    batch = mine.batch(step, 1)
                    seen.append(batch.x[0][batch.weight[0] > 0])
                    torch.testing.assert_close(batch.weight.sum(), torch.tensor(1.0))
                rows = torch.cat(seen)
                assert len(rows) == n
                own = stack.data.x[stack.data.parts[k]]
                torch.testing.assert_close(rows.sort(0).values, own.sort(0).values)

    def test_a_finished_client_moves_no_more(self):
        """The momentum's step count is the client's own."""
        stack = losses()
        _, store, _ = play("ivon-admm", stack, 2)
        assert store.read(torch.arange(5))["solver.steps"].tolist() == [2.0 * steps for steps in stack.steps]

    def test_gradients_are_unbiased_under_weights(self):
        """Whole weights are repeated examples; the mean over an epoch of equal batches is the full gradient."""
        x, y, weight = normal((8, 6), 0), torch.arange(8) % 3, torch.tensor([1.0, 2, 3, 1, 1, 2, 1, 1])
        repeated = Clients.from_pairs([(x.repeat_interleave(weight.long(), 0), y.repeat_interleave(weight.long()))])
        weighted = Clients.from_pairs([(x, y, weight)])
        full = losses(data=repeated, batch_size=12)
        theta = full.network.initial()[None]
        epoch = losses(data=weighted, batch_size=2, local_epochs=1)
        mean = sum(epoch.gradient(theta, step) for step in range(4)) / 4
        torch.testing.assert_close(mean, full.gradient(theta, 0))
        assert full.num_examples.tolist() == epoch.num_examples.tolist() == [12.0]


class TestDropout:
    def test_clients_have_different_masks_and_none_is_shared_between_steps(self):
        data = Clients.from_pairs([(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))] * 3)
        stack = losses(mlp(0.5), data)
        first, second = stack.uniforms(0, 3)[0], stack.uniforms(1, 3)[0]
        assert first.shape == (3, 4, 8)
        assert len({tuple(mask.flatten().tolist()) for mask in (*first, *second)}) == 6

    @pytest.mark.slow
    def test_the_mean_over_masks_is_no_dropout(self):
        stack = losses(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.25)), local_steps=1)
        network, x = stack.network, normal((4, 6), 1)
        parts = network.split(network.initial())
        draws = [network.forward(parts, x, [u[0] for u in stack.uniforms(step, 1)]) for step in range(4000)]
        torch.testing.assert_close(torch.stack(draws).mean(0), network(network.initial(), x), rtol=0.1, atol=0.05)

    def test_evaluation_has_none(self):
        network = Network(mlp(0.9))
        x = normal((4, 6), 1)
        assert torch.equal(network(network.initial(), x), mlp(0.9).eval()(x))


class TestNetwork:
    def test_frozen_parameters_stay_and_count_nothing(self):
        model = mlp()
        stack = Minibatches(Network(model, ["3"]), clients(), batch_size=4, local_epochs=2)
        assert stack.network.names == ("3.weight", "3.bias")
        server, _, _ = play(methods.fedavg(SGD(lr=0.1)), stack, 2)
        after = stack.network.state_dict(server.lam_g[0])
        before = model.state_dict()
        assert torch.equal(after["0.weight"], before["0.weight"])
        assert (after["3.weight"] - before["3.weight"]).abs().max() > 1e-3

    def test_trainable_by_predicate_and_by_requires_grad(self):
        model = mlp()
        model.get_submodule("0").requires_grad_(False)
        assert Network(model).names == Network(mlp(), lambda name: name.startswith("3")).names

    def test_split_and_join_are_inverse(self):
        class Scalar(nn.Module):
            def __init__(self):
                super().__init__()
                self.gain, self.weight = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(2, 3))

        network = Network(Scalar())
        for theta in (normal((7,), 0), normal((4, 7), 0)):
            assert torch.equal(network.join(network.split(theta)), theta)

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), "GroupNorm"),
            (nn.Sequential(nn.InstanceNorm1d(6, track_running_stats=True)), "GroupNorm"),
            (nn.Flatten(), "no trainable parameter"),
        ],
    )
    def test_models_that_cannot_be_trained_are_refused(self, model, message):
        with pytest.raises(InputError, match=message):
            Network(model)

    def test_a_buffer_that_changes_is_refused(self):
        class Counts(nn.Linear):
            def __init__(self):
                super().__init__(6, 3)
                self.register_buffer("seen", torch.zeros(()))

            def forward(self, input):
                self.seen += len(input)
                return super().forward(input)

        with pytest.raises(InputError, match=r"buffer seen.*GroupNorm"):
            check(losses(Counts()))

    def test_random_numbers_in_the_forward_pass_are_refused(self):
        class Noisy(nn.Linear):
            def forward(self, input):
                return super().forward(input) + torch.randn(len(input), 3)

        with pytest.raises(InputError, match="random numbers"):
            check(losses(Noisy(6, 3)))

    def test_dropout_that_evaluation_has_too_is_refused(self):
        class Always(nn.Linear):
            def forward(self, input):
                return F.dropout(super().forward(input), 0.5)

        with pytest.raises(InputError, match=r"training=self\.training"):
            check(losses(Always(6, 3)))

    @pytest.mark.parametrize("batch_size", [1, 4])
    def test_a_model_that_couples_the_examples_of_a_batch_is_refused(self, batch_size):
        class Centred(nn.Linear):
            def forward(self, input):
                return super().forward(input - input.mean(0))

        with pytest.raises(InputError, match=r"depends on the others.*GroupNorm"):
            check(losses(Centred(6, 3), batch_size=batch_size))

    def test_a_model_that_cannot_be_batched_over_clients_is_sent_to_the_other_engine(self):
        class Branch(nn.Linear):
            def forward(self, input):
                return super().forward(input) if input.sum() > 0 else 2 * super().forward(input)

        with pytest.raises(InputError, match="engine='sequential'"):
            rehearse(losses(Branch(6, 3)), False)
        server, _, _ = play(methods.fedavg(), losses(Branch(6, 3), local_epochs=1), 1, "sequential")
        assert server.moved

    def test_a_model_that_does_not_fit_the_inputs_is_refused(self):
        with pytest.raises(InputError, match="cannot take the clients' inputs"):
            check(losses(nn.Linear(5, 3)))
        with pytest.raises(InputError, match="one row an example"):
            check(losses(nn.Sequential(nn.Linear(6, 3), nn.Flatten(0))))


def test_a_gpu_repeats_itself_bit_for_bit_and_the_users_settings_come_back():
    """Only the switches, which need no GPU."""
    assert not torch.are_deterministic_algorithms_enabled()
    with arithmetic(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with arithmetic(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
