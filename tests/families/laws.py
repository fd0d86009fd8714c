"""The laws that every family obeys. A family's test inherits `Laws` and supplies `family` and `params`."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import normal, rng
from torch import Tensor

from fedual.errors import DomainError
from fedual.families import GaussHermite, check, entropy, inner, kl, log_prob

seeds = st.integers(0, 2**20)


class Laws:
    family: Any  # the Family under test
    dim = 3
    monte_carlo = 40_000

    def params(self, batch: tuple[int, ...], seed: int) -> Tensor:
        """A random λ with these leading axes."""
        raise NotImplementedError

    def outside(self, lam: Tensor) -> tuple[Tensor, int]:
        """λ (batch of 4) pushed out of the domain in some places, and in how many."""
        raise NotImplementedError

    def distribution(self, lam: Tensor) -> torch.distributions.Distribution:
        """The same distribution in torch.distributions, with event shape (P,)."""
        raise NotImplementedError

    @given(seed=seeds, batch=st.sampled_from([(), (2,), (2, 3)]))
    def test_expectation_is_the_gradient_of_the_log_partition(self, seed, batch):
        """μ = ∇A(λ) (below Eq. 10)."""
        lam = self.params(batch, seed).requires_grad_()
        (gradient,) = torch.autograd.grad(self.family.log_partition(lam).sum(), lam)
        torch.testing.assert_close(gradient, self.family.expectation(lam).detach(), rtol=1e-9, atol=1e-9)
        assert self.family.log_partition(lam).shape == batch

    @given(seed=seeds, batch=st.sampled_from([(), (2,), (2, 3)]))
    def test_round_trips(self, seed, batch):
        lam = self.params(batch, seed)
        mu = self.family.expectation(lam)
        torch.testing.assert_close(self.family.from_expectation(mu), lam, rtol=1e-7, atol=1e-9)
        back = self.family.expectation(self.family.from_expectation(mu))
        torch.testing.assert_close(back, mu, rtol=1e-9, atol=1e-9)

    @given(seed=seeds)
    def test_kl_is_positive_and_zero_only_at_equality(self, seed):
        p, q = self.params((5,), seed), self.params((5,), seed + 1)
        assert (kl(self.family, p, q) > 1e-6).all()
        torch.testing.assert_close(kl(self.family, p, p), torch.zeros(5), atol=1e-12, rtol=0)
        near = torch.lerp(p, q, 1e-3)
        assert (kl(self.family, p, near) > 0).all()

    @given(seed=seeds)
    def test_kl_and_entropy_against_torch_distributions(self, seed):
        p, q = self.params((4,), seed), self.params((4,), seed + 1)
        known = torch.distributions.kl_divergence(self.distribution(p), self.distribution(q))
        torch.testing.assert_close(kl(self.family, p, q), known, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(entropy(self.family, p), self.distribution(p).entropy(), rtol=1e-8, atol=1e-8)

    @given(seed=seeds)
    def test_eq10_log_density_against_torch_distributions(self, seed):
        lam = self.params((4,), seed)
        theta = self.family.sample(lam, 3, rng(seed))
        torch.testing.assert_close(
            log_prob(self.family, lam, theta), self.distribution(lam).log_prob(theta), rtol=1e-7, atol=1e-7
        )

    def test_samples_and_kl_against_monte_carlo(self):
        """Means of T(θ) and of log p − log q over samples are within 6 standard errors of μ and of KL."""
        p, q = self.params((2,), 11), self.params((2,), 12)
        theta = self.family.sample(p, self.monte_carlo, rng(13))
        assert theta.shape == (self.monte_carlo, 2, self.dim)
        ratio = log_prob(self.family, p, theta) - log_prob(self.family, q, theta)
        for draws, exact in (
            (self.family.statistic(theta), self.family.expectation(p)),
            (ratio, kl(self.family, p, q)),
        ):
            error = draws.std(0) / math.sqrt(self.monte_carlo)
            assert ((draws.mean(0) - exact).abs() <= 6 * error + 1e-12).all()

    def test_nodes_integrate_the_statistic(self):
        lam = self.params((2,), 5)
        theta, weight = self.family.nodes(lam, GaussHermite(16))
        mean = torch.einsum("nk,nkrp->krp", weight, self.family.statistic(theta))
        torch.testing.assert_close(mean, self.family.expectation(lam), rtol=1e-4, atol=1e-4)

    @given(seed=seeds)
    def test_eq11_fisher_times_expectation_gradient_is_natural_parameter_gradient(self, seed):
        """F(λ) ∇_μ L = ∇_λ L, with L(μ) any function; in Full's layout F is singular, so it is not inverted."""
        lam = self.params((), seed)
        weight = normal(lam.shape, seed + 1)
        weight = self.symmetric(weight)
        loss = lambda mu: torch.sin(inner(weight, mu)) + inner(weight, mu) ** 2 / 10
        mu = self.family.expectation(lam).detach().requires_grad_()
        (by_mu,) = torch.autograd.grad(loss(mu), mu)
        leaf = lam.clone().requires_grad_()
        (by_lam,) = torch.autograd.grad(loss(self.family.expectation(leaf)), leaf)
        fisher = torch.autograd.functional.hessian(self.family.log_partition, lam)
        torch.testing.assert_close(torch.einsum("abij,ij->ab", fisher, by_mu), by_lam, rtol=1e-7, atol=1e-8)

    def symmetric(self, weight: Tensor) -> Tensor:
        """Make a direction legal for the family's layout."""
        return weight

    @given(seed=seeds, far=st.sampled_from([0.5, 3.0, 1000.0]))
    def test_backtracking_stays_inside(self, seed, far):
        """As far as the domain goes on the way to a target that need not be in it."""
        lam, other = self.params((), seed), self.params((), seed + 1)
        found, part = self.family.backtrack(lam, torch.lerp(lam, other, far))
        assert self.family.inside(found)
        assert 0 <= part <= 1

    def test_out_of_domain_says_which_and_how_many(self):
        lam = self.params((4,), 3)
        check(self.family, lam)
        assert self.family.inside(lam).all()
        bad, count = self.outside(lam)
        with pytest.raises(DomainError, match=rf"\b{count} of ") as error:
            check(self.family, bad, "λ_k")
        assert "λ_k" in str(error.value)
        assert "index" in str(error.value)
        assert not self.family.inside(bad).all()

    def test_not_finite_is_out_of_domain(self):
        for value in (torch.nan, torch.inf, -torch.inf):
            for row in (0, -1):
                lam = self.params((4,), 3)
                lam[2, row, 1] = value
                assert self.family.inside(lam).tolist() == [True, True, False, True]
