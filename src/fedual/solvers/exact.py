# ruff: noqa: D102 (the base classes document these methods)
"""Conjugate losses, ℓ_k(θ) = −⟨c_k, T(θ)⟩: the client's problem in closed form (app. D.2)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedual.algorithm.method import Solution, Subproblem
from fedual.errors import InputError
from fedual.families import Family, Rule, inner
from fedual.solvers.base import Loss, Stateless, stationary


@dataclass(frozen=True)
class Conjugate(Loss):
    """ℓ_k(θ) = −⟨c_k, T(θ)⟩ with c `(K, R, P)`; the pooled posterior is λ_0 + Σ_k c_k."""

    family: Family
    c: Tensor

    def __post_init__(self) -> None:
        rows = self.family.rows(self.c.shape[-1])
        if self.c.dim() != 3 or self.c.shape[-2] != rows:
            raise InputError(f"c has shape {tuple(self.c.shape)}, but {self.family} needs (K, {rows}, P).")

    @property
    def dim(self) -> int:
        return self.c.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.c.dtype

    def __len__(self) -> int:
        return len(self.c)

    def __getitem__(self, clients: Any) -> "Conjugate":
        return Conjugate(self.family, self.c[clients])

    def __call__(self, theta: Tensor) -> Tensor:
        return -inner(self.c, self.family.statistic(theta))

    def natural_gradient(self, family: Family, lam: Tensor, rule: Rule, step: int = 0) -> tuple[Tensor, Tensor]:
        """E_q[ℓ_k] = −⟨c_k, μ⟩ and its gradient −c_k, without quadrature."""
        if family != self.family:
            raise InputError(f"These losses are conjugate to {self.family}, not to {family}: use the same family.")
        return -inner(self.c, family.expectation(lam)), -self.c


@dataclass(frozen=True)
class Exact(Stateless):
    """λ_k = λ_g + (c_k/τ − η_k)/ρ: E_q[ℓ_k] = −⟨c_k, μ⟩ has the natural gradient −c_k everywhere."""

    def __call__(self, problem: Subproblem) -> Solution:
        if not (isinstance(problem.losses, Conjugate) and problem.losses.family == problem.family):
            raise InputError(
                f"The exact solver needs Conjugate losses of {problem.family}: use BLR, VON or Point for others."
            )
        return Solution(stationary(problem, -problem.losses.c), problem.carry)
