"""What the three lines of Bayesian-ADMM ask of their parts, and what they hand to each other.

A `Method` is a family, and a `Solver`, a `Dual` and a `Server` for the lines of `fedual.admm`; clients see a
`Subproblem`, the server `Totals`, which are sums over clients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedual.errors import InputError, require_positive
from fedual.families import Family

Examples = TypeVar("Examples", float, Tensor)
Carry = dict[str, Tensor]
"""What a solver carries from round to round: named tensors with a leading client axis."""


class Losses(Protocol):
    """ℓ_1, …, ℓ_K, each a *sum* over the client's examples: what a solver makes of them is its own affair.

    Where they have a `dim` or a `dtype`, it is compared with the prior's.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, clients: Any, /) -> "Losses": ...


class Subproblem(NamedTuple):
    """The clients' problems min_q E_q[ℓ_k]/τ_k + ⟨η_k, μ⟩ + ρ KL(q ‖ q_g), stacked along a client axis.

    The problem of a client of weight w_k is divided by it: τ_k and η_k here are w_kτ_k and η_k/w_k.
    """

    family: Family
    losses: Any
    eta: Tensor  # (K, R, P)
    lam_g: Tensor  # (R, P)
    rho: float
    tau: Tensor  # (K,): τ, or τN_k for mean losses
    carry: Carry
    start: Tensor | None = None  # (P,), where an iterative solver starts while the server still sits at the prior
    weight: Tensor | None = None  # (K,), w_k; None: 1

    def select(self, clients: Any) -> "Subproblem":
        """The problems of some of the clients (indices, a mask or a slice)."""
        rows = {"losses": self.losses[clients], "eta": self.eta[clients], "tau": self.tau[clients]}
        weight = None if self.weight is None else self.weight[clients]
        return self._replace(**rows, carry=rows_of(self.carry, clients), weight=weight)

    def whole(self, eta: Tensor) -> Tensor:
        """w_k η_k: duals as clients keep them."""
        return eta if self.weight is None else eta * self.weight[:, None, None]

    def tempered(self, x: Tensor) -> Tensor:
        """x/τ_k for x `(K, ...)`."""
        return x / self.tau.reshape(-1, *(1,) * (x.dim() - 1))


class Guards(NamedTuple):
    """What a solver's guards had to do, in parts of the parameters: of each client `(K,)`, or a sum or mean."""

    limited: Tensor | float = 0.0  # those that a limit on the step held back at the end
    held: Tensor | float = 0.0  # those whose mean something other than the proximal term held to m_g

    def each(self, what: Callable[[Tensor | float], Tensor | float]) -> "Guards":
        """The same of every guard."""
        return Guards(*map(what, self))


UNGUARDED = Guards()


class Solution(NamedTuple):
    """λ_k of every client; `gradient` is ∇_μ E[ℓ_k]/τ where the solver knows it and the dual asks for it."""

    lam: Tensor
    carry: Carry
    gradient: Tensor | None = None
    guards: Guards = UNGUARDED

    def select(self, clients: Any) -> "Solution":
        """The solutions of some of the clients."""
        pick = lambda value: value[clients] if isinstance(value, Tensor) else value
        rest = pick(self.gradient), self.guards.each(pick)
        return Solution(self.lam[clients], rows_of(self.carry, clients), *rest)


class Solver(Protocol):
    """Line 1."""

    def init(self, family: Family, prior: Tensor, num_clients: int) -> Carry:
        """What is carried into the first round."""
        ...

    def __call__(self, problem: Subproblem) -> Solution:
        """Solve the stacked problems."""
        ...


class Dual(Protocol):
    """Line 2."""

    uploads: ClassVar[int]
    """How many vectors of λ's size a client sends: λ_k, and Δη_k where the server cannot infer it."""

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        """The new η_k."""
        ...


@dataclass(frozen=True)
class Totals:
    """What the server learns in a round: sums over the clients that count, and nothing of any single one."""

    count: int = 0  # |S|
    weight: float = 0.0  # Σ w_k
    lam: Tensor | float = 0.0  # Σ w_k λ_k, (R, P)
    before: Tensor | float = 0.0  # Σ w_k λ_k as they were before this round, where the server asks for it
    eta: Tensor | float = 0.0  # Σ change of η_k
    gap: float = 0.0  # Σ ‖λ_k − λ_g‖²
    guarded: Guards = UNGUARDED  # Σ of the parts of the parameters

    def plus(self, other: "Totals") -> "Totals":
        """The sums over both sets of clients."""
        return Totals(
            self.count + other.count,
            self.weight + other.weight,
            self.lam + other.lam,
            self.before + other.before,
            self.eta + other.eta,
            self.gap + other.gap,
            Guards(*(a + b for a, b in zip(self.guarded, other.guarded, strict=True))),
        )

    @property
    def residual(self) -> float:
        """‖λ_k − λ_g‖, root mean square over the clients that count."""
        return math.sqrt(self.gap / self.count) if self.count else 0.0

    @property
    def guards(self) -> Guards:
        """Means over the clients that count."""
        return self.guarded.each(lambda part: part / max(1, self.count))


@dataclass(frozen=True)
class Gathered:
    """A server's view at the end of a round."""

    lam_g: Tensor
    prior: Tensor
    mean: Tensor  # of λ_k over the clients that count, weighted as the server asks
    before: Tensor | float  # the same mean of the λ_k they had before
    eta_sum: Tensor  # Σ_k η_k over all K clients, this round's included
    eta_change: Tensor | float  # what this round added to it
    count: int  # |S|
    num_clients: int  # K
    rho: float


class Server(Protocol):
    """Line 3."""

    prior: ClassVar[bool]
    """Whether λ_0 counts; a server without a prior starts where the network starts."""
    weighted: ClassVar[bool]
    """Whether clients count by their number of examples."""
    remembers: ClassVar[bool]
    """Whether it needs the λ_k that each client had before."""

    def __call__(self, gathered: Gathered) -> Tensor:
        """The new λ_g."""
        ...


@dataclass(frozen=True)
class Method:
    """Family × solver × dual × server, with the clients' inverse step size ρ and temperature τ.

    `mean_loss` divides each client's loss by its number of examples; `delta` is the precision of the prior N(0, I/δ)
    that a caller builds where nobody gives one. With `momentum` β clients are given λ_g + β (λ_g − λ_g⁻), ahead of
    λ_g by a part of its last change. With a `unit` clients count by their examples: the ρ, the γ and, in the server's
    mean, the weight of client k are those times w_k = N_k/unit.
    """

    family: Family
    solver: Solver
    dual: Dual
    server: Server
    rho: float
    tau: float = 1.0
    mean_loss: bool = False
    delta: float = 1.0
    momentum: float = 0.0
    unit: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum = {self.momentum}: it must be at least 0 and below 1.")
        if self.unit != 0:  # all clients count the same
            require_positive("unit", self.unit)
        if self.rho != 0:  # no proximal term, FedAvg
            require_positive("rho", self.rho)
        require_positive("tau", self.tau)
        require_positive("delta", self.delta)


def num_examples(losses: Losses) -> Tensor:
    """N_k `(K,)` of the losses that know it; a loss that does not is one example."""
    return getattr(losses, "num_examples", torch.ones(len(losses)))


def counts(method: Method, examples: Examples) -> Examples:
    """How much a client with N_k examples counts; the same for each of several."""
    if method.unit:
        return examples / method.unit
    return examples if method.server.weighted else examples**0


def rows_of(carry: Carry, clients: Any) -> Carry:
    """What some of the clients carry."""
    return {name: value[clients] for name, value in carry.items()}
