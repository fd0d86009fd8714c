"""Every named method, one short composition of family × solver × dual × server each.

| method                | family            | solver       | client ρ | dual              | server              |
|-----------------------|-------------------|--------------|----------|-------------------|---------------------|
| `admm`                | Isotropic(δ)      | Point        | ρ/δ      | Natural(ρ/δ)      | Blend()             |
| `preconditioned_admm` | FixedPrecision(S) | Point        | ρ        | Natural(ρ)        | Blend()             |
| `newton_admm`         | Full              | VON or Exact | ρ        | Natural(ρ)        | Blend()             |
| `pvi`                 | any               | any          | 1        | Natural(damping)  | Blend(1)            |
| `ama`                 | any               | any          | ρ        | Natural(ρ)        | Blend(1)            |
| `bregman_admm`        | any               | any          | ρ        | Expectation(γ)    | Blend()             |
| `newton`              | Full              | Newton       | 1        | Natural(1)        | Blend(1)            |
| `blr`                 | any               | AtServer     | –        | Gradient()        | Relax(β)            |
| `ivon_admm`           | Diagonal          | IVON         | ρ        | Natural(damping·ρ)| Blend()             |
| `ivon_pvi`            | Diagonal          | IVON         | 1        | Natural(damping)  | Blend(1)            |
| `fedivon`             | Diagonal          | FreshIVON    | 0        | Zero()            | Average()           |
| `fedavg`              | Isotropic(1)      | SGD          | 0        | Zero()            | Average()           |
| `fedprox`             | Isotropic(1)      | SGD          | ρ        | Zero()            | Average()           |
| `feddyn`              | Isotropic(1)      | SGD          | ρ        | Natural(damping·ρ)| Consensus()         |
| `fedadmm`             | Isotropic(1)      | SGD          | ρ        | Natural(ρ)        | Track(step)         |
| `scaffold`            | Isotropic(1)      | plain SGD    | 0        | ControlVariate()  | Mean(step)          |
| `fedlap`              | Isotropic(δ)      | SGD          | 1        | Natural(damping)  | Blend(1)            |
| `fedlap_cov`          | Diagonal          | Laplace      | 1        | Natural(damping)  | Blend(1)            |

The five without a prior take the clients' *mean* losses, the others their sums.
`Blend()` has α = 1/(1 + ρ|S|); `Blend(1)` is the product of the sites.

The functions take plain numbers, and their defaults are plain numbers, too. A method that is chosen by *name* (a
`MethodSpec`) gets its defaults from the rules of `fedual.defaults` instead, once the federation is known.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from typing import Any

from torch import Tensor

from fedual.algorithm import ExampleWeights, Extrapolation, Method, Solver
from fedual.algorithm.duals import ControlVariate, Expectation, Gradient, Natural, Zero
from fedual.algorithm.servers import Average, Blend, Consensus, Mean, Relax, Track
from fedual.errors import InputError, hint, require_positive
from fedual.families import Delta, Diagonal, Family, FixedPrecision, Full, Isotropic, Rule
from fedual.parts import Versioned
from fedual.solvers import IVON, SGD, VON, AtServer, FreshIVON, Laplace, Newton, Point, Stepper


def admm(rho: float = 1.0, delta: float = 1.0, solver: Solver = Point(), tau: float = 1.0) -> Method:
    """Textbook consensus ADMM with the regulariser δ/2 ‖θ‖², derived from Bayesian duality (Eq. 5–7).

    Equivalence: `Isotropic(δ)` has λ = δm and KL = δ/2 ‖m_k − m_g‖², so a client ρ of ρ/δ gives the textbook
    proximal term ρ/2 ‖θ_k − θ_g‖², η_k = v_k, and θ_g = (ρ Σ θ_k + Σ v_k)/(δ + ρK). δ is also the precision of the
    prior and of every q. With the delta method as the solver's rule this is ADMM, with another the randomised Eq. 22.
    """
    family = Isotropic(delta)
    require_positive("rho", rho)
    return Method(family, solver, Natural(rho / delta), Blend(), rho / delta, tau, name="admm")


def preconditioned_admm(precision: Tensor, rho: float = 1.0, solver: Solver = Point(), tau: float = 1.0) -> Method:
    """ADMM in the metric of a fixed precision S, which is also the prior's.

    Equivalence: proximal term ρ/2 ‖θ_k − θ_g‖²_S, v_k ← v_k + ρS(θ_k − θ_g),
    θ_g = (1+ρK)⁻¹ (ρ Σ θ_k + S⁻¹ Σ v_k). With S = δI it is `admm(rho=ρδ, delta=δ)`.
    """
    require_positive("rho", rho)
    return Method(FixedPrecision(precision), solver, Natural(rho), Blend(), rho, tau, name="preconditioned-admm")


def newton_admm(rho: float = 1.0, solver: Solver = VON(), tau: float = 1.0) -> Method:
    """The Newton-like variant: full Gaussians, duals (v_k, V_k) with V_k = E_{q_k}[∇²ℓ_k] (Eq. 46–53).

    Equivalence: on quadratic losses at ρ = 1/K it is one Newton step, and reaches the pooled posterior in one round.
    """
    require_positive("rho", rho)
    return Method(Full(), solver, Natural(rho), Blend(), rho, tau, name="newton-admm")


def pvi(family: Family, solver: Solver, damping: float = 1.0, tau: float = 1.0) -> Method:
    """Partitioned variational inference (Eq. 36–38), plain (damping 1) or damped.

    Equivalence: q_g ∝ π_0 Π_k t_k with sites t_k = exp⟨η_k, T⟩; damped with exact clients it is
    η_k ← (1−γ) η_k − γ ∇L_k(μ_k) (Eq. 39, whose sign is misprinted in the paper).
    """
    require_positive("damping", damping, most=1.0)
    return Method(family, solver, Natural(damping), Blend(1.0), 1.0, tau, name="pvi")


def newton(delta: float | tuple[float, ...] = 1.0, tau: float = 1.0, solver: Newton = Newton(tol=1e-4)) -> Method:
    """PVI with full Gaussians in the delta limit, for networks whose outputs are affine in θ, such as linear models.

    Equivalence: at a fixed point λ_g has the mode of the pooled posterior and its Hessian there: Laplace's method on
    the pooled data, exact for quadratic losses, which take one round. Near the mode it is Newton's method.

    Args:
        delta: The prior's precision, or that of each parameter. By name (`fedual.defaults`) the prior is weak, in units
            of the inputs.
        tau: The temperature; 1 is the posterior.
        solver: Of the clients. The next round expands anew, so that a hundredth of a standard error is near enough, and
            the rounding of inputs far from their origin does not stop it.
    """
    return replace(pvi(Full(), solver, tau=tau), delta=delta, name="newton")


def ama(family: Family, solver: Solver, rho: float = 1.0, tau: float = 1.0) -> Method:
    """Tseng's alternating minimisation: Bayesian-ADMM without the proximal term at the server.

    Equivalence: λ_g = λ_0 + Σ_k η_k after every round; at ρ = 1 it is plain `pvi`.
    """
    require_positive("rho", rho)
    return Method(family, solver, Natural(rho), Blend(1.0), rho, tau, name="ama")


def bregman_admm(
    family: Family, solver: Solver, rho: float = 1.0, gamma: float | None = None, tau: float = 1.0
) -> Method:
    """Bregman-ADMM (Wang and Banerjee 2014): the dual step in primal coordinates, η_k ← η_k + γ(μ_k − μ_g).

    Equivalence: where λ = μ (`Isotropic(1)`) it is ADMM; elsewhere η_k is no natural gradient, and conjugate
    problems are not solved in one round. γ = ρ unless given.
    """
    require_positive("rho", rho)
    dual = Expectation(rho if gamma is None else gamma)
    return Method(family, solver, dual, Blend(), rho, tau, name="bregman-admm")


def blr(family: Family, beta: float = 1.0, rule: Rule = Delta(), tau: float = 1.0) -> Method:
    """The Bayesian learning rule run by the federation (app. C.2).

    Equivalence: λ_g ← (1−β) λ_g + β (λ_0 − Σ_k ∇L_k(μ_g)), natural-gradient descent on the pooled objective
    (Eq. 9) with step β. Bayesian-ADMM is the same if clients repeat lines 1–2 to convergence, with β = 1/(1+ρK).
    It is fast near the solution and unsafe far from it: run one round of Bayesian-ADMM at ρ = 1/K first.
    """
    return Method(family, AtServer(rule), Gradient(), Relax(beta), 1.0, tau, name="blr")


def ivon_admm(
    rho: float = 1.0,
    damping: float = 1.0,
    delta: float = 1.0,
    tau: float = 1.0,
    solver: IVON = IVON(),
    momentum: float = 0.0,
    unit: float = 0.0,
) -> Method:
    """The Adam-like variant for networks: diagonal Gaussians by IVON, γ = damping·ρ (Algorithm 1, Eq. 59).

    Equivalence: v_k ← v_k + γ(s_k m_k − s_g m_g), u_k ← u_k + γ(s_k − s_g), and
    s_g = (1−α) mean s_k + α(δ + Σ u_k), m_g = [(1−α) mean(s_k m_k) + α Σ v_k]/s_g with the prior's precision δ.

    Extensions: λ_g is extrapolated by `momentum`, and clients count by their examples in multiples of `unit`; 0 is off.
    """
    require_positive("rho", rho)
    require_positive("damping", damping)
    extrapolation, weighting = Extrapolation(momentum) if momentum else None, ExampleWeights(unit) if unit else None
    method = Method(Diagonal(), solver, Natural(damping * rho), Blend(), rho, tau, delta=delta, name="ivon-admm")
    return replace(method, extrapolation=extrapolation, weighting=weighting)


def ivon_pvi(damping: float = 1.0, delta: float = 1.0, tau: float = 1.0, solver: IVON = IVON()) -> Method:
    """Partitioned variational inference with diagonal Gaussians by IVON, damped.

    Equivalence: `ivon_admm` with ρ = 1 and α = 1, so that q_g is the product of the prior and the sites.
    """
    return replace(pvi(Diagonal(), solver, damping, tau), delta=delta, name="ivon-pvi")


def fedivon(tau: float = 1.0, unit: float = 0.0, solver: IVON = FreshIVON(0.1, h0=0.1, weight_decay=1e-4)) -> Method:
    """FedIvon: clients run IVON from q_g, and the server averages natural parameters (Pal et al. 2025).

    Equivalence: by number of examples, s_g = mean s_k and m_g = mean(s_k m_k)/s_g. Each client has IVON's own prior,
    of mean 0 and precision λδ with δ = `weight_decay`, in every round. λ is N_k/τ or, with a unit, unit/τ for all: then
    s_k = λ(h_k + δ) and h_g = mean h_k, and with unit N, one client or all alike, q_g counts every example once.
    """
    weighting = ExampleWeights(unit) if unit else None
    return Method(Diagonal(), solver, Zero(), Average(), 0.0, tau, weighting=weighting, name="fedivon")


def fedavg(solver: SGD = SGD()) -> Method:
    """Local training and an average by number of examples (McMahan et al. 2017).

    Equivalence: `fedprox` with ρ = 0; with one full-batch SGD step it is gradient descent on the pooled mean loss.
    """
    return Method(Isotropic(1.0), solver, Zero(), Average(), 0.0, mean_loss=True, name="fedavg")


def fedprox(rho: float = 0.001, solver: SGD = SGD()) -> Method:
    """FedAvg with ρ/2 ‖θ − θ_g‖² added to each client's mean loss (Li et al. 2020; their μ is ρ).

    Equivalence: with exact clients, a step of the proximal-point method on each loss, then `fedavg`'s average.
    """
    require_positive("rho", rho)
    return Method(Isotropic(1.0), solver, Zero(), Average(), rho, mean_loss=True, name="fedprox")


def feddyn(rho: float = 0.01, damping: float = 1.0, solver: SGD = SGD()) -> Method:
    """Dynamic regularisation: ADMM on the clients' mean losses, without a prior (Acar et al. 2021; their α is ρ).

    Undamped, as in that paper, the first round moves twice as far as the clients' mean.

    Equivalence: v_k = −∇L_k(θ_k) in their notation; at a fixed point Σ_k ∇L_k(θ_g) = 0 for clients of equal weight,
    whichever clients take part. With a prior and all clients in every round it would be `admm`.
    """
    require_positive("rho", rho)
    require_positive("damping", damping)
    return Method(Isotropic(1.0), solver, Natural(damping * rho), Consensus(), rho, mean_loss=True, name="feddyn")


def fedadmm(rho: float = 0.01, server_step: float = 1.0, solver: SGD = SGD()) -> Method:
    """FedADMM (Gong et al. 2022): the server adds up the changes of θ_k + v_k/ρ.

    Equivalence: with all clients in every round and `server_step` 1, θ_g is the mean of θ_k + v_k/ρ: `feddyn`.
    """
    require_positive("rho", rho)
    return Method(Isotropic(1.0), solver, Natural(rho), Track(server_step), rho, mean_loss=True, name="fedadmm")


def scaffold(server_step: float = 1.0, solver: SGD = SGD(lr=1.0, optimiser="sgd", max_norm=1.0)) -> Method:
    """SCAFFOLD: steps along g − c_k + c, where c_k estimates client k's gradient (Karimireddy et al. 2020).

    Equivalence: c_k = −η_k and c = −mean_k η_k. Option II, c_k ← c_k − c + (θ_g − θ_k)/(S lr), is the mean gradient of
    the S steps. With full batches, Σ_k ∇L_k(θ_g) = 0 at a fixed point, as with `feddyn`, and one step of everybody is
    gradient descent on the mean of their mean losses. `max_norm`, which is not in the paper, clips g − c_k + c.
    """
    if solver.optimiser != "sgd" or solver.momentum:
        chosen = f"optimiser = {solver.optimiser!r} and momentum = {solver.momentum:g}"
        raise InputError(f"{chosen}: the control variates of SCAFFOLD need plain SGD, so choose 'sgd' and 0.")
    return Method(Isotropic(1.0), solver, ControlVariate(), Mean(server_step), 0.0, mean_loss=True, name="scaffold")


def fedlap(delta: float = 1.0, damping: float = 1.0, tau: float = 1.0, solver: SGD = SGD()) -> Method:
    """PVI with means only (Swaroop et al. 2025): λ_g = λ_0 + Σ_k η_k, and δ is the precision of prior and q.

    Equivalence: `pvi` on `Isotropic(δ)`; at a fixed point δθ_g = −Σ_k ∇ℓ_k(θ_g)/τ, the pooled MAP estimate.
    """
    return replace(pvi(Isotropic(delta), solver, damping, tau), name="fedlap")


def fedlap_cov(delta: float = 1.0, damping: float = 0.1, tau: float = 1.0, solver: Laplace = Laplace()) -> Method:
    """PVI with Laplace's method at the clients: MAP and the diagonal Gauss–Newton matrix (Swaroop et al. 2025).

    Equivalence: `pvi` on `Diagonal` with the delta method; u_k ← (1−γ) u_k + γ h_k/τ, s_g = δ + Σ_k u_k.
    """
    return replace(pvi(Diagonal(), solver, damping, tau), delta=delta, name="fedlap-cov")


_FOR_NETWORKS = ivon_admm, ivon_pvi, fedivon, fedavg, fedprox, feddyn, fedadmm, scaffold, fedlap, fedlap_cov, admm
_OTHERS = newton, preconditioned_admm, newton_admm, pvi, ama, bregman_admm, blr
METHODS: dict[str, Callable[..., Method]] = {
    function.__name__.replace("_", "-"): function for function in (*_FOR_NETWORKS, *_OTHERS)
}
NETWORKS = tuple(METHODS)[: len(_FOR_NETWORKS)]
"""The methods that train networks by name, with minibatch solvers."""
NAMES = (*NETWORKS, "newton")
"""Every method that is chosen by name; "newton" trains networks with affine outputs only."""


@dataclass(frozen=True)
class MethodSpec(Versioned):
    """A named method with some settings chosen: `fedual.defaults.resolve` turns it into a `Method`."""

    name: str  # one of `NAMES`
    settings: Mapping[str, Any] = field(default_factory=dict)  # plain values of its own settings and its solver's

    def __post_init__(self) -> None:
        known = settings(self.name)
        for key, value in self.settings.items():
            if key not in known:
                raise InputError(f"{self.name} has no setting {key!r}: {hint(key, known)}")
            for kind in (bool, str):
                if isinstance(value, kind) != isinstance(known[key], kind):
                    raise InputError(f"{self.name}: {key} = {value!r}: give a value such as {known[key]!r}.")
        build(self.name, **self.settings)  # refuses values out of range

    def __hash__(self) -> int:
        return hash((self.name, *self.settings.items()))


def spec(name: str, **settings: Any) -> MethodSpec:
    """A method for networks by name, from one flat list of settings: the method's own and its solver's.

    >>> spec("ivon-admm", rho=0.2, lr=0.01).settings
    {'rho': 0.2, 'lr': 0.01}
    """
    return MethodSpec(name, settings)


def build(name: str, **numbers: Any) -> Method:
    """A method for networks from numbers for its own settings and its solver's; others keep their plain defaults."""
    own = {key: numbers.pop(key) for key in _own(name) if key in numbers}
    return METHODS[name](**own, solver=replace(_solver(name), **numbers))


def settings(name: str) -> dict[str, Any]:
    """The settings of a method for networks with their plain defaults."""
    if name not in NAMES:
        raise InputError(f"{name!r} is no method that trains networks by name: {hint(name, NAMES)}")
    solver = _solver(name)
    return _own(name) | {field.name: getattr(solver, field.name) for field in fields(solver)}


def _own(name: str) -> dict[str, Any]:
    parameters = signature(METHODS[name]).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "solver"}


def _solver(name: str) -> Stepper | Newton:
    default = signature(METHODS[name]).parameters["solver"].default
    return default if isinstance(default, Stepper | Newton) else SGD()
