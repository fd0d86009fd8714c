"""A regression's targets in standard units, and the variance of their noise: sums that clients give once each.

    before training   W_k = Σ w,   Σ w y,   Σ w (y − ȳ_k)²      → mean and sd of the federation's targets
    after training    W_k,   Σ w r²                             → σ², from residuals r at the mean of q_g

The network is trained on z = (y − mean)/sd, output by output. A regression with "mse" is the model

    z ~ N(f(x; θ), σ²),   θ ~ N(0, σ²/δ)

whose posterior mean does not depend on σ². Training has σ² = 1; with any other σ² both the likelihood and the prior
have 1/σ² times the precision, so that a posterior covariance such as (XᵀX + δI)⁻¹ becomes σ² (XᵀX + δI)⁻¹.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.errors import InputError
from fedual.families import Full, Gaussian, is_point

PRIOR_EXAMPLES, PRIOR_VARIANCE = 1.0, 1.0
"""The prior of σ², an inverse gamma with shape ½ PRIOR_EXAMPLES and scale ½ PRIOR_EXAMPLES · PRIOR_VARIANCE.

It counts as one example whose squared residual is the targets' own variance, as if inputs said nothing about targets.
"""
LEAST_FREE = 0.5
"""The least fraction of the examples that counts as degrees of freedom, however many parameters there are.

Estimates of the number of effective parameters are too large for networks: they count directions in which no example
moves the outputs, and can exceed the number of examples.
"""
WEAK_EXAMPLES, LEAST_EXACT = 0.01, 3.0
"""The same prior where γ is exact, and the least ν for which σ² has a mean to speak of."""
CONSTANT = 1e-12
"""Targets whose sd is below this fraction of their mean are constant up to rounding."""


@dataclass(frozen=True, eq=False)
class Targets:
    """The mean and standard deviation of the federation's targets, for each output `(D,)`, in double precision."""

    mean: Tensor
    sd: Tensor

    def __post_init__(self) -> None:
        if self.mean.shape != self.sd.shape or self.mean.dim() != 1:
            shapes = f"{tuple(self.mean.shape)} and {tuple(self.sd.shape)}"
            raise InputError(f"Targets have mean and sd of shapes {shapes}: give (D,) for both.")
        if not (self.mean.isfinite().all() and self.sd.isfinite().all() and (self.sd > 0).all()):
            values = f"{self.mean.tolist()} and sd {self.sd.tolist()}"
            raise InputError(f"Targets have the mean {values}: give finite means and positive sds.")

    @classmethod
    def of(cls, mean: Sequence[float] | float, sd: Sequence[float] | float) -> "Targets":
        """Targets of numbers, one for each output."""
        return cls(*(torch.atleast_1d(torch.as_tensor(value, dtype=torch.float64)) for value in (mean, sd)))

    def standardised(self, y: Tensor) -> Tensor:
        """(y − mean)/sd for targets `(N, ...)` in their own unit; the result has double precision."""
        if y[:1].numel() not in (0, len(self.mean)):
            raise InputError(f"Targets {tuple(y.shape)} do not have {len(self.mean)} outputs: use those of training.")
        flat = y.double().reshape(len(y), -1)
        return ((flat - self.mean.to(y.device)) / self.sd.to(y.device)).reshape(y.shape)

    def restored(self, f: Tensor) -> Tensor:
        """f · sd + mean for outputs `(..., D)`; in double precision, because a mean can be large beside its sd."""
        return f.double() * self.sd.to(f.device) + self.mean.to(f.device)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which `from_dict` restores every bit."""
        return {"mean": self.mean.tolist(), "sd": self.sd.tolist()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any] | None) -> "Targets | None":
        """The targets of `to_dict`; None where nothing is stored, which means mean 0 and sd 1."""
        return None if content is None else cls.of(content["mean"], content["sd"])


class Sums(NamedTuple):
    """What a client tells of its targets."""

    weight: Tensor  # W_k, ()
    total: Tensor  # Σ w y, (D,)
    squares: Tensor  # Σ w (y − ȳ_k)², (D,), about the client's own mean, because Σ w y² would cancel

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a message."""
        return {name: value.tolist() for name, value in self._asdict().items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Sums":
        """The sums of `to_dict`; refuse what no targets can have."""
        try:
            sums = cls(*(torch.tensor(content[name], dtype=torch.float64) for name in cls._fields))
            weight, total, squares = sums
            shapes = weight.dim() == 0 and total.dim() == 1 and total.shape == squares.shape
            fits = shapes and weight > 0 and (squares >= 0).all() and all(part.isfinite().all() for part in sums)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"its sums of targets cannot be read ({type(error).__name__})") from None
        if not fits:
            raise InputError("its sums of targets are not those of any targets")
        return sums


def client_sums(y: Tensor, weight: Tensor | None = None) -> Sums:
    """The sums of one client's targets `(N_k, ...)` with weights `(N_k,)`, in double precision."""
    flat = y.double().reshape(len(y), -1)
    weight = torch.ones_like(flat[:, 0]) if weight is None else weight.to(flat)
    total = weight @ flat
    return Sums(weight.sum(), total, weight @ (flat - total / weight.sum()).square())


def mean_and_sd(sums: Sequence[Sums]) -> tuple[Tensor, Tensor]:
    """Of all clients' values: Σ_k squares_k + W_k (ȳ_k − mean)² is the sum of squares about the mean.

    The sd of what is constant up to rounding is 0.
    """
    weight, total, squares = (torch.stack(each).cpu() for each in zip(*sums, strict=True))
    mean = total.sum(0) / weight.sum()
    between = weight @ (total / weight[:, None] - mean).square()
    sd = ((squares.sum(0) + between) / weight.sum()).sqrt()
    return mean, torch.where(sd <= CONSTANT * mean.abs(), 0.0, sd)


def pooled(sums: Sequence[Sums]) -> Targets:
    """Mean and sd of all clients' targets; the sd is 1 where they are constant."""
    mean, sd = mean_and_sd(sums)
    return Targets(mean, torch.where(sd == 0, 1.0, sd))


def noise_variance(squares: Tensor, weight: float, parameters: float, exact: bool = False) -> Tensor:
    """σ² = (Σ w r² + b₀)/(ν + a₀) for each output `(D,)`: 1/σ² is the posterior mean of the noise's precision.

    a₀ is PRIOR_EXAMPLES and b₀ = a₀ · PRIOR_VARIANCE. Residuals of fitted parameters are too small, so ν = W − γ/D
    degrees of freedom are left of the W examples, γ being the number of effective parameters; at least LEAST_FREE · W.

    Where γ is `exact`, as with a full covariance of a linear model, and ν ≥ LEAST_EXACT, σ² is its own posterior mean
    (Σ w r² + a)/(ν + a − 2) with a = WEAK_EXAMPLES: the sd of an observation is then that of the Student t with ν
    degrees of freedom, which makes 95 % intervals cover 94 to 96 % also with few examples, or little noise.

    Args:
        squares: Σ w r² of all clients in standard units, `(D,)`.
        weight: W, the clients' examples together.
        parameters: γ, of all outputs together.
        exact: γ is exact.
    """
    free = weight - parameters / len(squares)
    if exact and free >= LEAST_EXACT:
        return (squares + WEAK_EXAMPLES) / (free + WEAK_EXAMPLES - 2)
    free = max(free, LEAST_FREE * weight)
    return (squares + PRIOR_EXAMPLES * PRIOR_VARIANCE) / (free + PRIOR_EXAMPLES)


def effective_parameters(family: Gaussian, lam: Tensor, prior: Tensor, tau: float) -> float:
    """γ = tr H (H + S_0)⁻¹ with the data's part H = τ (S − S_0) of the precision: how many parameters the data fixed.

    The server knows it from λ_g and λ_0, both `(R, P)`. A family of fixed precision does not say: γ = P.
    """
    if is_point(family):
        return float(lam.shape[-1])
    first, data = (family.precision(each).double() for each in (prior, lam))
    data = tau * (data - first)
    if isinstance(family, Full):
        return float(torch.linalg.solve(data + first, data).diagonal().sum())
    data = data.clamp(min=0)
    return float((data / (data + first)).sum())
