# ruff: noqa: D102 (`SGD` and `Stepper` document these methods)
"""Laplace's method at a client: the posterior mode, and the diagonal Gauss–Newton matrix there as the precision."""

from dataclasses import dataclass

from fedual.algorithm.method import Solution, Subproblem
from fedual.errors import InputError
from fedual.families import Diagonal, Family
from fedual.solvers.sgd import SGD
from fedual.solvers.stepper import Variables


@dataclass(frozen=True)
class Laplace(SGD):
    """MAP by `SGD`, then the precision from the diagonal Gauss–Newton matrix at it (FedLap-Cov).

    s_k = s_g + (h/τ_k − u_k)/ρ with h = diag Σ_i J_iᵀ H_i J_i: Eq. 32 with the delta method and that h for the Hessian.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proximal != "squared":
            raise InputError(f"proximal = {self.proximal!r}: with a precision for each parameter use 'squared'.")

    def check(self, family: Family) -> None:
        if not isinstance(family, Diagonal):
            raise InputError(f"Laplace gives a diagonal precision and needs Diagonal, not {family}.")

    def end(self, problem: Subproblem, variables: Variables) -> Solution:
        mean, family = variables["mean"], Diagonal()
        bend = problem.tempered(problem.losses.curvature(mean)) + 2 * problem.eta[:, 1]  # h/τ − u
        precision = family.precision(problem.lam_g) + bend / problem.rho
        return Solution(family.natural(mean, precision), problem.carry)
