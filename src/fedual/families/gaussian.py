"""Gaussians: the four rows of the paper's table of exponential families (app. B.1).

| family             | λ            | T(θ)      | μ               | ∇_μ E_q[ℓ]        | method              |
|--------------------|--------------|-----------|-----------------|-------------------|---------------------|
| `Isotropic(δ)`     | δm           | θ         | m               | g                 | ADMM                |
| `FixedPrecision(S)`| Sm           | θ         | m               | g                 | preconditioned ADMM |
| `Diagonal()`       | (sm, −½s)    | (θ, θ²)   | (m, m² + 1/s)   | (g − hm, ½h)      | Adam-like (IVON)    |
| `Full()`           | (Sm, −½S)    | (θ, θθᵀ)  | (m, mmᵀ + S⁻¹)  | (g − Hm, ½H)      | Newton-like (VON)   |

with g = E_q[∇ℓ] (Bonnet) and H = E_q[∇²ℓ], h = diag(H) (Price).
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedual.errors import DomainError, InputError
from fedual.families.base import Family
from fedual.families.quadrature import Rule

LOG_2PI = math.log(2 * math.pi)

Curvature = Literal["none", "diagonal", "full"]
"""How much of a Hessian is wanted."""


class Gaussian(Family):
    """N(m, S⁻¹): what the Gaussian families share."""

    curvature: ClassVar[Curvature] = "none"
    """Which part of the Hessian the natural gradient needs."""

    @abstractmethod
    def natural(self, mean: Tensor, precision: Tensor | float | None = None) -> Tensor:
        """λ of N(mean, precision⁻¹)."""

    @abstractmethod
    def mean(self, lam: Tensor) -> Tensor:
        """m, `(..., P)`."""

    @abstractmethod
    def precision(self, lam: Tensor) -> Tensor:
        """S as a matrix `(..., P, P)` for full precisions, its diagonal `(..., P)` otherwise."""

    @abstractmethod
    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        """θ = m + S^{−1/2} ε for standard-normal ε `(..., P)`."""

    @abstractmethod
    def natural_gradient(self, lam: Tensor, gradient: Tensor, hessian: Tensor | None) -> Tensor:
        """∇_μ E_q[ℓ] from g = E_q[∇ℓ] and E_q[∇²ℓ] (matrix, diagonal or unused: see `curvature`)."""

    def sample(self, lam: Tensor, num: int, generator: torch.Generator | None = None) -> Tensor:
        """`num` draws of θ, `(num, ..., P)`."""
        shape = (num, *lam.shape[:-2], lam.shape[-1])
        noise = torch.randn(shape, generator=generator, dtype=lam.dtype, device=lam.device)
        return self.place(lam, noise)

    def nodes(self, lam: Tensor, rule: Rule, step: int = 0) -> tuple[Tensor, Tensor]:
        """The rule's nodes, moved to N(m, S⁻¹)."""
        noise, weight = rule(lam.shape[-1], step, lam)
        ones = (1,) * (lam.dim() - 2)
        shape = (len(noise), *lam.shape[:-2], lam.shape[-1])
        theta = self.place(lam, noise.reshape(-1, *ones, lam.shape[-1]).expand(shape))
        return theta, weight.reshape(-1, *ones).expand(theta.shape[:-1])


class _Fixed(Gaussian):
    """Gaussians with a known precision S: h(θ) = N(θ | 0, S⁻¹), T(θ) = θ, A(λ) = ½ λᵀS⁻¹λ."""

    domain = "every entry must be finite"

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """S x, `(..., P)`."""

    @abstractmethod
    def log_det(self, dim: int) -> Tensor | float:
        """Log det S."""

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
            if given.dim() > own.dim() or not torch.allclose(given.expand_as(own), own):
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
        """Log N(θ | 0, S⁻¹)."""
        quadratic = (theta * self.multiply(theta)).sum(-1)
        return (self.log_det(theta.shape[-1]) - theta.shape[-1] * LOG_2PI - quadratic) / 2

    def expected_log_base(self, lam: Tensor) -> Tensor:
        """E_q[log h] = log h(m) − P/2."""
        return self.log_base(self.mean(lam)) - lam.shape[-1] / 2


@dataclass(frozen=True)
class Isotropic(_Fixed):
    """N(m, I/δ) with fixed δ, which is the prior's precision too: Bayesian-ADMM becomes ADMM (Eq. 21)."""

    delta: float = 1.0

    def __post_init__(self):
        if not (math.isfinite(self.delta) and self.delta > 0):
            raise InputError(f"Isotropic(delta={self.delta}): the precision must be positive and finite.")

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

    def __post_init__(self):
        if self.matrix.dim() not in (1, 2) or self.matrix.shape[0] != self.matrix.shape[-1]:
            shape = tuple(self.matrix.shape)
            raise InputError(f"FixedPrecision got a precision of shape {shape}: give (P,) or (P, P).")
        if self.matrix.dim() == 1 and not (self.matrix.isfinite() & (self.matrix > 0)).all():
            bad = int((~(self.matrix > 0)).sum())
            raise DomainError(f"FixedPrecision: {bad} of {len(self.matrix)} precisions are not positive.")
        if self.matrix.dim() == 2 and not positive_definite(self.matrix):
            raise DomainError("FixedPrecision: the precision matrix is not symmetric positive definite.")

    @cached_property
    def _factor(self) -> Tensor:
        """L with S = L Lᵀ."""
        return torch.linalg.cholesky(self.matrix)

    def multiply(self, x: Tensor) -> Tensor:
        """S x."""
        return x * self.matrix if self.matrix.dim() == 1 else x @ self.matrix

    def log_det(self, dim: int) -> Tensor:
        """Log det S."""
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
        return self.mean(lam) + _solve_transposed(self._factor, noise)

    def __str__(self) -> str:
        return "FixedPrecision"


@dataclass(frozen=True)
class Diagonal(Gaussian):
    """N(m, diag(s)⁻¹), λ = (sm, −½s) (Eq. 56)."""

    domain = "every precision s = −2 λ[1] must be positive and finite"
    curvature = "diagonal"

    def rows(self, dim: int) -> int:
        """Two."""
        return 2

    def statistic(self, theta: Tensor) -> Tensor:
        """T(θ) = (θ, θ²)."""
        return torch.stack([theta, theta**2], -2)

    def natural(self, mean: Tensor, precision: Tensor | float | None = None) -> Tensor:
        """λ = (sm, −½s); s = 1 unless given, a number or `(..., P)`."""
        s = _as_tensor(precision, mean)
        shift = s * mean
        return torch.stack([shift, -s.expand_as(shift) / 2], -2)

    def mean(self, lam: Tensor) -> Tensor:
        """m = λ[0] / s."""
        return lam[..., 0, :] / self.precision(lam)

    def precision(self, lam: Tensor) -> Tensor:
        """s = −2 λ[1]."""
        return -2 * lam[..., 1, :]

    def expectation(self, lam: Tensor) -> Tensor:
        """μ = (m, m² + 1/s)."""
        mean = self.mean(lam)
        return torch.stack([mean, mean**2 + 1 / self.precision(lam)], -2)

    def from_expectation(self, mu: Tensor) -> Tensor:
        """1/s = μ[1] − μ[0]²."""
        variance = mu[..., 1, :] - mu[..., 0, :] ** 2
        if not (variance > 0).all():
            bad = int((~(variance > 0)).sum())
            raise DomainError(f"μ is not a Diagonal expectation: {bad} of {variance.numel()} variances ≤ 0.")
        return self.natural(mu[..., 0, :], 1 / variance)

    def log_partition(self, lam: Tensor) -> Tensor:
        """A(λ) = ½ Σ (s m² − log s + log 2π)."""
        precision = self.precision(lam)
        return (lam[..., 0, :] ** 2 / precision - precision.log() + LOG_2PI).sum(-1) / 2

    def violations(self, lam: Tensor) -> Tensor:
        """True where s ≤ 0 or an entry is not finite."""
        return ~(lam.isfinite().all(-2) & (lam[..., 1, :] < 0))

    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        """θ = m + ε/√s."""
        return self.mean(lam) + noise / self.precision(lam).sqrt()

    def natural_gradient(self, lam: Tensor, gradient: Tensor, hessian: Tensor | None) -> Tensor:
        """(g − hm, ½h) (Eq. 57)."""
        assert hessian is not None
        return torch.stack([gradient - hessian * self.mean(lam), hessian / 2], -2)


@dataclass(frozen=True)
class Full(Gaussian):
    """N(m, S⁻¹), λ = (Sm, −½S), the matrix below the vector: P + 1 rows (Eq. 44).

    Only the symmetric part of the matrix block counts, so the Fisher matrix in this layout is singular.
    """

    domain = "the precision matrix S = −2 λ[1:] must be finite and positive definite"
    curvature = "full"

    def rows(self, dim: int) -> int:
        """P + 1."""
        return dim + 1

    def statistic(self, theta: Tensor) -> Tensor:
        """T(θ) = (θ, θθᵀ)."""
        return torch.cat([theta.unsqueeze(-2), theta.unsqueeze(-1) * theta.unsqueeze(-2)], -2)

    def natural(self, mean: Tensor, precision: Tensor | float | None = None) -> Tensor:
        """λ = (Sm, −½S); S = I unless given: a number, a diagonal `(..., P)` or a matrix `(..., P, P)`."""
        matrix, dim = _as_tensor(precision, mean), mean.shape[-1]
        if matrix.shape[-2:] != (dim, dim):
            matrix = torch.diag_embed(matrix.expand(mean.shape))
        shift = (matrix @ mean.unsqueeze(-1)).mT
        return torch.cat([shift, -matrix.expand(*shift.shape[:-2], dim, dim) / 2], -2)

    def precision(self, lam: Tensor) -> Tensor:
        """S = −2 λ[1:], its symmetric part."""
        return -(lam[..., 1:, :] + lam[..., 1:, :].mT)

    def mean(self, lam: Tensor) -> Tensor:
        """m = S⁻¹ λ[0]."""
        return torch.cholesky_solve(lam[..., 0, :, None], self._factor(lam))[..., 0]

    def covariance(self, lam: Tensor) -> Tensor:
        """S⁻¹."""
        return torch.cholesky_inverse(self._factor(lam))

    def _factor(self, lam: Tensor) -> Tensor:
        return torch.linalg.cholesky(self.precision(lam))

    def expectation(self, lam: Tensor) -> Tensor:
        """μ = (m, mmᵀ + S⁻¹)."""
        factor = self._factor(lam)
        mean = torch.cholesky_solve(lam[..., 0, :, None], factor)
        return torch.cat([mean.mT, mean @ mean.mT + torch.cholesky_inverse(factor)], -2)

    def from_expectation(self, mu: Tensor) -> Tensor:
        """S⁻¹ = μ[1:] − μ[0] μ[0]ᵀ."""
        mean, second = mu[..., 0, :], (mu[..., 1:, :] + mu[..., 1:, :].mT) / 2
        covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        factor, info = torch.linalg.cholesky_ex(covariance)
        if info.any():
            bad = int((info != 0).sum())
            raise DomainError(f"μ is not a Full expectation: {bad} of {info.numel()} covariances are not positive.")
        return self.natural(mean, torch.cholesky_inverse(factor))

    def log_partition(self, lam: Tensor) -> Tensor:
        """A(λ) = ½ (mᵀSm − log det S + P log 2π)."""
        factor = self._factor(lam)
        half = torch.linalg.solve_triangular(factor, lam[..., 0, :, None], upper=False)[..., 0]
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return ((half**2).sum(-1) - log_det + lam.shape[-1] * LOG_2PI) / 2

    def violations(self, lam: Tensor) -> Tensor:
        """True where S is not positive definite or an entry is not finite."""
        return ~(lam.isfinite().all(-1).all(-1) & positive_definite(self.precision(lam)))

    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        """θ = m + L⁻ᵀ ε with S = L Lᵀ."""
        return self.mean(lam) + _solve_transposed(self._factor(lam), noise)

    def natural_gradient(self, lam: Tensor, gradient: Tensor, hessian: Tensor | None) -> Tensor:
        """(g − Hm, ½H) (Eq. 45)."""
        assert hessian is not None
        shift = gradient - (hessian @ self.mean(lam).unsqueeze(-1))[..., 0]
        return torch.cat([shift.unsqueeze(-2), hessian / 2], -2)


def positive_definite(matrix: Tensor) -> Tensor:
    """True where a matrix is symmetric (to rounding) and positive definite, `(..., P, P)` → `(...)`."""
    finite = matrix.isfinite().all(-1).all(-1)
    safe = torch.where(finite[..., None, None], matrix, torch.eye(matrix.shape[-1]).to(matrix))
    symmetric = torch.isclose(safe, safe.mT, rtol=1e-5, atol=1e-12).all(-1).all(-1)
    return finite & symmetric & (torch.linalg.cholesky_ex(safe).info == 0)


def _as_tensor(precision: Tensor | float | None, mean: Tensor) -> Tensor:
    return torch.as_tensor(1.0 if precision is None else precision, dtype=mean.dtype, device=mean.device)


def _solve_transposed(factor: Tensor, noise: Tensor) -> Tensor:
    """L⁻ᵀ ε: noise with covariance S⁻¹ = L⁻ᵀL⁻¹."""
    return torch.linalg.solve_triangular(factor.mT, noise.unsqueeze(-1), upper=True)[..., 0]
