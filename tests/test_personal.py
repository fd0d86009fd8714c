"""Personal posteriors: λ_g + β η_k, chosen on held-out examples, for clients whose data differ."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from problems import normal
from torch import Tensor, nn
from torch.testing import assert_close

import fedual
from fedual import calibration, personal
from fedual.calibration import TEMPERATURES, TENTH, hold_out
from fedual.errors import InputError
from fedual.metrics import Prediction
from fedual.networks import Clients, Draws
from fedual.personal import BETAS
from fedual.posterior import Posterior
from fedual.run import Run
from fedual.settings import Evaluation, Execution, LocalTraining

CLIENTS, EACH = 3, 40


def clients(alike: bool = False) -> Clients:
    """Clients with the same inputs; they call them by the same or by different names."""
    x = normal((EACH, 4), 1)
    same = x[:, :3].argmax(-1)
    return Clients.from_pairs([(x, same if alike else (same + k) % 3) for k in range(CLIENTS)])


def train(data: Clients | None = None, method: Any = "ivon-admm", rounds: int = 8, **given: Any) -> Run:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    local, execution = LocalTraining(batch_size=8, local_epochs=4), Execution(device="cpu")
    given = {"evaluation": Evaluation(samples=2), "local": local, "execution": execution, **given}
    return fedual.fit(model, clients() if data is None else data, method, rounds, seed=5, **given)


@pytest.fixture
def tenth(monkeypatch: pytest.MonkeyPatch):
    """However few the examples, a tenth is held out."""
    monkeypatch.setattr(calibration, "SMALL", 0)


def dual(run: Run, client: int) -> Tensor:
    return run.store.read(torch.tensor([client]))["eta"][0]


def outputs(theta: np.ndarray, x: Tensor) -> np.ndarray:
    w, b, v, c = np.split(theta, np.cumsum([24, 6, 18]))
    return np.tanh(x.numpy() @ w.reshape(6, 4).T + b) @ v.reshape(3, 6).T + c


def log_softmax(f: np.ndarray) -> np.ndarray:
    return f - np.log(np.exp(f).sum(-1, keepdims=True))


def test_a_table_is_that_of_numpy():
    run, weights = train(posterior="point"), torch.linspace(0.5, 2, EACH)
    x, y = clients().x[:EACH], clients().y[EACH : 2 * EACH]
    found = personal.table(run.trained, dual(run, 1), x, y, weights)
    for row, beta in enumerate(BETAS):
        top, bottom = run.server.lam_g.numpy() + beta * dual(run, 1).numpy()  # (s m, −s/2)
        for column, temperature in enumerate(TEMPERATURES):
            log_p = log_softmax(outputs(top / (-2 * bottom), x) / temperature)[np.arange(EACH), y.numpy()]
            assert_close(float(found[row, column]), float(log_p @ weights.numpy()), rtol=1e-9, atol=1e-9)


def test_the_choice_is_the_best_pair_on_what_was_held_out(tenth: None):
    run = train()
    assert run.personal is not None
    held = hold_out(clients(), TENTH, Draws(5))[1]
    tables = [
        personal.table(run.trained, dual(run, k), clients().x[rows], clients().y[rows], None)
        for k, rows in enumerate(held.rows)
    ]
    total = torch.stack(tables).sum(0) / 12
    assert_close(-run.personal.nll, float(total.max()))
    assert_close(
        -float(total[BETAS.index(run.personal.beta), TEMPERATURES.index(run.personal.temperature)]), run.personal.nll
    )
    assert_close(-float(total[0, TEMPERATURES.index(1.0)]), run.personal.nll_mean)
    assert (run.personal.examples, run.personal.clients, run.personal.folds) == (12, 3, 0)


def test_clients_that_differ_gain_and_each_predicts_its_own():
    run = train()
    assert run.personal is not None
    assert run.personal.folds == 5
    assert run.personal.beta > 0
    assert run.personal.nll < run.personal.nll_mean - 0.1
    for k, posterior in enumerate(run.clients):
        x, y = (each[k * EACH : (k + 1) * EACH] for each in (clients().x, clients().y))
        assert posterior.figures((x, y))["nll"] < run.posterior.figures((x, y))["nll"]


def test_a_personal_posterior_predicts_at_its_mean_with_the_temperature():
    run = train()
    assert run.personal is not None
    found, x = run.clients[2], normal((5, 4), 7)
    assert_close(found.lam, run.server.lam_g + run.personal.beta * dual(run, 2))
    expected = np.exp(log_softmax(outputs(found.mean.numpy(), x) / run.personal.temperature))
    prediction = found.predict(x, samples=9)
    assert isinstance(prediction, Prediction)
    assert_close(prediction.probabilities.numpy(), expected)
    assert_close(run.clients[-1].lam, found.lam)


def test_clients_that_are_alike_lose_nothing(tenth: None):
    run = train(clients(alike=True))
    assert run.personal is not None
    assert run.personal.nll <= run.personal.nll_mean


def test_without_a_step_clients_get_what_is_handed_over(monkeypatch: pytest.MonkeyPatch, tenth: None):
    monkeypatch.setattr(personal, "BETAS", (0.0,))
    run = train()
    assert run.personal is not None
    assert run.personal.beta == 0
    assert torch.equal(run.clients[1].lam, run.posterior.lam)
    assert run.clients[1].calibration == run.posterior.calibration


def test_parameters_that_would_lose_their_precision_stay():
    trained = train(posterior="point").trained
    eta = trained.lam.clone()
    eta[:, ::2] *= -0.4
    assert not trained.family.inside(trained.lam + 3 * eta)
    found = personal.towards(trained, eta, 3)
    assert trained.family.inside(found)
    assert_close(found[:, ::2], trained.lam[:, ::2])
    assert_close(found[:, 1::2], 4 * trained.lam[:, 1::2])


def test_a_choice_survives_a_resume_and_a_file(tmp_path, tenth: None):
    first = train(out=tmp_path / "run")
    again = train(out=tmp_path / "run", resume=True)
    assert first.personal is not None
    assert again.personal == first.personal
    assert torch.equal(again.clients[1].lam, first.clients[1].lam)
    first.clients[1].save(tmp_path / "one.safetensors")
    read = Posterior.load(tmp_path / "one.safetensors", nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    assert read.calibration == first.clients[1].calibration == first.personal
    assert "of one client" in read.about


class TestRefusals:
    def test_a_method_without_duals(self):
        run = train(method="fedavg", rounds=1)
        with pytest.raises(InputError, match="keeps no duals η_k"):
            run.clients[0]
        with pytest.raises(InputError, match="keeps no duals"):
            run.clients.at(0, 1.0)

    def test_a_run_without_a_choice(self):
        run = train(posterior="point", rounds=1)
        with pytest.raises(InputError, match="chose no β: train with"):
            run.clients[0]
        assert run.clients.at(0, 0.5).calibration is None

    @pytest.mark.parametrize("beta", [0, -1.0, math.nan])
    def test_a_step_that_is_no_positive_number(self, beta: float):
        with pytest.raises(InputError, match="beta = "):
            train(posterior="point", rounds=1).clients.at(0, beta)

    @pytest.mark.parametrize("client", [3, -4])
    def test_a_client_that_is_not_there(self, client: int):
        with pytest.raises(IndexError, match="there are 3"):
            train(posterior="point", rounds=1).clients.at(client, 1.0)
