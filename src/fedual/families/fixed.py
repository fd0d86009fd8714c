# ruff: noqa: D102 (`Family` documents these methods)
"""Gaussians of fixed precision: only the mean is learned, and Bayesian-ADMM becomes ADMM (paper Eq. 21)."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedual.errors import DomainError, InputError, require_positive
from fedual.families.base import Family, require_all
from fedual.families.gaussian import LOG_2PI, Gaussian, positive_definite, solve_transposed


class _Fixed(Gaussian):
    """Gaussians with a known precision S: h(θ) = N(θ | 0, S⁻¹), λ = Sm, T(θ) = θ, μ = m, A(λ) = ½ λᵀm."""

    domain = "every entry must be finite"

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """S x, `(..., P)`."""

    @abstractmethod
    def log_det(self, dim: int) -> Tensor | float:
        """log det S."""

    def rows(self, dim: int) -> int:
        return 1

    def statistic(self, theta: Tensor) -> Tensor:
        return theta.unsqueeze(-2)

    def natural(self, mean: Tensor, precision: Tensor | float | None = None) -> Tensor:
        """λ = S m; a precision other than S is refused."""
        if precision is not None:
            fixed, other = self.precision(mean.unsqueeze(-2)), torch.as_tensor(precision).to(mean)
            fits = other.dim() == 0 or other.shape == fixed.shape[fixed.dim() - other.dim() :]
            if not (fits and torch.allclose(other.expand_as(fixed), fixed)):
                raise InputError(
                    f"{self} contains its precision, which is also the prior's, and cannot hold another one: "
                    "leave `precision` out, or use Diagonal or Full."
                )
        return self.multiply(mean).unsqueeze(-2)

    def expectation(self, lam: Tensor) -> Tensor:
        return self.mean(lam).unsqueeze(-2)

    def from_expectation(self, mu: Tensor) -> Tensor:
        return self.multiply(mu[..., 0, :]).unsqueeze(-2)

    def log_partition(self, lam: Tensor) -> Tensor:
        return (lam[..., 0, :] * self.mean(lam)).sum(-1) / 2

    def violations(self, lam: Tensor) -> Tensor:
        return ~lam[..., 0, :].isfinite()

    def natural_gradient(self, lam: Tensor, gradient: Tensor, hessian: Tensor | None = None) -> Tensor:
        return gradient.unsqueeze(-2)

    def log_base(self, theta: Tensor) -> Tensor:
        quadratic = (theta * self.multiply(theta)).sum(-1)
        return (self.log_det(theta.shape[-1]) - theta.shape[-1] * LOG_2PI - quadratic) / 2

    def expected_log_base(self, lam: Tensor) -> Tensor:
        return self.log_base(self.mean(lam)) - lam.shape[-1] / 2


@dataclass(frozen=True)
class Isotropic(_Fixed):
    """N(m, I/δ) with fixed δ, which is the prior's precision too: Bayesian-ADMM becomes ADMM (Eq. 21)."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        require_positive("delta", self.delta)

    def multiply(self, x: Tensor) -> Tensor:
        return self.delta * x

    def log_det(self, dim: int) -> float:
        return dim * math.log(self.delta)

    def mean(self, lam: Tensor) -> Tensor:
        return lam[..., 0, :] / self.delta

    def precision(self, lam: Tensor) -> Tensor:
        return torch.full_like(lam[..., 0, :], self.delta)

    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        return self.mean(lam) + noise / math.sqrt(self.delta)


@dataclass(frozen=True, eq=False)
class FixedPrecision(_Fixed):
    """N(m, S⁻¹) with a fixed S (a diagonal `(P,)` or a matrix `(P, P)`), which is the prior's precision too."""

    matrix: Tensor

    def __post_init__(self) -> None:
        if self.matrix.dim() not in (1, 2) or self.matrix.shape[0] != self.matrix.shape[-1]:
            raise InputError(f"FixedPrecision has a matrix of shape {tuple(self.matrix.shape)}: give (P,) or (P, P).")
        if self.matrix.dim() == 1:
            valid = self.matrix.isfinite() & (self.matrix > 0)
            require_all(valid, "FixedPrecision: {} precisions are not positive and finite.")
        elif not positive_definite(self.matrix):
            raise DomainError("FixedPrecision: the precision matrix is not symmetric positive definite.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedPrecision) and torch.equal(self.matrix, other.matrix)

    def __hash__(self) -> int:
        return hash(tuple(self.matrix.shape))

    def rows(self, dim: int) -> int:
        if dim != len(self.matrix):
            raise InputError(f"{dim} parameters for a FixedPrecision of {len(self.matrix)}: make them the same.")
        return 1

    @cached_property
    def _factor(self) -> Tensor:
        """L with S = L Lᵀ."""
        return torch.linalg.cholesky(self.matrix)

    def multiply(self, x: Tensor) -> Tensor:
        return x * self.matrix if self.matrix.dim() == 1 else x @ self.matrix

    def log_det(self, dim: int) -> Tensor:
        if self.matrix.dim() == 1:
            return self.matrix.log().sum()
        return 2 * self._factor.diagonal().log().sum()

    def mean(self, lam: Tensor) -> Tensor:
        if self.matrix.dim() == 1:
            return lam[..., 0, :] / self.matrix
        return torch.cholesky_solve(lam[..., 0, :, None], self._factor)[..., 0]

    def precision(self, lam: Tensor) -> Tensor:
        return self.matrix.expand(*lam.shape[:-2], *self.matrix.shape)

    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        """θ = m + L⁻ᵀ ε."""
        if self.matrix.dim() == 1:
            return self.mean(lam) + noise / self.matrix.sqrt()
        return self.mean(lam) + solve_transposed(self._factor, noise)

    def __str__(self) -> str:
        return "FixedPrecision"


def is_point(family: Family) -> bool:
    """True for families of fixed precision: they learn only a point, and the spread of q is the prior's."""
    return isinstance(family, _Fixed)
