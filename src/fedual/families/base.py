"""Exponential families in natural and expectation coordinates (paper Eq. 10).

    q(θ) = h(θ) exp(⟨λ, T(θ)⟩ − A(λ)),        μ = ∇A(λ) = E_q[T(θ)]

λ, μ and T(θ) are plain tensors `(..., R, P)`: P parameters, R rows of statistics for each of them. Leading axes
(clients, samples) pass through every function, so the paper's equations are arithmetic on these tensors.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from fedual.errors import DomainError, InputError
from fedual.families.quadrature import Rule

MIN_STEP = 1e-6
"""Smallest fraction of a step that `Family.backtrack` tries before it stays where it is."""


class Family(ABC):
    """The interface of an exponential family; CONTRIBUTING.md has a skeleton to copy."""

    domain: ClassVar[str]
    """The condition that λ must meet, in words, for error messages."""

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
        """True where λ is outside the domain: `(..., P)`, or `(...)` if the condition is on λ as a whole."""

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
        """λ + t (target − λ) and t, the first of 1, ½, ¼, … inside the domain, which is convex and contains λ."""
        step = 1.0
        while step > MIN_STEP:
            if self.inside(new := torch.lerp(lam, target, step)):
                return new, step
            step /= 2
        return lam, 0.0

    def log_base(self, theta: Tensor) -> Tensor:
        """Log h(θ), `(..., P)` → `(...)`; zero by default."""
        return torch.zeros_like(theta[..., 0])

    def expected_log_base(self, lam: Tensor) -> Tensor:
        """E_q[log h(θ)], `(..., R, P)` → `(...)`."""
        return torch.zeros_like(lam[..., 0, 0])

    def __str__(self) -> str:
        return type(self).__name__


class Reparametrised(Family):
    """A family whose draws are a function of λ and of standard-normal noise."""

    @abstractmethod
    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        """θ from standard-normal ε, both `(..., P)`."""

    def sample(self, lam: Tensor, num: int, generator: torch.Generator | None = None) -> Tensor:
        """Standard-normal noise, placed."""
        shape = (num, *lam.shape[:-2], lam.shape[-1])
        return self.place(lam, torch.randn(shape, generator=generator, dtype=lam.dtype, device=lam.device))

    def nodes(self, lam: Tensor, rule: Rule, step: int = 0) -> tuple[Tensor, Tensor]:
        """The rule's nodes, placed."""
        noise, weight = rule(lam.shape[-1], step, lam)
        ones = (1,) * (lam.dim() - 2)
        noise = noise.reshape(-1, *ones, lam.shape[-1]).expand(-1, *lam.shape[:-2], -1)
        theta = self.place(lam, noise)
        return theta, weight.reshape(-1, *ones).expand(theta.shape[:-1])


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
    """True where a whole matrix is finite, `(..., R, P)` → `(...)`, without allocating a tensor of its size."""
    return x.amax((-2, -1)).isfinite() & x.amin((-2, -1)).isfinite()  # both are NaN if an entry is


def require_all(valid: Tensor, message: str) -> None:
    """Raise `DomainError` unless all entries are valid; `{}` in the message becomes the count of the others."""
    if not valid.all():
        raise DomainError(message.format(f"{int((~valid).sum())} of {valid.numel()}"))


def check(family: Family, lam: Tensor, name: str = "λ") -> None:
    """Raise if λ has the wrong shape (`InputError`) or is outside the domain (`DomainError`)."""
    if lam.dim() < 2 or lam.shape[-2] != family.rows(lam.shape[-1]) or lam.shape[-1] == 0:
        expected = f"(..., {family.rows(lam.shape[-1]) if lam.dim() else 'R'}, P)"
        raise InputError(f"{name} has shape {tuple(lam.shape)}, but {family} needs {expected} with P ≥ 1.")
    if not lam.is_floating_point():
        raise InputError(f"{name} is {lam.dtype}: give floating-point numbers.")
    bad = family.violations(lam)
    if not bad.any():
        return
    count, what = int(bad.sum()), "elements" if bad.dim() == lam.dim() - 1 else "matrices"
    where = ", ".join(str(tuple(i)) for i in bad.nonzero()[:5].tolist()) or "()"
    where = f"{count} of {bad.numel()} {what} (index {where}{', …' if count > 5 else ''})"
    raise DomainError(f"{name} is outside the domain of {family} at {where}: {family.domain}.")
