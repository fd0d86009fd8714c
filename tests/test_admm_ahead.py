"""Bayesian-ADMM with clients that count by their examples, and with momentum: against closed forms."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from problems import CONJUGATE
from test_admm import bayesian_admm, relative, run
from torch import Tensor

from fedual import admm, methods
from fedual.admm import init, step
from fedual.errors import InputError
from fedual.families import Diagonal, Full
from fedual.solvers import Conjugate

SIZES = torch.tensor([3.0, 40.0, 12.0, 10.0], dtype=torch.float64)


@dataclass(frozen=True)
class Sized(Conjugate):
    """Losses that know how many examples they are of."""

    num_examples: Tensor = field(default_factory=lambda: SIZES)

    def __getitem__(self, clients):
        return Sized(self.family, self.c[clients], self.num_examples[clients])


@pytest.mark.parametrize("make", CONJUGATE)
@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_clients_that_count_by_their_examples_have_a_rho_and_a_gamma_of_their_own(make, tau):
    """λ_k = λ_g + (c_k/τ − η_k)/ρ_k, η_k += γ_k (λ_k − λ_g), λ_g = (Σ ρ_k λ_k + λ_0 + Σ η_k)/(1 + Σ ρ_k); some rest."""
    problem, rho, gamma, unit = make(num_clients=4, seed=4), 0.8, 0.3, 10.0
    method = replace(bayesian_admm(problem.family, rho, gamma, tau), unit=unit)
    losses, w = Sized(problem.family, problem.losses.c), (SIZES / unit)[:, None, None]
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
        assert relative(state.eta_sum, eta.sum(0)) < 1e-12
    for _ in range(300):
        state, _ = step(method, state, losses)
    assert relative(state.lam_g, problem.prior + losses.c.sum(0) / tau) < 1e-8


@pytest.mark.parametrize("make", CONJUGATE)
def test_with_momentum_clients_are_given_a_point_ahead(make):
    """λ_g + β (λ_g − λ_g⁻) from the third round on; everything else is as without, and so is the fixed point."""
    problem, beta = make(seed=2), 0.5
    plain = bayesian_admm(problem.family, 0.6, 0.2)
    method, seen = replace(plain, momentum=beta), []
    state = init(method, problem.prior, len(problem.losses))
    for _ in range(5):
        point = seen[-1] + beta * (seen[-1] - seen[-2]) if len(seen) > 1 else state.lam_g
        assert relative(state.given, point) < 1e-12
        expected, _ = step(plain, state._replace(lam_g=point, ahead=None), problem.losses)
        state, _ = step(method, state, problem.losses)
        assert relative(state.lam_g, expected.lam_g) < 1e-12
        assert relative(state.eta, expected.eta) < 1e-12
        seen.append(state.lam_g)
    assert relative(run(method, problem, 300).lam_g, problem.pooled) < 1e-8


def test_a_point_ahead_stays_inside_the_domain():
    """Coordinates that would lose more than half of their precision go no further; whole matrices a part of the way."""
    fall = lambda family, last: [family.natural(torch.zeros(2), s) for s in (4.0, last)]
    before, now = fall(Diagonal(), torch.tensor([2.5, 1.0]))
    method = replace(bayesian_admm(Diagonal(), 1.0), momentum=0.5)
    ahead = admm.ahead(method, before, now)
    assert ahead is not None
    assert Diagonal().precision(ahead).tolist() == pytest.approx([1.75, 1.0])
    before, now = fall(Full(), torch.eye(2))
    method = replace(bayesian_admm(Full(), 1.0), momentum=0.9)
    assert relative(admm.ahead(method, before, now), now + 0.225 * (now - before)) < 1e-12
    assert admm.ahead(bayesian_admm(Full(), 1.0), before, now) is None


def test_momentum_is_a_share():
    with pytest.raises(InputError, match=r"momentum = 1\.0: it must be at least 0 and below 1"):
        methods.ivon_admm(momentum=1.0)
