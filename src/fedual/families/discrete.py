"""The product of Bernoullis over {0, 1}^P: λ = logit(p), T(θ) = θ, μ = p."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedual.errors import DomainError, InputError
from fedual.families.base import Family, log_prob
from fedual.families.quadrature import MAX_NODES, MonteCarlo, Rule


@dataclass(frozen=True)
class Bernoulli(Family):
    """q(θ) = Π_j p_j^{θ_j} (1 − p_j)^{1 − θ_j}, θ ∈ {0, 1}^P."""

    domain = "every logit must be finite"

    def rows(self, dim: int) -> int:
        """One."""
        return 1

    def natural(self, probability: Tensor) -> Tensor:
        """λ = log(p / (1 − p))."""
        return torch.logit(probability).unsqueeze(-2)

    def statistic(self, theta: Tensor) -> Tensor:
        """T(θ) = θ."""
        return theta.unsqueeze(-2)

    def log_partition(self, lam: Tensor) -> Tensor:
        """A(λ) = Σ log(1 + e^λ)."""
        return F.softplus(lam, threshold=40).sum((-2, -1))

    def expectation(self, lam: Tensor) -> Tensor:
        """μ = σ(λ)."""
        return torch.sigmoid(lam)

    def from_expectation(self, mu: Tensor) -> Tensor:
        """λ = logit(μ)."""
        inside = (mu > 0) & (mu < 1)
        if not inside.all():
            bad = int((~inside).sum())
            raise DomainError(f"μ is not a Bernoulli expectation: {bad} of {mu.numel()} are not inside (0, 1).")
        return torch.logit(mu)

    def violations(self, lam: Tensor) -> Tensor:
        """True where a logit is not finite."""
        return ~lam[..., 0, :].isfinite()

    def sample(self, lam: Tensor, num: int, generator: torch.Generator | None = None) -> Tensor:
        """`num` draws of θ, `(num, ..., P)`."""
        shape = (num, *lam.shape[:-2], lam.shape[-1])
        uniform = torch.rand(shape, generator=generator, dtype=lam.dtype, device=lam.device)
        return (uniform < torch.sigmoid(lam[..., 0, :])).to(lam)

    def nodes(self, lam: Tensor, rule: Rule, step: int = 0) -> tuple[Tensor, Tensor]:
        """All 2^P states with their probabilities, or draws if the rule is `MonteCarlo`."""
        dim, batch = lam.shape[-1], (1,) * (lam.dim() - 2)
        if isinstance(rule, MonteCarlo):
            noise, weight = rule(dim, step, lam)
            uniform = torch.special.ndtr(noise).reshape(-1, *batch, dim)
            theta = (uniform < torch.sigmoid(lam[..., 0, :])).to(lam)
            return theta, weight.reshape(-1, *batch).expand(theta.shape[:-1])
        if 2**dim > MAX_NODES:
            raise InputError(f"2^{dim} states are too many to sum over (limit {MAX_NODES}): use MonteCarlo.")
        states = torch.arange(2**dim, device=lam.device).unsqueeze(-1) >> torch.arange(dim, device=lam.device) & 1
        theta = states.to(lam).reshape(-1, *batch, dim).expand(-1, *lam.shape[:-2], dim)
        return theta, log_prob(self, lam, theta).exp()
