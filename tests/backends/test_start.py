"""Clients start at the network's initialisation until an update counted: in `step`, both engines, and resumed runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import SIZES, begin, clients, losses, mlp, resolved
from flat import fit
from problems import normal
from torch import Tensor

from fedual import algorithm, methods
from fedual.algorithm import Blend, Method, Natural, Solution, Subproblem
from fedual.families import Diagonal
from fedual.networks import Clients, Draws
from fedual.run import ENGINES, Run
from fedual.solvers import IVON, Conjugate, Exact

BAD = 2
GOOD = torch.tensor([0, 1, 3, 4])
H0 = 0.05
STILL = IVON(lr=1e-13, beta2=1 - 1e-13, h0=H0)
"""A solver that stays where it starts, to rounding: what comes out is where it began."""


def nan_above_two(f: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy that is NaN on the labels of a client that will be refused."""
    return torch.where(y > 2, torch.nan, 1.0) * F.cross_entropy(f, y % 3, reduction="none")


def with_bad(bad: int) -> Clients:
    """The unequal clients, one of whom has the labels on which the loss is NaN."""
    data, y = clients(), clients().y.clone()
    y[data.parts[bad]] += 3
    return Clients(data.x, y, data.parts)


def test_a_round_that_nobody_counts_in_leaves_the_start_of_step():
    seen = []

    class Recorder(Exact):
        def __call__(self, problem: Subproblem) -> Solution:
            seen.append(problem.start)
            return super().__call__(problem)

    family, start = Diagonal(), normal((4,), 1)
    c = family.natural(normal((3, 4), 2), 2.0)
    c[0] = torch.nan
    method = Method(family, Recorder(), Natural(0.5), Blend(), 0.5)
    now = algorithm.init(method, family.natural(torch.zeros(4)), 3, start)
    counted = []
    for active in ([0], [], [0], [0, 1], [2]):
        now, info = algorithm.step(method, now, Conjugate(family, c), torch.tensor(active))
        counted.append(int(info.counted.sum()))
    assert counted == [0, 0, 0, 1, 1]
    assert len(seen) == 4  # nobody was asked in the second round
    assert all(value is not None and torch.equal(value, start) for value in seen[:3])
    assert seen[3] is None


class TestEngine:
    @pytest.fixture(params=ENGINES)
    def play(self, request: pytest.FixtureRequest) -> Callable[..., Any]:
        """Some rounds, each with its number and who is active, from the beginning."""

        def rounds(method: str | Method, *plan: tuple[int, Tensor]):
            stack = losses(data=with_bad(BAD), loss=nan_above_two, local_epochs=1)
            method = resolved(method, stack)
            server, store = begin(method, stack.network.initial(), len(SIZES))
            moved = []
            for number, active in plan:
                server, info = ENGINES[request.param](method, server, store, stack.at(number), active, 2)
                assert info.refused.tolist() == [k == BAD and BAD in active for k in range(len(SIZES))]
                moved.append(server.moved)
            return server, store.read(torch.arange(len(SIZES))), moved

        return rounds

    @pytest.mark.parametrize("name", ["ivon-admm", "fedlap", "fedlap-cov"])
    def test_a_round_that_nobody_counts_in_might_not_have_been(self, play, name):
        one, rows, moved = play(name, (0, torch.tensor([BAD])), (1, GOOD))
        other, its, _ = play(name, (1, GOOD))
        assert moved == [False, True]
        assert torch.equal(one.lam_g, other.lam_g)
        assert all(torch.equal(value, its[name]) for name, value in rows.items())

    def test_ivon_starts_at_the_initialisation_with_h0_and_then_at_the_server(self, play):
        """λ_k = λ_g + η_k/γ is N(θ_init, 1/s) with s = δ + N_k h0/(ρτ), Algorithm 2's first line; then it is λ_g."""
        rho, tau, delta, gamma = 0.3, 0.01, 2.0, 0.03
        method = methods.ivon_admm(rho, gamma / rho, delta, tau, STILL)
        refused = (0, torch.tensor([BAD]))
        server, rows, _ = play(method, refused, (1, GOOD))
        size = torch.tensor(SIZES)[GOOD, None]
        start = torch.cat([value.detach().flatten() for value in mlp().parameters()])
        s = (delta + size * H0 / (rho * tau)).expand(-1, len(start))
        expected = torch.stack([s * start, -s / 2], 1)
        expected[:, 1] += delta / 2  # − λ_g, the prior N(0, 1/δ)
        torch.testing.assert_close(rows["eta"][GOOD] / gamma, expected, rtol=1e-9, atol=1e-9)
        assert not rows["eta"][BAD].any()
        assert not torch.equal(server.lam_g, server.prior)

        _, later, _ = play(method, refused, (1, GOOD), (2, GOOD))
        torch.testing.assert_close(later["eta"], rows["eta"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["ivon-admm", "fedlap"])
def test_a_run_resumed_before_any_update_counted_goes_on_as_if_it_had_not_stopped(tmp_path: Path, method: str):
    """One client a round, of whom the first is refused; a stop after every round."""
    seed, fraction = 3, 1 / len(SIZES)
    bad, *others = (int(Draws(seed).participants(round, len(SIZES), fraction)) for round in range(3))
    assert bad not in others

    def train(stop: bool = False, **options: Any) -> Run:
        def halt(run: Run, record: Any) -> None:
            run.stop = stop and record is not None

        options |= {"seed": seed, "participation": fraction, "loss": nan_above_two, "device": "cpu", "chunk": 1}
        return fit(mlp(), with_bad(bad), method, 3, local_epochs=1, callbacks=[halt], **options)

    whole = train()
    assert [record["counted"] for record in whole.history] == [0, 1, 1]
    parts = [train(stop=True, out=tmp_path, resume=True) for _ in range(3)]
    assert [len(part.history) for part in parts] == [1, 2, 3]
    assert [part.server.moved for part in parts] == [False, True, True]
    assert torch.equal(parts[-1].server.lam_g, whole.server.lam_g)
    rows = [run.store.read(torch.arange(len(SIZES))) for run in (parts[-1], whole)]
    assert all(torch.equal(value, rows[1][name]) for name, value in rows[0].items())
