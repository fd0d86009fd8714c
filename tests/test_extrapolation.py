"""The two extensions of a method, extrapolation of λ_g and weights by examples, against closed forms."""

from dataclasses import dataclass, replace

import pytest
import torch
from problems import CONJUGATE
from test_round import bayesian_admm, relative, run
from torch import Tensor

from fedual import methods
from fedual.algorithm import ExampleWeights, Extrapolation, init, step
from fedual.errors import InputError
from fedual.families import Diagonal, Full
from fedual.solvers import Conjugate

SIZES = torch.tensor([3.0, 40.0, 12.0, 10.0], dtype=torch.float64)


@dataclass(frozen=True)
class Sized(Conjugate):
    """Losses that know how many examples they are of."""

    sizes: Tensor

    @property
    def num_examples(self):
        return self.sizes

    def __getitem__(self, clients):
        return Sized(self.family, self.c[clients], self.sizes[clients])


@pytest.mark.parametrize("make", CONJUGATE)
@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_clients_that_count_by_their_examples_have_a_rho_and_a_gamma_of_their_own(make, tau):
    """λ_k = λ_g + (c_k/τ − η_k)/ρ_k, η_k += γ_k (λ_k − λ_g), λ_g = (Σ ρ_k λ_k + λ_0 + Σ η_k)/(1 + Σ ρ_k); some rest."""
    problem, rho, gamma, unit = make(num_clients=4, seed=4), 0.8, 0.3, 10.0
    method = replace(bayesian_admm(problem.family, rho, gamma, tau), weighting=ExampleWeights(unit))
    losses, w = Sized(problem.family, problem.losses.c, SIZES), (SIZES / unit)[:, None, None]
    state = init(method, problem.prior, 4)
    lam_g, eta = problem.prior, torch.zeros_like(losses.c)
    for active in (range(4), [0, 2], range(4)):
        some = list(active)
        state, _ = step(method, state, losses, torch.tensor(some))
        lam = lam_g + (losses.c[some] / tau - eta[some]) / (rho * w[some])
        eta[some] += gamma * w[some] * (lam - lam_g)
        lam_g = (rho * (w[some] * lam).sum(0) + problem.prior + eta.sum(0)) / (1 + rho * w[some].sum())
        assert relative(state.lam_g, lam_g) < 1e-12
        assert relative(state.eta, eta) < 1e-12
        assert relative(state.server.eta_sum, eta.sum(0)) < 1e-12
    for _ in range(300):
        state, _ = step(method, state, losses)
    assert relative(state.lam_g, problem.prior + losses.c.sum(0) / tau) < 1e-8


@pytest.mark.parametrize("make", CONJUGATE)
def test_clients_are_sent_an_extrapolated_point(make):
    """λ_g + β (λ_g − λ_g⁻) from the third round on; everything else is as without, and so is the fixed point."""
    problem, beta = make(seed=2), 0.5
    plain = bayesian_admm(problem.family, 0.6, 0.2)
    method, seen = replace(plain, extrapolation=Extrapolation(beta)), []
    state = init(method, problem.prior, len(problem.losses))
    for _ in range(5):
        point = seen[-1] + beta * (seen[-1] - seen[-2]) if len(seen) > 1 else state.lam_g
        assert relative(state.server.broadcast(method.dual, len(problem.losses)).lam_g, point) < 1e-12
        there = state._replace(server=state.server._replace(lam_g=point, ahead=None))
        expected, _ = step(plain, there, problem.losses)
        state, _ = step(method, state, problem.losses)
        assert relative(state.lam_g, expected.lam_g) < 1e-12
        assert relative(state.eta, expected.eta) < 1e-12
        seen.append(state.lam_g)
    assert relative(run(method, problem, 300).lam_g, problem.pooled) < 1e-8


def test_the_jump_from_the_prior_is_not_extrapolated_whenever_it_comes():
    """Two rounds in which nobody counted change nothing but the number of the round."""
    problem = CONJUGATE[0](num_clients=3, dim=2)
    method = replace(bayesian_admm(problem.family, 0.6, 0.2), extrapolation=Extrapolation(0.5))
    nobody, everybody = torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)
    at_once, later = (
        run(method, problem, len(plan), plan)
        for plan in ([everybody, everybody], [nobody, nobody, everybody, everybody])
    )
    given = lambda state: state.server.broadcast(method.dual, 3).lam_g
    assert torch.equal(given(at_once), given(later))
    assert torch.equal(at_once.lam_g, later.lam_g)
    first = run(method, problem, 3, [nobody, nobody, everybody])
    assert torch.equal(given(first), first.lam_g)


def test_an_extrapolated_point_stays_inside_the_domain():
    """Coordinates that would lose more than half of their precision go no further; whole matrices a part of the way."""
    fall = lambda family, last: [family.natural(torch.zeros(2), s) for s in (4.0, last)]
    before, now = fall(Diagonal(), torch.tensor([2.5, 1.0]))
    ahead = Extrapolation(0.5).ahead(Diagonal(), before, now)
    assert Diagonal().precision(ahead).tolist() == pytest.approx([1.75, 1.0])
    before, now = fall(Full(), torch.eye(2))
    assert relative(Extrapolation(0.9).ahead(Full(), before, now), now + 0.225 * (now - before)) < 1e-12


@pytest.mark.parametrize("beta", [1.0, -0.1, float("nan")])
def test_momentum_is_a_share(beta):
    with pytest.raises(InputError, match=rf"momentum = {beta}: it must be at least 0 and below 1"):
        methods.ivon_admm(momentum=beta)
