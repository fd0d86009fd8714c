# ruff: noqa: D102 (`Loss` documents these methods)
"""Hazards that are constant in pieces of time, and common to all sites: the likelihood of one site's rows.

With α_j the log hazard in piece j, e_ij the time that row i is at risk in it, and d_ij = 1 for an event in it,

    ℓ = Σ_ij w_i [ e_ij exp(f_i + α_j) − d_ij (f_i + α_j) ],    f_i = x_iᵀβ + o_i,    θ = (β, α)

a Poisson likelihood of which no row is expanded: E_ij = w_i e_ij exp(f_i + α_j) has the sums that all derivatives need.
The pieces have no products with each other in the Hessian, and no message has them.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.errors import DomainError
from fedual.families import Curvature, Gaussian, Rule
from fedual.glm.distributions import Distribution, PiecewiseExponential
from fedual.glm.likelihood import CHUNK, Expansion, weighted_products
from fedual.glm.survival.partial import PartialLikelihood
from fedual.glm.survival.times import Times
from fedual.solvers import Loss
from fedual.solvers.base import Moments


class Pieces(NamedTuple):
    """Of each piece, at one site."""

    events: Tensor  # Σ d, (J,)
    at_risk: Tensor  # rows that are at risk in it, (J,)


@dataclass(frozen=True)
class PiecewiseLikelihood(Loss):
    """The loss of one site, with a client axis of one; x has no intercept."""

    x: Tensor  # (N, p)
    event: Tensor  # (N,)
    weight: Tensor  # (N,)
    offset: Tensor  # (N,)
    partial: PartialLikelihood  # of the same rows
    cuts: Tensor  # ends of the pieces but the last, (J − 1,)
    last: list = field(default_factory=list, compare=False, repr=False)  # θ and the expansion there

    @property
    def distribution(self) -> Distribution:
        """Its name, for the server's rounds."""
        return PiecewiseExponential()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, clients: Any) -> "PiecewiseLikelihood":
        return self

    @property
    def times(self) -> Times:
        """When rows are at risk."""
        return self.partial.times

    @property
    def dim(self) -> int:
        return self.x.shape[1] + len(self.cuts) + 1

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def num_examples(self) -> Tensor:
        return torch.tensor([len(self.x)])

    @property
    def says_nothing(self) -> bool:
        return False

    @cached_property
    def piece(self) -> Tensor:
        """The piece in which each row is seen last `(N,)`: the end of a piece belongs to it."""
        return torch.searchsorted(self.cuts, self.times.time)

    @cached_property
    def exposure(self) -> Tensor:
        """e: the time of each row in each piece, `(N, J)`."""
        inner = self.cuts.expand(len(self.x), -1)
        start, end = self.times.entry.clamp_min(0)[:, None], self.times.time[:, None]
        low = torch.cat([torch.zeros_like(end), inner], 1)
        high = torch.cat([inner, torch.full_like(end, torch.inf)], 1)
        return (torch.minimum(high, end) - torch.maximum(low, start)).clamp_min(0)

    @cached_property
    def deaths(self) -> Tensor:
        """Σ w d of each piece, `(J,)`."""
        return self._by_piece(self.weight * self.event)

    @property
    def pieces(self) -> Pieces:
        """Rows with an event in each piece, and rows that are at risk in it."""
        return Pieces(self._by_piece(self.event).long(), (self.exposure > 0).sum(0))

    def _by_piece(self, each: Tensor) -> Tensor:
        return torch.zeros(len(self.cuts) + 1, dtype=each.dtype).index_add(0, self.piece, each)

    def separated(self, theta: Tensor) -> bool:
        return self.partial.separated(self.split(theta)[0])

    def hides(self, start: Tensor) -> bool:
        return False

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """β and α."""
        return theta[: self.x.shape[1]], theta[self.x.shape[1] :]

    def __call__(self, theta: Tensor) -> Tensor:
        flat = theta.reshape(-1, theta.shape[-1])
        return torch.stack([self.loss(point) for point in flat]).reshape(theta.shape[:-1])

    def moments(
        self, family: Gaussian, lam: Tensor, rule: Rule, step: int = 0, curvature: Curvature | None = None
    ) -> Moments:
        """The loss, its gradient and its Hessian at the mean."""
        if rule(1, step, lam)[0].any():
            raise DomainError("The piecewise likelihood has no quadrature: use estimate='both'.")
        found = self.expand(family.mean(lam)[0])
        return Moments(found.loss[None], found.gradient[None], found.hessian[None])

    def loss(self, theta: Tensor) -> Tensor:
        beta, alpha = self.split(theta)
        return self._loss(beta, alpha, self._expected(theta))

    def _expected(self, theta: Tensor) -> Tensor:
        """E: expected events of each row in each piece, `(N, J)`."""
        beta, alpha = self.split(theta)
        rates = (self.x @ beta + self.offset)[:, None] + alpha
        return torch.where(self.exposure > 0, self.weight[:, None] * self.exposure * rates.exp(), 0.0)

    def _loss(self, beta: Tensor, alpha: Tensor, expected: Tensor) -> Tensor:
        f = self.x @ beta + self.offset
        return expected.sum() - (self.weight * self.event) @ f - self.deaths @ alpha

    def expand(self, theta: Tensor) -> Expansion:
        """The loss and its derivatives at θ `(P,)`; those at the last θ are kept."""
        if not self.last or not torch.equal(self.last[0], theta):
            self.last[:] = [theta, self._expand(theta)]
        return self.last[1]

    def _expand(self, theta: Tensor) -> Expansion:
        p = self.x.shape[1]
        expected = self._expected(theta)
        weights = expected.sum(1)
        scores = weights - self.weight * self.event
        gradient = torch.cat([self.x.mT @ scores, expected.sum(0) - self.deaths])
        hessian = theta.new_zeros(len(theta), len(theta))
        for start in range(0, len(self.x), CHUNK):
            rows = slice(start, start + CHUNK)
            hessian[:p, :p] += weighted_products(self.x[rows], weights[rows])
        hessian[:p, p:] = self.x.mT @ expected
        hessian[p:, :p] = hessian[:p, p:].mT
        hessian[p:, p:] = torch.diag(expected.sum(0))
        loss = self._loss(*self.split(theta), expected)
        return Expansion(loss, gradient, hessian, hessian, weights, scores)

    def meat(self, theta: Tensor, lean: Tensor) -> Tensor:
        """Σ_i s_i s_iᵀ of the rows' scores of β, from which the pieces' are taken out, `(p, p)`.

        Args:
            theta: θ.
            lean: H_βα H_αα⁻¹ of all sites together, `(p, J)`.
        """
        expected = self._expected(theta)
        in_beta = (expected.sum(1) - self.weight * self.event)[:, None] * self.x
        own = torch.nn.functional.one_hot(self.piece, len(self.cuts) + 1) * (self.weight * self.event)[:, None]
        scores = in_beta - (expected - own) @ lean.mT
        return weighted_products(scores, torch.ones_like(self.weight))
