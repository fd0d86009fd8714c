# ruff: noqa: D102 (`Solver` documents `__call__`)
"""The client's problem in the delta limit, for full Gaussians: a mode and its Hessian, by safeguarded Newton steps.

With Gaussians in the place of their modes, Eq. 15 asks for the minimum of

    F(θ) = ℓ_k(θ)/τ − ⟨c, θ⟩ + ½ θᵀCθ,      (c, −½C) = ρ λ_g − η_k,

whose quadratic part is the cavity: q_g without what client k contributed. ℓ_k is then replaced by its quadratic
expansion at θ_k, which the dual step with γ = ρ makes the new η_k = (H_k θ_k − ∇ℓ_k, −½H_k)/τ.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedual.algorithm.method import Solution, Subproblem
from fedual.errors import InputError
from fedual.families import Delta, Full
from fedual.solvers.base import Loss, Stateless, not_converged, require_finite, stationary

RIDGE = 1e-10
"""Weight of a proximal term at m_g, in units of q_g's precision: a small client's cavity may be singular."""
FLOOR = 1e-13
"""Smallest eigenvalue of a scaled Hessian, relative to the largest."""
ROUNDING = 1e-12
"""Relative rise of F that counts as rounding."""
MOST_HALVINGS = 34
"""Lengths of a step that are tried, down to 1e-10 of it: beyond, F does not fall along it."""


@dataclass(frozen=True)
class Newton(Stateless):
    """Mode and Hessian of every client's F; λ_k follows from the stationarity condition (Eq. 32)."""

    tol: float = 1e-8  # the squared Newton decrement at which to stop: a step of √tol standard errors
    max_steps: int = 100
    anchor: float = 0.0  # weight of a proximal term at m_g, in units of the loss's Hessian there

    def __call__(self, problem: Subproblem) -> Solution:
        if not isinstance(problem.family, Full):
            raise InputError(f"Newton works on Full Gaussians, not on {problem.family}: use Point or BLR.")
        clients = [problem.select(slice(k, k + 1)) for k in range(len(problem.eta))]
        return Solution(torch.cat([self._solve(one) for one in clients]), problem.carry)

    def _solve(self, problem: Subproblem) -> Tensor:
        """λ_k `(1, R, P)` of one client."""
        family, losses, tau = Full(), problem.losses, problem.tau[0]
        scale = family.precision(problem.lam_g).diagonal() * RIDGE
        theta = family.mean(problem.lam_g)
        cavity = problem.rho * problem.lam_g - problem.eta[0]
        pull, curve = cavity[0] + scale * theta, family.precision(cavity) + torch.diag(scale)
        if self.anchor:
            hold = self.anchor / tau * expand(losses, theta).hessian
            pull, curve = pull + hold @ theta, curve + hold
        objective = lambda loss, theta: loss / tau - pull @ theta + theta @ curve @ theta / 2
        found = expand(losses, theta)
        value = objective(found.loss, theta)
        require_finite(value[None])
        decrement = value.new_tensor(torch.inf)
        for _ in range(self.max_steps):
            hessian = found.hessian / tau + curve
            step = -solve(hessian, found.gradient / tau - pull + curve @ theta)
            decrement = step @ hessian @ step
            if decrement <= self.tol:
                at = family.natural(theta)[None]
                return stationary(problem, family.natural_gradient(at, found.gradient[None], found.hessian[None]))
            for halvings in range(MOST_HALVINGS):
                trial = theta + 0.5**halvings * step
                found = expand(losses, trial)
                after = objective(found.loss, trial)
                if after <= value + ROUNDING * value.abs():
                    break
            else:
                break
            theta, value = trial, after
        raise not_converged("Newton", "squared decrement", decrement[None], self.tol, self.max_steps)


class Expansion(NamedTuple):
    """ℓ, ∇ℓ and ∇²ℓ of one client at a θ."""

    loss: Tensor  # ()
    gradient: Tensor  # (P,)
    hessian: Tensor  # (P, P)


def expand(losses: Loss, theta: Tensor) -> Expansion:
    """The expansion of one client's loss, given with a client axis, at θ `(P,)`."""
    found = losses.moments(Full(), Full().natural(theta)[None], Delta(), curvature="full")
    assert found.hessian is not None
    return Expansion(found.value[0], found.gradient[0], found.hessian[0])


def solve(matrix: Tensor, vector: Tensor) -> Tensor:
    """Solve a symmetric system; eigenvalues of the scaled matrix count by their size, at least `FLOOR`."""
    scale = matrix.diagonal().abs().clamp_min(torch.finfo(matrix.dtype).tiny).rsqrt()
    scaled = matrix * scale * scale[:, None]
    factor, info = torch.linalg.cholesky_ex(scaled)
    if info == 0 and factor.diagonal().min() ** 2 > FLOOR:
        return scale * torch.cholesky_solve((scale * vector)[:, None], factor)[:, 0]
    values, vectors = torch.linalg.eigh(scaled)
    values = values.abs().clamp_min(FLOOR * values.abs().max())
    return scale * (vectors @ ((vectors.mT @ (scale * vector)) / values))
