# ruff: noqa: D102 (`Server` documents `__call__`)
"""The server's step: line 3 of Bayesian-ADMM (paper Eq. 17 in closed form, Eq. 51), and of other methods."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedual.algorithm.method import Gathered, Server
from fedual.errors import require_positive


@dataclass(frozen=True)
class Blend(Server):
    """λ_g ← (1−α) mean_k λ_k + α (λ_0 + Σ_k η_k) (Eq. 51).

    α = 1/(1 + ρ|S|) for the |S| clients of the round solves Eq. 17; α = 1 is the product of the sites
    (PVI, AMA), which leaves the clients' λ_k out.
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None:
            require_positive("alpha", self.alpha, most=1.0)

    def __call__(self, gathered: Gathered) -> Tensor:
        alpha = 1 / (1 + gathered.rho * gathered.count) if self.alpha is None else self.alpha
        return torch.lerp(gathered.mean, gathered.prior + gathered.eta_sum, alpha)


@dataclass(frozen=True)
class Relax(Server):
    """λ_g ← (1−β) λ_g + β (λ_0 + Σ_k η_k): the Bayesian learning rule with step β (app. C.2)."""

    beta: float

    def __post_init__(self) -> None:
        require_positive("beta", self.beta, most=1.0)

    def __call__(self, gathered: Gathered) -> Tensor:
        return torch.lerp(gathered.lam_g, gathered.prior + gathered.eta_sum, self.beta)


@dataclass(frozen=True)
class Average(Server):
    """θ_g ← Σ_k N_k θ_k / Σ_k N_k over the clients of the round: FedAvg."""

    prior: ClassVar[bool] = False
    weighted: ClassVar[bool] = True

    def __call__(self, gathered: Gathered) -> Tensor:
        return gathered.mean


@dataclass(frozen=True)
class Consensus(Server):
    """θ_g ← mean_{k∈S} θ_k + Σ_k v_k/(ρK): FedDyn, ADMM for mean losses without a regulariser.

    The mean is over the clients S of the round, the sum over all K. In FedDyn's letters: its state is
    h = −(1/K) Σ_k v_k, its α is ρ, and θ_g = mean_{k∈S} θ_k − h/α.
    """

    prior: ClassVar[bool] = False

    def __call__(self, gathered: Gathered) -> Tensor:
        return gathered.mean + gathered.eta_sum / (gathered.rho * gathered.num_clients)


@dataclass(frozen=True)
class Track(Server):
    """θ_g ← θ_g + s · mean_{k∈S} Δ_k, Δ_k the change of θ_k + v_k/ρ since client k last took part: FedADMM."""

    step: float = 1.0
    prior: ClassVar[bool] = False
    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive("step", self.step)

    def __call__(self, gathered: Gathered) -> Tensor:
        change = gathered.mean - gathered.before + gathered.eta_change / (gathered.rho * gathered.count)
        return gathered.lam_g + self.step * change


@dataclass(frozen=True)
class Mean(Track):
    """θ_g ← θ_g + s (mean_{k∈S} θ_k − θ_g), in which clients count alike: `Track` without a memory, for SCAFFOLD."""

    remembers: ClassVar[bool] = False

    def __call__(self, gathered: Gathered) -> Tensor:
        return torch.lerp(gathered.lam_g, gathered.mean, self.step)
