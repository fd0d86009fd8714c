"""Linear models get the posterior of the pooled data, with its full covariance: oracles in NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedual
from fedual import methods, scenarios
from fedual.errors import InputError
from fedual.families import Full
from fedual.networks import Clients, Network
from fedual.networks.affine import Affine, is_affine
from fedual.posterior import Posterior
from fedual.predict import open_run
from fedual.report.run_data import read as read_run
from fedual.report.verdict import verdict
from fedual.scenarios.federation import execute
from fedual.settings import Execution, LocalTraining
from fedual.solvers import IVON, Newton

Sites = list[Any]  # of (x, y) or (x, y, weights)


def table(rows: int = 60, columns: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, columns)) * [1.0, 3.0, 0.2, 1.0][:columns] + [0.0, 1.0, 0.5, -2.0][:columns]
    return x, random.normal(size=rows)


def sites(x: np.ndarray, y: np.ndarray, cuts: list[int], *more: np.ndarray) -> Sites:
    columns = [torch.tensor(each).tensor_split(cuts) for each in (x, y, *more)]
    return list(zip(*columns, strict=True))


def prior_precision(x: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """Of slopes and the intercept, written once more: N(0, (2.5/sd)²), and the intercept's that takes up the means."""
    centre = np.average(x, 0, weight)
    sd = np.sqrt(np.average((x - centre) ** 2, 0, weight))
    return np.append((sd / 2.5) ** 2, (10 * (1 + np.abs(centre / sd).max())) ** -2.0)


def ridge(x: np.ndarray, z: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and precision, for noise of variance 1."""
    design = np.column_stack([x, np.ones(len(x))])
    precision = design.T @ (weight[:, None] * design) + np.diag(prior_precision(x, weight))
    return np.linalg.solve(precision, design.T @ (weight * z)), precision


def softmax_map(x: np.ndarray, y: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Mode and Hessian of a multinomial regression by Newton's method; parameters as nn.Linear has them."""
    design, truth = np.column_stack([x, np.ones(len(x))]), np.eye(classes)[y]
    delta = np.tile(prior_precision(x), classes)
    theta, step, hessian = np.zeros(len(delta)), np.ones(1), np.eye(1)
    for _ in range(100):
        logits = design @ theta.reshape(classes, -1).T
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        gradient = ((p - truth).T @ design).ravel() + delta * theta
        bend = np.einsum("nc,cd->ncd", p, np.eye(classes)) - p[:, :, None] * p[:, None, :]
        hessian = np.einsum("ncd,ni,nj->cidj", bend, design, design).reshape(len(delta), -1) + np.diag(delta)
        step = np.linalg.solve(hessian, gradient)
        theta = theta - step
    assert np.abs(step).max() < 1e-10
    return theta, hessian


def as_linear(matrix: np.ndarray, classes: int) -> np.ndarray:
    """Reorder (w_1, b_1, w_2, b_2, …) to nn.Linear's (w_1, w_2, …, b_1, b_2, …), in every axis."""
    width = matrix.shape[0] // classes
    order = [c * width + j for c in range(classes) for j in range(width - 1)]
    order += [c * width + width - 1 for c in range(classes)]
    return matrix[np.ix_(*[order] * matrix.ndim)]


def regression(rows: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x, noise = table(rows, seed=seed)
    return x, 150 + x @ [40.0, -3.0, 9.0, 1.0] + 30 * noise


class TestRegression:
    @pytest.mark.parametrize("weighted", [False, True])
    def test_it_is_the_pooled_ridge_posterior_after_two_rounds(self, weighted: bool):
        x, y = regression()
        weight = np.random.default_rng(5).uniform(0.5, 2, len(x)) if weighted else np.ones(len(x))
        clients = sites(x, y, [25, 30], *([weight] if weighted else []))
        run = fedual.fit(nn.Linear(4, 1), clients, loss="mse", rounds=2)
        assert (run.method.name, run.mode, type(run.method.solver)) == ("newton", "bayes", Newton)
        centre = weight @ y / weight.sum()
        sd = np.sqrt(weight @ (y - centre) ** 2 / weight.sum())
        design, z = np.column_stack([x, np.ones(len(x))]), (y - centre) / sd
        mean, precision = ridge(x, z, weight)
        np.testing.assert_allclose(run.posterior.mean, mean, rtol=1e-8)
        np.testing.assert_allclose(run.trained.family.precision(run.trained.lam), precision, rtol=1e-8)
        # the noise: residual squares over the degrees of freedom that are left, as the variance of a Student t
        left = weight.sum() - np.trace(np.linalg.solve(precision, design.T @ (weight[:, None] * design)))
        noise = (weight @ (z - design @ mean) ** 2 + 0.01) / (left + 0.01 - 2)
        assert float(run.posterior.noise[0]) == pytest.approx(noise, rel=1e-8)  # pyright: ignore[reportOptionalSubscript]
        covariance = noise * np.linalg.inv(precision)
        np.testing.assert_allclose(Full().covariance(run.posterior.lam), covariance, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(run.posterior.summary()["sd"], np.sqrt(np.diag(covariance)), rtol=1e-8)
        new = np.column_stack([x[:7] + 1, np.ones(7)])
        prediction: Any = run.posterior.predict(torch.tensor(x[:7] + 1))
        variance = np.einsum("ij,jk,ik->i", new, covariance, new)
        np.testing.assert_allclose(prediction.mean[:, 0], centre + sd * new @ mean, rtol=1e-8)
        np.testing.assert_allclose(prediction.standard_deviation[:, 0], sd * np.sqrt(variance), rtol=1e-8)
        np.testing.assert_allclose(prediction.observation_sd[:, 0], sd * np.sqrt(variance + noise), rtol=1e-8)

    def test_several_outputs(self):
        x, y = regression()
        both = np.column_stack([y, y**2])
        run = fedual.fit(nn.Linear(4, 2), sites(x, both, [25]), loss="mse", rounds=2)
        for column in range(2):
            z = (both[:, column] - both[:, column].mean()) / both[:, column].std()
            mean, _ = ridge(x, z, np.ones(len(x)))
            parts = run.posterior.named_parameters()
            np.testing.assert_allclose(parts["weight"][column], mean[:-1], rtol=1e-8)
            assert float(parts["bias"][column]) == pytest.approx(mean[-1], rel=1e-8)

    @pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
    def test_the_unit_and_origin_of_inputs_do_not_matter(self, loss: str):
        x, y = regression(200)
        target = y if loss == "mse" else (y > y.mean()).astype(int)
        other = x * [1e3, 1e-3, 1.0, 50.0] + [0.0, 0.002, 3.0, -20.0]
        outputs = 1 if loss == "mse" else 2
        runs = [fedual.fit(nn.Linear(4, outputs), sites(each, target, [80]), loss=loss) for each in (x, other)]
        found = []
        for run, each in zip(runs, (x, other), strict=True):
            logits: Any = run.posterior.network(run.posterior.mean, torch.tensor(each))
            found.append(logits.softmax(-1) if outputs == 2 else logits)
        assert float((found[0] - found[1]).abs().max()) < 2e-4  # the intercept's prior is wide, not flat


def labels(x: np.ndarray, classes: int, seed: int = 1) -> np.ndarray:
    random = np.random.default_rng(seed)
    logits = x @ random.normal(size=(x.shape[1], classes)) + random.gumbel(size=(len(x), classes))
    return logits.argmax(1)


class TestClassification:
    @pytest.mark.parametrize("classes", [2, 4])
    def test_it_is_the_pooled_mode_with_its_hessian(self, classes: int):
        x, _ = table(120)
        y = labels(x, classes)
        order = np.argsort(y, kind="stable")  # sites with one class each
        run = fedual.fit(nn.Linear(4, classes), sites(x[order], y[order], [30, 40, 90]), rounds=12)
        mode, hessian = softmax_map(x, y, classes)
        covariance = np.linalg.inv(as_linear(hessian, classes))
        np.testing.assert_allclose(run.posterior.mean, as_linear(mode, classes), atol=1e-6, rtol=1e-6)
        np.testing.assert_allclose(Full().covariance(run.posterior.lam), covariance, atol=1e-6, rtol=1e-6)
        sentence = f"q_g is the posterior of {5 * classes} parameters with their full covariance; it counts"
        assert run.posterior.about == f"{sentence} every example once."

    @pytest.mark.parametrize("away", [1e2, 1e4])
    def test_inputs_far_from_their_origin_are_no_reason_to_stop(self, away: float):
        x = np.random.default_rng(0).normal(size=(120, 3))
        y = labels(x, 2)
        contrasts = []
        for far in (0.0, away):
            run = fedual.fit(nn.Linear(3, 2), sites(x + far, y, [30, 60]), rounds=12)
            outputs: Any = run.posterior.network(run.posterior.mean, torch.tensor(x + far))
            contrasts.append(outputs.diff(dim=1))
        assert float((contrasts[0] - contrasts[1]).abs().max()) < 0.01

    def test_inputs_too_far_from_their_origin_are_refused(self):
        x = np.random.default_rng(0).normal(size=(120, 3))
        with pytest.raises(InputError, match=r"An input.s mean is 1e\+06 times its sd.*subtract its mean first"):
            fedual.fit(nn.Linear(3, 2), sites(x + 1e6, labels(x, 2), [30]))

    def test_any_split_and_any_initialisation_give_the_same(self):
        x, _ = table(120)
        y = labels(x, 3)
        runs = [fedual.fit(nn.Linear(4, 3), sites(x, y, cuts), rounds=12) for cuts in ([], [20], [3, 60, 61, 100])]
        for run in runs[1:]:
            torch.testing.assert_close(run.posterior.lam, runs[0].posterior.lam, rtol=1e-7, atol=1e-7)

    def test_a_client_that_is_absent_counts_with_what_it_last_said(self):
        x, _ = table(120)
        y = labels(x, 2)
        clients = sites(x, y, [30, 60, 90])
        all_, some = (
            fedual.fit(nn.Linear(4, 2), clients, rounds=40, local=LocalTraining(participation=share))
            for share in (1.0, 0.5)
        )
        torch.testing.assert_close(all_.posterior.mean, some.posterior.mean, rtol=1e-6, atol=1e-6)

    def test_a_trained_head_on_a_frozen_backbone(self):
        x, _ = table(120)
        y = labels(x, 2)
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        features = body(torch.tensor(x)).detach().numpy()
        network = Network(nn.Sequential(body, nn.Linear(3, 2)), trainable=["1"])
        run = fedual.fit(network, sites(x, y, [50]), rounds=12)
        assert run.method.name == "newton"
        mode, _ = softmax_map(features, y, 2)
        np.testing.assert_allclose(run.posterior.mean, as_linear(mode, 2), atol=1e-6)

    def test_many_rows_are_taken_in_chunks(self, monkeypatch: pytest.MonkeyPatch):
        x, _ = table(120)
        y = labels(x, 3)
        clients = Clients.from_pairs(sites(x, y, [50]))
        losses = Affine(Network(nn.Linear(4, 3)), clients, clients.y, "cross_entropy")
        theta = torch.randn(2, 15)
        whole, prior = losses.moments([0, 1], theta), losses.prior()
        monkeypatch.setattr("fedual.networks.affine.CHUNK", 15 * 3 * 7)
        monkeypatch.setattr("fedual.networks.affine.KEPT", 0)
        other = Affine(losses.network, clients, clients.y, "cross_entropy")
        for a, b in zip(whole, other.moments([0, 1], theta), strict=True):
            torch.testing.assert_close(a, b)
        assert other.prior() == pytest.approx(prior)
        assert not other.kept


class TestWhoGetsIt:
    x, y = table(60)
    clients: Sites = sites(x, labels(x, 2), [20])

    def method(self, model: nn.Module, *args: Any, **options: Any) -> Any:
        return fedual.fit(model, options.pop("clients", self.clients), *args, rounds=1, **options).method.solver

    def test_networks_with_other_outputs_keep_ivon_admm(self):
        kink = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        deep = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        dropped = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
        bounded = nn.Sequential(nn.Linear(4, 2), nn.Hardtanh(-50, 50))
        for model in (kink, deep, dropped, bounded):
            assert isinstance(self.method(model), IVON)

    def test_a_model_of_501_parameters_keeps_ivon_admm(self):
        for width, kept in ((500, False), (501, True)):
            clients = [(torch.randn(3, width), torch.randn(3)) for _ in range(2)]
            solver = self.method(nn.Linear(width, 1, bias=False), clients=clients, loss="mse")
            assert isinstance(solver, IVON) == kept

    def test_settings_other_losses_and_a_point_keep_ivon_admm(self):
        linear = nn.Linear(4, 2)
        for options in ({"posterior": "point"}, {"local": LocalTraining(schedule="cosine")}):
            assert isinstance(self.method(linear, **options), IVON)
        for method in (methods.spec("ivon-admm", momentum=0.3), methods.ivon_admm()):
            assert isinstance(self.method(linear, method), IVON)
        targets = [(x, y[:, None].double()) for x, y in self.clients]
        assert isinstance(self.method(nn.Linear(4, 1), clients=targets, loss="binary_cross_entropy"), IVON)

    def test_by_name_other_losses_have_it_too(self):
        targets = [(x, y[:, None].double()) for x, y in self.clients]
        one = fedual.fit(nn.Linear(4, 1), targets, "newton", rounds=8, loss="binary_cross_entropy")
        assert one.history[-1]["dual"] < 1e-6 * one.history[-1]["norm"]
        assert one.mode == "bayes"
        flat = fedual.fit(nn.Linear(4, 1), targets, methods.spec("newton", delta=0.5), rounds=1, loss="mse")
        assert flat.method.delta == 0.5

    def test_an_engine_that_is_chosen_does_not_matter(self):
        runs = [
            fedual.fit(nn.Linear(4, 2), self.clients, rounds=2, execution=Execution(engine=engine))
            for engine in ("vectorised", "sequential")
        ]
        assert torch.equal(runs[0].posterior.lam, runs[1].posterior.lam)

    def test_inputs_in_another_unit_are_no_reason_to_warn(self, caplog: pytest.LogCaptureFixture):
        fedual.fit(nn.Linear(4, 2), [(1e3 * x, y) for x, y in self.clients], rounds=1)
        assert not caplog.records

    def test_newton_refuses_other_networks(self):
        words = "outputs of Sequential are not affine in its 23 parameters"
        with pytest.raises(InputError, match=words):
            self.method(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), "newton")
        with pytest.raises(InputError, match="cannot take the clients' inputs"):
            self.method(nn.Linear(5, 2), "newton")

    def test_embeddings_are_linear(self):
        model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten())
        clients = Clients.from_pairs([(torch.arange(5)[:, None], torch.tensor([0, 1, 0, 1, 1]))] * 2)
        assert is_affine(Network(model), clients)


class TestFiles:
    def test_a_resumed_run_ends_with_the_same_bits(self, tmp_path: Any):
        x, _ = table(60)
        clients = sites(x, labels(x, 2), [20])
        fit = lambda rounds, out, resume=False: fedual.fit(
            nn.Linear(4, 2).float(), clients, rounds=rounds, out=tmp_path / out, resume=resume, test=clients[0]
        )
        whole, part = fit(4, "whole"), fit(2, "part")
        resumed = fit(4, "part", True)
        assert not torch.equal(part.posterior.lam, whole.posterior.lam)
        assert torch.equal(resumed.posterior.lam, whole.posterior.lam)
        assert resumed.history[-1]["nll_bayes"] == whole.history[-1]["nll_bayes"]

    def test_a_run_of_ivon_admm_goes_on_as_it_was(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
        x, _ = table(60)
        fit = lambda resume: fedual.fit(
            nn.Linear(4, 1), sites(x, x[:, 0], [20]), rounds=2, loss="mse", out=tmp_path / "run", resume=resume
        )
        with monkeypatch.context() as before:
            before.setattr("fedual.fitting.wants_full", lambda *facts: False)
            old = fit(False)
        assert torch.equal(fit(True).posterior.lam, old.posterior.lam)

    def test_a_model_in_single_precision_loads_it(self, tmp_path: Any):
        x, y = regression()
        model = nn.Linear(4, 1).float()
        clients = [(x.float(), y.float()) for x, y in sites(x, y, [20])]
        posterior = fedual.fit(model, clients, loss="mse", rounds=2).posterior
        assert posterior.lam.dtype == torch.float64
        posterior.save(tmp_path / "q.safetensors")
        again = Posterior.load(tmp_path / "q.safetensors", model)
        assert torch.equal(again.lam, posterior.lam)
        assert model.weight.dtype == torch.float32
        for a, b in zip(again.predict(clients[0][0]), posterior.predict(clients[0][0]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        model.load_state_dict(posterior.state_dict())

    def test_an_exported_regression_is_what_predict_says(self, tmp_path: Any):
        x, y = regression()
        posterior = fedual.fit(nn.Linear(4, 1), sites(x, y, [20]), loss="mse", rounds=2).posterior
        posterior.export(tmp_path / "p.pt2", torch.tensor(x[:2]))
        exported = torch.export.load(tmp_path / "p.pt2").module()(torch.tensor(x[:5]))
        for a, b in zip(exported, posterior.predict(torch.tensor(x[:5])), strict=True):
            torch.testing.assert_close(a, b)

    def test_a_scenario_runs_reports_and_predicts_with_it(self, tmp_path: Any):
        x, y = regression()
        rows = [
            f"{','.join(map(str, row))},{target},{'ab'[k % 2]}"
            for k, (row, target) in enumerate(zip(x, y, strict=True))
        ]
        (tmp_path / "all.csv").write_text("\n".join(["a,b,c,d,y,site", *rows]))
        (tmp_path / "linear_of_a_test.py").write_text("from torch import nn\n\ndef build(): return nn.Linear(4, 1)\n")
        (tmp_path / "s.toml").write_text(
            'title = "A table"\n[data]\nfile = "all.csv"\ntarget = "y"\ntest_fraction = 0.2\n'
            '[split]\nkind = "column"\ncolumn = "site"\n'
            '[model]\nfunction = "linear_of_a_test:build"\n[train]\nrounds = 3\nloss = "mse"\n'
        )
        scenario = scenarios.load(str(tmp_path / "s.toml"))
        run = execute(scenario, 0, out=tmp_path / "run")
        assert run.method.name == "newton"
        page = read_run(tmp_path / "run")
        assert (page.method, page.about) == ("newton", run.posterior.about)
        assert any("Full covariance" in remark for remark in verdict(page))
        finished = open_run(tmp_path / "run", nn.Linear(4, 1).float())
        inputs = torch.tensor(x[:3]).to(finished.dtype)
        again, first = finished.posterior.predict(inputs), run.posterior.predict(inputs)
        for a, b in zip(again, first, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)

    def test_methods_are_compared_with_it(self):
        x, y = regression()
        found = fedual.compare(
            ["newton", "fedavg"], nn.Linear(4, 1), sites(x, y, [20]), test=sites(x, y, [])[0], loss="mse", rounds=2
        )
        figures = found.summaries()
        assert figures["newton"]["rmse"]["mean"] < figures["fedavg"]["rmse"]["mean"]
        assert "every example once" in repr(found)
