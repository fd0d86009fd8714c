# ruff: noqa: D102 (`Loss` documents these methods)
"""One site's loss as a function of the coefficients, computed in chunks of rows.

    ℓ_k(θ) = Σ_i w_i ℓ(x_iᵀθ + o_i; y_i),   ∇ℓ_k = Xᵀ(w ℓ'),   ∇²ℓ_k = Xᵀ diag(w ℓ'') X

With an intercept of its own, the site reports the loss at its best intercept a(θ): ℓ_k(θ) = min_a ℓ_k(a, θ), whose
gradient is that of the coefficients, and whose Hessian is the Schur complement H − h hᵀ/H_aa.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.errors import DomainError
from fedual.families import Curvature, Gaussian, Rule
from fedual.glm.distributions import Bend, Binomial, Distribution, NegativeBinomial, Poisson
from fedual.solvers import Loss
from fedual.solvers.base import Moments

CHUNK = 4096
"""Rows at a time: their products stay in the cache."""
HIDDEN, KEPT = 0.2, 0.5
"""Shares of the information at the start: a coefficient is hidden with less than the first, but where all rows together
keep less than the second, the effects are large."""
MOST_STEPS, MOST_HALVINGS = 200, 60
"""Newton steps for a site's own intercept, and halvings of one of them."""


class Expansion(NamedTuple):
    """ℓ, ∇ℓ, ∇²ℓ and E_y[∇²ℓ] at θ, and what rows weigh in the information and in the gradient.

    `swings` is what rows weigh in the covariance of gradients, which a Hessian with integrated effects has besides.
    """

    loss: Tensor
    gradient: Tensor
    hessian: Tensor
    expected: Tensor
    weights: Tensor  # w E_y[ℓ''], (N,)
    scores: Tensor  # w ℓ', (N,)
    swings: Tensor | None = None  # (N,)


@dataclass(frozen=True)
class Likelihood(Loss):
    """The loss of one site, with a client axis of one.

    θ holds the coefficients of x's columns, the distribution's extra parameters after them. With `own_intercept`, the
    first column of x is constant, and its coefficient is the site's own instead of an entry of θ.
    """

    distribution: Distribution
    x: Tensor  # (N, p)
    y: Tensor  # (N,)
    weight: Tensor  # (N,)
    offset: Tensor  # (N,)
    own_intercept: bool = False
    last: list = field(default_factory=list, compare=False, repr=False)  # θ and the expansion there

    def __len__(self) -> int:
        return 1

    def __getitem__(self, clients: Any) -> "Likelihood":
        return self

    @property
    def dim(self) -> int:
        return self.x.shape[1] - self.own_intercept + len(self.distribution.extra)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def num_examples(self) -> Tensor:
        return torch.tensor([len(self.x)])

    @property
    def says_nothing(self) -> bool:
        """True if the best intercept of its own is infinite, whatever θ is: all responses are of one class, or zero."""
        if not self.own_intercept or not isinstance(self.distribution, Binomial | Poisson | NegativeBinomial):
            return False
        one_class = isinstance(self.distribution, Binomial) and bool((self.y == 1).all())
        return one_class or bool((self.y == 0).all())

    def separated(self, theta: Tensor) -> bool:
        """True if θ tells the classes of a binomial response apart without an error."""
        if not isinstance(self.distribution, Binomial):
            return False
        if self.says_nothing:
            return True
        mean = self.means(theta)
        return bool(((self.y == 1) & (mean > 0.5) | (self.y == 0) & (mean < 0.5)).all())

    def hides(self, start: Tensor) -> bool:
        """True if a coefficient has no information left at the last θ that it has at `start`, though most rows do.

        So it is with a rare level whose few rows at this site all have one response: at the site's own mode they have
        no curvature. Where most rows have none, effects are large, or all responses are the same.
        """
        if not isinstance(self.distribution, Binomial) or self.says_nothing or not self.last:
            return False
        points = torch.stack([self.split(self.complete(theta))[0] for theta in (start, self.last[0])], 1)
        rows, entries = self.x.new_zeros(2), self.x.new_zeros(self.x.shape[1], 2)
        for part in self.chunks():
            bend = self.distribution.bend(part.x @ points + part.offset[:, None], part.y[:, None])
            weights = part.weight[:, None] * bend.expected
            rows, entries = rows + weights.sum(0), entries + part.x.square().mT @ weights
        return bool(rows[1] > KEPT * rows[0]) and bool((entries[:, 1] < HIDDEN * entries[:, 0]).any())

    def __call__(self, theta: Tensor) -> Tensor:
        flat = theta.reshape(-1, theta.shape[-1])
        return torch.stack([self.loss(point) for point in flat]).reshape(theta.shape[:-1])

    def moments(
        self, family: Gaussian, lam: Tensor, rule: Rule, step: int = 0, curvature: Curvature | None = None
    ) -> Moments:
        """E_q of the loss, its gradient and its Hessian; all nodes but the mean need a θ without extra parameters."""
        mean, (noise, share) = family.mean(lam)[0], rule(1, step, lam)
        if not noise.any():
            found = self.expand(mean)
            return Moments(found.loss[None], found.gradient[None], found.hessian[None])
        if self.own_intercept or self.distribution.extra:
            raise DomainError("Expectations need a likelihood of the coefficients alone: leave out the site's own.")
        factor = torch.linalg.cholesky(family.precision(lam)[0])
        value, gradient, hessian = mean.new_zeros(()), torch.zeros_like(mean), mean.new_zeros(len(mean), len(mean))
        for part in self.chunks():
            spread = torch.linalg.solve_triangular(factor, part.x.mT, upper=False).norm(dim=0)
            f = (part.x @ mean + part.offset)[:, None] + spread[:, None] * noise[:, 0]
            loss, first, second, _ = (term @ share for term in self.distribution.bend(f, part.y[:, None]))
            value = value + part.weight @ loss
            gradient += part.x.mT @ (part.weight * first)
            hessian += weighted_products(part.x, part.weight * second)
        return Moments(value[None], gradient[None], hessian[None])

    def loss(self, theta: Tensor) -> Tensor:
        """ℓ_k(θ)."""
        if self.says_nothing:
            return theta.new_zeros(())
        return self._pass(self.complete(theta), derivatives=False).loss

    def expand(self, theta: Tensor) -> Expansion:
        """The loss and its derivatives at θ `(P,)`; those at the last θ are kept."""
        if not self.last or not torch.equal(self.last[0], theta):
            self.last[:] = [theta, self._expand(theta)]
        return self.last[1]

    def _expand(self, theta: Tensor) -> Expansion:
        if self.says_nothing:
            zero, nothing = theta.new_zeros(len(theta), len(theta)), torch.zeros_like(self.weight)
            return Expansion(theta.new_zeros(()), torch.zeros_like(theta), zero, zero, nothing, nothing)
        found = self._pass(self.complete(theta), derivatives=True)
        if not self.own_intercept:
            return found
        reduced = lambda h: h[1:, 1:] - torch.outer(h[0, 1:], h[0, 1:]) / h[0, 0]
        return found._replace(
            gradient=found.gradient[1:], hessian=reduced(found.hessian), expected=reduced(found.expected)
        )

    def complete(self, theta: Tensor) -> Tensor:
        """θ with the best intercept of the site's own before it, if it has one."""
        if not self.own_intercept:
            return theta
        slopes, extra = self.split(theta)
        f = torch.cat([part.x[:, 1:] @ slopes + part.offset for part in self.chunks()])
        return torch.cat([self._intercept(f, extra)[None], theta])

    def means(self, theta: Tensor) -> Tensor:
        """μ of every row at θ; a site that says nothing fits its responses."""
        if self.says_nothing:
            return self.y.clone()
        whole, _ = self.split(self.complete(theta))
        return torch.cat([self.distribution.mean(part.x @ whole + part.offset) for part in self.chunks()])

    def null_means(self, theta: Tensor, null: float | None) -> Tensor:
        """μ without covariates, with the intercept `null` or the site's own; extra parameters are those in θ."""
        if self.own_intercept:
            slopes, extra = self.split(theta)
            return self.means(torch.cat([torch.zeros_like(slopes), extra]))
        return self.distribution.mean(self.offset + (null or 0.0))

    def _intercept(self, f: Tensor, extra: Tensor) -> Tensor:
        """argmin_a Σ w ℓ(a + f), by Newton steps that are halved until the loss falls."""
        a = self._first_intercept(f)
        total = lambda a: self.bend(f + a, self.y, extra)
        bend = total(a)
        for _ in range(MOST_STEPS):
            slope, curve = self.weight @ bend.first, self.weight @ bend.second
            if curve <= 0:
                curve = self.weight @ bend.expected
            step = -slope / curve
            if step * step * curve <= 1e-20:
                return a
            before = self.weight @ bend.loss
            for _ in range(MOST_HALVINGS):
                bend = total(a + step)
                if self.weight @ bend.loss <= before + 1e-13 * before.abs():
                    break
                step = step / 2
            else:
                break
            a = a + step
        raise DomainError("A site's own intercept was not found: its responses do not fit the family.")

    def _first_intercept(self, f: Tensor) -> Tensor:
        mean = (self.weight @ self.y) / self.weight.sum()
        return self.distribution.predictor(mean) - (self.weight @ f) / self.weight.sum()

    def _pass(self, theta: Tensor, derivatives: bool) -> Expansion:
        """One pass over the rows, without a site's own intercept taken out."""
        coefficients, extra = self.split(theta)
        p, size = len(coefficients), len(theta)
        loss, gradient = theta.new_zeros(()), torch.zeros_like(theta)
        hessian, expected = theta.new_zeros(size, size), theta.new_zeros(size, size)
        weights, scores = [], []
        for part in self.chunks():
            f = part.x @ coefficients + part.offset
            bend = self.bend(f, part.y, extra)
            loss = loss + torch.where(part.weight > 0, part.weight * bend.loss, 0.0).sum()
            if not derivatives:
                continue
            scores.append(part.weight * bend.first)
            gradient[:p] += part.x.mT @ scores[-1]
            hessian[:p, :p] += weighted_products(part.x, part.weight * bend.second)
            weights.append(part.weight * bend.expected)
            if not self.distribution.fisher_is_hessian:
                expected[:p, :p] += weighted_products(part.x, weights[-1])
            if len(extra):
                assert isinstance(self.distribution, NegativeBinomial)
                _, first, second, mixed = self.distribution.bend_jointly(f, extra[0], part.y)
                gradient[p] += part.weight @ first
                hessian[p, p] += part.weight @ second
                hessian[p, :p] += part.x.mT @ (part.weight * mixed)
        hessian[:p, p:] = hessian[p:, :p].mT
        symmetric = (hessian + hessian.mT) / 2
        if self.distribution.fisher_is_hessian or len(extra):
            expected = symmetric  # of the negative binomial, all software reports the observed information
        rows = (torch.cat(each) if derivatives else self.weight for each in (weights, scores))
        return Expansion(loss, gradient, symmetric, expected, *rows)

    def bend(self, f: Tensor, y: Tensor, extra: Tensor) -> Bend:
        """The loss of every row and its derivatives in f."""
        if len(extra):
            assert isinstance(self.distribution, NegativeBinomial)
            return self.distribution.bend_jointly(f, extra[0], y)[0]
        return self.distribution.bend(f, y)

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients and the distribution's extra parameters."""
        size = len(theta) - len(self.distribution.extra)
        return theta[:size], theta[size:]

    def chunks(self) -> Iterator["Likelihood"]:
        """The rows, `CHUNK` at a time."""
        for start in range(0, len(self.x), CHUNK):
            rows = slice(start, start + CHUNK)
            yield replace(self, x=self.x[rows], y=self.y[rows], weight=self.weight[rows], offset=self.offset[rows])


def weighted_products(x: Tensor, weight: Tensor) -> Tensor:
    """Xᵀ diag(w) X; with w ≥ 0 as a product of √w X with itself, of which NumPy computes one half alone."""
    if (weight < 0).any():
        return x.mT @ (weight[:, None] * x)
    root = (weight.sqrt()[:, None] * x).numpy()
    return torch.from_numpy(root.T @ root)
