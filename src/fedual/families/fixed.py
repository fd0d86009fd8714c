"""Gaussians of fixed precision, where only the mean moves: Bayesian-ADMM becomes ADMM (paper Eq. 21)."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedual.errors import DomainError, InputError, require_positive
from fedual.families.base import Family
from fedual.families.gaussian import LOG_2PI, Gaussian, positive_definite, solve_transposed


class _Fixed(Gaussian):
    """Gaussians with a known precision S: h(θ) = N(θ | 0, S⁻¹), T(θ) = θ, A(λ) = ½ λᵀS⁻¹λ."""

    domain = "every entry must be finite"

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """S x, `(..., P)`."""

    @abstractmethod
    def log_det(self, dim: int) -> Tensor | float:
        """log det S."""

    def rows(self, dim: int) -> int:
        """One."""
        return 1

    def statistic(self, theta: Tensor) -> Tensor:
        """T(θ) = θ."""
        return theta.unsqueeze(-2)

    def natural(self, mean: Tensor, precision: Tensor | float | None = None) -> Tensor:
        """λ = S m; a precision other than the family's own is refused."""
        if precision is not None:
            own = self.precision(mean.unsqueeze(-2))
            given = torch.as_tensor(precision, dtype=mean.dtype, device=mean.device)
            fits = given.dim() == 0 or given.shape == own.shape[own.dim() - given.dim() :]
            if not (fits and torch.allclose(given.expand_as(own), own)):
                raise InputError(
                    f"{self} contains its precision, which is also the prior's, and cannot hold another one: "
                    "leave `precision` out, or use Diagonal or Full."
                )
        return self.multiply(mean).unsqueeze(-2)

    def expectation(self, lam: Tensor) -> Tensor:
        """μ = m."""
        return self.mean(lam).unsqueeze(-2)

    def from_expectation(self, mu: Tensor) -> Tensor:
        """λ = S μ."""
        return self.multiply(mu[..., 0, :]).unsqueeze(-2)

    def log_partition(self, lam: Tensor) -> Tensor:
        """A(λ) = ½ ⟨λ, m⟩."""
        return (lam[..., 0, :] * self.mean(lam)).sum(-1) / 2

    def violations(self, lam: Tensor) -> Tensor:
        """True where λ is not finite."""
        return ~lam[..., 0, :].isfinite()

    def natural_gradient(self, lam: Tensor, gradient: Tensor, hessian: Tensor | None = None) -> Tensor:
        """∇_μ E_q[ℓ] = g (Eq. 21)."""
        return gradient.unsqueeze(-2)

    def log_base(self, theta: Tensor) -> Tensor:
        """log N(θ | 0, S⁻¹)."""
        quadratic = (theta * self.multiply(theta)).sum(-1)
        return (self.log_det(theta.shape[-1]) - theta.shape[-1] * LOG_2PI - quadratic) / 2

    def expected_log_base(self, lam: Tensor) -> Tensor:
        """E_q[log h] = log h(m) − P/2."""
        return self.log_base(self.mean(lam)) - lam.shape[-1] / 2


@dataclass(frozen=True)
class Isotropic(_Fixed):
    """N(m, I/δ) with fixed δ, which is the prior's precision too: Bayesian-ADMM becomes ADMM (Eq. 21)."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        require_positive("delta", self.delta)

    def multiply(self, x: Tensor) -> Tensor:
        """δ x."""
        return self.delta * x

    def log_det(self, dim: int) -> float:
        """P log δ."""
        return dim * math.log(self.delta)

    def mean(self, lam: Tensor) -> Tensor:
        """m = λ/δ."""
        return lam[..., 0, :] / self.delta

    def precision(self, lam: Tensor) -> Tensor:
        """δ for every parameter."""
        return torch.full_like(lam[..., 0, :], self.delta)

    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        """θ = m + ε/√δ."""
        return self.mean(lam) + noise / math.sqrt(self.delta)


@dataclass(frozen=True, eq=False)
class FixedPrecision(_Fixed):
    """N(m, S⁻¹) with a fixed S (a diagonal `(P,)` or a matrix `(P, P)`), which is the prior's precision too."""

    matrix: Tensor

    def __post_init__(self) -> None:
        if self.matrix.dim() not in (1, 2) or self.matrix.shape[0] != self.matrix.shape[-1]:
            shape = tuple(self.matrix.shape)
            raise InputError(f"FixedPrecision got a precision of shape {shape}: give (P,) or (P, P).")
        if self.matrix.dim() == 1 and not (self.matrix.isfinite() & (self.matrix > 0)).all():
            bad = int((~(self.matrix.isfinite() & (self.matrix > 0))).sum())
            raise DomainError(f"FixedPrecision: {bad} of {len(self.matrix)} precisions are not positive and finite.")
        if self.matrix.dim() == 2 and not positive_definite(self.matrix):
            raise DomainError("FixedPrecision: the precision matrix is not symmetric positive definite.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedPrecision) and torch.equal(self.matrix, other.matrix)

    def __hash__(self) -> int:
        return hash(tuple(self.matrix.shape))

    def rows(self, dim: int) -> int:
        """One; `dim` has to be that of S."""
        if dim != len(self.matrix):
            raise InputError(f"{dim} parameters for a FixedPrecision of {len(self.matrix)}: make them the same.")
        return 1

    @cached_property
    def _factor(self) -> Tensor:
        """L with S = L Lᵀ."""
        return torch.linalg.cholesky(self.matrix)

    def multiply(self, x: Tensor) -> Tensor:
        """S x."""
        return x * self.matrix if self.matrix.dim() == 1 else x @ self.matrix

    def log_det(self, dim: int) -> Tensor:
        """log det S."""
        if self.matrix.dim() == 1:
            return self.matrix.log().sum()
        return 2 * self._factor.diagonal().log().sum()

    def mean(self, lam: Tensor) -> Tensor:
        """m = S⁻¹ λ."""
        if self.matrix.dim() == 1:
            return lam[..., 0, :] / self.matrix
        return torch.cholesky_solve(lam[..., 0, :, None], self._factor)[..., 0]

    def precision(self, lam: Tensor) -> Tensor:
        """S."""
        return self.matrix.expand(*lam.shape[:-2], *self.matrix.shape)

    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        """θ = m + L⁻ᵀ ε."""
        if self.matrix.dim() == 1:
            return self.mean(lam) + noise / self.matrix.sqrt()
        return self.mean(lam) + solve_transposed(self._factor, noise)

    def __str__(self) -> str:
        return "FixedPrecision"


def is_point(family: Family) -> bool:
    """True for families of fixed precision: the spread of q is then the prior's, and only a point is learned."""
    return isinstance(family, _Fixed)
