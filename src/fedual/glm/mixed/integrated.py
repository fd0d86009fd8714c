# ruff: noqa: D102 (`Loss` documents these methods)
"""One site's loss with its own effects integrated out, by adaptive Gauss–Hermite quadrature.

    L_k(β, θ) = −log ∫ exp(−ℓ_k(β + E Λ_θ v)) N(v; 0, I) dv

ℓ_k is the loss of a GLM, and E Λ_θ v what the site adds to its coefficients. Nodes v_j with shares p_j lie about the
mode of the integrand, scaled by its curvature. Louis' identity gives the derivatives

    ∇L = Σ_j p_j g_j,   ∇²L = Σ_j p_j H_j − Σ_j p_j (g_j − ∇L)(g_j − ∇L)ᵀ,

g_j and H_j those of ℓ_k at v_j in (β, θ), in which the predictor is linear: x_iᵀβ + Σ_ab θ_ab (x_iᵀE_a) v_b.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedual.errors import NotConvergedError
from fedual.families import Curvature, Gaussian, Rule
from fedual.glm.likelihood import Expansion, Likelihood, weighted_products
from fedual.glm.mixed.cholesky import entries, factor, places
from fedual.solvers import Loss
from fedual.solvers.base import Moments

NODES = {1: 25, 2: 15, 3: 9}
"""Nodes along each effect of a site, by the number of effects."""
MOST_STEPS, MOST_HALVINGS = 100, 40
"""Newton steps for the mode of the integrand, and halvings of one of them."""
STEP = 1e-10
"""The squared decrement of the last one: quadrature corrects what is left."""


class Mode(NamedTuple):
    """The mode v̂ `(q,)` of the integrand, and R `(q, q)` with R Rᵀ the inverse of its curvature there."""

    place: Tensor
    root: Tensor


@dataclass(frozen=True)
class Integrated(Loss):
    """The loss of one site in (β, θ), with a client axis of one.

    Args:
        plain: ℓ_k.
        spread: E `(p, q)`: the coefficients that an effect of the site adds to.
    """

    plain: Likelihood
    spread: Tensor
    last: list = field(default_factory=list, compare=False, repr=False)  # (β, θ) and the expansion there

    def __len__(self) -> int:
        return 1

    def __getitem__(self, clients: Any) -> "Integrated":
        return self

    @property
    def effects(self) -> int:
        """q."""
        return self.spread.shape[1]

    @property
    def dim(self) -> int:
        return self.plain.dim + entries(self.effects)

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    @property
    def num_examples(self) -> Tensor:
        return self.plain.num_examples

    @property
    def distribution(self) -> Any:
        """The response's."""
        return self.plain.distribution

    @property
    def says_nothing(self) -> bool:
        """False: a site of one class tells something of how sites differ."""
        return False

    def split(self, psi: Tensor) -> tuple[Tensor, Tensor]:
        """β, and Λ."""
        size = self.plain.dim
        return psi[:size], factor(psi[size:], self.effects)

    def separated(self, psi: Tensor) -> bool:
        """True if the coefficients, with the site's own effects, tell the classes apart without an error."""
        beta, scale = self.split(psi)
        return self.plain.separated(beta + self.spread @ scale @ self.mode(psi).place)

    def hides(self, start: Tensor) -> bool:
        """False: only rounds of plain GLMs begin at a site's own mode."""
        return False

    def __call__(self, theta: Tensor) -> Tensor:
        flat = theta.reshape(-1, theta.shape[-1])
        return torch.stack([self.loss(point) for point in flat]).reshape(theta.shape[:-1])

    def moments(
        self, family: Gaussian, lam: Tensor, rule: Rule, step: int = 0, curvature: Curvature | None = None
    ) -> Moments:
        """The loss and its derivatives at the mean."""
        found = self.expand(family.mean(lam)[0])
        return Moments(found.loss[None], found.gradient[None], found.hessian[None])

    def mode(self, psi: Tensor) -> Mode:
        """argmin_v ℓ_k(β + E Λ v) + ½ |v|²."""
        beta, scale = self.split(psi)
        loadings, eye = self.spread @ scale, torch.eye(self.effects, dtype=psi.dtype)
        value = lambda v: self.plain.loss(beta + loadings @ v) + v @ v / 2
        v = psi.new_zeros(self.effects)
        before = value(v)
        for _ in range(MOST_STEPS):
            found = self.plain.expand(beta + loadings @ v)
            slope = loadings.mT @ found.gradient + v
            root = torch.linalg.cholesky(loadings.mT @ found.expected @ loadings + eye)
            step = -torch.cholesky_solve(slope[:, None], root)[:, 0]
            if float(-slope @ step) <= STEP:
                return Mode(v, torch.linalg.solve_triangular(root, eye, upper=False).mT)
            for _ in range(MOST_HALVINGS):
                if (after := value(v + step)) <= before + 1e-13 * before.abs():
                    break
                step = step / 2
            else:
                return Mode(v, torch.linalg.solve_triangular(root, eye, upper=False).mT)
            v, before = v + step, after
        raise NotConvergedError("A site's own effects were not found.")

    def loss(self, psi: Tensor) -> Tensor:
        """L_k(β, θ)."""
        if not self._finite(psi):
            return psi.new_tensor(torch.inf)
        nodes, weights = self._nodes(self.mode(psi))
        return -torch.logsumexp(weights - self._losses(psi, nodes), 0)

    def expand(self, psi: Tensor) -> Expansion:
        """L_k and its derivatives at (β, θ); those at the last point are kept."""
        if not self.last or not torch.equal(self.last[0], psi):
            self.last[:] = [psi, self._expand(psi)]
        return self.last[1]

    def _finite(self, psi: Tensor) -> bool:
        return bool(psi.isfinite().all()) and bool(self.plain.loss(self.split(psi)[0]).isfinite())

    def _nodes(self, mode: Mode) -> tuple[Tensor, Tensor]:
        """The nodes v_j `(J, q)`, and the logarithms of their weights with N(v; 0, I) in them."""
        nodes, logs = _rule(self.effects)
        v = mode.place + nodes @ mode.root.mT
        return v, logs + mode.root.diagonal().log().sum() - v.square().sum(1) / 2

    def _losses(self, psi: Tensor, nodes: Tensor) -> Tensor:
        """ℓ_k at every node, `(J,)`."""
        points = self._points(psi, nodes)
        total = psi.new_zeros(len(nodes))
        for part in self.plain.chunks():
            bend = self.plain.bend(part.x @ points + part.offset[:, None], part.y[:, None], psi[:0])
            total = total + part.weight @ bend.loss
        return total

    def _points(self, psi: Tensor, nodes: Tensor) -> Tensor:
        """The coefficients at every node, `(p, J)`."""
        beta, scale = self.split(psi)
        return beta[:, None] + self.spread @ scale @ nodes.mT

    def _expand(self, psi: Tensor) -> Expansion:
        if not self._finite(psi):
            nothing, square = torch.full_like(psi, torch.nan), psi.new_full((len(psi), len(psi)), torch.nan)
            rows = torch.zeros_like(self.plain.weight)
            return Expansion(psi.new_tensor(torch.inf), nothing, square, square, rows, rows)
        nodes, logs = self._nodes(self.mode(psi))
        exponents = logs - self._losses(psi, nodes)
        share, p, (rows, columns) = exponents.softmax(0), self.plain.dim, places(self.effects)
        points, powers = self._points(psi, nodes), _powers(nodes)
        gradients = psi.new_zeros(p, len(nodes))
        curves = psi.new_zeros(powers.shape[1], p, p)
        weights, scores, swings = [], [], []
        for part in self.plain.chunks():
            bend = self.plain.bend(part.x @ points + part.offset[:, None], part.y[:, None], psi[:0])
            first, second = part.weight[:, None] * bend.first, part.weight[:, None] * bend.second
            gradients += part.x.mT @ first
            for i, each in enumerate((second @ (share[:, None] * powers)).T):
                curves[i] += weighted_products(part.x, each)
            weights.append(part.weight * (bend.expected @ share))
            scores.append(first @ share)
            swings.append((first - scores[-1][:, None]).square() @ share)
        own = (self.spread.mT @ gradients)[rows] * nodes.mT[columns]  # in θ, (m, J)
        slopes = torch.cat([gradients, own])
        gradient = slopes @ share
        away = slopes - gradient[:, None]
        hessian = self._assembled(curves) - (away * share) @ away.mT
        hessian = (hessian + hessian.mT) / 2
        loss = -exponents.logsumexp(0)
        sums = (torch.cat(each) for each in (weights, scores, swings))
        return Expansion(loss, gradient, hessian, hessian, *sums)

    def _assembled(self, curves: Tensor) -> Tensor:
        """Σ_j p_j H_j in (β, θ), from Σ_j p_j v_b … H_j in β: of 1, of every v_b, and of every v_b v_c."""
        q, (rows, columns) = self.effects, places(self.effects)
        plain, linear = curves[0], curves[1 : 1 + q]
        squares = curves[1 + q :].reshape(q, q, *plain.shape)
        cross = torch.stack(
            [linear[b] @ self.spread[:, a] for a, b in zip(rows.tolist(), columns.tolist(), strict=True)], 1
        )
        within = torch.stack(
            [
                torch.stack(
                    [self.spread[:, a] @ squares[b, d] @ self.spread[:, c] for c, d in zip(rows, columns, strict=True)]
                )
                for a, b in zip(rows, columns, strict=True)
            ]
        )
        return torch.cat([torch.cat([plain, cross], 1), torch.cat([cross.mT, within], 1)])


def _powers(nodes: Tensor) -> Tensor:
    """1, v_b and v_b v_c of every node, `(J, 1 + q + q²)`."""
    squares = nodes[:, :, None] * nodes[:, None, :]
    return torch.cat([torch.ones_like(nodes[:, :1]), nodes, squares.flatten(1)], 1)


@lru_cache
def _rule(effects: int) -> tuple[Tensor, Tensor]:
    """Nodes t_j `(J, q)`, and log(ω_j e^{t_j²/2} / (2π)^{q/2}): weights of ∫ f(t) dt / (2π)^{q/2}."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES[effects])
    grid = torch.cartesian_prod(*[torch.tensor(nodes)] * effects).reshape(-1, effects)
    logs = torch.cartesian_prod(*[torch.tensor(np.log(weights) + nodes**2 / 2)] * effects).reshape(-1, effects)
    return grid, logs.sum(1) - effects * np.log(2 * np.pi) / 2
