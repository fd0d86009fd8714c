"""Losses with known answers, and what federations of them should converge to."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedual.families import Bernoulli, Family, Full, Gamma
from fedual.solvers import Conjugate, Linear


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape, seed: int) -> Tensor:
    return torch.randn(shape, generator=rng(seed))


class Problem(NamedTuple):
    """Conjugate losses, their prior, and the pooled posterior λ_0 + Σ c_k."""

    family: Family
    losses: Conjugate
    prior: Tensor

    @property
    def pooled(self) -> Tensor:
        return self.prior + self.losses.c.sum(0)


def quadratics(num_clients: int = 7, dim: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A_k (positive semi-definite, of low rank: no client can do it alone) and b_k of ½ θᵀA_kθ + b_kᵀθ."""
    root = normal((num_clients, dim, dim // 2), seed)
    return root @ root.mT, normal((num_clients, dim), seed + 1)


def full_gaussian(num_clients: int = 7, dim: int = 20, seed: int = 0) -> Problem:
    """Quadratic losses ½ θᵀAθ + bᵀθ = −⟨(−b, −½A), (θ, θθᵀ)⟩."""
    a, b = quadratics(num_clients, dim, seed)
    family = Full()
    prior = family.natural(normal((dim,), seed + 2), torch.rand(dim, generator=rng(seed + 3)) + 0.5)
    return Problem(family, Conjugate(family, torch.cat([-b[:, None], -a / 2], 1)), prior)


def poisson_counts(num_clients: int = 7, dim: int = 20, seed: int = 0) -> Problem:
    """n_k counts y ~ Poisson(θ_j): ℓ_k = −Σy log θ + n θ, posterior Gamma(a + Σy, b + Σn)."""
    family = Gamma()
    rate = 5 * torch.rand(dim, generator=rng(seed)) + 0.5
    exposure = torch.randint(1, 9, (num_clients, dim), generator=rng(seed + 1)).double()
    counts = torch.poisson(exposure * rate, generator=rng(seed + 2))
    prior = family.natural(torch.full((dim,), 1.5), torch.full((dim,), 0.7))
    return Problem(family, Conjugate(family, torch.stack([counts, -exposure], 1)), prior)


def linear_bits(num_clients: int = 7, dim: int = 20, seed: int = 0) -> Problem:
    """Losses linear in θ ∈ {0, 1}^P."""
    family = Bernoulli()
    prior = family.natural(torch.full((dim,), 0.3))
    return Problem(family, Conjugate(family, normal((num_clients, 1, dim), seed)), prior)


CONJUGATE = [full_gaussian, poisson_counts, linear_bits]


def logistic(num_clients: int = 3, dim: int = 3, size: int = 30, seed: int = 0) -> Linear:
    """Logistic regression on clients of unequal size, each with its own input distribution."""
    truth, clients = normal((dim,), seed), []
    for k in range(num_clients):
        x = normal((size + 7 * k, dim), seed + 10 + k) + normal((dim,), seed + 20 + k)
        y = (torch.rand(len(x), generator=rng(seed + 30 + k)) < torch.sigmoid(x @ truth)).double()
        clients.append((x, y))
    return Linear.from_clients("binomial", clients)
