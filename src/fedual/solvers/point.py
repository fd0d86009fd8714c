# ruff: noqa: D102 (`Solver` documents `__call__`)
"""The client's problem for Gaussians of fixed precision S, where only the mean moves (paper Eq. 5, 22, 41).

    m_k ← argmin_m  E_{N(m, S⁻¹)}[ℓ_k]/τ + ⟨η_k, m⟩ + ρ/2 ‖m − m_g‖²_S

With the delta method, E[ℓ_k] ≈ ℓ_k(m), this is the client step of textbook ADMM; with another rule it is the
randomised ADMM of Eq. 22. Its gradient is ∇F(m) = E[∇ℓ_k]/τ + η_k + ρ(λ − λ_g), its Hessian E[∇²ℓ_k]/τ + ρS.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedual.algorithm.method import Solution, Subproblem
from fedual.errors import InputError
from fedual.families import Curvature, Delta, FixedPrecision, Isotropic, Rule
from fedual.solvers.base import Stateless, not_converged, require_finite, start, tolerance


@dataclass(frozen=True)
class Point(Stateless):
    """Minimise over the mean by "newton" (damped by a line search), "lbfgs", or "gradient" (descent with momentum)."""

    optimiser: Literal["newton", "lbfgs", "gradient"] = "newton"
    rule: Rule = Delta()  # how E_q is computed
    lr: float = 0.01  # for "gradient"
    momentum: float = 0.9  # for "gradient"
    tol: float | None = None  # the stopping rule is ‖∇F(m)‖ ≤ tol (1 + ‖m‖); √eps of the dtype if None
    max_steps: int = 1000  # then `NotConvergedError` is raised

    def __post_init__(self) -> None:
        if self.optimiser not in ("newton", "lbfgs", "gradient"):
            raise InputError(f"optimiser = {self.optimiser!r}: choose newton, lbfgs or gradient.")

    def __call__(self, problem: Subproblem) -> Solution:
        if not isinstance(problem.family, Isotropic | FixedPrecision):
            raise InputError(f"Point needs a fixed precision (Isotropic, FixedPrecision), not {problem.family}.")
        solve = {"newton": self._newton, "lbfgs": self._lbfgs, "gradient": self._gradient}[self.optimiser]
        tol = tolerance(self.tol, problem.lam_g)
        objective = _Objective(problem, problem.family, self.rule)
        require_finite(objective.look(objective.start(), "none")[0])
        mean, residual = solve(objective, tol)
        if not (residual <= tol).all():
            raise not_converged(f"Point({self.optimiser})", "‖∇F(m)‖/(1 + ‖m‖)", residual, tol, self.max_steps)
        return Solution(problem.family.natural(mean), problem.carry)

    def _newton(self, problem: "_Objective", tol: float) -> tuple[Tensor, Tensor]:
        mean = problem.start()
        value, gradient, hessian = problem.look(mean, "full")
        assert hessian is not None
        rounding = max(1e-10, 4 * torch.finfo(value.dtype).eps)
        length = torch.ones_like(value)
        for _ in range(self.max_steps):
            todo = _residual(mean, gradient) > tol
            if not todo.any():
                break
            direction = -torch.linalg.solve(hessian, gradient)
            uphill = (direction * gradient).sum(-1, keepdim=True) >= 0  # where F is not convex
            direction = torch.where(uphill, -gradient, direction)
            slope = (direction * gradient).sum(-1)
            trial = torch.where(todo[:, None], mean + length[:, None] * direction, mean)
            new_value, new_gradient, new_hessian = problem.look(trial, "full")
            assert new_hessian is not None
            enough = new_value <= value + 1e-4 * length * slope
            level = (new_value - value).abs() <= rounding * (1 + value.abs())  # below rounding: compare ∇F
            closer = level & (new_gradient.norm(dim=-1) < gradient.norm(dim=-1))
            good = todo & (enough | closer) & new_gradient.isfinite().all(-1)
            mean = torch.where(good[:, None], trial, mean)
            value = torch.where(good, new_value, value)
            gradient = torch.where(good[:, None], new_gradient, gradient)
            hessian = torch.where(good[:, None, None], new_hessian, hessian)
            length = torch.where(good, torch.ones_like(length), length / 2)
        return mean, _residual(mean, gradient)

    def _lbfgs(self, problem: "_Objective", tol: float) -> tuple[Tensor, Tensor]:
        alone = [self._lbfgs_alone(problem.select(k), tol) for k in range(len(problem.problem.eta))]
        mean = torch.cat(alone)
        return mean, _residual(mean, problem.look(mean, "none")[1])

    def _lbfgs_alone(self, problem: "_Objective", tol: float) -> Tensor:
        mean = problem.start().requires_grad_()
        settings = {"max_iter": 20, "line_search_fn": "strong_wolfe", "tolerance_grad": 0.0, "tolerance_change": 0.0}
        optimiser = torch.optim.LBFGS([mean], **settings)

        def closure() -> Tensor:
            value, mean.grad, _ = problem.look(mean.detach(), "none")
            return value.sum()

        before = float("inf")
        for _ in range(0, self.max_steps, 20):
            optimiser.step(closure)
            residual = float(_residual(mean.detach(), problem.look(mean.detach(), "none")[1]))
            if residual <= tol:
                break
            if residual > before / 2:  # differences of F are below rounding: continue without a line search
                optimiser.param_groups[0]["line_search_fn"] = None
            before = residual
        return mean.detach()

    def _gradient(self, problem: "_Objective", tol: float) -> tuple[Tensor, Tensor]:
        mean = problem.start()
        velocity = torch.zeros_like(mean)
        gradient = problem.look(mean, "none")[1]
        for _ in range(self.max_steps):
            todo = _residual(mean, gradient) > tol
            if not todo.any():
                break
            velocity = torch.where(todo[:, None], self.momentum * velocity - self.lr * gradient, velocity)
            mean = torch.where(todo[:, None], mean + velocity, mean)
            gradient = problem.look(mean, "none")[1]
        return mean, _residual(mean, gradient)


@dataclass(frozen=True)
class _Objective:
    """F(m) with its derivatives for a stack of clients."""

    problem: Subproblem
    family: Isotropic | FixedPrecision
    rule: Rule

    def start(self) -> Tensor:
        """m_g for every client."""
        return self.family.mean(start(self.problem))

    def select(self, client: int) -> "_Objective":
        """The problem of one client, still with a client axis."""
        return replace(self, problem=self.problem.select(slice(client, client + 1)))

    def look(self, mean: Tensor, curvature: Curvature) -> tuple[Tensor, Tensor, Tensor | None]:
        """F, ∇F and ∇²F at m `(K, P)`."""
        family, rho, eta, tempered = self.family, self.problem.rho, self.problem.eta[:, 0], self.problem.tempered
        found = self.problem.losses.moments(family, family.natural(mean), self.rule, curvature=curvature)
        away = mean - family.mean(self.problem.lam_g)
        pull = rho * family.multiply(away)
        value = tempered(found.value) + (eta * mean).sum(-1) + (away * pull).sum(-1) / 2
        hessian = found.hessian
        if hessian is not None:
            hessian = tempered(hessian) + rho * family.multiply(torch.eye(mean.shape[-1]).to(mean))
        return value, tempered(found.gradient) + eta + pull, hessian


def _residual(mean: Tensor, gradient: Tensor) -> Tensor:
    return gradient.norm(dim=-1) / (1 + mean.norm(dim=-1))
