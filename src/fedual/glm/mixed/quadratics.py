"""Sites whose losses are quadratic, and whose effects are integrated out in closed form.

    ℓ_k(β) = ½ βᵀS_kβ − λ_kᵀβ + c_k,   C = E Λ,   M_k = I + CᵀS_kC
    L_k(β) = ½ βᵀA_kβ − b_kᵀβ + c_k + ½ log|M_k| − ½ (Cᵀλ_k)ᵀ M_k⁻¹ Cᵀλ_k,
    A_k = S_k − S_kC M_k⁻¹ CᵀS_k,   b_k = λ_k − S_kC M_k⁻¹ Cᵀλ_k

The losses of a linear model are quadratic: the sums of one round suffice for all its mixed models. Of other models, the
quadratics of a first round give the start.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy import optimize
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from fedual.glm.mixed.cholesky import diagonal, entries, factor

SIZES = (0.03, 0.1, 0.3, 1.0, 3.0)
"""Where the search for Λ begins: multiples of its unit."""
MOST_STEPS = 60
"""Newton steps that end the search."""
SMALL = 1e-6
"""A Λ, in its unit, that is zero if the criterion is no better than at zero."""


class Pooled(NamedTuple):
    """Σ_k L_k as a quadratic in β."""

    precision: Tensor  # A
    shift: Tensor  # b
    constant: Tensor  # without Σ c_k, and without
    logs: Tensor  # ½ Σ log|M_k|

    @property
    def least(self) -> Tensor:
        """Its minimum over β, without the logarithms."""
        return self.constant - self.shift @ torch.linalg.solve(self.precision, self.shift) / 2


@dataclass(frozen=True)
class Quadratics:
    """The sites' quadratics.

    Args:
        precision: S_k, `(K, p, p)`.
        shift: λ_k, `(K, p)`.
        spread: E, `(p, q)`.
    """

    precision: Tensor
    shift: Tensor
    spread: Tensor

    @property
    def effects(self) -> int:
        """q."""
        return self.spread.shape[1]

    @property
    def unit(self) -> Tensor:
        """Entries of Λ whose effects are as large as the error of a site's own estimate of them, `(m,)`."""
        own = torch.einsum("pq,kpr,rq->kq", self.spread, self.precision, self.spread).mean(0)
        rows = torch.tril_indices(self.effects, self.effects)[0]
        return own.rsqrt()[rows]

    def scaled(self, by: float) -> "Quadratics":
        """All losses times a number."""
        return Quadratics(self.precision * by, self.shift * by, self.spread)

    def integrated(self, theta: Tensor) -> Pooled:
        """Σ_k L_k."""
        loadings = self.spread @ factor(theta, self.effects)
        curved = self.precision @ loadings
        inner = torch.eye(self.effects, dtype=theta.dtype) + loadings.mT @ curved
        own = self.shift @ loadings
        back = torch.linalg.solve(inner, torch.cat([curved.mT, own[:, :, None]], 2))
        precision = (self.precision - curved @ back[:, :, :-1]).sum(0)
        shift = (self.shift - (curved @ back[:, :, -1:])[:, :, 0]).sum(0)
        constant, logs = -(own * back[:, :, -1]).sum() / 2, torch.linalg.slogdet(inner)[1].sum() / 2
        return Pooled((precision + precision.mT) / 2, shift, constant, logs)

    def profile(self, theta: Tensor) -> Tensor:
        """min_β Σ_k L_k(β), without Σ c_k: the negative log-likelihood of a model that knows its dispersion."""
        found = self.integrated(theta)
        return found.least + found.logs


def least(criterion: Callable[[Tensor], Tensor], unit: Tensor, effects: int) -> Tensor:
    """The entries of Λ at which a criterion is least; zero where that is as good."""
    value = lambda x: float(criterion(torch.tensor(x) * unit))
    gradient = lambda x: jacobian(lambda x: criterion(x * unit), torch.tensor(x)).numpy()
    starts = []
    for size in SIZES:
        x = np.zeros(entries(effects))
        x[diagonal(effects)] = size
        starts.append(x)
    begin = sorted(starts, key=value)[: 1 if effects == 1 else 2]
    found = [optimize.minimize(value, x, jac=gradient, method="BFGS", options={"gtol": 1e-7}) for x in begin]
    best = _polished(lambda x: criterion(x * unit), torch.tensor(min(found, key=lambda one: one.fun).x))
    none = torch.zeros_like(best)
    if float(best.abs().max()) < SMALL or value(none.numpy()) <= value(best.numpy()):
        best = none
    return best * unit


def _polished(criterion: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Newton steps to the last digits."""
    for _ in range(MOST_STEPS):
        gradient, (values, vectors) = jacobian(criterion, x), torch.linalg.eigh(hessian(criterion, x))
        step = -vectors @ ((vectors.mT @ gradient) / values.abs().clamp_min(1e-8))
        if not step.isfinite().all() or criterion(x + step) > criterion(x) + 1e-13 * (1 + criterion(x).abs()):
            break
        x = x + step
        if float(step.abs().max()) < 1e-13:
            break
    return x


@dataclass(frozen=True)
class Linear:
    """A linear mixed model of sites, whose errors have the variance φ/w.

    Args:
        sums: The quadratics of ½ Σ w (y − xᵀβ)².
        squares: Σ w y², over all sites.
        rows: n.
        restricted: REML instead of maximum likelihood.
    """

    sums: Quadratics
    squares: float
    rows: int
    restricted: bool

    @property
    def df(self) -> int:
        """Rows, less coefficients for REML."""
        return self.rows - self.restricted * self.sums.precision.shape[-1]

    def dispersion(self, theta: Tensor) -> Tensor:
        """The best φ for a Λ in units of √φ."""
        return (self.squares + 2 * self.sums.integrated(theta).least) / self.df

    def criterion(self, theta: Tensor) -> Tensor:
        """The negative log-likelihood, restricted or not, at the best φ; Λ is in units of √φ."""
        found = self.sums.integrated(theta)
        dispersion = (self.squares + 2 * found.least) / self.df
        value = self.df / 2 * ((2 * math.pi * dispersion).log() + 1) + found.logs
        return value + torch.linalg.slogdet(found.precision)[1] / 2 if self.restricted else value

    def spread_of_entries(self, own: Tensor, dispersion: float) -> Tensor:
        """The covariance of Λ's entries, in the predictor's units, from the information about them and φ."""

        def loss(x: Tensor) -> Tensor:
            found = self.sums.integrated(x[:-1] * (-x[-1] / 2).exp())
            value = self.df / 2 * x[-1] + (self.squares / 2 + found.least) * (-x[-1]).exp() + found.logs
            return value + torch.linalg.slogdet(found.precision)[1] / 2 if self.restricted else value

        x = torch.cat([own, own.new_tensor([math.log(dispersion)])])
        return torch.linalg.pinv(hessian(loss, x))[:-1, :-1]
