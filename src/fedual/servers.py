"""The server's step, line 3 of Bayesian-ADMM (paper Eq. 17 in closed form, Eq. 51)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedual.errors import require_positive


@dataclass(frozen=True)
class Blend:
    """λ_g ← (1−α) mean_k λ_k + α (λ_0 + Σ_k η_k) (Eq. 51).

    α = 1/(1 + ρ|S|) for the |S| clients of the round solves Eq. 17; α = 1 is the product of the sites
    (PVI, AMA), which leaves the clients' λ_k out.
    """

    alpha: float | None = None

    def __post_init__(self):
        if self.alpha is not None:
            require_positive("alpha", self.alpha, most=1.0)

    def __call__(self, lam_g: Tensor, lam: Tensor, prior: Tensor, eta_sum: Tensor, rho: float) -> Tensor:
        """The new λ_g."""
        alpha = 1 / (1 + rho * len(lam)) if self.alpha is None else self.alpha
        return torch.lerp(lam.mean(0), prior + eta_sum, alpha)


@dataclass(frozen=True)
class Relax:
    """λ_g ← (1−β) λ_g + β (λ_0 + Σ_k η_k): the Bayesian learning rule with step β (app. C.2)."""

    beta: float

    def __post_init__(self):
        require_positive("beta", self.beta, most=1.0)

    def __call__(self, lam_g: Tensor, lam: Tensor, prior: Tensor, eta_sum: Tensor, rho: float) -> Tensor:
        """The new λ_g."""
        return torch.lerp(lam_g, prior + eta_sum, self.beta)
