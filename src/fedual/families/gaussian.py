# ruff: noqa: D102 (`Family` documents these methods)
"""Gaussians: the four rows of the paper's table of exponential families (app. B.1).

| family             | λ            | T(θ)      | μ               | ∇_μ E_q[ℓ]        | method              |
|--------------------|--------------|-----------|-----------------|-------------------|---------------------|
| `Isotropic(δ)`     | δm           | θ         | m               | g                 | ADMM                |
| `FixedPrecision(S)`| Sm           | θ         | m               | g                 | preconditioned ADMM |
| `Diagonal()`       | (sm, −½s)    | (θ, θ²)   | (m, m² + 1/s)   | (g − hm, ½h)      | Adam-like (IVON)    |
| `Full()`           | (Sm, −½S)    | (θ, θθᵀ)  | (m, mmᵀ + S⁻¹)  | (g − Hm, ½H)      | Newton-like (VON)   |

with g = E_q[∇ℓ] (Bonnet) and H = E_q[∇²ℓ], h = diag(H) (Price). The first two are in `fixed.py`.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedual.errors import InputError
from fedual.families.base import Reparametrised, finite, require_all

LOG_2PI = math.log(2 * math.pi)
MIN_PRECISION_RATIO = 0.5
"""In a step that leaves the domain, coordinates whose precision would fall below this ratio of itself do not move."""

Curvature = Literal["none", "diagonal", "full"]
"""The part of a Hessian that is computed."""


class Gaussian(Reparametrised):
    """N(m, S⁻¹), the interface of the Gaussian families."""

    curvature: ClassVar[Curvature] = "none"
    """The part of the Hessian that the natural gradient needs."""

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
    def natural_gradient(self, lam: Tensor, gradient: Tensor, hessian: Tensor | None) -> Tensor:
        """∇_μ E_q[ℓ] from g = E_q[∇ℓ] and E_q[∇²ℓ] (matrix, diagonal or unused: see `curvature`)."""


@dataclass(frozen=True)
class Diagonal(Gaussian):
    """N(m, diag(s)⁻¹), λ = (sm, −½s) (Eq. 56), A(λ) = ½ Σ (s m² − log s + log 2π)."""

    domain = "every precision s = −2 λ[1] must be positive and finite"
    curvature: ClassVar[Curvature] = "diagonal"

    def rows(self, dim: int) -> int:
        return 2

    def statistic(self, theta: Tensor) -> Tensor:
        return torch.stack([theta, theta**2], -2)

    def natural(self, mean: Tensor, precision: Tensor | float | None = None) -> Tensor:
        """λ = (sm, −½s); s = 1 unless given, a number or `(..., P)`."""
        s = _as_tensor(precision, mean)
        if s.dim() > mean.dim() or s.shape[-1:] not in ((), (1,), mean.shape[-1:]):
            raise InputError(
                f"precision has shape {tuple(s.shape)} for a mean {tuple(mean.shape)}: give a number or (..., P)."
            )
        shift = s * mean
        return torch.stack([shift, -s.expand_as(shift) / 2], -2)

    def mean(self, lam: Tensor) -> Tensor:
        return lam[..., 0, :] / self.precision(lam)

    def precision(self, lam: Tensor) -> Tensor:
        return -2 * lam[..., 1, :]

    def expectation(self, lam: Tensor) -> Tensor:
        mean = self.mean(lam)
        return torch.stack([mean, mean**2 + 1 / self.precision(lam)], -2)

    def from_expectation(self, mu: Tensor) -> Tensor:
        variance = mu[..., 1, :] - mu[..., 0, :] ** 2
        require_all(variance > 0, "μ is not a Diagonal expectation: {} variances ≤ 0.")
        return self.natural(mu[..., 0, :], 1 / variance)

    def log_partition(self, lam: Tensor) -> Tensor:
        precision = self.precision(lam)
        return (lam[..., 0, :] ** 2 / precision - precision.log() + LOG_2PI).sum(-1) / 2

    def violations(self, lam: Tensor) -> Tensor:
        return ~(lam.isfinite().all(-2) & (lam[..., 1, :] < 0))

    def inside(self, lam: Tensor) -> Tensor:
        """As in `Family`, without temporaries, because every round asks for every client."""
        return finite(lam) & (lam[..., 1, :].amax(-1) < 0)

    def backtrack(self, lam: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """Move all coordinates but those that would lose over half of their precision; return the moved fraction, too.

        With a single step size t, one coordinate would hold back all others. With a t for each coordinate, some would
        keep a small precision s, and their means λ[0]/s would diverge over the rounds.
        """
        stay = self.precision(target) < MIN_PRECISION_RATIO * self.precision(lam)
        return torch.where(stay.unsqueeze(-2), lam, target), 1 - float(stay.to(lam.dtype).mean())

    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        return self.mean(lam) + noise / self.precision(lam).sqrt()

    def natural_gradient(self, lam: Tensor, gradient: Tensor, hessian: Tensor | None) -> Tensor:
        """(g − hm, ½h) (Eq. 57)."""
        assert hessian is not None
        return torch.stack([gradient - hessian * self.mean(lam), hessian / 2], -2)


@dataclass(frozen=True)
class Full(Gaussian):
    """N(m, S⁻¹), λ = (Sm, −½S), the vector above the matrix (Eq. 44), A(λ) = ½ (mᵀSm − log det S + P log 2π).

    Only the symmetric part of the matrix block matters, so the Fisher matrix in this layout is singular.
    """

    domain = "the precision matrix S = −2 λ[1:] must be finite and positive definite"
    curvature: ClassVar[Curvature] = "full"

    def rows(self, dim: int) -> int:
        return dim + 1

    def statistic(self, theta: Tensor) -> Tensor:
        return torch.cat([theta.unsqueeze(-2), theta.unsqueeze(-1) * theta.unsqueeze(-2)], -2)

    def natural(self, mean: Tensor, precision: Tensor | float | None = None) -> Tensor:
        """λ = (Sm, −½S); S = I unless given: a number, a diagonal `(P,)` or a matrix `(..., P, P)`."""
        matrix, dim = _as_tensor(precision, mean), mean.shape[-1]
        if matrix.dim() == 0 or matrix.shape == (dim,):
            matrix = torch.diag(matrix.expand(dim))
        if matrix.shape[-2:] != (dim, dim):
            shape = tuple(matrix.shape)
            raise InputError(f"precision has shape {shape}: give a number, ({dim},) or (..., {dim}, {dim}).")
        if not symmetric(matrix).all():
            raise InputError("The precision matrix is not symmetric: give (S + Sᵀ)/2 if that is what you mean.")
        shift = (matrix @ mean.unsqueeze(-1)).mT
        return torch.cat([shift, -matrix.expand(*shift.shape[:-2], dim, dim) / 2], -2)

    def precision(self, lam: Tensor) -> Tensor:
        """S = −2 λ[1:], its symmetric part."""
        return -(lam[..., 1:, :] + lam[..., 1:, :].mT)

    def mean(self, lam: Tensor) -> Tensor:
        return torch.cholesky_solve(lam[..., 0, :, None], self._factor(lam))[..., 0]

    def covariance(self, lam: Tensor) -> Tensor:
        """S⁻¹."""
        return torch.cholesky_inverse(self._factor(lam))

    def _factor(self, lam: Tensor) -> Tensor:
        return torch.linalg.cholesky(self.precision(lam))

    def expectation(self, lam: Tensor) -> Tensor:
        factor = self._factor(lam)
        mean = torch.cholesky_solve(lam[..., 0, :, None], factor)
        return torch.cat([mean.mT, mean @ mean.mT + torch.cholesky_inverse(factor)], -2)

    def from_expectation(self, mu: Tensor) -> Tensor:
        mean, second = mu[..., 0, :], (mu[..., 1:, :] + mu[..., 1:, :].mT) / 2
        covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        factor, info = torch.linalg.cholesky_ex(covariance)
        require_all(info == 0, "μ is not a Full expectation: {} covariances are not positive.")
        return self.natural(mean, torch.cholesky_inverse(factor))

    def log_partition(self, lam: Tensor) -> Tensor:
        factor = self._factor(lam)
        half = torch.linalg.solve_triangular(factor, lam[..., 0, :, None], upper=False)[..., 0]
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return ((half**2).sum(-1) - log_det + lam.shape[-1] * LOG_2PI) / 2

    def violations(self, lam: Tensor) -> Tensor:
        return ~(finite(lam) & positive_definite(self.precision(lam)))

    def place(self, lam: Tensor, noise: Tensor) -> Tensor:
        """θ = m + L⁻ᵀ ε with S = L Lᵀ."""
        return self.mean(lam) + solve_transposed(self._factor(lam), noise)

    def cubature(self, lam: Tensor) -> Tensor:
        """m ± √P L⁻ᵀe_p for p = 1 … P, `(2P, P)`: they have the mean m and the covariance S⁻¹, without chance."""
        around = lam.shape[-1] ** 0.5 * torch.eye(lam.shape[-1]).to(lam)
        return self.place(lam, torch.cat([around, -around]))

    def natural_gradient(self, lam: Tensor, gradient: Tensor, hessian: Tensor | None) -> Tensor:
        """(g − Hm, ½H) (Eq. 45)."""
        assert hessian is not None
        shift = gradient - (hessian @ self.mean(lam).unsqueeze(-1))[..., 0]
        return torch.cat([shift.unsqueeze(-2), hessian / 2], -2)


def positive_definite(matrix: Tensor) -> Tensor:
    """True where a matrix is symmetric (to rounding) and positive definite, `(..., P, P)` → `(...)`."""
    is_finite = finite(matrix)
    safe = torch.where(is_finite[..., None, None], matrix, torch.eye(matrix.shape[-1]).to(matrix))
    return is_finite & symmetric(safe) & (torch.linalg.cholesky_ex(safe).info == 0)


def symmetric(matrix: Tensor) -> Tensor:
    """True where a matrix is symmetric to rounding, `(..., P, P)` → `(...)`."""
    rounding = 100 * torch.finfo(matrix.dtype).eps * matrix.abs().amax((-2, -1))
    return ~((matrix - matrix.mT).abs().amax((-2, -1)) > rounding)


def _as_tensor(precision: Tensor | float | None, mean: Tensor) -> Tensor:
    if not mean.is_floating_point():
        raise InputError(f"mean is {mean.dtype}: give floating-point numbers.")
    return torch.as_tensor(1.0 if precision is None else precision, dtype=mean.dtype, device=mean.device)


def solve_transposed(factor: Tensor, noise: Tensor) -> Tensor:
    """L⁻ᵀ ε: noise with covariance S⁻¹ = L⁻ᵀL⁻¹."""
    return torch.linalg.solve_triangular(factor.mT, noise.unsqueeze(-1), upper=True)[..., 0]
