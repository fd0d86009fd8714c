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

from fedual.errors import DomainError, InputError
from fedual.families.base import Family, finite
from fedual.families.quadrature import Rule

LOG_2PI = math.log(2 * math.pi)
LEAST = 0.5
"""In a step that leaves the domain, coordinates that lose more of their precision do not take part."""

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


@dataclass(frozen=True)
class Diagonal(Gaussian):
    """N(m, diag(s)⁻¹), λ = (sm, −½s) (Eq. 56)."""

    domain = "every precision s = −2 λ[1] must be positive and finite"
    curvature: ClassVar[Curvature] = "diagonal"

    def rows(self, dim: int) -> int:
        """Two."""
        return 2

    def statistic(self, theta: Tensor) -> Tensor:
        """T(θ) = (θ, θ²)."""
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

    def inside(self, lam: Tensor) -> Tensor:
        """Two passes over λ, and no memory of its size: every client is asked in every round."""
        return finite(lam) & (lam[..., 1, :].amax(-1) < 0)

    def backtrack(self, lam: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """Coordinates that would lose more than half of their precision stay; the part of them that does not.

        With one t for all, a single one would hold the others back. And a t for each, which leaves it a part of its
        precision s, would drive its mean λ[0]/s away, round after round.
        """
        stay = self.precision(target) < LEAST * self.precision(lam)
        return torch.where(stay.unsqueeze(-2), lam, target), 1 - float(stay.to(lam.dtype).mean())

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
    curvature: ClassVar[Curvature] = "full"

    def rows(self, dim: int) -> int:
        """P + 1."""
        return dim + 1

    def statistic(self, theta: Tensor) -> Tensor:
        """T(θ) = (θ, θθᵀ)."""
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
        return self.mean(lam) + solve_transposed(self._factor(lam), noise)

    def natural_gradient(self, lam: Tensor, gradient: Tensor, hessian: Tensor | None) -> Tensor:
        """(g − Hm, ½H) (Eq. 45)."""
        assert hessian is not None
        shift = gradient - (hessian @ self.mean(lam).unsqueeze(-1))[..., 0]
        return torch.cat([shift.unsqueeze(-2), hessian / 2], -2)


def positive_definite(matrix: Tensor) -> Tensor:
    """True where a matrix is symmetric (to rounding) and positive definite, `(..., P, P)` → `(...)`."""
    finite = matrix.isfinite().all(-1).all(-1)
    safe = torch.where(finite[..., None, None], matrix, torch.eye(matrix.shape[-1]).to(matrix))
    return finite & symmetric(safe) & (torch.linalg.cholesky_ex(safe).info == 0)


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
