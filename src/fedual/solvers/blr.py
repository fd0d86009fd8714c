# ruff: noqa: D102 (`Solver` documents `__call__`)
"""The client's problem by the Bayesian learning rule: natural-gradient descent for every family.

    λ ← λ + β (λ_g − (η + ∇_μ E_q[ℓ]/τ)/ρ − λ)                              (KhRu23, Eq. 6)

whose fixed point is the stationarity condition of Eq. 15. With a deterministic rule each client's β follows the
secant of the last step (Barzilai–Borwein; plain β = 1 can oscillate for ever) and is halved where a step would
leave the domain or not bring the objective down; the stopping rule is ‖λ_target − λ‖ ≤ tol (1 + ‖λ‖). With fresh
noise the solver takes `max_steps` steps of size β and stops.

If η_k subtracts more curvature than ρ q_g and the loss add, Eq. 15 is unbounded below and q moves away from q_g without
end. Such a client, and one whose last noisy step left the domain, gets λ_k = NaN; the round refuses and counts it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedual.algorithm.method import Solution, Subproblem
from fedual.errors import require_positive
from fedual.families import Delta, Family, GaussHermite, Rule, inner, kl
from fedual.solvers.base import Stateless, not_converged, objective, require_finite, start, stationary, tolerance


@dataclass(frozen=True)
class BLR(Stateless):
    """Natural-gradient descent on Eq. 15."""

    rule: Rule = GaussHermite(20)  # how E_q is computed
    beta: float = 1.0  # the (first) step size, in (0, 1]
    tol: float | None = None  # of the stopping rule; √eps of the dtype if None
    max_steps: int = 200  # the number of steps with fresh noise; otherwise the limit (`NotConvergedError`)
    max_kl: float = 100.0  # KL(q ‖ q_g) in nats a parameter beyond which a client's problem counts as unbounded

    def __post_init__(self) -> None:
        require_positive("beta", self.beta, most=1.0)

    def move(self, family: Family, lam: Tensor, target: Tensor, beta: Tensor) -> Tensor:
        """λ + β (λ_target − λ), `beta` one number a client."""
        return torch.lerp(lam, target, beta[:, None, None])

    def __call__(self, problem: Subproblem) -> Solution:
        solve = self._noisy if self.rule.random else self._converge
        return Solution(solve(problem), problem.carry)

    def _noisy(self, problem: Subproblem) -> Tensor:
        lam = start(problem)
        beta, lost = lam.new_full((len(lam),), self.beta), torch.zeros(len(lam), dtype=torch.bool, device=lam.device)
        for t in range(self.max_steps):
            value, gradient = problem.losses.natural_gradient(problem.family, lam, self.rule, t)
            if t == 0:
                require_finite(value)
            moved = self.move(problem.family, lam, stationary(problem, gradient), beta)
            inside = problem.family.inside(moved) & ~lost
            lam = torch.where(inside[:, None, None], moved, lam)
            lost = lost | self._ran_away(problem, lam)
            if t == self.max_steps - 1:
                lost = lost | ~inside
        return torch.where(lost[:, None, None], torch.nan, lam)

    def _converge(self, problem: Subproblem) -> Tensor:
        tol, lam = tolerance(self.tol, problem.lam_g), start(problem)
        beta, lost = lam.new_full((len(lam),), self.beta), torch.zeros(len(lam), dtype=torch.bool, device=lam.device)
        target, value, residual = self._look(problem, lam)
        require_finite(value)
        recent = residual[:, None].repeat(1, 5)
        for taken in range(self.max_steps + 1):
            todo = ((residual > tol) & ~lost).nonzero()[:, 0]
            if not len(todo):
                return torch.where(lost[:, None, None], torch.nan, lam)
            if taken == self.max_steps:
                break
            part = problem.select(todo)
            trial = self.move(problem.family, lam[todo], target[todo], beta[todo])
            inside = problem.family.inside(trial)
            trial = torch.where(inside[:, None, None], trial, lam[todo])
            new_target, new_value, new_residual = self._look(part, trial)
            change = new_value - value[todo]
            level = change.abs() <= 1e-5 * (1 + value[todo].abs())  # below the error of E_q: compare residuals
            good = inside & ((change < 0) | level & (new_residual < recent[todo].amax(-1)))
            moved, turned = trial - lam[todo], (target[todo] - lam[todo]) - (new_target - trial)
            secant = inner(moved, moved) / inner(moved, turned)
            secant = torch.where(secant > 0, secant, self.beta).clamp(0.01, 10.0)
            beta[todo] = torch.where(good, secant, beta[todo] / 2)
            took = todo[good]
            lam[took], target[took] = trial[good], new_target[good]
            value[took], residual[took] = new_value[good], new_residual[good]
            recent[took] = torch.cat([recent[took, 1:], new_residual[good, None]], -1)
            lost[todo] = self._ran_away(part, lam[todo])
        raise not_converged(type(self).__name__, "‖λ_target − λ‖/(1 + ‖λ‖)", residual[~lost], tol, self.max_steps)

    def _ran_away(self, problem: Subproblem, lam: Tensor) -> Tensor:
        """Clients further than `max_kl` nats a parameter from q_g."""
        return ~(kl(problem.family, lam, problem.lam_g) <= self.max_kl * lam.shape[-1])

    def _look(self, problem: Subproblem, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """λ_target, the objective and the relative residual at λ."""
        expected, gradient = problem.losses.natural_gradient(problem.family, lam, self.rule)
        target = stationary(problem, gradient)
        residual = (target - lam).flatten(1).norm(dim=1) / (1 + lam.flatten(1).norm(dim=1))
        return target, objective(problem, lam, expected), residual


@dataclass(frozen=True)
class AtServer(Stateless):
    """Stay at q_g and report ∇_μ E_{q_g}[ℓ_k]/τ, for the learning rule that the server runs (`Relax`)."""

    rule: Rule = Delta()

    def __call__(self, problem: Subproblem) -> Solution:
        lam = start(problem)
        value, gradient = problem.losses.natural_gradient(problem.family, lam, self.rule)
        require_finite(value)
        return Solution(lam, problem.carry, problem.tempered(gradient))
