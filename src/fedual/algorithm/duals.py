# ruff: noqa: D102 (`Dual` documents these methods)
"""The client's dual step, line 2 of Bayesian-ADMM (paper Eq. 16), and the dual steps of other methods."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedual.algorithm.method import Dual, Solution, Subproblem
from fedual.errors import InputError, require_positive


class _Sent(Dual):
    """The change of η_k does not follow from λ_k − λ_g, so clients send it."""

    uploads: ClassVar[int] = 2

    def change(self, gap: Tensor, weight: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Natural(Dual):
    """η_k ← η_k + γ (λ_k − λ_g) (Eq. 16).

    With γ = ρ and an exact client step, η_k = −∇_μ E_{q_k}[ℓ_k]/τ afterwards (app. C.1).
    """

    gamma: float

    def __post_init__(self) -> None:
        require_positive("gamma", self.gamma)

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        return (solution.lam - problem.lam_g).mul_(self.gamma).add_(problem.eta)

    def change(self, gap: Tensor, weight: Tensor) -> Tensor | None:
        return gap * (self.gamma * weight)[:, None, None]


@dataclass(frozen=True)
class Expectation(_Sent):
    """η_k ← η_k + γ (μ_k − μ_g): the step of Bregman-ADMM, in primal coordinates."""

    gamma: float

    def __post_init__(self) -> None:
        require_positive("gamma", self.gamma)

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        expectation = problem.family.expectation
        return problem.eta + self.gamma * (expectation(solution.lam) - expectation(problem.lam_g))


@dataclass(frozen=True)
class Gradient(_Sent):
    """η_k ← −∇_μ E_{q_k}[ℓ_k]/τ, set rather than stepped to: the dual of the Bayesian learning rule."""

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        if solution.gradient is None:
            raise InputError("The Gradient dual needs a solver that reports ∇_μ E[ℓ_k], e.g. `AtServer` or plain SGD.")
        return -solution.gradient


@dataclass(frozen=True)
class ControlVariate(Gradient):
    """η_k ← −(mean gradient of client k's steps), in whose problem η_k is centred: SCAFFOLD with c_k = −η_k."""

    centred: ClassVar[bool] = True


@dataclass(frozen=True)
class Zero(Dual):
    """η_k = 0: no dual at all (FedAvg, FedProx)."""

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        return torch.zeros_like(problem.eta)

    def change(self, gap: Tensor, weight: Tensor) -> Tensor | None:
        return torch.zeros_like(gap)
