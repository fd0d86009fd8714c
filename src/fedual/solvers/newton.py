# ruff: noqa: D102 (`Solver` documents `__call__`)
"""The client's problem in the delta limit, for full Gaussians: a mode and its Hessian, by safeguarded Newton steps.

With Gaussians in the place of their modes, Eq. 15 asks for the minimum of

    F(θ) = ℓ_k(θ)/τ − ⟨c, θ⟩ + ½ θᵀCθ,      (c, −½C) = ρ λ_g − η_k,

whose quadratic part is the cavity: q_g without what client k contributed. ℓ_k is then replaced by its quadratic
expansion at θ_k, which the dual step with γ = ρ makes the new η_k = (H_k θ_k − ∇ℓ_k, −½H_k)/τ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedual.algorithm.method import Solution, Subproblem
from fedual.errors import InputError
from fedual.families import Delta, Full
from fedual.solvers.base import Loss, Moments, Stateless, not_converged, require_finite, stationary

RIDGE = 1e-10
"""Weight of a proximal term at m_g, in units of q_g's precision: a small client's cavity may be singular."""
FLOOR = 1e-13
"""Smallest eigenvalue of a scaled Hessian, relative to the largest."""
ROUNDING = 1e-12
"""Relative rise of F that counts as rounding."""


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
        start = family.mean(problem.lam_g)
        cavity = problem.rho * problem.lam_g - problem.eta[0]
        pull, curve = cavity[0] + scale * start, family.precision(cavity) + torch.diag(scale)

        def look(theta: Tensor) -> tuple[Tensor, Moments]:
            found = expansion(losses, theta)
            return found.value[0] / tau - pull @ theta + theta @ curve @ theta / 2, found

        if self.anchor:
            hessian = expansion(losses, start).hessian
            assert hessian is not None
            hold = self.anchor / tau * hessian[0]
            pull, curve = pull + hold @ start, curve + hold
        theta = start
        value, found = look(theta)
        require_finite(value[None])
        decrement = value.new_tensor(torch.inf)
        for _ in range(self.max_steps):
            assert found.hessian is not None
            step = -solve(found.hessian[0] / tau + curve, found.gradient[0] / tau - pull + curve @ theta)
            decrement = step @ (found.hessian[0] / tau + curve) @ step
            if decrement <= self.tol:
                break
            t, before = 1.0, value
            while True:
                value, trial = look(theta + t * step)
                if value <= before + ROUNDING * before.abs():
                    break
                t /= 2
                if t < 1e-10:
                    raise not_converged("Newton", "squared decrement", decrement[None], self.tol, self.max_steps)
            theta, found = theta + t * step, trial
        else:
            raise not_converged("Newton", "squared decrement", decrement[None], self.tol, self.max_steps)
        assert found.hessian is not None
        gradient = family.natural_gradient(family.natural(theta)[None], found.gradient, found.hessian)
        return stationary(problem, gradient)


def expansion(losses: Loss, theta: Tensor) -> Moments:
    """ℓ, ∇ℓ and ∇²ℓ of one client at θ `(P,)`, with a client axis."""
    return losses.moments(Full(), Full().natural(theta)[None], Delta(), curvature="full")


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
