# ruff: noqa: D102 (`Family` documents these methods)
"""The product of Gammas over (0, ∞)^P, the conjugate family of Poisson rates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedual.errors import InputError
from fedual.families.base import Reparametrised, require_all
from fedual.families.quadrature import Delta, Rule


@dataclass(frozen=True)
class Gamma(Reparametrised):
    """q(θ) ∝ θ^{a−1} e^{−bθ}: λ = (a − 1, −b), T = (log θ, θ), μ = (ψ(a) − log b, a/b), A = Σ log Γ(a) − a log b."""

    domain = "every shape a = λ[0] + 1 and every rate b = −λ[1] must be positive and finite"

    def rows(self, dim: int) -> int:
        return 2

    def natural(self, shape: Tensor, rate: Tensor) -> Tensor:
        return torch.stack(torch.broadcast_tensors(shape - 1, -rate), -2)

    def shape(self, lam: Tensor) -> Tensor:
        return lam[..., 0, :] + 1

    def rate(self, lam: Tensor) -> Tensor:
        return -lam[..., 1, :]

    def statistic(self, theta: Tensor) -> Tensor:
        return torch.stack([theta.log(), theta], -2)

    def log_partition(self, lam: Tensor) -> Tensor:
        return (torch.lgamma(self.shape(lam)) - self.shape(lam) * self.rate(lam).log()).sum(-1)

    def expectation(self, lam: Tensor) -> Tensor:
        shape, rate = self.shape(lam), self.rate(lam)
        return torch.stack([torch.digamma(shape) - rate.log(), shape / rate], -2)

    def from_expectation(self, mu: Tensor) -> Tensor:
        """Solve log a − ψ(a) = log μ[1] − μ[0] for a by Newton's method in log a; b = a/μ[1].

        Only the last Newton step is differentiated: its derivative is that of the exact solution.
        """
        mean_log, mean = mu[..., 0, :], mu[..., 1, :]
        gap = mean.log() - mean_log
        require_all(gap > 0, "μ is not a Gamma expectation: log μ[1] ≤ μ[0] at {} elements.")
        fixed = gap.detach()
        log_shape = ((3 - fixed + ((fixed - 3) ** 2 + 24 * fixed).sqrt()) / (12 * fixed)).log()
        for _ in range(8):
            log_shape = _newton(log_shape, fixed)
        shape = _newton(log_shape, gap).exp()
        return self.natural(shape, shape / mean)

    def violations(self, lam: Tensor) -> Tensor:
        return ~(lam.isfinite().all(-2) & (lam[..., 0, :] > -1) & (lam[..., 1, :] < 0))

    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        """θ = F⁻¹(Φ(ε)) with the distribution function F."""
        return _quantile(self.shape(lam), noise) / self.rate(lam)

    def nodes(self, lam: Tensor, rule: Rule, step: int = 0) -> tuple[Tensor, Tensor]:
        if isinstance(rule, Delta):
            raise InputError("The delta method needs a Gaussian: use GaussHermite or MonteCarlo with Gamma.")
        return super().nodes(lam, rule, step)


def _quantile(shape: Tensor, noise: Tensor) -> Tensor:
    """x with P(X ≤ x) = Φ(noise) for X ~ Gamma(shape, 1), by bisection in log x on the smaller tail."""
    shape, noise = torch.broadcast_tensors(shape, noise)
    upper, tail = noise > 0, torch.special.ndtr(-noise.abs())
    low = (torch.special.log_ndtr(noise) + torch.lgamma(shape + 1)) / shape  # P(X ≤ x) ≤ x^a / Γ(a + 1)
    high = torch.maximum((shape + 15 * shape.sqrt() + 60).log(), low)
    for _ in range(60):
        middle = (low + high) / 2
        x = middle.exp()
        below = torch.where(upper, torch.special.gammaincc(shape, x) > tail, torch.special.gammainc(shape, x) < tail)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return ((low + high) / 2).exp()


def _newton(log_shape: Tensor, gap: Tensor) -> Tensor:
    """One Newton step on f(x) = x − ψ(eˣ) − gap, which is convex and decreasing in x = log a."""
    shape = log_shape.exp()
    slope = 1 - shape * torch.polygamma(1, shape)
    return log_shape - (log_shape - torch.digamma(shape) - gap) / slope
