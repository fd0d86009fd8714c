"""Every named method, one short composition of family × solver × dual × server each.

| method                | family            | solver       | client ρ | dual              | server              |
|-----------------------|-------------------|--------------|----------|-------------------|---------------------|
| `admm`                | Isotropic(δ)      | Point        | ρ/δ      | Natural(ρ/δ)      | Blend()             |
| `preconditioned_admm` | FixedPrecision(S) | Point        | ρ        | Natural(ρ)        | Blend()             |
| `newton_admm`         | Full              | VON or Exact | ρ        | Natural(ρ)        | Blend()             |
| `pvi`                 | any               | any          | 1        | Natural(damping)  | Blend(1)            |
| `ama`                 | any               | any          | ρ        | Natural(ρ)        | Blend(1)            |
| `bregman_admm`        | any               | any          | ρ        | Expectation(γ)    | Blend()             |
| `blr`                 | any               | AtServer     | –        | Gradient()        | Relax(β)            |

`Blend()` has α = 1/(1 + ρ|S|); `Blend(1)` is the product of the sites.
"""

from collections.abc import Callable

from torch import Tensor

from fedual.admm import Method, Solver
from fedual.duals import Expectation, Gradient, Natural
from fedual.errors import require_positive
from fedual.families import Delta, Family, FixedPrecision, Full, Isotropic, Rule
from fedual.servers import Blend, Relax
from fedual.solvers import VON, AtServer, Point


def admm(rho: float = 1.0, delta: float = 1.0, solver: Solver = Point(), tau: float = 1.0) -> Method:
    """Textbook consensus ADMM with the regulariser δ/2 ‖θ‖², derived from Bayesian duality (Eq. 5–7).

    Equivalence: `Isotropic(δ)` has λ = δm and KL = δ/2 ‖m_k − m_g‖², so a client ρ of ρ/δ gives the textbook
    proximal term ρ/2 ‖θ_k − θ_g‖², η_k = v_k, and θ_g = (ρ Σ θ_k + Σ v_k)/(δ + ρK).

    Args:
        rho: The textbook ρ.
        delta: Strength of the regulariser, and precision of the prior and of every q.
        solver: Of the client's problem; its delta method makes this ADMM, another rule the randomised Eq. 22.
        tau: Temperature.
    """
    family = Isotropic(delta)
    require_positive("rho", rho)
    return Method(family, solver, Natural(rho / delta), Blend(), rho / delta, tau)


def preconditioned_admm(precision: Tensor, rho: float = 1.0, solver: Solver = Point(), tau: float = 1.0) -> Method:
    """ADMM in the metric of a fixed precision S, which is also the prior's.

    Equivalence: proximal term ρ/2 ‖θ_k − θ_g‖²_S, v_k ← v_k + ρS(θ_k − θ_g),
    θ_g = (1+ρK)⁻¹ (ρ Σ θ_k + S⁻¹ Σ v_k). With S = δI it is `admm(rho=ρδ, delta=δ)`.
    """
    require_positive("rho", rho)
    return Method(FixedPrecision(precision), solver, Natural(rho), Blend(), rho, tau)


def newton_admm(rho: float = 1.0, solver: Solver = VON(), tau: float = 1.0) -> Method:
    """The Newton-like variant: full Gaussians, duals (v_k, V_k) with V_k = E_{q_k}[∇²ℓ_k] (Eq. 46–53).

    Equivalence: on quadratic losses at ρ = 1/K it is one Newton step, and reaches the pooled posterior in one round.
    """
    require_positive("rho", rho)
    return Method(Full(), solver, Natural(rho), Blend(), rho, tau)


def pvi(family: Family, solver: Solver, damping: float = 1.0, tau: float = 1.0) -> Method:
    """Partitioned variational inference (Eq. 36–38), plain (damping 1) or damped.

    Equivalence: q_g ∝ π_0 Π_k t_k with sites t_k = exp⟨η_k, T⟩; damped with exact clients it is
    η_k ← (1−γ) η_k − γ ∇L_k(μ_k) (Eq. 39, whose sign is misprinted in the paper).
    """
    return Method(family, solver, Natural(damping), Blend(1.0), 1.0, tau)


def ama(family: Family, solver: Solver, rho: float = 1.0, tau: float = 1.0) -> Method:
    """Tseng's alternating minimisation: Bayesian-ADMM without the proximal term at the server.

    Equivalence: λ_g = λ_0 + Σ_k η_k after every round; at ρ = 1 it is plain `pvi`.
    """
    require_positive("rho", rho)
    return Method(family, solver, Natural(rho), Blend(1.0), rho, tau)


def bregman_admm(
    family: Family, solver: Solver, rho: float = 1.0, gamma: float | None = None, tau: float = 1.0
) -> Method:
    """Bregman-ADMM (Wang and Banerjee 2014): the dual step in primal coordinates, η_k ← η_k + γ(μ_k − μ_g).

    Equivalence: where λ = μ (`Isotropic(1)`) it is ADMM; elsewhere η_k is no natural gradient, and conjugate
    problems are not solved in one round. γ = ρ unless given.
    """
    require_positive("rho", rho)
    return Method(family, solver, Expectation(rho if gamma is None else gamma), Blend(), rho, tau)


def blr(family: Family, beta: float = 1.0, rule: Rule = Delta(), tau: float = 1.0) -> Method:
    """The Bayesian learning rule run by the federation (app. C.2).

    Equivalence: λ_g ← (1−β) λ_g + β (λ_0 − Σ_k ∇L_k(μ_g)), natural-gradient descent on the pooled objective
    (Eq. 9) with step β; what Bayesian-ADMM does when clients repeat lines 1–2 to convergence, with β = 1/(1+ρK).
    Fast near the solution and unsafe far from it: run one round of Bayesian-ADMM at ρ = 1/K first.
    """
    return Method(family, AtServer(rule), Gradient(), Relax(beta), 1.0, tau)


METHODS: dict[str, Callable[..., Method]] = {
    "admm": admm,
    "preconditioned-admm": preconditioned_admm,
    "newton-admm": newton_admm,
    "pvi": pvi,
    "ama": ama,
    "bregman-admm": bregman_admm,
    "blr": blr,
}
