"""The client's dual step, line 2 of Bayesian-ADMM (paper Eq. 16 and its rivals)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedual.contracts import Solution, Subproblem
from fedual.errors import InputError, require_positive


@dataclass(frozen=True)
class Natural:
    """η_k ← η_k + γ (λ_k − λ_g) (Eq. 16).

    With γ = ρ and an exact client step, η_k = −∇_μ E_{q_k}[ℓ_k]/τ afterwards (app. C.1).
    """

    gamma: float
    uploads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive("gamma", self.gamma)

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        """The new η_k."""
        return (solution.lam - problem.lam_g).mul_(self.gamma).add_(problem.eta)


@dataclass(frozen=True)
class Expectation:
    """η_k ← η_k + γ (μ_k − μ_g): the step of Bregman-ADMM, in primal coordinates."""

    gamma: float
    uploads: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_positive("gamma", self.gamma)

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        """The new η_k."""
        expectation = problem.family.expectation
        return problem.eta + self.gamma * (expectation(solution.lam) - expectation(problem.lam_g))


@dataclass(frozen=True)
class Gradient:
    """η_k ← −∇_μ E_{q_k}[ℓ_k]/τ, set rather than stepped to: the dual of the Bayesian learning rule."""

    uploads: ClassVar[int] = 2

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        """The new η_k."""
        if solution.gradient is None:
            raise InputError("The Gradient dual needs a solver that reports ∇_μ E[ℓ_k], such as `AtServer`.")
        return -solution.gradient


@dataclass(frozen=True)
class Zero:
    """η_k = 0: no dual at all (FedAvg, FedProx)."""

    uploads: ClassVar[int] = 1

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        """Zeros."""
        return torch.zeros_like(problem.eta)
