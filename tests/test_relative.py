"""Settings in units of the federation, and IVON's start in units of the network."""

import copy
import math
import pickle
from typing import cast

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from fedual import fit, methods
from fedual.contracts import Method
from fedual.duals import Natural
from fedual.errors import InputError
from fedual.experiments import load
from fedual.relative import Relative, is_settled, settled
from fedual.rounds import scheduled
from fedual.solvers import IVON, Clients, Draws, Gain, Hidden, Minibatches, Network, Noise, Reach, Units
from fedual.solvers.scale import sizes, units


def mlp(seed: int = 0, wide: int = 7) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, wide), nn.Sigmoid(), nn.Linear(wide, 3)).double()


def deep(between: type[nn.Module]) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 20), between(), nn.Linear(20, 9), between(), nn.Linear(9, 3)).double()


def pairs(count: int = 3, size: int = 12, times: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three classes, each around its own point."""
    made = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        y = torch.randint(3, (size,), generator=made)
        x = torch.randn(size, 5, generator=made, dtype=torch.float64) + 2 * nn.functional.one_hot(y, 5)
        found.append((times * x, y))
    return found


def stack(model: nn.Module, clients: list, **options) -> Minibatches:
    return Minibatches(Network(model), Clients.from_pairs(clients), draws=Draws(0), batch_size=4, **options)


def gamma(method: Method) -> float:
    return cast(Natural, method.dual).gamma


class TestRelative:
    @pytest.mark.parametrize(
        ("unit", "text", "value"),
        [
            ({"clients": -1}, "6/K", 1.5),
            ({"examples": 1}, "6*N", 600.0),
            ({"examples": 1, "clients": -1}, "6*N/K", 150.0),
            ({"examples": 1, "length": 1}, "6*N*L", 600.0),
            ({"length": -1}, "6/L", 6.0),
        ],
    )
    def test_a_number_and_its_unit(self, unit, text, value):
        number = Relative(6.0, **unit)
        of = lambda number: number.at(4, 100)
        assert (str(number), of(number)) == (text, value)
        assert of(0.5 * number) == of(number * 0.5) == value / 2
        for same in (pickle.loads(pickle.dumps(number)), copy.deepcopy(number)):
            assert (type(same), of(same)) == (Relative, value)
        assert of(number * Relative(0.5, clients=1)) == 2 * value

    def test_it_is_never_taken_for_a_plain_number_by_mistake(self):
        with pytest.raises(TypeError, match="8/K has no value before the federation is known"):
            _ = Relative(8.0, clients=-1) * torch.ones(2)

    @pytest.mark.parametrize("name", ["ivon-admm", "ivon-pvi"])
    def test_what_a_client_may_do_depends_on_its_share_alone(self, name):
        """ρτ/N_k, the same for both, and ρK of ADMM do not depend on how many clients or examples there are."""
        assert not is_settled(methods.build(name))
        of = lambda k, size: settled(methods.build(name), k, k * size)
        radii = {(k, size): of(k, size).rho * of(k, size).tau / size for k in (10, 1000) for size in (50, 5000)}
        admm = settled(methods.build("ivon-admm"), 7, 700)
        assert list(radii.values()) == pytest.approx([admm.rho * admm.tau / 100] * 4)
        assert gamma(of(10, 50)) / gamma(of(1000, 50)) == pytest.approx(100)
        assert is_settled(of(10, 50))

    @pytest.mark.parametrize("name", ["ivon-admm", "ivon-pvi"])
    def test_multipliers_move_the_more_the_fewer_clients_take_part(self, name):
        """By as much as they move less often, and at most by ρ/3."""
        of = lambda share: settled(methods.build(name), 100, 6000, share)
        assert gamma(of(0.5)) == pytest.approx(2 * gamma(of(1.0)))
        assert gamma(of(0.01)) == pytest.approx(min(of(1.0).rho / 3, 100 * gamma(of(1.0))))
        plain = methods.build("ivon-admm", damping=0.5, rho=0.2)
        assert gamma(settled(plain, 100, 6000, 0.1)) == 0.1

    @pytest.mark.parametrize(("clients", "most"), [(1, 1.0), (2, 0.5), (3, 1 / 3), (100, 1 / 3)])
    def test_multipliers_never_run_ahead(self, clients, most):
        method = settled(methods.ivon_admm(damping=Relative(7.0, length=-1)), clients, 6000)
        assert gamma(method) == pytest.approx(most * method.rho)

    def test_clients_count_by_their_share_of_the_examples(self):
        assert str(methods.ivon_admm().unit) == "1*N/K"
        assert settled(methods.ivon_admm(), 100, 6000).unit == 60.0
        assert settled(methods.ivon_admm(unit=0.0), 100, 6000).unit == 0.0
        assert not is_settled(methods.ivon_admm(rho=0.3, damping=0.5, tau=0.01, solver=IVON()))

    @pytest.mark.parametrize(("examples", "decay"), [(40_000, 2.5e-6), (100, 1e-3)])
    def test_a_prior_counts_the_less_the_more_examples_there_are(self, examples, decay):
        solver = cast(IVON, settled(methods.build("ivon-admm"), 10, examples).solver)
        assert (type(solver.weight_decay), float(solver.weight_decay)) == (Hidden, pytest.approx(decay))
        waiting = Relative(0.1, Hidden, examples=-1)
        assert str(waiting) == "0.1·fan_in·min(1, 4Var(x))/N"
        for same in (pickle.loads(pickle.dumps(waiting)), copy.deepcopy(waiting), waiting * 1.0):
            assert (type(same.at(10, examples)), same.at(10, examples)) == (Hidden, pytest.approx(decay))

    def test_long_rounds_hold_clients_back(self):
        """Beyond 200 steps: τ by the square, the rate by its inverse, γ and the limit in inverse proportion, ρ not.

        And the decay, with its limit, in proportion.
        """
        of = lambda steps: settled(methods.build("ivon-admm"), 10, 6000, 1.0, steps)
        assert of(0) == of(200)
        assert of(500).tau == pytest.approx(2.5**2 * of(200).tau)
        assert gamma(of(500)) == pytest.approx(gamma(of(200)) / 2.5)
        assert of(500).rho == of(200).rho
        short, long = (cast(IVON, of(steps).solver) for steps in (200, 500))
        assert (type(long.lr), type(long.clip)) == (Gain, Units)
        assert (long.lr, long.clip) == pytest.approx((short.lr / 2.5**2, short.clip / 2.5))
        for method, solver in ((of(200), short), (of(500), long)):  # λ is λ_c, α = 3.2/S
            assert cast(Gain, solver.lr).coldest == pytest.approx(600 / (method.rho * method.tau))
            assert solver.lr / cast(Gain, solver.lr).coldest == pytest.approx(3.2)
        for losses in (stack(mlp(), pairs()), stack(mlp(wide=700), pairs())):  # 0.1 · 700/6000 is beyond the limit
            each = [
                cast(Hidden, solver.weight_decay).each(losses, losses.network.initial().expand(3, -1))
                for solver in (short, long)
            ]
            assert each[0].any()
            torch.testing.assert_close(each[1], 2.5 * each[0])

    @pytest.mark.parametrize("local", [{"local_steps": 401}, {"local_epochs": 33}])
    def test_fit_counts_the_steps_of_a_client_of_average_size(self, local):
        clients = [(x[: 6 * (k + 1)], y[: 6 * (k + 1)]) for k, (x, y) in enumerate(pairs(3))]
        run = fit(mlp(), clients, batch_size=1, rounds=1, device="cpu", **local)
        steps = local.get("local_steps", 33 * 30 / 3)
        assert run.method == settled(methods.build("ivon-admm"), 3, 30, 1.0, steps)
        assert run.method.tau > settled(methods.build("ivon-admm"), 3, 30).tau

    def test_what_is_given_is_taken_as_it_is(self):
        method, usual = (settled(x, 7, 100) for x in (methods.ivon_admm(rho=0.3, damping=0.5), methods.ivon_admm()))
        assert (method.rho, gamma(method), method.tau) == (0.3, 0.15, usual.tau)
        method = methods.build(
            "ivon-admm", rho=0.3, damping=0.5, tau=0.01, lr=0.1, clip=1.0, weight_decay=0.0, unit=0.0
        )
        assert settled(method, 7, 100) is method

    def test_a_solver_of_any_kind_is_left_as_it_is(self):
        solver = lambda problem: problem
        method = settled(methods.ivon_admm(solver=solver), 10, 6000)  # pyright: ignore[reportArgumentType]
        assert is_settled(method)
        assert method.solver is solver

    def test_fit_settles_it(self):
        run = fit(mlp(), pairs(4), rounds=1, local_epochs=1, device="cpu")
        assert run.method == settled(methods.build("ivon-admm"), 4, 48)
        assert run.config["schedule"] == "harmonic"
        assert run.config["method"] == repr(run.method)


class TestScale:
    def test_units_from_inputs_and_fan_in(self):
        """By hand: 1/(max(RMS(x), ½) √fan_in) for weights, 1/√fan_in for biases, of each client's own inputs."""
        model, clients = mlp(), [(x * (k + 1), y) for k, (x, y) in enumerate(pairs())]
        losses = stack(model, clients)
        found = losses.network.split(units(losses, losses.network.initial().expand(3, -1)))
        for k, (x, _) in enumerate(clients):
            seen = x[torch.arange(64) % len(x)]
            hidden = model[:2](seen).detach()
            for layer, value, root in (("0", seen, 5**0.5), ("2", hidden, 7**0.5)):
                size = max(0.5, float(value.square().mean().sqrt()))
                torch.testing.assert_close(
                    found[f"{layer}.weight"][k], torch.full_like(found[f"{layer}.weight"][k], 1 / (size * root))
                )
                torch.testing.assert_close(
                    found[f"{layer}.bias"][k], torch.full_like(found[f"{layer}.bias"][k], 1 / root)
                )

    @pytest.mark.parametrize("between", [nn.ReLU, nn.Sigmoid])
    def test_units_of_a_network_that_carries_on_the_unit_of_its_inputs(self, between):
        """By hand, with a third layer: s is the smaller RMS of the network's inputs and of the next layer's."""
        model, clients = deep(between), pairs(times=100.0)
        losses = stack(model, clients)
        found = losses.network.split(units(losses, losses.network.initial().expand(3, -1)))
        rms = lambda x: float(x.detach().square().mean().sqrt())
        for k, (x, _) in enumerate(clients):
            x = x[torch.arange(64) % len(x)]
            first, second, third = rms(x), rms(model[:2](x)), rms(model[:4](x))
            assert first > 10
            assert (min(second, third) > 2) == (between is nn.ReLU)
            layers = (("0", first, second, 5), ("2", second, third, 20), ("4", third, third, 9))
            for layer, own, following, fan_in in layers:
                scale = max(1, min(first, following))
                for kind, value in (("weight", max(own, 0.5)), ("bias", 1)):
                    part = found[f"{layer}.{kind}"][k]
                    torch.testing.assert_close(part, torch.full_like(part, scale / (value * fan_in**0.5)))

    def test_weights_of_hidden_layers_decay_where_their_inputs_vary(self):
        model, clients = mlp(), pairs(times=30.0)
        losses = stack(model, clients)
        found = losses.network.split(Hidden(1e-4).each(losses, losses.network.initial().expand(3, -1)))
        for name in ("0.weight", "0.bias", "2.bias"):
            assert not found[name].any()
        for k, (x, _) in enumerate(clients):
            varied = float(model[:2](x[torch.arange(64) % len(x)]).detach().var(0, correction=0).mean())
            assert 0.01 < varied < 0.25
            torch.testing.assert_close(found["2.weight"][k], torch.full((3, 7), 28e-4 * varied, dtype=torch.float64))
        twice = 2 * Hidden(0.1, most=0.5)
        assert (twice, twice.most) == (0.2, 0.5)
        with pytest.raises(TypeError, match="Hidden has no coldest"):
            Hidden(0.1, coldest=0.5)
        strongest = losses.network.split(Hidden(1.0).each(losses, losses.network.initial().expand(3, -1)))
        torch.testing.assert_close(strongest["2.weight"], found["2.weight"] * 0.003 / 7e-4)

    def test_a_network_of_one_layer_does_not_decay(self):
        losses = stack(nn.Linear(5, 3).double(), pairs())
        assert not Hidden(0.1).each(losses, losses.network.initial().expand(3, -1)).any()

    def test_the_first_noise_is_a_part_of_the_weights(self):
        losses, ess = stack(mlp(), pairs()), torch.tensor([[1e-3], [1.0], [1e9]], dtype=torch.float64)
        mean = losses.network.initial().expand(3, -1)
        noise = losses.network.split((ess * Noise(0.5).h0(losses, mean, ess)).rsqrt())
        for layer in ("0", "2"):
            half = mlp().state_dict()[f"{layer}.weight"].square().mean().sqrt() / 2
            for name in ("weight", "bias"):
                torch.testing.assert_close(noise[f"{layer}.{name}"], torch.full_like(noise[f"{layer}.{name}"], half))

    def test_the_rate_of_a_round_is_shared_by_its_steps(self):
        """α = gain/(λS), at most 0.1, with S = 2 epochs of 3, 1 and 25 batches of 4; a schedule lowers both.

        A λ above λ_c counts as λ_c.
        """
        losses = stack(mlp(), [pairs(1, size)[0] for size in (12, 3, 100)], local_epochs=2)
        ess = torch.tensor([[10.0], [1.0], [5.0]], dtype=torch.float64)
        found = Gain(6.0).rate(losses, ess)
        torch.testing.assert_close(found, ess.new_tensor([[6 / (10 * 6)], [0.1], [6 / (5 * 50)]]))
        for half in (Gain(6.0) * 0.5, pickle.loads(pickle.dumps(0.5 * Gain(6.0)))):
            torch.testing.assert_close(half.rate(losses, ess), found / 2)
            assert str(half) == "3/λS"
        cold = Gain(2.4, coldest=5.0) * 0.5
        for same in (cold, pickle.loads(pickle.dumps(cold)), copy.deepcopy(cold)):
            known = ess.new_tensor([[1.2 / (5 * 6)], [0.05], [1.2 / (5 * 50)]])
            torch.testing.assert_close(same.rate(losses, ess), known)
        found = Reach(0.05).rate(losses, losses.network.initial().expand(3, -1))
        torch.testing.assert_close(found, ess.new_tensor([[0.05 / 6], [0.01], [0.05 / 50]]))

    @pytest.mark.parametrize("given", [{"rho": 70.0}, {"tau": 1e-5}, {"rho": 3.0, "tau": 1e-6}])
    def test_the_first_step_does_not_depend_on_rho_and_tau(self, given):
        """Its noise is a part of the weights, and α/(h + δ) does not have λ < λ_c in it, as long as h is h0."""

        def means(**settings) -> torch.Tensor:
            method = methods.build("ivon-admm", lr=Gain(10.0), beta2=1 - 1e-12, clip=0.0, **settings)
            run = fit(mlp(), pairs(), method, 1, local_steps=1, device="cpu")
            eta = run.store.read(torch.arange(3))["eta"]
            scaled_mean, scaled_precision = (run.server.prior + eta / gamma(run.method)).unbind(1)
            return scaled_mean / (-2 * scaled_precision) - run.losses.network.initial()

        torch.testing.assert_close(means(**given), means(), rtol=1e-3, atol=1e-6)

    def test_layers_without_a_fan_in_and_weights_of_zero(self):
        model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
        nn.init.zeros_(dict(model.named_parameters())["2.weight"])
        losses = stack(model, pairs())
        mean = losses.network.initial().expand(3, -1)
        parts, weights = losses.network.split(units(losses, mean)), losses.network.split(sizes(losses, mean))
        assert (parts["1.weight"] == 0.2).all()
        assert (weights["1.weight"] == 0.1).all()
        assert (weights["2.weight"] == 0.1 / 2).all()

    def test_settings_out_of_range(self):
        with pytest.raises(InputError, match="h0 = 0"):
            IVON(h0=Noise(0.0))

    def test_no_step_is_longer_than_its_limit(self):
        """After one step, λ_k = λ_g + η_k/γ; the record says how many parameters were held back."""
        free, held = (
            fit(mlp(), pairs(), methods.build("ivon-admm", clip=clip), 1, local_steps=1, device="cpu")
            for clip in (0.0, Units(1e-6))
        )
        assert free.history[0]["limited"] == 0
        assert held.history[0]["limited"] > 0.9
        start = held.losses.network.initial()
        eta = held.store.read(torch.arange(3))["eta"]
        scaled_mean, scaled_precision = (held.server.prior + eta / gamma(held.method)).unbind(1)
        steps = (scaled_mean / (-2 * scaled_precision) - start).abs()
        limit = 1e-6 * units(held.losses, start.expand(3, -1))
        assert (steps < limit * (1 + 1e-6)).all()
        assert (steps > limit * (1 - 1e-6)).double().mean() > 0.9

    @pytest.mark.parametrize("count", [2, 20])
    def test_one_default_for_any_number_of_clients(self, count):
        """As good as logistic regression on the pooled data, which is the right model for them."""
        *clients, test = pairs(count, 60) + pairs(1, 600)
        run = fit(mlp(), clients, rounds=20, test=test, batch_size=8, evaluate_every=20, device="cpu")
        x, y = (torch.cat(parts).numpy() for parts in zip(*clients, strict=True))
        expected = LogisticRegression(max_iter=1000).fit(x, y).score(test[0].numpy(), test[1].numpy())
        assert expected > 0.8
        assert run.history[-1]["accuracy"] > expected - 0.05

    def test_relus_learn_from_inputs_up_to_255(self):
        """They come near logistic regression on the pooled data, where s = 1 leaves them 15 points behind."""
        *clients, test = pairs(5, 60, 255.0) + pairs(1, 600, 255.0)
        run = fit(deep(nn.ReLU), clients, rounds=10, test=test, batch_size=8, device="cpu", scale=1.0)
        x, y = (torch.cat(parts).numpy() for parts in zip(*clients, strict=True))
        expected = LogisticRegression(max_iter=1000).fit(x / 255, y).score(test[0].numpy() / 255, test[1].numpy())
        assert run.history[-1]["accuracy"] > expected - 0.1

    def test_inputs_that_saturate_the_network_do_no_harm(self):
        *clients, test = pairs(3, 60, 255.0) + pairs(1, 600, 255.0)
        run = fit(mlp(), clients, rounds=20, test=test, batch_size=8, device="cpu")
        losses = [record["nll"] for record in run.history]
        assert losses[-1] < losses[0]
        assert losses[-1] < math.log(3)  # that of guessing


@pytest.mark.parametrize(("examples", "rest"), [(0, 10), (6000, 10), (60_000, 100)])
def test_the_harmonic_schedule_halves_the_rate_the_later_the_more_examples_there_are(examples, rest):
    method = settled(methods.ivon_admm(solver=IVON(lr=0.4)), 1, 1)
    rate = lambda round: cast(IVON, scheduled(method, "harmonic", round, 5, examples=examples).solver).lr
    assert [rate(0), rate(rest), rate(3 * rest)] == pytest.approx([0.4, 0.2, 0.1])


def test_a_runs_rate_falls_by_its_examples(monkeypatch):
    """One round is alike, whatever N is; the second is not."""
    posterior = lambda rounds: fit(mlp(), pairs(4), rounds=rounds, local_epochs=1, device="cpu").posterior.lam
    one, two = posterior(1), posterior(2)
    monkeypatch.setattr("fedual.rounds.EACH", 0.01)  # as if there were 60,000 times as many
    assert torch.equal(posterior(1), one)
    assert not torch.equal(posterior(2), two)


def test_the_preset_default_leaves_the_scenarios_settings_out():
    tuned, plain = (load("cifar10-zenke-heterog-10", preset=preset) for preset in (None, "default"))
    assert plain.settings == {}
    assert plain.build() == methods.build("ivon-admm")
    assert (tuned.train["local_epochs"], plain.train["local_epochs"]) == (25, 10)
    assert plain.preset == "default"
