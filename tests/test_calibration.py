"""Calibrated predictions: what is held out, the tables and the choice, and a posterior that keeps both numbers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sealed
import torch
from problems import normal, rng
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

import fedual
from fedual import calibration, methods
from fedual.calibration import TENTH, Calibration, Fold, Grid, Trained, hold_out, table
from fedual.errors import DataError, InputError
from fedual.families import Diagonal, Full, Gaussian, Isotropic
from fedual.networks import Clients, Draws, Network
from fedual.posterior import Posterior
from fedual.run import Run
from fedual.rundir import artifacts
from fedual.rundir.checksum import parse, seal
from fedual.settings import Evaluation, Execution, LocalTraining

SIZES = (24, 8, 31)
SAMPLES = 3


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def data(weighted: bool = False) -> Clients:
    n = sum(SIZES)
    x = normal((n, 4), 1)
    y = (x[:, :3] + normal((n, 3), 2)).argmax(-1)
    parts = list(torch.arange(n).split(SIZES))
    return Clients(x, y, parts, [1 + torch.rand(k, generator=rng(k)) for k in SIZES] if weighted else None)


def train(clients: Clients | None = None, method: Any = "ivon-admm", rounds: int = 4, **given: Any) -> Run:
    found = data() if clients is None else clients
    given = {"test": (found.x[:9], found.y[:9]), "evaluation": Evaluation(samples=SAMPLES), **given}
    local, execution = LocalTraining(batch_size=8, local_epochs=2), Execution(device="cpu")
    return fedual.fit(model(), found, method, rounds, seed=5, local=local, execution=execution, **given)


@pytest.fixture
def tenth(monkeypatch: pytest.MonkeyPatch):
    """However few the examples, a tenth is held out."""
    monkeypatch.setattr(calibration, "SMALL", 0)


def trained(family: Gaussian | None = None, tau: float = 0.01) -> Trained:
    network, family = Network(model()), family or Diagonal()
    mean = network.initial()
    prior = family.natural(0 * mean)
    precision = None if isinstance(family, Isotropic) else 1 + 10 * torch.rand(network.dim, generator=rng(4))
    return Trained(network, family, family.natural(mean, precision), prior, tau)


def in_numpy(q: Trained, tau: float, temperature: float, x: Tensor, y: Tensor, seed: int) -> np.ndarray:
    """Log p of every example, from the definitions at the top of the module."""
    mean, s = (each(q.lam).numpy() for each in (q.family.mean, q.family.precision))
    delta, generator, p = q.family.precision(q.prior).numpy(), torch.Generator().manual_seed(seed), 0
    for _ in range(SAMPLES if tau else 1):
        theta = mean
        if tau:
            noise = torch.randn(1, len(mean), generator=generator, dtype=torch.float64)[0].numpy()
            theta = mean + noise / np.sqrt(delta + q.tau / tau * (s - delta))
        w, b, v, c = np.split(theta, np.cumsum([24, 6, 18]))
        f = (np.tanh(x.numpy() @ w.reshape(6, 4).T + b) @ v.reshape(3, 6).T + c) / temperature
        p = p + (np.exp(f) / np.exp(f).sum(-1, keepdims=True))[np.arange(len(y)), y.numpy()]
    return np.log(p / (SAMPLES if tau else 1))


class TestHeldOut:
    def test_folds_share_a_clients_examples_among_them(self):
        for n in (10, 24, 31):
            parts = [Fold(number, 5).of_client(Draws(1), 0, n) for number in range(5)]
            assert torch.cat(parts).sort().values.tolist() == list(range(n))
            assert [len(part) for part in parts] == [Fold(number, 5).size(n) for number in range(5)]
            assert TENTH.size(n) == n // 10
        assert TENTH.size(9) == Fold(3, 5).size(9) == 0

    def test_it_depends_on_the_seed_the_client_and_its_size_alone(self):
        (one, held), (two, again) = (hold_out(data(), TENTH, Draws(7)) for _ in range(2))
        assert [part.tolist() for part in one.parts] == [part.tolist() for part in two.parts]
        assert one.sizes == [22, 8, 28]
        assert [rows.tolist() for rows in held.rows] == [rows.tolist() for rows in again.rows]
        other = hold_out(data(), TENTH, Draws(8))[1]
        assert [rows.tolist() for rows in held.rows] != [rows.tolist() for rows in other.rows]
        for client in range(3):
            union = sorted(one.parts[client].tolist() + held.rows[client].tolist())
            assert union == data().parts[client].tolist()

    def test_weights_follow_their_examples(self):
        clients = data(weighted=True)
        assert clients.weights is not None
        whole = dict(
            zip(torch.cat(list(clients.parts)).tolist(), torch.cat(list(clients.weights)).tolist(), strict=True)
        )
        stay, held = hold_out(clients, TENTH, Draws(7))
        assert stay.weights is not None
        assert held.weights is not None
        for rows, weights in ((stay.parts, stay.weights), (held.rows, held.weights)):
            for own, weight in zip(rows, weights, strict=True):
                assert [whole[row] for row in own.tolist()] == weight.tolist()

    def test_nobody_trains_on_an_example_that_a_client_with_the_same_example_holds_out(self):
        parts = [torch.arange(30), torch.arange(10, 40), torch.arange(5, 8)]
        stay, held = hold_out(Clients(normal((40, 1), 0), torch.zeros(40), parts), Fold(1, 2), Draws(3))
        out = torch.cat(held.rows).tolist()
        assert len(out) == len(set(out)) == 15 + 5  # each example belongs to the first that has it
        trained = {row for part in stay.parts[:2] for row in part.tolist()}
        assert not trained & set(out)
        assert all(len(part) for part in stay.parts)

    def test_a_client_keeps_what_it_shares_if_nothing_else_is_left(self):
        parts = [torch.arange(10), *(torch.tensor([row]) for row in range(10))]
        stay, held = hold_out(Clients(normal((10, 1), 0), torch.zeros(10), parts), TENTH, Draws(3))
        assert stay.sizes == [10] + [1] * 10
        assert not any(map(len, held.rows))

    def test_what_is_held_out_has_no_influence_on_training(self, tenth: None):
        first = train()
        rows = torch.cat(hold_out(data(), TENTH, Draws(5))[1].rows)
        clients = data()
        clients.x[rows] += 3.0
        clients.y[rows] = 2 - clients.y[rows]
        second = train(clients)
        assert len(rows) == 5
        assert torch.equal(first.server.lam_g, second.server.lam_g)
        assert first.calibration != second.calibration
        assert first.config["examples"] == sum(SIZES) - 5
        assert train(posterior="point").config["examples"] == sum(SIZES)


class TestTable:
    def test_it_is_that_of_numpy(self):
        q, (x, y) = trained(), (data().x, data().y)
        weights = torch.rand(len(y), generator=rng(9))
        grid = Grid((0.0, 0.01, 0.2, 1.0), (0.5, 1.0, 3.0))
        found = table(q, grid, x, y, weights, SAMPLES, 11)
        assert found.dtype == torch.float64
        for row, tau in enumerate(grid.widths):
            for column, temperature in enumerate(grid.temperatures):
                wanted = weights.numpy() @ in_numpy(q, tau, temperature, x, y, 11)
                assert float(found[row, column]) == pytest.approx(wanted, rel=1e-12)
        assert_close(table(q, grid, x, y, None, SAMPLES, 11), table(q, grid, x, y, torch.ones(len(y)), SAMPLES, 11))

    @pytest.mark.parametrize("family", [Diagonal(), Full()])
    def test_another_temperature_rescales_the_datas_precision_and_keeps_the_mean(self, family: Gaussian):
        q = trained(family)
        for tau in (0.01, 0.3, 1.0):
            lam = q.at(tau)
            wanted = family.precision(q.prior) + q.tau / tau * (family.precision(q.lam) - family.precision(q.prior))
            assert_close(family.precision(lam), wanted, rtol=1e-12, atol=1e-12)
            assert_close(family.mean(lam), family.mean(q.lam), rtol=1e-10, atol=1e-12)

    def test_the_grid_has_the_mean_the_widths_to_1_and_the_temperature_1(self):
        grid = Grid.of(Diagonal(), 1e-3, 32)
        assert grid.widths[0] == 0
        assert grid.widths[1] == pytest.approx(1e-3)
        assert grid.widths[-1] == 1
        assert len(grid.widths) == 2 + 3 * calibration.PER_DECADE
        assert 1.0 in grid.temperatures
        assert Grid.of(Diagonal(), 1.0, 32).widths == (0.0, 1.0)
        assert Grid.of(Isotropic(), 1e-3, 32).widths == Grid.of(Diagonal(), 1e-3, 0).widths == (0.0,)

    def test_outputs_that_are_nan_exclude_a_width_and_not_the_others(self):
        q = trained(tau=1.0)
        mean = q.network.initial()
        wide = q._replace(lam=q.family.natural(mean, 1e-320), prior=q.family.natural(0 * mean, 1e-320))
        found = table(wide, Grid((0.0, 1.0)), 1e200 * data().x, data().y, None, 2, 0)
        assert found[0].isfinite().all()
        assert (found[1] == -torch.inf).all()


class TestChoice:
    @pytest.mark.parametrize("small", [0, 10**6])
    @pytest.mark.parametrize("method", ["ivon-admm", "fedavg"])
    def test_the_held_out_nll_is_never_above_the_means(self, monkeypatch: pytest.MonkeyPatch, small: int, method: str):
        monkeypatch.setattr(calibration, "SMALL", small)
        run = train(method=method)
        found = run.calibration
        assert found is not None
        assert found.nll <= found.nll_mean
        assert (found.examples, found.clients, found.folds) == ((55, 2, 5) if small else (5, 2, 0))
        if method == "fedavg":
            assert found.tau == 0

    def test_predictions_with_the_same_draws_have_the_nll_that_was_chosen(self, tenth: None):
        run, clients = train(), data(weighted=False)
        rows = torch.cat(hold_out(clients, TENTH, Draws(5))[1].rows)
        seed, found = run.losses.draws.evaluation(run.server.round), run.calibration
        assert found is not None
        held = clients.x[rows], clients.y[rows]
        assert run.posterior.figures(held, SAMPLES, seed)["nll"] == pytest.approx(found.nll, rel=1e-10)
        at_mean = Posterior.handed_over(run.trained, "cross_entropy").figures(held, samples=0)
        assert at_mean["nll"] == pytest.approx(found.nll_mean, rel=1e-10)
        assert run.history[-1]["nll_cal"] == run.posterior.figures((clients.x[:9], clients.y[:9]), SAMPLES, seed)["nll"]

    def test_the_best_sum_over_clients_wins(self):
        grid = Grid((0.0, 0.1), (1.0, 2.0))
        tables = [torch.tensor([[-3.0, -2.0], [-9.0, -1.0]]), torch.tensor([[-3.0, -4.0], [-1.0, -6.0]])]
        found = Calibration.choose(grid, tables, weight=2.0, examples=4, clients=2)
        assert found == Calibration(0.0, 1.0, 4, 2, 3.0, 3.0)
        assert Calibration.choose(grid, [], weight=0.0, examples=0, clients=0) is None

    def test_clients_too_small_to_hold_anything_out_leave_the_posterior_as_trained(self):
        x, y = data().x, data().y
        run = train(Clients(x, y, list(torch.arange(27).split(9))))
        assert run.calibration is None
        assert run.posterior.lam is run.server.lam_g
        assert "nll_cal" not in run.history[-1]

    def test_a_callback_that_stops_the_run_gets_a_calibrated_posterior(self, tenth: None):
        run = train(callbacks=[lambda run, record: setattr(run, "stop", record is not None)])
        assert len(run.history) == 1
        assert run.posterior.calibration is run.calibration is not None


class TestPosterior:
    def test_it_says_on_what_it_rests(self):
        words = str(Calibration(0.01, 1.19, 598, 10, 0.4, 0.5))
        assert words == "calibrated on 598 held-out examples of 10 sites: q_g at τ = 0.01, logits divided by 1.19."
        words = str(Calibration(0, 0.7, 90, 1, 0.4, 0.5, 5, ("north",)))
        head = "calibrated in 5 short runs on 90 held-out examples of 1 site"
        assert words == f"{head}: at the mean, logits divided by 0.70; without north."
        with pytest.raises(InputError, match="temperature positive"):
            Calibration(0.1, 0.0, 1, 1, 0.1, 0.1)

    def test_draws_density_and_summary_have_the_width_and_predictions_both_numbers(self, tmp_path: Path):
        q = trained()
        own = Posterior.handed_over(q, "cross_entropy", calibration=Calibration(0.2, 2.0, 5, 2, 0.4, 0.5))
        assert own.tau == 0.2
        assert torch.equal(own.lam, q.at(0.2))
        np.testing.assert_allclose(own.summary()["sd"], own.precision.rsqrt())
        x = data().x
        f = torch.stack([own.network(theta, x) for theta in own.sample(SAMPLES, 3)])
        found = own.predict(x, SAMPLES, 3)
        assert_close(found[0], (f / 2).softmax(-1).mean(0))
        own.export(tmp_path / "p.pt2", x, SAMPLES, 3)
        assert_close(torch.export.load(tmp_path / "p.pt2").module()(x), found[0])
        at_mean = Posterior.handed_over(q, "cross_entropy", calibration=Calibration(0, 2.0, 5, 2, 0.4, 0.5))
        assert torch.equal(at_mean.lam, q.lam)
        assert_close(at_mean.predict(x)[0], (own.network(own.mean, x) / 2).softmax(-1))

    def test_it_is_stored_and_older_files_have_none(self, tmp_path: Path):
        chosen = Calibration(0.2, 2.0, 5, 2, 0.4, 0.5, 5, ("north",))
        own = Posterior.handed_over(trained(), "cross_entropy", calibration=chosen)
        path = tmp_path / "p.safetensors"
        own.save(path)
        loaded = Posterior.load(path, model())
        assert loaded.calibration == chosen
        assert torch.equal(loaded.predict(data().x)[0], own.predict(data().x)[0])
        about, tensors = parse(path.read_bytes())
        rest = {key: value for key, value in about.items() if key not in ("calibration", "sha256")}
        path.write_bytes(seal(tensors, rest))
        assert Posterior.load(path, model()).calibration is None
        path.write_bytes(seal(tensors, rest | {"calibration": '{"tau": 0.1}'}))
        with pytest.raises(DataError, match=r"calibration\.temperature is missing"):
            Posterior.load(path, model())


class TestModes:
    def test_point_holds_nothing_out_and_is_q_g_as_trained(self):
        run = train(posterior="point")
        assert run.calibration is None
        assert run.posterior.lam is run.server.lam_g
        assert not any(key.endswith(("_cal", "_bayes")) for key in run.history[-1])

    def test_bayes_is_q_g_at_1_of_the_same_run(self):
        point, bayes = train(posterior="point"), train(posterior="bayes")
        assert torch.equal(point.server.lam_g, bayes.server.lam_g)
        assert torch.equal(bayes.posterior.lam, point.trained.at(1.0))
        assert (bayes.posterior.tau, bayes.posterior.about) == (1.0, "")
        assert math.isfinite(bayes.history[-1]["nll_bayes"])
        spec = methods.spec("ivon-admm", tau=2.0)
        with pytest.raises(InputError, match=r'posterior = "bayes" hands q_g over at τ = 1, but tau = 2: train with'):
            train(method=spec, posterior="bayes")

    def test_a_regression_is_as_before(self):
        clients = data()
        given: dict[str, Any] = {"loss": "mse", "test": None}
        both = [
            train(Clients(clients.x, clients.x[:, :3], clients.parts), posterior=mode, **given)
            for mode in ("calibrated", "point")
        ]
        assert torch.equal(both[0].posterior.lam, both[1].posterior.lam)
        assert both[0].posterior.calibration is None

    def test_another_word_is_refused(self):
        with pytest.raises(InputError, match="posterior = 'bayesian': choose calibrated, bayes, point"):
            train(posterior="bayesian")


class TestResume:
    @pytest.mark.parametrize("small", [0, 10**6])
    def test_an_interrupted_run_has_the_same_bits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int):
        monkeypatch.setattr(calibration, "SMALL", small)

        def interrupt(run: Run, record: Any) -> None:
            if run.server.round == 3:
                raise KeyboardInterrupt

        whole = train(out=tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            train(out=tmp_path / "cut", callbacks=[interrupt])
        cut = train(out=tmp_path / "cut", resume=True)
        assert whole.calibration is not None
        assert cut.calibration == whole.calibration
        both = [load_file(tmp_path / name / "posterior.safetensors") for name in ("whole", "cut")]
        assert torch.equal(both[0]["lam"], both[1]["lam"])
        assert artifacts.read_calibration(tmp_path / "cut") == whole.calibration

    def test_a_finished_run_keeps_its_calibration_and_a_longer_one_is_calibrated_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        first = train(out=tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr("fedual.handing_over.calibration.tables", None)  # is not called
            assert train(out=tmp_path, resume=True).calibration == first.calibration
        more = train(out=tmp_path, rounds=6, resume=True)
        assert more.calibration == train(rounds=6).calibration != first.calibration

    def test_a_folder_without_the_setting_goes_on_as_a_point(self, tmp_path: Path, tenth: None):
        train(out=tmp_path, posterior="point")
        config = tmp_path / "config.json"
        stored = sealed.content(config)
        assert stored.pop("posterior") == "point"
        sealed.age(config, stored)
        more = train(out=tmp_path, rounds=6, resume=True)
        assert more.mode == "point"
        assert torch.equal(more.server.lam_g, train(rounds=6, posterior="point").server.lam_g)

    def test_another_posterior_than_the_stored_one_is_refused(self, tmp_path: Path, tenth: None):
        train(out=tmp_path, posterior="bayes")
        with pytest.raises(InputError, match='posterior = "bayes", not "point"'):
            train(out=tmp_path, posterior="point", resume=True)
