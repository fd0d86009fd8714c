"""Exponential families in natural and expectation coordinates (paper Eq. 10).

    q(θ) = h(θ) exp(⟨λ, T(θ)⟩ − A(λ)),        μ = ∇A(λ) = E_q[T(θ)]

λ, μ and T(θ) are plain tensors `(..., R, P)`: P parameters, R rows of statistics for each of them.
Any leading axes (clients, samples) pass through every function, so the paper's equations are literal
arithmetic on these tensors.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from fedual.errors import DomainError, InputError
from fedual.families.quadrature import Rule

SHORTEST = 1e-6
"""A step of which not even this part stays inside the domain is not taken."""


class Family(ABC):
    """What every exponential family supplies; see CONTRIBUTING.md for a skeleton to copy."""

    domain: ClassVar[str]
    """The condition that λ has to meet, in words, for error messages."""

    @abstractmethod
    def rows(self, dim: int) -> int:
        """R, the number of rows of λ for `dim` parameters."""

    @abstractmethod
    def statistic(self, theta: Tensor) -> Tensor:
        """T(θ), `(..., P)` → `(..., R, P)`."""

    @abstractmethod
    def log_partition(self, lam: Tensor) -> Tensor:
        """A(λ), `(..., R, P)` → `(...)`."""

    @abstractmethod
    def expectation(self, lam: Tensor) -> Tensor:
        """μ = ∇A(λ)."""

    @abstractmethod
    def from_expectation(self, mu: Tensor) -> Tensor:
        """λ = (∇A)⁻¹(μ), differentiable in μ."""

    @abstractmethod
    def violations(self, lam: Tensor) -> Tensor:
        """True where λ is outside the domain: `(..., P)`, or `(...)` if λ is judged as a whole."""

    @abstractmethod
    def sample(self, lam: Tensor, num: int, generator: torch.Generator | None = None) -> Tensor:
        """`num` draws of θ, `(num, ..., P)`."""

    @abstractmethod
    def nodes(self, lam: Tensor, rule: Rule, step: int = 0) -> tuple[Tensor, Tensor]:
        """Points `(N, ..., P)` and weights `(N, ...)` with Σ_n w_n f(θ_n) ≈ E_q[f]."""

    def inside(self, lam: Tensor) -> Tensor:
        """True where a whole λ is inside the domain, `(..., R, P)` → `(...)`."""
        bad = self.violations(lam)
        return ~bad if bad.dim() == lam.dim() - 2 else ~bad.any(-1)

    def backtrack(self, lam: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """λ + t (target − λ), and t: the first of 1, ½, ¼, … that is inside the domain, which is convex and has λ."""
        part = 1.0
        while part > SHORTEST:
            if self.inside(new := torch.lerp(lam, target, part)):
                return new, part
            part /= 2
        return lam, 0.0

    def log_base(self, theta: Tensor) -> Tensor:
        """Log h(θ), `(..., P)` → `(...)`; zero unless a family says otherwise."""
        return torch.zeros_like(theta[..., 0])

    def expected_log_base(self, lam: Tensor) -> Tensor:
        """E_q[log h(θ)], `(..., R, P)` → `(...)`."""
        return torch.zeros_like(lam[..., 0, 0])

    def __str__(self) -> str:
        return type(self).__name__


def inner(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ over the last two axes."""
    return (a * b).sum((-2, -1))


def kl(family: Family, lam_p: Tensor, lam_q: Tensor) -> Tensor:
    """KL(p ‖ q) = A(λ_q) − A(λ_p) − ⟨λ_q − λ_p, μ_p⟩, for every family."""
    bregman = family.log_partition(lam_q) - family.log_partition(lam_p)
    return bregman - inner(lam_q - lam_p, family.expectation(lam_p))


def log_prob(family: Family, lam: Tensor, theta: Tensor) -> Tensor:
    """Log q(θ) of Eq. 10, `(..., P)` → `(...)`."""
    return inner(lam, family.statistic(theta)) - family.log_partition(lam) + family.log_base(theta)


def entropy(family: Family, lam: Tensor) -> Tensor:
    """−E_q[log q] = A(λ) − ⟨λ, μ⟩ − E_q[log h]."""
    return family.log_partition(lam) - inner(lam, family.expectation(lam)) - family.expected_log_base(lam)


def finite(x: Tensor) -> Tensor:
    """True where a whole matrix is finite, `(..., R, P)` → `(...)`, without memory of its size."""
    return x.amax((-2, -1)).isfinite() & x.amin((-2, -1)).isfinite()  # both are NaN where an entry is


def check(family: Family, lam: Tensor, name: str = "λ") -> None:
    """Raise if λ has a wrong shape (`InputError`) or is outside the domain (`DomainError`)."""
    if lam.dim() < 2 or lam.shape[-2] != family.rows(lam.shape[-1]) or lam.shape[-1] == 0:
        wanted = f"(..., {family.rows(lam.shape[-1]) if lam.dim() else 'R'}, P)"
        raise InputError(f"{name} has shape {tuple(lam.shape)}, but {family} needs {wanted} with P ≥ 1.")
    if not lam.is_floating_point():
        raise InputError(f"{name} is {lam.dtype}: give floating-point numbers.")
    bad = family.violations(lam)
    if not bad.any():
        return
    where = ", ".join(str(tuple(i)) for i in bad.nonzero()[:5].tolist()) or "()"
    more = ", …" if int(bad.sum()) > 5 else ""
    of = f"{int(bad.sum())} of {bad.numel()} " + ("elements" if bad.dim() == lam.dim() - 1 else "matrices")
    raise DomainError(f"{name} is outside the domain of {family} at {of} (index {where}{more}): {family.domain}.")
