"""Laplace's method at a client: the posterior mode, and the diagonal Gauss–Newton matrix there for a precision."""

from dataclasses import dataclass

from fedual.admm import Solution, Subproblem
from fedual.errors import InputError
from fedual.families import Diagonal
from fedual.solvers.sgd import SGD
from fedual.solvers.stochastic import Inner


@dataclass(frozen=True)
class Laplace(SGD):
    """MAP by `SGD`, then the precision from the diagonal Gauss–Newton matrix at it (FedLap-Cov).

    s_k = s_g + (h/τ_k − u_k)/ρ with h = diag Σ_i J_iᵀ H_i J_i: Eq. 32 with the delta method and that h for the Hessian.
    """

    def end(self, problem: Subproblem, inner: Inner) -> Solution:
        """(m, s) with one more pass over the data."""
        if not isinstance(problem.family, Diagonal):
            raise InputError(f"Laplace gives a diagonal precision and needs Diagonal, not {problem.family}.")
        mean = inner["mean"]
        bend = problem.tempered(problem.losses.curvature(mean)) + 2 * problem.eta[:, 1]  # h/τ − u
        precision = problem.family.precision(problem.lam_g) + bend / problem.rho
        return Solution(problem.family.natural(mean, precision), problem.carry)
