"""Regressions in the targets' own unit: trained on standard units, seen in those of the data."""

import json
from pathlib import Path
from typing import Any

import flat
import numpy as np
import pytest
import sealed
import torch
from scipy.stats import norm
from torch import Tensor, nn

from fedual import methods
from fedual.errors import DataError, InputError
from fedual.families import Diagonal, Full, Gaussian
from fedual.metrics import RegressionPrediction
from fedual.models import build
from fedual.networks import Clients, Draws, Minibatches, Network
from fedual.networks.targets import Targets
from fedual.posterior import Posterior
from fedual.report.run_data import read
from fedual.report.verdict import verdict
from fedual.run import Run
from fedual.rundir import artifacts, checksum
from fedual.solvers import SGD

SIZES = [12, 7, 20]
SETTINGS = {"inputs": 3, "hidden": [4], "outputs": 2, "activation": "tanh"}
OPTIONS: dict[str, Any] = {"rounds": 2, "loss": "mse", "local_epochs": 2, "batch_size": 8, "progress": False}


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def sites(outputs: tuple[int, ...] = (2,), offset: float = 300.0, scale: float = 80.0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    weights = draw(3, *outputs)
    pairs = [(x := draw(n, 3), torch.tensordot(x, weights, 1) + 0.5 * draw(n, *outputs)) for n in SIZES]
    return [(x, offset + scale * y) for x, y in pairs]


def model(outputs: int = 2, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build("mlp", **{**SETTINGS, "outputs": outputs})


def train(clients: Any = None, network: Any = None, **options: Any) -> Run:
    return flat.fit(network or model(), clients or sites(), **{**OPTIONS, **options})


def predicted(posterior: Posterior, x: Tensor, **options: Any) -> RegressionPrediction:
    found = posterior.predict(x, **options)
    assert isinstance(found, RegressionPrediction)
    return found


def posterior(family: Gaussian, matrix: np.ndarray, mean: np.ndarray, **fields: Any) -> Posterior:
    network = Network(nn.Linear(len(mean), 1, bias=False), targets=fields.pop("targets", None))
    lam = family.natural(torch.tensor(mean), torch.tensor(matrix))
    return Posterior(network, family, lam, loss="mse", **fields)


@pytest.mark.parametrize("method", ["ivon-admm", "fedlap-cov", "fedavg"])
def test_a_run_does_not_depend_on_the_unit_of_the_targets(method: str):
    """With y ↦ a + b y everything that is shown changes as the unit does."""
    plain, moved = (train(sites(offset=a, scale=b), method=method) for a, b in ((0.0, 1.0), (1e6, 40.0)))
    torch.testing.assert_close(moved.posterior.lam, plain.posterior.lam, rtol=1e-6, atol=1e-8)
    x = sites()[1][0]
    one, other = (predicted(run.posterior, x) for run in (plain, moved))
    torch.testing.assert_close(other.mean, 1e6 + 40 * one.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(other.standard_deviation, 40 * one.standard_deviation, rtol=1e-6, atol=1e-9)
    assert one.observation_sd is not None
    assert other.observation_sd is not None
    torch.testing.assert_close(other.observation_sd, 40 * one.observation_sd, rtol=1e-6, atol=1e-9)


def test_figures_are_in_the_targets_unit():
    clients = sites()
    run = train(clients[:2], test=clients[2])
    record, (x, y) = run.history[-1], clients[2]
    f = predicted(run.posterior, x, samples=0).mean
    assert record["rmse"] == pytest.approx(float((f - y).square().mean().sqrt()))
    assert record["r2"] == pytest.approx(float((1 - (f - y).square().sum(0) / (y - y.mean(0)).square().sum(0)).mean()))
    targets = Clients.from_pairs(clients[:2]).targets()
    density = norm.logpdf(y.numpy(), f.numpy(), targets.sd.numpy())
    assert record["nll"] == pytest.approx(-density.mean())


def test_the_report_has_the_noise_and_how_it_fits_the_test_set(tmp_path: Path):
    clients = sites()
    q = train(clients[:2], test=clients[2], out=tmp_path).posterior
    kept, found = artifacts.read_regression(tmp_path), predicted(q, clients[2][0], seed=Draws(0).evaluation(2))
    assert kept is not None
    assert found.observation_sd is not None
    assert q.noise is not None
    assert q.network.targets is not None
    np.testing.assert_allclose(kept["noise_sd"], q.noise.sqrt() * q.network.targets.sd)
    distribution, y = norm(found.mean.numpy(), found.observation_sd.numpy()), clients[2][1].numpy()
    assert kept["nll"] == pytest.approx(-distribution.logpdf(y).mean())  # pyright: ignore[reportAttributeAccessIssue]
    assert kept["coverage"] == pytest.approx((abs(distribution.cdf(y) - 0.5) <= 0.475).mean())
    (remark,) = (one for one in verdict(read(tmp_path)) if one.head == "Noise")
    assert f"cover {kept['coverage']:.1%} of {SIZES[2]} test targets" in remark.text
    sealed.reseal(tmp_path / "regression.json", {})
    with pytest.raises(DataError, match=r"regression\.json .* noise_sd is missing"):
        artifacts.read_regression(tmp_path)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("outputs", "shape"), [(1, ()), (1, (1,)), (2, (2,))])
def test_both_engines_agree(weights: bool, outputs: int, shape: tuple[int, ...]):
    own = [torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.5 for n in SIZES] if weights else None
    runs = [
        train(sites(shape), model(outputs), weights=own, engine=engine, test=sites(shape)[0])
        for engine in ("vectorised", "sequential")
    ]
    one, other = (run.posterior for run in runs)
    torch.testing.assert_close(one.lam, other.lam, rtol=1e-8, atol=1e-10)
    assert one.noise is not None
    assert other.noise is not None
    torch.testing.assert_close(one.noise, other.noise)
    assert runs[0].history[-1]["rmse"] == pytest.approx(runs[1].history[-1]["rmse"])


def test_a_callable_loss_sees_standard_units_where_the_network_has_them():
    """The curvature of the Laplace solver and the evaluation take the same targets as the gradients."""
    square = lambda f, y: (f - y).square().sum(-1) / 2
    network = Network(model(), targets=Clients.from_pairs(sites()).targets())
    one, other = (train(network=network, method="fedlap-cov", loss=loss, test=sites()[0]) for loss in ("mse", square))
    torch.testing.assert_close(one.posterior.lam, other.posterior.lam)
    f, y = one.posterior.network(one.posterior.mean, sites()[0][0]), network.standardised(sites()[0][1])
    assert other.history[-1]["loss"] == pytest.approx(float(square(f, y).mean()))


def test_other_losses_keep_their_targets():
    run = train(sites((), 5.0, 0.0), model(1), loss="poisson")
    assert run.posterior.network.targets is None
    assert run.posterior.noise is None
    assert "targets" not in run.config
    found = predicted(run.posterior, sites()[0][0])
    assert found.observation_sd is None
    with pytest.raises(InputError, match='Only the loss "mse"'):
        found.quantiles(0.5)


def test_constant_targets_are_predicted():
    clients, method = sites((), 7.0, 0.0), methods.fedavg(SGD(lr=0.1, optimiser="sgd"))
    run = train(clients, nn.Linear(3, 1), method=method, rounds=20, test=clients[0])
    assert run.config["targets"] == {"mean": [7.0], "sd": [1.0]}
    assert "r2" not in run.history[-1]
    assert float((predicted(run.posterior, sites()[0][0]).mean - 7).abs().max()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_offset_that_is_huge_beside_the_spread(dtype: torch.dtype):
    """y = 10⁶ ± 1 in double precision: a network of single precision does not lose the digits."""
    clients = [(x.to(dtype), y) for x, y in sites((), 1e6, 1.0)]
    run = train(clients, model(1).to(dtype), rounds=20, test=clients[0])
    assert run.posterior.lam.dtype == dtype
    assert run.history[-1]["rmse"] < 0.9
    assert run.history[-1]["r2"] > 0.5
    f = predicted(run.posterior, clients[0][0], samples=0).mean[:, 0]
    assert float((f - clients[0][1]).square().mean().sqrt()) == pytest.approx(run.history[-1]["rmse"], rel=1e-5)


def test_a_resumed_run_has_the_same_targets_and_noise(tmp_path: Path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(rounds=4, out=whole)
    train(rounds=2, out=part)
    train(rounds=4, out=part, resume=True)
    one, other = (Posterior.load(folder / "posterior.safetensors", model()) for folder in (whole, part))
    assert torch.equal(one.lam, other.lam)
    assert one.noise is not None
    assert other.noise is not None
    assert torch.equal(one.noise, other.noise)
    assert json.loads((part / "config.json").read_text())["targets"] == Clients.from_pairs(sites()).targets().to_dict()


def test_a_run_that_began_without_standard_units_goes_on_without(tmp_path: Path):
    """Configs of older versions have no targets, which means mean 0 and sd 1."""
    clients = sites(offset=0.0, scale=1.0)
    train(clients, Network(model(), targets=Targets.of([0.0, 0.0], [1.0, 1.0])), out=tmp_path)
    config = sealed.content(tmp_path / "config.json")
    del config["targets"]
    sealed.age(tmp_path / "config.json", config)
    again = train(clients, rounds=3, out=tmp_path, resume=True)
    assert again.posterior.network.targets is None
    assert len(again.history) == 3


class TestFiles:
    def test_saved_and_loaded_it_predicts_the_same(self, tmp_path: Path):
        q, x = train().posterior, sites()[0][0]
        q.save(tmp_path / "q.safetensors")
        loaded = Posterior.load(tmp_path / "q.safetensors", model(seed=1))
        for own, its in zip(predicted(q, x), predicted(loaded, x), strict=True):
            assert own is not None
            assert its is not None
            assert torch.equal(own, its)

    def test_a_file_without_targets_and_noise_has_0_and_1(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        q = Posterior(Network(model()), Diagonal(), Diagonal().natural(Network(model()).initial(), 5.0), loss="mse")
        x, seal = sites()[0][0], checksum.seal
        old = lambda tensors, about: seal(tensors, {k: v for k, v in about.items() if k not in ("targets", "noise")})
        monkeypatch.setattr("fedual.posterior.seal", old)
        q.save(tmp_path / "q.safetensors")
        assert b'"targets"' not in (tmp_path / "q.safetensors").read_bytes()
        found = predicted(Posterior.load(tmp_path / "q.safetensors", model()), x, samples=6)
        f = torch.stack([q.network(theta, x) for theta in q.sample(6)])
        torch.testing.assert_close(found.mean, f.mean(0))
        torch.testing.assert_close(found.standard_deviation, f.std(0, correction=0))
        torch.testing.assert_close(found.observation_sd, (f.var(0, correction=0) + 1).sqrt())

    def test_an_exported_program_predicts_the_same(self, tmp_path: Path):
        q, x = train().posterior, sites()[0][0]
        q.export(tmp_path / "q.pt2", x, samples=5)
        for own, its in zip(torch.export.load(tmp_path / "q.pt2").module()(x), predicted(q, x, samples=5), strict=True):
            torch.testing.assert_close(own, its)


class TestNoise:
    """q = N(m, (XᵀX + δI)⁻¹) in standard units against the conjugate posterior with noise σ²."""

    SIGMA2 = 0.3

    def problem(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(1)
        x = rng.normal(size=(40, 3))
        return x, x.T @ x + 2 * np.eye(3), rng.normal(size=3)

    @pytest.mark.parametrize("family", [Full(), Diagonal()], ids=str)
    def test_the_spread_is_that_of_the_conjugate_posterior(self, family: Gaussian):
        """Likelihood N(f, σ²) and prior N(0, σ²/δ) have the precision (XᵀX + δI)/σ², here of targets in unit 80."""
        x, matrix, mean = self.problem()
        if isinstance(family, Diagonal):
            matrix = np.diag(matrix)
        noise = torch.tensor([self.SIGMA2])
        q = posterior(family, matrix, mean, noise=noise, targets=Targets.of(300.0, 80.0))
        covariance = np.linalg.inv((matrix if matrix.ndim == 2 else np.diag(matrix)) / self.SIGMA2)
        found = predicted(q, torch.tensor(x), samples=20_000)
        np.testing.assert_allclose(found.mean[:, 0], 300 + 80 * x @ mean, atol=80 * 0.02)
        variance = np.einsum("np,pq,nq->n", x, covariance, x)
        np.testing.assert_allclose(found.standard_deviation[:, 0], 80 * np.sqrt(variance), rtol=0.03)
        assert found.observation_sd is not None
        np.testing.assert_allclose(found.observation_sd[:, 0], 80 * np.sqrt(variance + self.SIGMA2), rtol=0.01)

    def test_quantiles_are_those_of_a_gaussian(self):
        x, matrix, mean = self.problem()
        found = predicted(posterior(Full(), matrix, mean, noise=torch.tensor([0.3])), torch.tensor(x))
        assert found.observation_sd is not None
        levels = [0.025, 0.5, 0.9]
        wanted = [norm(found.mean, found.observation_sd).ppf(level) for level in levels]
        np.testing.assert_allclose(found.quantiles(levels), wanted)
        assert torch.equal(found.quantiles(0.5), found.mean)
        with pytest.raises(InputError, match=r"p = 1\.0: quantiles need probabilities between 0 and 1"):
            found.quantiles(1.0)

    def test_fit_learns_it_from_the_residuals_at_the_mean(self):
        weights = [torch.rand(n) + 0.5 for n in SIZES]
        clients = sites()
        run = train(clients, weights=weights)
        q, (x, y), w = run.posterior, (torch.cat(each) for each in zip(*clients, strict=True)), torch.cat(weights)
        assert q.network.targets is not None
        r = (predicted(q, x, samples=0).mean - y) / q.network.targets.sd
        total = float(w.sum())
        delta = run.method.delta
        assert isinstance(delta, float)
        data = q.tau * (q.precision - delta).clamp(min=0)
        free = max(total - float((data / (data + delta)).sum()) / 2, total / 2)
        torch.testing.assert_close(q.noise, ((w[:, None] * r.square()).sum(0) + 1) / (free + 1))

    def test_a_noise_that_cannot_be_is_refused(self):
        _, matrix, mean = self.problem()
        with pytest.raises(InputError, match=r"noise = \[0.0\]: give a positive, finite variance"):
            posterior(Full(), matrix, mean, noise=torch.zeros(1))


def test_minibatches_prepare_targets_once():
    losses = Minibatches(
        Network(model(), targets=Targets.of([1.0, 2.0], [3.0, 4.0])), Clients.from_pairs(sites()), "mse"
    )
    assert losses.at(3)[torch.tensor([1])].y is losses.y
    torch.testing.assert_close(losses.y, (losses.data.y - torch.tensor([1.0, 2.0])) / torch.tensor([3.0, 4.0]))
    labels = Minibatches(Network(model()), Clients.from_pairs([(torch.zeros(3, 3), torch.tensor([0, 1, 1]))]))
    assert labels.y is labels.data.y
