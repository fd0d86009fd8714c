# ruff: noqa: D102 (`Family` documents these methods)
"""The product of Bernoullis over {0, 1}^P."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedual.errors import InputError
from fedual.families.base import Reparametrised, log_prob, require_all
from fedual.families.quadrature import MAX_NODES, MonteCarlo, Rule


@dataclass(frozen=True)
class Bernoulli(Reparametrised):
    """q(θ) = Π_j p_j^{θ_j} (1 − p_j)^{1 − θ_j}: λ = logit(p), T(θ) = θ, μ = p = σ(λ), A(λ) = Σ log(1 + e^λ)."""

    domain = "every logit must be finite"

    def rows(self, dim: int) -> int:
        return 1

    def natural(self, probability: Tensor) -> Tensor:
        """λ from p `(..., P)`."""
        return torch.logit(probability).unsqueeze(-2)

    def statistic(self, theta: Tensor) -> Tensor:
        return theta.unsqueeze(-2)

    def log_partition(self, lam: Tensor) -> Tensor:
        return F.softplus(lam, threshold=40).sum((-2, -1))

    def expectation(self, lam: Tensor) -> Tensor:
        return torch.sigmoid(lam)

    def from_expectation(self, mu: Tensor) -> Tensor:
        require_all((mu > 0) & (mu < 1), "μ is not a Bernoulli expectation: {} are not inside (0, 1).")
        return torch.logit(mu)

    def violations(self, lam: Tensor) -> Tensor:
        return ~lam[..., 0, :].isfinite()

    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        """θ = [Φ(ε) < p]."""
        return (torch.special.ndtr(noise) < torch.sigmoid(lam[..., 0, :])).to(lam)

    def sample(self, lam: Tensor, num: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from uniform instead of normal noise."""
        shape = (num, *lam.shape[:-2], lam.shape[-1])
        uniform = torch.rand(shape, generator=generator, dtype=lam.dtype, device=lam.device)
        return (uniform < torch.sigmoid(lam[..., 0, :])).to(lam)

    def nodes(self, lam: Tensor, rule: Rule, step: int = 0) -> tuple[Tensor, Tensor]:
        """All 2^P states with their probabilities, or draws if the rule is `MonteCarlo`."""
        if isinstance(rule, MonteCarlo):
            return super().nodes(lam, rule, step)
        dim, ones = lam.shape[-1], (1,) * (lam.dim() - 2)
        if 2**dim > MAX_NODES:
            raise InputError(f"2^{dim} states are too many to sum over (limit {MAX_NODES}): use MonteCarlo.")
        states = torch.arange(2**dim, device=lam.device).unsqueeze(-1) >> torch.arange(dim, device=lam.device) & 1
        theta = states.to(lam).reshape(-1, *ones, dim).expand(-1, *lam.shape[:-2], dim)
        return theta, log_prob(self, lam, theta).exp()
