"""The front door on problems that take milliseconds: what a run records, what it depends on, how it fails."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sealed
import torch
import torch.nn.functional as F
from flat import fit
from problems import normal, rng
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedual import methods
from fedual.algorithm.duals import Expectation
from fedual.errors import InputError
from fedual.models import build
from fedual.networks import Network
from fedual.networks.targets import Targets
from fedual.posterior import Posterior, Prediction, RegressionPrediction
from fedual.run import Run
from fedual.rundir import RunDirectory
from fedual.solvers import SGD

DIM = 43  # 4·5 + 5 + 5·3 + 3
SIZES = [9, 5, 12, 7]
SETTINGS = {"inputs": 4, "hidden": [5], "outputs": 3, "activation": "tanh"}
Pairs = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def _seed():
    """Of the models that tests make."""
    torch.manual_seed(0)


UNIT = Targets.of(0.0, 1.0)
"""The targets as they are."""


def mlp(outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def pairs(sizes: list[int] = SIZES, dtype: torch.dtype = torch.float64) -> Pairs:
    """Clients of unequal size with inputs of their own; classes are linear in the inputs."""
    truth = normal((4, 3), 99)
    x = [normal((n, 4), k) + normal((4,), 50 + k) for k, n in enumerate(sizes)]
    return [(own.to(dtype), (own @ truth).argmax(1)) for own in x]


def regression(of: Callable[[Tensor], Tensor], sizes: list[int] = SIZES) -> Pairs:
    """Clients with standard-normal inputs and the targets that a function makes of them."""
    inputs = [normal((n, 4), 30 + k) for k, n in enumerate(sizes)]
    return [(x, of(x)) for x in inputs]


def train(method: Any = "ivon-admm", rounds: int = 2, **options: Any) -> Run:
    defaults = {"batch_size": 4, "local_epochs": 1, "samples": 3, "device": "cpu"}
    options = {"model": mlp(), "clients": pairs(), **defaults, **options}
    return fit(options.pop("model"), options.pop("clients"), method, rounds, **options)


def pooled(clients: Pairs) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients])


def watch() -> tuple[list[dict[str, Tensor]], Any]:
    """A list that fills with λ_g and the clients' rows as they are before the first and after every round."""
    seen = []

    def look(run: Run, record: Any) -> None:
        seen.append({"lam_g": run.server.lam_g, **run.store.read(torch.arange(len(run.losses.data)))})

    return seen, look


class TestHistory:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_one_record_a_round_with_figures_at_the_mean_and_under_q(self, dtype):
        run = train(clients=pairs(dtype=dtype), model=mlp().to(dtype), test=pairs(dtype=dtype)[0], rounds=3)
        assert [record["round"] for record in run.history] == [1, 2, 3]
        facts = {
            "round",
            "active",
            "counted",
            "refused",
            "shortened",
            "primal",
            "dual",
            "norm",
            "bytes_up",
            "bytes_down",
            "limited",
            "held",
        }
        figures = {f"{name}{kind}" for name in ("accuracy", "nll", "brier", "ece") for kind in ("", "_mc")}
        assert all(record.keys() == facts | figures | {"seconds", "evaluation_seconds"} for record in run.history)
        assert all(record["active"] == record["counted"] == 4 and record["refused"] == 0 for record in run.history)
        assert run.posterior.mean.dtype == run.posterior.precision.dtype == dtype
        assert run.posterior.mean.shape == run.posterior.precision.shape == (DIM,)

    def test_the_figures_are_those_of_the_posterior(self):
        x, y = pairs()[0]
        run = train("fedavg", test=(x, y))
        f = run.posterior.module()(x).detach().numpy()
        log_p = f - np.log(np.exp(f).sum(1, keepdims=True))
        assert run.history[-1]["nll"] == pytest.approx(-log_p[np.arange(len(y)), y].mean())
        assert run.history[-1]["accuracy"] == (f.argmax(1) == y.numpy()).mean()
        assert "nll_mc" not in run.history[-1]  # a point estimate has no figures under q

    @pytest.mark.parametrize(
        ("method", "rows", "uploads", "downloads"),
        [
            (methods.ivon_admm(), 2, 1, 1),
            (methods.feddyn(), 1, 1, 1),
            (replace(methods.ivon_admm(), dual=Expectation(0.1)), 2, 2, 1),
            (methods.scaffold(), 1, 2, 2),
        ],
    )
    def test_bytes_are_those_of_the_vectors_that_travel(self, method, rows, uploads, downloads):
        clients = [(x.float(), y) for x, y in pairs()]
        for participation, active in ((1.0, 4), (0.5, 2)):
            run = train(method, model=mlp().float(), clients=clients, participation=participation)
            for record in run.history:
                assert record["active"] == active
                assert record["bytes_down"] == active * downloads * rows * DIM * 4
                assert record["bytes_up"] == record["counted"] * uploads * rows * DIM * 4

    def test_residuals_of_a_method_that_remembers_its_clients(self):
        seen, look = watch()
        run = train("fedadmm", rounds=4, participation=0.5, callbacks=[look])
        for before, after, record in zip(seen, seen[1:], run.history, strict=False):
            moved = (before["lam"] != after["lam"]).flatten(1).any(1)
            assert int(moved.sum()) == record["active"] == 2
            gaps = (after["lam"][moved] - before["lam_g"]).numpy()
            assert record["primal"] == pytest.approx(math.sqrt((gaps**2).sum() / 2))
            assert record["dual"] == pytest.approx(np.linalg.norm((after["lam_g"] - before["lam_g"]).numpy()))
            assert record["norm"] == pytest.approx(np.linalg.norm(after["lam_g"].numpy()))

    def test_residuals_of_ivon_admm_from_its_duals(self):
        """η_k grows by γ_k (λ_k − λ_g), so the primal residual is the root mean square of its change over γ_k."""
        seen, look = watch()
        run = train(methods.ivon_admm(rho=0.5, damping=0.2, unit=8.0), rounds=3, callbacks=[look])
        gamma = 0.5 * 0.2 * np.array(run.losses.data.sizes)[:, None, None] / 8
        for before, after, record in zip(seen, seen[1:], run.history, strict=False):
            gaps = (after["eta"] - before["eta"]).numpy() / gamma
            assert record["primal"] == pytest.approx(math.sqrt((gaps**2).sum() / 4))

    def test_no_test_set_no_figures(self):
        assert not any("accuracy" in record or "nll" in record for record in train().history)

    def test_evaluate_every_and_in_the_last_round(self):
        run = train(rounds=5, test=pairs()[0], evaluate_every=2)
        assert [record["round"] for record in run.history if "nll" in record] == [2, 4, 5]

    def test_callbacks_see_none_first_and_can_stop(self, tmp_path: Path):
        calls = []

        def stop_after_two(run: Run, record: Any) -> None:
            calls.append((record and record["round"], len(run.history), run.server.round))
            run.stop = len(run.history) == 2

        run = train(rounds=9, callbacks=[stop_after_two], out=tmp_path)
        assert calls == [(None, 0, 0), (1, 1, 1), (2, 2, 2)]
        assert len(run.history) == 2
        snapshot = RunDirectory.open(tmp_path).load()
        assert snapshot is not None
        assert snapshot.round == 2
        assert torch.equal(snapshot.server["lam_g"], train(rounds=2).server.lam_g)


class TestSettings:
    def test_the_cosine_schedule_is_in_the_size_of_the_steps(self):
        """One client, one full batch a round: ‖change of θ‖ = lr · ½(1 + cos(π r/R)) · ‖∇ mean loss‖."""
        x, y = pairs([8])[0]
        seen, look = watch()
        method = methods.fedavg(SGD(lr=0.3, optimiser="sgd"))
        run = train(method, 4, clients=[(x, y)], batch_size=8, schedule="cosine", callbacks=[look])
        for number, (before, record) in enumerate(zip(seen, run.history, strict=False)):
            model = run.posterior.module(before["lam_g"][0]).requires_grad_()
            gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
            assert record["dual"] == pytest.approx(0.3 * (1 + math.cos(math.pi * number / 4)) / 2 * norm)
        constant = train(method, 4, clients=[(x, y)], batch_size=8)
        assert not torch.allclose(constant.posterior.lam, run.posterior.lam)

    @pytest.mark.parametrize("schedule", ["constant", "cosine"])
    def test_the_decay_is_in_the_size_of_the_steps(self, schedule):
        """Two rounds of one step are two steps of gradient descent, the second decay · lr (· ½ under a cosine)."""
        x, y = pairs([8])[0]
        method = methods.fedavg(SGD(lr=0.3, optimiser="sgd"))
        run = train(method, 2, clients=[(x, y)], batch_size=8, schedule=schedule, decay=0.7)
        model = mlp()
        for rate in (0.3, 0.3 * 0.7 * (0.5 if schedule == "cosine" else 1)):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            torch.optim.SGD(model.parameters(), lr=rate).step()
        expected = torch.cat([value.flatten() for value in model.parameters()]).detach()
        torch.testing.assert_close(run.posterior.mean, expected, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("decay", [0, -0.5, 1.5, math.nan, "slow", True])
    def test_a_decay_that_is_none_is_refused(self, decay):
        with pytest.raises(InputError, match=f"decay = {decay!r}: it must be a positive, finite number of at most 1"):
            train("fedavg", decay=decay)

    def test_a_rate_that_would_decay_to_nothing_is_refused_before_the_first_round(self):
        with pytest.raises(InputError, match=r"reach = 0\.0: it must be a positive"):
            train("fedavg", 200, decay=0.01, callbacks=[lambda run, record: pytest.fail("it started")])

    def test_a_resumed_run_keeps_its_decay(self, tmp_path: Path):
        whole = train("fedavg", 3, decay=0.9)
        train("fedavg", 1, decay=0.9, out=tmp_path)
        with pytest.raises(InputError, match=r"decay = 0\.9, not 1\.0: resume with the same settings"):
            train("fedavg", 3, out=tmp_path, resume=True)
        assert torch.equal(train("fedavg", 3, decay=0.9, out=tmp_path, resume=True).posterior.lam, whole.posterior.lam)

    def test_folders_older_than_a_setting_are_resumed_with_its_default(self, tmp_path: Path):
        """A config.json as it was before the settings `decay` and `precision`."""
        whole = train("fedprox", 2)
        train("fedprox", 1, out=tmp_path)
        file = tmp_path / "config.json"
        config = sealed.content(file)
        del config["training"]["decay"], config["execution"]["precision"]
        sealed.age(file, config)
        with pytest.raises(InputError, match=r"training\.decay = 1\.0, not 0\.9"):
            train("fedprox", 2, decay=0.9, out=tmp_path, resume=True)
        assert torch.equal(train("fedprox", 2, out=tmp_path, resume=True).posterior.lam, whole.posterior.lam)
        assert json.loads(file.read_text())["training"]["decay"] == 1.0

    def test_whole_weights_are_repeated_examples(self):
        method = methods.fedavg(SGD(lr=0.3, optimiser="sgd"))
        weights = [torch.randint(1, 4, (n,), generator=rng(n)) for n in SIZES]
        repeat = lambda values, times: values.repeat_interleave(times, 0)
        repeated = [(repeat(x, w), repeat(y, w)) for (x, y), w in zip(pairs(), weights, strict=True)]
        one = train(method, 3, weights=[w.double() for w in weights], batch_size=99)
        other = train(method, 3, clients=repeated, batch_size=99)
        torch.testing.assert_close(one.posterior.mean, other.posterior.mean, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(train(method, 3, batch_size=99).posterior.mean, one.posterior.mean)

    def test_frozen_parameters_stay_and_do_not_travel(self):
        run = train("fedavg", trainable=["2"])
        before, after = mlp().state_dict(), run.posterior.module().state_dict()
        assert torch.equal(after["0.weight"], before["0.weight"])
        assert not torch.equal(after["2.weight"], before["2.weight"])
        assert run.history[0]["bytes_down"] == 4 * (5 * 3 + 3) * 8

    def test_datasets_are_clients_too(self):
        sets = [TensorDataset(*pair) for pair in pairs()]
        one, other = train(test=pairs()[0]), train(clients=sets, test=sets[0])
        assert torch.equal(one.posterior.lam, other.posterior.lam)
        assert one.history[-1]["nll"] == other.history[-1]["nll"]

    def test_embeddings_take_whole_numbers(self):
        model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3))
        words = [torch.randint(7, (n, 2), generator=rng(n)) for n in SIZES]
        clients = [(x, x[:, 0] % 3) for x in words]
        run = train(methods.fedavg(SGD(lr=0.1)), 5, model=model, clients=clients, local_epochs=5, test=pooled(clients))
        assert run.history[-1]["nll"] < run.history[0]["nll"] / 2

    def test_a_run_is_a_function_of_its_seed_and_modes(self):
        lam = lambda **options: train(**options).posterior.lam
        first = lam(seed=5)
        assert torch.equal(first, lam(seed=5))
        others = [{"seed": 6}, {"noise": "independent"}, {"order": "independent"}, {"noise": "shared-fixed"}]
        for changed in (*others, {"order": "shared-fixed"}, {"participation": 0.5}, {"local_steps": 2}):
            assert not torch.equal(first, lam(**{"seed": 5, **changed})), changed

    def test_the_caller_s_model_and_generator_are_left_alone(self):
        model, state = mlp(), torch.get_rng_state()
        train(model=model, test=pairs()[0])
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), mlp().parameters(), strict=True))
        assert torch.equal(state, torch.get_rng_state())

    def test_the_chunk_is_recorded(self, tmp_path: Path):
        assert train(chunk=3).config["execution"]["chunk"] == 3
        chosen = train(out=tmp_path).config["execution"]["chunk"]
        assert 1 <= chosen <= 4
        assert RunDirectory.open(tmp_path).config["execution"]["chunk"] == chosen


class TestPosterior:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("name", ["ivon-admm", "fedlap-cov", "fedavg"])
    def test_saved_and_loaded_it_predicts_the_same(self, tmp_path: Path, name, dtype):
        clients, recipe = pairs(dtype=dtype), {"model": "mlp", "settings": SETTINGS}
        model = Network(build("mlp", **SETTINGS).to(dtype), recipe=recipe)
        run = train(name, model=model, clients=clients, out=tmp_path)
        loaded = Posterior.load(tmp_path / "posterior.safetensors")
        assert torch.equal(loaded.lam, run.posterior.lam)
        x = clients[0][0]
        prediction = loaded.predict(x, samples=4)
        assert isinstance(prediction, Prediction)
        assert prediction.probabilities.shape == (SIZES[0], 3)
        for own, its in zip(prediction, run.posterior.predict(x, samples=4), strict=True):
            assert its is not None
            assert torch.equal(own, its)

    def test_least_squares_recovers_the_function_that_made_the_data(self):
        """Without noise the clients agree on the optimum, which federated averaging then reaches."""
        truth = np.array([1.0, -2.0, 0.5, 3.0])
        clients = regression(lambda x: x @ torch.tensor(truth) + 0.7)
        method = methods.fedavg(SGD(lr=0.3, optimiser="sgd"))
        run = train(method, 20, model=nn.Linear(4, 1), clients=clients, loss="mse", batch_size=99, local_steps=20)
        x = torch.eye(4)
        prediction = run.posterior.predict(x)
        assert isinstance(prediction, RegressionPrediction)
        torch.testing.assert_close(prediction.mean[:, 0], torch.tensor(truth + 0.7), rtol=1e-6, atol=1e-6)

    @staticmethod
    def ridge(clients: Pairs, delta: float) -> tuple[np.ndarray, np.ndarray]:
        """The pooled posterior of linear regression with unit noise: mean, and matrix of precision."""
        x, y = (values.numpy() for values in pooled(clients))
        x = np.hstack([x, np.ones((len(x), 1))])
        precision = x.T @ x + delta * np.eye(x.shape[1])
        return np.linalg.solve(precision, x.T @ y), precision

    def test_fedlap_reaches_the_pooled_ridge_solution(self):
        """Its fixed point is exact, δθ_g = −Σ ∇ℓ_k(θ_g).

        With ten examples a client and δ = 30 a local step shrinks the error by 0.3 or less, a round by about 0.6.
        """
        clients = regression(lambda x: x.sum(1) + x[:, 0] ** 2, [10, 10, 10])
        mean, _ = self.ridge(clients, 30.0)
        method = methods.fedlap(delta=30.0, damping=0.7, solver=SGD(lr=0.22, optimiser="sgd"))
        model = Network(nn.Linear(4, 1), targets=UNIT)
        run = train(method, 30, model=model, clients=clients, loss="mse", batch_size=10, local_steps=20)
        torch.testing.assert_close(run.posterior.mean, torch.tensor(mean), rtol=1e-5, atol=1e-5)

    def test_ivon_admm_comes_close_to_the_pooled_ridge_posterior(self):
        """A diagonal Gaussian has the pooled mean and the diagonal of the pooled precision.

        Its steps are noisy (seeds differ by 0.05 posterior standard deviations and 7 % of the precision), so a fifth
        of each is asked for; one client alone is more than half a standard deviation and a third off.
        """
        clients = regression(lambda x: x.sum(1) + normal(len(x), len(x)), [40, 25, 60])
        mean, precision = self.ridge(clients, 1.0)
        method = methods.build(
            "ivon-admm", rho=1.0, damping=0.5, tau=1.0, lr=0.1, h0=1.0, beta2=0.98, samples=2, clip=0.0
        )
        options = {"loss": "mse", "batch_size": 64, "local_steps": 20, "schedule": "cosine", "noise": "independent"}
        run = train(method, 20, model=Network(nn.Linear(4, 1), targets=UNIT), clients=clients, **options)
        error = np.abs(run.posterior.mean.numpy() - mean) * np.sqrt(np.diag(precision))
        assert error.max() < 0.2
        np.testing.assert_allclose(run.posterior.precision.numpy(), np.diag(precision), rtol=0.2)
        for client in clients:
            own, few = self.ridge([client], 1.0)
            assert np.abs((own - mean) * np.sqrt(np.diag(precision))).max() > 0.5
            assert np.abs(np.diag(few) / np.diag(precision) - 1).max() > 1 / 3

    @pytest.mark.parametrize(
        ("loss", "targets", "by_hand"),
        [
            ("binary_cross_entropy", lambda x: (x[:, 0] > 0).double(), lambda f, y: np.log1p(np.exp(f)) - y * f),
            ("poisson", lambda x: x[:, 0].abs().round(), lambda f, y: np.exp(f) - y * f),
            (lambda f, y: (f[:, 0] - y).abs(), lambda x: x[:, 0], lambda f, y: np.abs(f - y)),
        ],
    )
    def test_other_losses_are_reported_and_predicted_with(self, loss, targets, by_hand):
        clients = regression(targets)
        test = clients[0]
        run = train("ivon-admm", 3, model=mlp(1), clients=clients, loss=loss, test=test)
        f = run.posterior.module()(test[0])[:, 0].detach()
        assert run.history[-1]["loss"] == pytest.approx(by_hand(f.numpy(), test[1].numpy()).mean())
        assert run.history[-1]["loss_mc"] != run.history[-1]["loss"]
        prediction = run.posterior.predict(test[0], samples=0)
        assert isinstance(prediction, RegressionPrediction)
        torch.testing.assert_close(prediction.mean[:, 0], f)
