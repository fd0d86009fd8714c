"""Calibration across sites: the numbers of the simulator, whoever answers, and no dual lost."""

from pathlib import Path
from typing import Any

import flat
import pytest
import sealed
import torch
from federation import nested
from flwr.app import Message
from here import Here
from torch import Tensor, nn
from torch.testing import assert_close

from fedual import calibration
from fedual.calibration import TENTH, Fold
from fedual.flower import BayesianADMM, Policy, client_app, wire
from fedual.flower.vault import opened
from fedual.posterior import Posterior
from fedual.run import Run
from fedual.rundir import RunDirectory

pytestmark = pytest.mark.usefixtures("clock")
SIZES, ROUNDS = [24, 8, 31], 3
LOCAL: dict[str, Any] = {"batch_size": 8, "local_epochs": 1, "seed": 3, "samples": 3}


def sites() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(n, 4, generator=generator) for n in SIZES]
    return [(a, (a[:, :3] + torch.randn(len(a), 3, generator=generator)).argmax(-1)) for a in x]


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def grid(path: Path, between: Any = None) -> Here:
    data = sites()
    app = lambda: client_app(model, lambda node: data[int(node["partition-id"])], device="cpu")
    return Here({100 + k: (app(), {"partition-id": k, "state-dir": str(path / "state")}) for k in range(3)}, between)


def server(path: Path, rounds: int = ROUNDS, **given: Any) -> BayesianADMM:
    given = {"posterior": "calibrated", "policy": Policy(min_clients=3), "test": sites()[0], **LOCAL, **given}
    return BayesianADMM(model(), "ivon-admm", rounds, experiment="e", out=path / "out", **nested(given))


def simulated(rounds: int = ROUNDS, **given: Any) -> Run:
    given = {"posterior": "calibrated", "test": sites()[0], "device": "cpu", **LOCAL, **given}
    return flat.fit(model(), sites(), "ivon-admm", rounds, **given)


def agree(own: BayesianADMM, run: Run) -> None:
    assert own.ledger.calibration is not None
    assert run.calibration is not None
    mine, its = (each.to_dict() for each in (own.ledger.calibration, run.calibration))
    assert mine.pop("missing") == its.pop("missing") == []
    assert mine == pytest.approx(its, rel=1e-9)
    assert_close(own.ledger.server.lam_g, run.server.lam_g, rtol=1e-9, atol=1e-12)
    assert_close(own.posterior.lam, run.posterior.lam, rtol=1e-9, atol=1e-12)
    for key in ("accuracy_cal", "nll_cal", "ece_cal"):
        assert own.history[-1][key] == pytest.approx(run.history[-1][key], rel=1e-9)


@pytest.mark.parametrize("small", [0, 10**6])
def test_it_is_the_calibration_of_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int):
    """With a tenth held out, and with short runs."""
    monkeypatch.setattr(calibration, "SMALL", small)
    own, run = server(tmp_path), simulated()
    own.start(grid(tmp_path))  # type: ignore[arg-type]
    agree(own, run)
    assert own.ledger.total == run.config["examples"] == sum(SIZES) - (2 + 3) * (not small)
    found = own.ledger.calibration
    assert found is not None
    assert (found.examples, found.clients, found.folds) == ((55, 2, 5) if small else (5, 2, 0))
    assert own.ledger.fold == (None if small else TENTH)
    assert not (tmp_path / "out" / "folds").exists()
    loaded = Posterior.load(tmp_path / "out" / "posterior.safetensors", model())
    assert loaded.calibration == found
    assert RunDirectory.open(tmp_path / "out").history() == own.history

    again = server(tmp_path)
    again.start(Here({}))  # type: ignore[arg-type]
    assert again.ledger.calibration == found  # asks nobody
    more = server(tmp_path, ROUNDS + 2)
    more.start(grid(tmp_path))  # type: ignore[arg-type]
    agree(more, simulated(ROUNDS + 2))


def test_a_site_that_gives_no_table_is_named_and_keeps_its_dual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "SMALL", 0)

    def between(node: int, message: Message, answer: Any) -> Message | None:
        lost = wire.config_of(message.content).get("action") == "calibrate" and node == 102
        return None if lost else answer()

    own = server(tmp_path)
    own.start(grid(tmp_path, between))  # type: ignore[arg-type]
    found = own.ledger.calibration
    assert found is not None
    assert (found.examples, found.clients, found.missing) == (2, 1, ("2",))
    assert "2 held-out examples of 1 site" in str(found)
    assert str(found).endswith("; without 2.")
    with opened(tmp_path / "state", "e", "2") as vault:
        rows = vault.settle(own.ledger.acks["2"])
    assert rows is not None
    assert rows["eta"].norm() > 0
    more = server(tmp_path, ROUNDS + 1)
    more.start(grid(tmp_path))  # type: ignore[arg-type]
    assert more.history[-1]["counted"] == 3
    agree(more, simulated(ROUNDS + 1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda table: {}, "it sent no table of the grid"),
        (lambda table: {"table": table[:1]}, "it sent no table of the grid"),
        (lambda table: {"table": table.float()}, "it sent no table of the grid"),
        (lambda table: {"table": table + 1e9}, "its table has numbers that no log-likelihoods have"),
        (lambda table: {"table": table * torch.nan}, "its table has numbers that no log-likelihoods have"),
    ],
)
def test_tables_that_cannot_be_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Any, why: str
):
    monkeypatch.setattr(calibration, "SMALL", 0)

    def between(node: int, message: Message, answer: Any) -> Message:
        reply = answer()
        if wire.config_of(message.content).get("action") == "calibrate" and node == 100:
            table = wire.tensors_of(reply.content)["table"]
            return Message(wire.pack(change(table), wire.config_of(reply.content)), reply_to=message)
        return reply

    own = server(tmp_path)
    own.start(grid(tmp_path, between))  # type: ignore[arg-type]
    assert f"client 0 does not count in the calibration: {why}" in caplog.text
    assert own.ledger.calibration is not None
    assert (own.ledger.calibration.examples, own.ledger.calibration.missing) == (3, ("0",))


def test_without_an_answer_the_posterior_is_that_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "SMALL", 0)
    silent = lambda node, message, answer: (
        None if wire.config_of(message.content).get("action") == "calibrate" else answer()
    )
    own = server(tmp_path)
    own.start(grid(tmp_path, silent))  # type: ignore[arg-type]
    assert own.ledger.calibration is None
    assert torch.equal(own.posterior.lam, own.ledger.server.lam_g)
    assert "tempered" in own.posterior.about


def test_short_runs_that_cannot_be_made_do_not_cost_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def between(node: int, message: Message, answer: Any) -> Message | None:
        config = wire.config_of(message.content)
        return None if "fold-1" in str(config.get("experiment")) and node == 101 else answer()

    own = server(tmp_path, policy=Policy(min_clients=3, wait=5, timeout=5))
    own.start(grid(tmp_path, between))  # type: ignore[arg-type]
    assert "short run 2 does not count in the calibration: After 5 s" in caplog.text
    found = own.ledger.calibration
    assert found is not None
    assert found.examples == 55 - Fold(1, 5).size(24) - Fold(1, 5).size(31)


def test_a_folder_of_an_older_fedual_goes_on_as_a_point(tmp_path: Path):
    server(tmp_path, 1, posterior="point").start(grid(tmp_path))  # type: ignore[arg-type]
    config = tmp_path / "out" / "config.json"
    sealed.age(config, {key: value for key, value in sealed.content(config).items() if key != "posterior"})
    own = server(tmp_path, 2)
    own.start(grid(tmp_path))  # type: ignore[arg-type]
    assert own.mode == "point"
    assert own.ledger.calibration is None


def test_bayes_is_the_simulators(tmp_path: Path):
    own, run = server(tmp_path, posterior="bayes"), simulated(posterior="bayes")
    own.start(grid(tmp_path))  # type: ignore[arg-type]
    assert own.posterior.tau == 1
    assert_close(own.posterior.lam, run.posterior.lam, rtol=1e-9, atol=1e-12)
    assert own.history[-1]["nll_bayes"] == pytest.approx(run.history[-1]["nll_bayes"], rel=1e-9)
