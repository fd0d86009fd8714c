"""What a run's folder spares and what it insists on: checkpoints, the chunk, the data; and bytes of refused clients."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flat import fit
from problems import normal
from torch import Tensor, nn

from fedual import fitting
from fedual import run as running
from fedual.algorithm import Expectation
from fedual.defaults import Federation, resolve
from fedual.errors import InputError
from fedual.run import Run
from fedual.rundir import RunDirectory

SIZES = (5, 3, 6, 4)


def pairs() -> list[tuple[Tensor, Tensor]]:
    return [(normal((n, 3), n), torch.arange(n) % 2) for n in SIZES]


def train(out: Path | None = None, rounds: int = 2, **options: Any) -> Run:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    given = {"clients": pairs(), "method": "ivon-admm", "batch_size": 4, "local_epochs": 1, "device": "cpu"} | options
    return fit(model, given.pop("clients"), given.pop("method"), rounds, out=out, **given)


@pytest.mark.parametrize("uploads", [1, 2])
def test_a_refused_client_sends_nothing_but_was_sent_q_g(uploads: int):
    """λ has 2P float64 numbers; P = 3·4 + 4 + 4·2 + 2."""
    clients = pairs()
    clients[1] = (clients[1][0], clients[1][1] + 2)
    nan_above_one = lambda f, y: torch.where(y > 1, torch.nan, 1.0) * F.cross_entropy(f, y % 2, reduction="none")
    method = resolve("ivon-admm", Federation(len(SIZES), sum(SIZES)))
    method = replace(method, dual=Expectation(1e-6)) if uploads == 2 else method
    vector = 2 * (3 * 4 + 4 + 4 * 2 + 2) * 8
    for record in train(clients=clients, loss=nan_above_one, method=method).history:
        assert (record["active"], record["counted"], record["refused"]) == (4, 3, 1)
        assert (record["bytes_up"], record["bytes_down"]) == (3 * vector * uploads, 4 * vector)


class TestCheckpoints:
    """Rounds take one second each on a clock of ours, and saving what a test says."""

    rounds = 12

    @pytest.fixture
    def timed(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
        """Train, and return the rounds that were saved."""

        def work(out: Path, cost: float, after: Callable[[Run, Any], None] = lambda run, record: None) -> list[int]:
            now, saved, real = 0.0, [], RunDirectory.save

            def tick(run: Run, record: Any) -> None:
                nonlocal now
                now += record is not None

            def save(self: RunDirectory, round: int, *rest: Any) -> None:
                nonlocal now
                now += cost
                saved.append(round)
                real(self, round, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(running, "time", SimpleNamespace(perf_counter=lambda: now))
                patch.setattr(RunDirectory, "save", save)
                train(out, self.rounds, callbacks=[tick, after])
            return saved

        return work

    @pytest.mark.parametrize(
        ("cost", "expected"),
        [
            (0.0, list(range(1, 13))),
            (1 / 32, list(range(1, 13))),  # 20/32 s, less than a round
            (0.125, [1, 4, 7, 10, 12]),  # 2.5 s
            (0.25, [1, 6, 11, 12]),  # 5 s
            (100.0, [1, 12]),
        ],
    )
    def test_one_is_due_20_times_its_cost_after_the_last_and_at_the_end(self, tmp_path, timed, cost, expected):
        assert timed(tmp_path, cost) == expected
        assert len(RunDirectory.open(tmp_path).history()) == self.rounds
        snapshot = RunDirectory.open(tmp_path).load()
        assert snapshot is not None
        assert snapshot.round == self.rounds

    def test_the_last_round_before_a_stop_is_saved(self, tmp_path, timed):
        def stop(run: Run, record: Any) -> None:
            run.stop = record is not None and record["round"] == 5

        assert timed(tmp_path, 100.0, stop) == [1, 5]

    def test_rounds_whose_checkpoint_was_spared_are_run_again(self, tmp_path, timed):
        def crash(run: Run, record: Any) -> None:
            if record is not None and record["round"] == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            timed(tmp_path, 100.0, crash)
        left = RunDirectory.open(tmp_path)
        snapshot = left.load()
        assert snapshot is not None
        assert (snapshot.round, len(left.history())) == (1, 4)
        again, whole = train(tmp_path, self.rounds, resume=True), train(rounds=self.rounds)
        assert [record["round"] for record in again.history] == list(range(1, 13))
        assert torch.equal(again.server.lam_g, whole.server.lam_g)


def test_a_resumed_run_keeps_the_chunk_it_was_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The memory that is free on another day does not decide, for other chunks add up in another order."""
    monkeypatch.setattr(fitting, "choose_chunk", lambda losses, most: 2)
    train(tmp_path, 1)
    monkeypatch.setattr(fitting, "choose_chunk", lambda losses, most: 3)
    run = train(tmp_path, 2, resume=True)
    assert len(run.history) == 2
    assert run.execution.chunk == RunDirectory.open(tmp_path).config["execution"]["chunk"] == 2
    assert torch.equal(run.server.lam_g, train(rounds=2, chunk=2).server.lam_g)


def test_other_example_weights_are_other_data(tmp_path: Path):
    weights = [torch.linspace(1, 2, n) for n in SIZES]
    train(tmp_path, weights=weights)
    others = [*weights[:-1], weights[-1].flip(0)]  # the same sums, so that only the weights themselves tell
    for given in (others, None):
        with pytest.raises(InputError, match=r"holds a run with data = .*: resume with the same settings"):
            train(tmp_path, 3, weights=given, resume=True)
    assert len(train(tmp_path, 3, weights=weights, resume=True).history) == 3
