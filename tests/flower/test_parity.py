"""The same rounds on Flower as in the simulator: λ_g of every method, whoever answers first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flat
import numpy as np
import pytest
import torch
from federation import nested
from here import Here
from problems import full_gaussian, logistic, normal, rng
from slow import rest_slow
from torch import nn
from torch.testing import assert_close

from fedual import algorithm, defaults, methods
from fedual.algorithm import Method, Natural, Track
from fedual.families import Full, GaussHermite, Isotropic
from fedual.flower import BayesianADMM, Policy, client_app
from fedual.networks import Draws
from fedual.settings import LocalTraining
from fedual.solvers import VON, Exact, Point

pytestmark = pytest.mark.usefixtures("clock")
ROUNDS, SEED = 5, 3
GENTLE = {"fedlap": {"damping": 0.05}, "fedlap-cov": {"damping": 0.05}, "ivon-pvi": {"damping": 0.05}}
LOCAL: dict[str, Any] = {"batch_size": 8, "local_epochs": 1, "seed": SEED}


def mlp(dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def pairs(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Unequal clients."""
    size = lambda k: 5 + 7 * k % 19
    return [(normal((size(k), 6), 10 + k), torch.randint(3, (size(k),), generator=rng(20 + k))) for k in range(num)]


def grid(path: Path, num: int, apps: Callable[[], Any], nodes: list[int] | None = None) -> Here:
    config = lambda k: {"partition-id": k, "state-dir": str(path / "state")}
    return Here({node: (apps(), config(k)) for k, node in enumerate(nodes or range(100, 100 + num))})


def deployed(
    path: Path,
    num: int,
    method: Any,
    *,
    rounds: int = ROUNDS,
    model: nn.Module | None = None,
    nodes: list[int] | None = None,
    **given: Any,
) -> tuple[BayesianADMM, Here]:
    """A server that ran all rounds, and its grid."""
    data = pairs(num)
    app = lambda: client_app(model or mlp(), lambda node: data[int(node["partition-id"])], device="cpu")
    found = grid(path, num, app, nodes)
    policy = Policy(min_clients=num, largest=None)  # the arithmetic alone
    given = nested({"policy": policy, **given})
    server = BayesianADMM(model or mlp(), method, rounds, experiment="e", out=path / "out", **given)
    server.start(found)  # type: ignore[arg-type]
    return server, found


@pytest.mark.parametrize(("num", "participation"), [(2, 1.0), (6, 0.5)])
@pytest.mark.parametrize("name", methods.NETWORKS)
def test_every_network_method_has_the_simulators_posterior(tmp_path, name, num, participation):
    method, local = methods.spec(name, **GENTLE.get(name, {})), {"participation": participation, **LOCAL}
    run = flat.fit(mlp(), pairs(num), method, ROUNDS, device="cpu", **local)
    server, _ = deployed(tmp_path, num, method, **local)
    assert_close(server.ledger.server.lam_g, run.server.lam_g, rtol=1e-9, atol=1e-12)
    assert_close(server.ledger.server.eta_sum, run.server.eta_sum, rtol=1e-9, atol=1e-12)
    if isinstance(server.method.dual, Natural):
        assert server.ledger.server.eta_sum.norm() > 0
    assert [record["counted"] for record in server.history] == [record["counted"] for record in run.history]


@pytest.mark.parametrize("local", [{"local_epochs": 140}, {"local_steps": 210}])
def test_server_and_clients_agree_on_how_long_a_round_is(tmp_path, local):
    """It is that of a client of average size, whatever the client's own."""
    given = {"batch_size": 8, "seed": SEED, **local}
    run = flat.fit(mlp(), pairs(3), "ivon-admm", 1, device="cpu", **given)
    server, _ = deployed(tmp_path, 3, "ivon-admm", rounds=1, **given)
    assert server.resolved == run.method
    assert run.local.average_steps(3, 36) > defaults.LONG
    assert_close(server.ledger.server.lam_g, run.server.lam_g, rtol=1e-9, atol=1e-12)


def test_guards_that_trigger_are_counted_at_the_server(tmp_path):
    method = methods.spec("ivon-admm", lr=0.1, clip=0.01, rho=0.01, damping=1.0, unit=0.0, hold=0.25)
    run = flat.fit(mlp(), pairs(3), method, ROUNDS, device="cpu", **LOCAL)
    server, _ = deployed(tmp_path, 3, method, **LOCAL)
    for key in ("limited", "held"):
        assert run.history[-1][key] > 0
        assert [record[key] for record in server.history] == pytest.approx([record[key] for record in run.history])


def test_server_and_clients_agree_on_how_fast_the_rate_falls(tmp_path, monkeypatch):
    monkeypatch.setattr(defaults, "EACH", 1.0)  # 36 rounds for 36 examples
    given = {**LOCAL, "schedule": "harmonic"}
    method = methods.spec("fedavg", lr=0.01)
    run = flat.fit(mlp(), pairs(3), method, ROUNDS, device="cpu", **given)
    server, _ = deployed(tmp_path, 3, method, **given)
    assert run.config["examples"] == 36
    assert_close(server.ledger.server.lam_g, run.server.lam_g, rtol=1e-9, atol=1e-12)


def test_a_server_that_starts_again_goes_on_with_its_momentum(tmp_path):
    _, found = deployed(tmp_path, 3, "ivon-admm", **LOCAL)
    policy, more = Policy(min_clients=3), ROUNDS + 3
    given = nested({"policy": policy, **LOCAL})
    server = BayesianADMM(mlp(), "ivon-admm", more, experiment="e", out=tmp_path / "out", **given)
    server.start(found)  # type: ignore[arg-type]
    run = flat.fit(mlp(), pairs(3), "ivon-admm", more, device="cpu", **LOCAL)
    assert run.method.extrapolation is not None
    assert len(server.history) == more
    assert_close(server.ledger.server.lam_g, run.server.lam_g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["shared-fixed", "independent"])
def test_a_clients_draws_are_those_of_its_number(tmp_path, mode):
    """Monte-Carlo noise, order of batches, and dropout, which is always a client's own."""
    given = {**LOCAL, "noise": mode, "order": mode, "schedule": "cosine", "decay": 0.9}
    run = flat.fit(mlp(dropout=0.3), pairs(4), "ivon-admm", ROUNDS, device="cpu", **given)
    server, _ = deployed(tmp_path, 4, "ivon-admm", model=mlp(dropout=0.3), **given)
    assert_close(server.ledger.server.lam_g, run.server.lam_g, rtol=1e-9, atol=1e-12)


def test_neither_the_order_of_nodes_nor_that_of_answers_matters(tmp_path, monkeypatch):
    one, _ = deployed(tmp_path / "one", 5, "ivon-admm", participation=0.6, **LOCAL)
    pull = Here.pull_messages
    monkeypatch.setattr(Here, "pull_messages", lambda self, ids: list(pull(self, ids))[::-1])
    monkeypatch.setattr(Here, "get_node_ids", lambda self: list(self.apps)[::-1])
    other, _ = deployed(tmp_path / "other", 5, "ivon-admm", nodes=[7, 3, 9, 1, 5], participation=0.6, **LOCAL)
    assert torch.equal(one.ledger.server.lam_g, other.ledger.server.lam_g)
    assert [record["clients"] for record in one.history] == [record["clients"] for record in other.history]


def solver(kind: str) -> Method:
    rule = GaussHermite(9)
    return {
        "admm": methods.admm(rho=3.0, delta=2.0),
        "newton-admm": methods.newton_admm(0.5, VON(rule)),
        "bregman-admm": methods.bregman_admm(Full(), VON(rule), rho=1.0, gamma=0.1),
        "blr": methods.blr(Full(), 0.3, rule),
        "pvi": methods.pvi(Full(), VON(rule), 0.3),
        "track": Method(Isotropic(1.0), Point(), Natural(2.0), Track(), 2.0),
    }[kind]


def on_losses(path: Path, method: Method, losses: Any, prior: torch.Tensor, participation: float) -> BayesianADMM:
    app = lambda: client_app(losses=lambda node: losses[[int(node["partition-id"])]], device="cpu")
    num, local = len(losses), LocalTraining(participation=participation)
    server = BayesianADMM(
        None, method, ROUNDS, prior=prior, seed=SEED, local=local, experiment="e", out=path / "out",
        policy=Policy(min_clients=num),
    )  # fmt: skip
    server.start(grid(path, num, app))  # type: ignore[arg-type]
    return server


def stepped(method: Method, losses: Any, prior: torch.Tensor, participation: float) -> algorithm.State:
    state = algorithm.init(method, prior, len(losses))
    for round in range(ROUNDS):
        active = Draws(SEED).participants(round, len(losses), participation)
        state, _ = algorithm.step(method, state, losses, active)
    return state


@pytest.mark.parametrize(("num", "participation"), [(2, 1.0), (6, 0.5)])
@pytest.mark.parametrize(
    "kind",
    rest_slow(["admm", "newton-admm", "bregman-admm", "blr", "pvi", "track"], "newton-admm", "bregman-admm", "track"),
)
def test_methods_on_losses_have_the_posterior_of_the_three_lines(tmp_path, kind, num, participation):
    method, losses = solver(kind), logistic(num)
    prior = method.family.natural(normal((3,), 5) / 10)  # type: ignore[attr-defined]
    server = on_losses(tmp_path, method, losses, prior, participation)
    state = stepped(method, losses, prior, participation)
    assert_close(server.ledger.server.lam_g, state.lam_g, rtol=1e-9, atol=1e-12)
    assert_close(server.ledger.server.eta_sum, state.server.eta_sum, rtol=1e-9, atol=1e-12)
    assert (state.lam_g - prior).norm() > 0.1


def test_conjugate_losses_need_one_round_at_rho_1_over_K(tmp_path):
    problem = full_gaussian(4, 5)
    server = on_losses(tmp_path, methods.newton_admm(1 / 4, Exact()), problem.losses, problem.prior, 1.0)
    first = server.history[0]
    np.testing.assert_allclose(server.ledger.server.lam_g, problem.pooled, rtol=1e-9, atol=1e-9)
    assert first["dual"] == pytest.approx(float((problem.pooled - problem.prior).norm()), rel=1e-9)


@pytest.mark.parametrize(("name", "up", "first"), [
    ("ivon-admm", 2, 2 + 1), ("fedivon", 2, 2 + 1), ("fedavg", 1, 1 + 1), ("fedadmm", 2, 2), ("scaffold", 2, 2 + 1),
])  # fmt: skip
def test_one_vector_up_and_one_down(tmp_path, name, up, first):
    """2P numbers for `Diagonal` and, with a control variate, SCAFFOLD.

    The initialisation comes down until the server has moved, for FedADMM always.
    """
    server, found = deployed(tmp_path, 3, name, **LOCAL)
    numbers = server.network.dim if server.network else 0
    header = 256  # at most, for each array
    for record in server.history:
        down = first if record["round"] == 1 or name == "fedadmm" else up
        for bytes, vectors in ((record["bytes_up"], up), (record["bytes_down"], down)):
            assert 0 < bytes / 3 - 8 * numbers * vectors <= 2 * header
    arrays = {id(message.content.array_records["arrays"]) for message in found.sent[-3:]}
    assert len(arrays) == 1  # the clients share the memory of λ_g
