"""The rounds of a generalised linear mixed model: Newton steps in (β, θ) with their safeguards.

    start      one cavity round of the GLM; the sites' quadratics with their effects integrated out in closed form
    round r    sites: λ_g ↦ η_k of Bayesian-ADMM's "newton" round at (β, θ), with their effects integrated out
               server: (β, θ) ← a safeguarded Newton step of Σ_k L_k
    last       the step that is left certifies the result

Sites take the same `client_step` as in a GLM. The server takes no `server_step`: L is not convex in θ, so that line 3's
λ_0 + Σ_k η_k need not be a Gaussian; near the maximum, where it is, its mean is the same Newton step. Beside it, the
same messages expand the GLM without sites' effects at its own Newton steps: for the likelihood-ratio test of σ = 0.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.families import Full
from fedual.glm.messages import Message, packed_lam, unpacked_lam
from fedual.glm.mixed.cholesky import diagonal
from fedual.glm.rounds import ROUNDING, STEPS, Rounds

FAMILY = Full()
LONGEST = 0.7
"""The longest step of an entry of Λ, on the scale of the link."""
LEAST = 1e-10
"""Smallest eigenvalue, in absolute value, of a Hessian scaled to a unit diagonal."""
BEGIN = 0.1
"""Entries of Λ's diagonal that the start has at least: at zero their gradient is zero whatever the data."""
NEAR = 0.3
"""A σ below which steps are those of σ², in which the likelihood is nearly quadratic where the maximum is at zero."""
ZERO = 1e-2
"""A σ below which steps are those of σ again: derivatives in σ² lose their digits."""
SETTLED = 0.1
"""A step of the GLM beside, in standard errors, after which its maximum follows from its quadratic."""


class Point(NamedTuple):
    """A point with the pooled expansion there."""

    psi: Tensor
    loss: float
    gradient: Tensor
    hessian: Tensor


class Beside:
    """The GLM without sites' effects, by Newton steps."""

    def __init__(self, eta: Tensor):
        self.mean, self.minimum, self.settled = FAMILY.mean(eta), float("inf"), False

    def hear(self, loss: float, eta: Tensor) -> None:
        """Take a step, and what is left of the loss by the quadratic."""
        precision = FAMILY.precision(eta)
        step = FAMILY.mean(eta) - self.mean
        fall = float(step @ precision @ step) / 2
        self.settled = float((step.abs() * precision.diagonal().sqrt()).max()) < SETTLED
        self.minimum, self.mean = loss - fall, self.mean + step


class MixedRounds:
    """The rounds of one fit after the first.

    Args:
        first: The rounds of the GLM, of which one was run.
        start: (β, θ).
        prior: λ_0 of (β, θ), `(P + 1, P)`; zeros are flat.
        effects: q.
    """

    def __init__(self, first: Rounds, start: Tensor, prior: Tensor, effects: int):
        self.first, self.psi, self.prior, self.effects = first, start, prior, effects
        self.beside = Beside(first.state.eta_sum)
        self.point: Point | None = None
        self.replies: Mapping[str, Message] = {}

    def run(self) -> bool:
        """Newton steps until the next one is short; True if it is at most `tol` standard errors."""
        self._exchange()
        while True:
            best = self._best
            step, se = self._step(best)
            self.first.history[-1]["step_se"] = float((step.abs() / se).max())
            arrived = self._regular(best) and self.first.history[-1]["step_se"] <= self.first.tol
            self.psi = best.psi + step
            if arrived and self.beside.settled:
                return True
            if self.first.left <= 0:
                return False
            self._advance(best, step)

    @property
    def _best(self) -> Point:
        assert self.point is not None
        return self.point

    @property
    def covariance(self) -> Tensor:
        """The inverse of the information at the last point."""
        return torch.linalg.inv(self._best.hessian)

    def _advance(self, best: Point, step: Tensor) -> None:
        """Expand at the new point; where the loss rose, at the best point of a line search."""
        self._exchange()
        if self._best.loss <= best.loss + ROUNDING * (1 + abs(best.loss)) or self.first.left <= 1:
            return
        points = torch.stack([best.psi + t * step for t in STEPS])
        self.psi = best.psi
        losses = self._exchange(points)
        self.psi = points[losses.argmin()] if losses.min() < best.loss else best.psi
        self._exchange()

    def _exchange(self, points: Tensor | None = None) -> Tensor:
        """One round at `psi`; the losses at `points`, if they are asked for."""
        first, size = self.first, len(self.psi)
        lam = FAMILY.natural(self.psi, torch.eye(size, dtype=self.psi.dtype))
        facts: dict[str, Any] = dict(
            first.facts, method="newton", previous="", anchor="eta", null=None, integrated=True
        )
        tensors = {**first.units, "lam": packed_lam(lam)}
        tensors |= {} if self.beside.settled else {"beside": self.beside.mean}
        tensors |= {} if points is None else {"points": points}
        self.replies = first.ask(Message("round", facts, tensors))
        total = lambda name: torch.stack([unpacked_lam(reply.tensors[name]) for reply in self.replies.values()]).sum(0)
        losses = lambda name: sum(_loss(reply.facts[name]) for reply in self.replies.values())
        if not self.beside.settled:
            self.beside.hear(losses("beside"), total("beside"))
        eta = total("eta") + self.prior
        hessian = FAMILY.precision(eta)
        penalty = float(self.prior[0] @ self.psi + self.psi @ self.prior[1:] @ self.psi)
        self.point = Point(self.psi, losses("loss") - penalty, hessian @ self.psi - eta[0], hessian)
        first.history.append({"kind": "newton", "loss": self.point.loss, "step_se": float("nan")})
        if points is None:
            return torch.zeros(0)
        found = [sum(_loss(reply.facts["losses"][i]) for reply in self.replies.values()) for i in range(len(points))]
        own = torch.einsum("ni,ij,nj->n", points, self.prior[1:], points) + points @ self.prior[0]
        return torch.tensor(found) - own

    def _step(self, at: Point) -> tuple[Tensor, Tensor]:
        """A Newton step, and the entries' standard errors; a single small σ moves by a step of σ²."""
        step, se = _newton(at.gradient, at.hessian)
        sigma = float(at.psi[-1])
        if self.effects == 1 and ZERO < abs(sigma) < NEAR:
            step = _step_of_square(at.gradient, at.hessian, sigma, step)
        elif self.effects == 1 and abs(sigma) <= ZERO and at.hessian[-1, -1] < 0:
            step[-1] = BEGIN / 2  # zero is a maximum over σ: leave it
        longest = float(step[self.first.start.shape[1] :].abs().max())
        return step * min(1.0, LONGEST / max(longest, LONGEST)), se

    def _regular(self, at: Point) -> bool:
        return bool(torch.linalg.eigvalsh(at.hessian)[0] > 0)


def _newton(gradient: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """A Newton step with |eigenvalues|, and the standard errors of the entries."""
    scale = hessian.diagonal().abs().clamp_min(1e-300).rsqrt()
    values, vectors = torch.linalg.eigh(hessian * scale * scale[:, None])
    values = values.abs().clamp_min(LEAST)
    step = -scale * (vectors @ ((vectors.mT @ (scale * gradient)) / values))
    return step, scale * (vectors.square() / values).sum(1).sqrt()


def _step_of_square(gradient: Tensor, hessian: Tensor, sigma: float, otherwise: Tensor) -> Tensor:
    """A Newton step in (β, σ²), which ends where σ² is zero; `otherwise` where the loss is not convex there."""
    change = torch.ones_like(gradient)
    change[-1] = 1 / (2 * sigma)
    slope, curve = gradient * change, hessian * change * change[:, None]
    curve[-1, -1] -= gradient[-1] / (4 * sigma**3)
    if torch.linalg.cholesky_ex(curve).info > 0:
        return otherwise
    step, _ = _newton(slope, curve)
    if float(step[-1]) < -(sigma**2):
        rest, _ = _newton(slope[:-1] - curve[:-1, -1] * sigma**2, curve[:-1, :-1])
        return torch.cat([rest, rest.new_tensor([-sigma])])
    step[-1] = math.copysign(math.sqrt(sigma**2 + float(step[-1])), sigma) - sigma
    return step


def away_from_zero(theta: Tensor, effects: int) -> Tensor:
    """A start whose gradient tells something: every entry of Λ's diagonal is at least `BEGIN`."""
    theta = theta.clone()
    for place in diagonal(effects):
        if abs(float(theta[place])) < BEGIN:
            theta[place] = BEGIN
    return theta


def _loss(loss: float | None) -> float:
    return float("inf") if loss is None else float(loss)
