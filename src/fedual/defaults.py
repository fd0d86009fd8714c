"""The rules behind "no setting": the defaults of a method chosen by name, computed once the federation is known.

| constant     | setting               | value                      | meaning                                          |
|--------------|-----------------------|----------------------------|--------------------------------------------------|
| `RHO`        | ρ (ivon-admm)         | RHO/K                      | ρK is the clients' weight at the server (Eq. 17) |
| `TAU`        | τ (ivon-admm)         | TAU/RHO · N L²             | ρτ/N_k: how far a client may go from q_g         |
| `FEW`        | τ (ivon-admm)         | 1/RHO for N < FEW          | Σ_k ρ_kτ is 1, see below                         |
| `TAU`        | τ (ivon-pvi)          | TAU · N L²/K               | the same where ρ is 1                            |
| `DAMPING`    | damping (ivon-admm)   | DAMPING/L                  | γ = damping·ρ, see below                         |
| –            | damping (PVI, FedLap) | 1/K                        | as in the papers                                 |
| –            | unit (ivon-admm)      | N/K; N for fedivon         | clients count by their share of the examples     |
| `MOMENTUM`   | momentum (ivon-admm)  | MOMENTUM                   | extrapolation of λ_g                             |
| `HOLD`       | hold (IVON)           | HOLD                       | a mean is held to m_g                            |
| `GAIN`       | lr (IVON)             | RoundRate(GAIN/L², …)      | the steps of a round add up to GAIN/λ            |
| `COLDEST`    | lr (IVON)             | λ_c = COLDEST/L²           | the largest λ that counts                        |
| `FASTEST`    | lr (IVON)             | at most FASTEST            | steps with α > 1 overshoot                       |
| `NOISE`      | h0 (IVON)             | InitialNoise(NOISE)        | first noise, as a fraction of the weights        |
| `LIMIT`      | clip (IVON)           | StepLimit(LIMIT/L)         | a step, in units of the weight                   |
| `DECAY`      | weight_decay (IVON)   | HiddenDecay(DECAY·L/N, …)  | a prior on hidden layers                         |
| `STRONGEST`  | weight_decay (IVON)   | at most STRONGEST · L      | with few examples a prior would outweigh them    |
| `REACH`      | lr (Adam)             | RoundReach(REACH, …)       | Adam's steps of a round together                 |
| `ADAM_MOST`  | lr (Adam)             | at most ADAM_MOST          | the largest rate of Adam                         |
| `REST`,`EACH`| rest                  | max(REST, N/EACH)          | rounds after which a harmonic rate is halved     |
| `FULL_MOST`  | newton for ivon-admm  | P ≤ FULL_MOST              | linear models get a full covariance, see below   |
| –            | δ (newton)            | (sd/2.5)²                  | of `fedual.networks.affine`: a weak prior        |
| `LONG`       | L                     | max(1, steps/LONG)         | length of a round of a client of average size    |

K clients have N examples in all. A client's problem, divided by N_k/τ, is
(1/N_k) Σ_i E_q[ℓ_i] + (ρ_kτ/N_k) KL(q ‖ q_g) + …: how far a client may go from q_g depends on ρ_kτ/N_k, and the
clients' weight in the server's step on Σ_k ρ_k. With ρ_k = ρ N_k/(N/K), ρ = c/K and τ = νN the first is cν for every
client and the second is c, whatever K and N are. And ρ_kλ_g outweighs the client's multiplier, which is about the
fraction N_k/N of Σ_j η_j ≈ λ_g; otherwise the client's problem would have no solution.

With this τ an example counts many thousand times, which trains large networks in few rounds and makes a few hundred
noisy rows be learnt by heart. Up to `FEW` examples Σ_k ρ_kτ is 1 instead: λ = N_k/(ρ_kτ) is N, so that a client weighs
its mean loss as if it had all N examples, at temperature 1, against KL(q ‖ q_g).

A multiplier that moves only in every tenth round may move ten times as far: γ is divided by the fraction of clients in
a round, but is at most ρ/3 (with fewer than three clients ρ/K), because faster multipliers diverge. The more steps a
client takes in a round, the further it drifts: in long rounds τ, which holds clients at q_g, is larger, and learning
rate, step limit and the steps of multipliers are smaller.

A network whose outputs are affine in its at most `FULL_MOST` parameters has a posterior that can be computed: with
"ivon-admm", no setting, and a posterior to hand over, "newton" takes its place (`wants_full`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fedual import methods
from fedual.algorithm import Method, Natural
from fedual.methods import MethodSpec
from fedual.networks.randomness import num_asked
from fedual.settings import LocalTraining
from fedual.solvers import HiddenDecay, InitialNoise, RoundRate, RoundReach, StepLimit, Stepper

RHO, TAU, FEW, DAMPING, MOMENTUM, HOLD = 20.0, 1.6e-7, 1000, 0.1, 0.3, 0.25
GAIN, COLDEST, FASTEST, NOISE, LIMIT, DECAY, STRONGEST = 2e7, 6.25e6, 0.1, 0.7, 0.06, 0.1, 3e-3
REACH, ADAM_MOST = 0.4, 0.01
REST, EACH, LONG = 10, 600, 200
FULL_MOST = 500


@dataclass(frozen=True)
class Federation:
    """The facts about a federation that rules depend on."""

    clients: int  # K
    examples: float  # N
    participation: float = 1.0  # the fraction of clients in a round
    steps: float = 0.0  # of a client of average size in a round
    prior: tuple[float, ...] | None = None  # precisions that suit the inputs, where outputs are affine in θ

    @property
    def length(self) -> float:
        """L, the length of a round in multiples of `LONG` steps, at least 1."""
        return max(1.0, self.steps / LONG)


class Rule(NamedTuple):
    """A setting whose value depends on the federation."""

    text: str
    value: Callable[[Federation], Any]


_PER_CLIENT = Rule("1/K", lambda f: 1.0 / f.clients)
_IVON: dict[str, Rule] = {
    "lr": Rule(
        f"{GAIN:g}/(min(λ, {COLDEST:g}/L²)·S·L²)",
        lambda f: RoundRate(GAIN * f.length**-2, COLDEST / f.length**2, FASTEST),
    ),
    "h0": Rule(f"1/(λ({NOISE:g}·RMS(W))²)", lambda f: InitialNoise(NOISE)),
    "clip": Rule(f"{LIMIT:g}·a/L", lambda f: StepLimit(LIMIT * f.length**-1)),
    "weight_decay": Rule(
        f"{DECAY:g}·fan_in·min(1, 4Var(x))·L/N",
        lambda f: HiddenDecay(DECAY * (float(f.examples) ** -1 * f.length), STRONGEST * f.length),
    ),
    "hold": Rule(f"{HOLD:g}", lambda f: HOLD),
}
_ADAM: dict[str, Rule] = {"lr": Rule(f"{REACH:g}/S", lambda f: RoundReach(REACH, ADAM_MOST))}
RULES: dict[str, dict[str, Rule]] = {
    "ivon-admm": {
        "rho": Rule(f"{RHO:g}/K", lambda f: RHO * float(f.clients) ** -1),
        "damping": Rule(f"{DAMPING:g}/L", lambda f: DAMPING * f.length**-1),
        "tau": Rule(
            f"{TAU / RHO:g}·N·L²; {1 / RHO:g} if N < {FEW}",
            lambda f: 1 / RHO if f.examples < FEW else TAU / RHO * (float(f.examples) * f.length**2),
        ),
        "momentum": Rule(f"{MOMENTUM:g}", lambda f: MOMENTUM),
        "unit": Rule("N/K", lambda f: float(f.clients) ** -1 * float(f.examples)),
        **_IVON,
    },
    "ivon-pvi": {
        "damping": _PER_CLIENT,
        "tau": Rule(f"{TAU:g}·N·L²/K", lambda f: TAU * (float(f.clients) ** -1 * float(f.examples) * f.length**2)),
        **_IVON,
    },
    "fedivon": {"unit": Rule("N", lambda f: float(f.examples))},
    "scaffold": {},
    "newton": {"delta": Rule("(sd/2.5)²", lambda f: f.prior or 1.0)},
    "fedlap": {"damping": _PER_CLIENT, **_ADAM},
    **dict.fromkeys(("fedavg", "fedprox", "feddyn", "fedadmm", "fedlap-cov", "admm"), _ADAM),
}
"""For each method the settings that are rules; every other setting has the plain default of `fedual.methods`."""


def settings(name: str) -> dict[str, Any]:
    """The settings of a method for networks with their defaults: plain values, and texts of rules."""
    return methods.settings(name) | {key: rule.text for key, rule in RULES[name].items()}


def wants_full(method: MethodSpec | Method, local: LocalTraining, loss: Any, parameters: int) -> bool:
    """True if a network with affine outputs gets the full covariance: nothing is set that "newton" does not have."""
    unset = isinstance(method, MethodSpec) and method.name == "ivon-admm" and not method.settings
    rates = (local.schedule, local.rest, local.decay) != (None, None, 1.0)
    return unset and not rates and loss in ("cross_entropy", "mse") and parameters <= FULL_MOST


def resolve(method: str | MethodSpec | Method, federation: Federation) -> Method:
    """The method with plain numbers for a federation, in place of rules; called once, at the front door."""
    spec = methods.spec(method) if isinstance(method, str) else method
    if isinstance(spec, Method):
        return spec
    rules, chosen = RULES[spec.name], spec.settings
    values = {name: rule.value(federation) for name, rule in rules.items() if name not in chosen}
    resolved = methods.build(spec.name, **values, **chosen)
    by_rule = "damping" in rules and not {"rho", "damping"} & rules.keys() <= chosen.keys()
    if by_rule and isinstance(resolved.dual, Natural):  # see above: γ depends on participation, up to a limit
        asked = num_asked(federation.clients, federation.participation)
        most = resolved.rho * max(1 / 3, 1 / federation.clients)
        resolved = replace(resolved, dual=Natural(min(resolved.dual.gamma * federation.clients / asked, most)))
    return resolved


def resolve_training(local: LocalTraining, method: Method, examples: float) -> LocalTraining:
    """The training with a schedule, which is that of the method's learning rate unless another one is chosen."""
    schedule = local.schedule or (method.solver.schedule if isinstance(method.solver, Stepper) else "constant")
    rest = max(REST, examples / EACH) if schedule == "harmonic" and local.rest is None else local.rest
    return replace(local, schedule=schedule, rest=rest)
