"""The interfaces of a method's parts, and the data that the three lines of Bayesian-ADMM exchange.

A `Method` is a family with a `Solver`, a `Dual` and a `Server` for the three lines of `fedual.algorithm.round`. Clients
see a `Subproblem`; the server sees `Totals`, which are sums over clients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedual.algorithm.extensions import ExampleWeights, Extrapolation
from fedual.errors import require_positive
from fedual.families import Family
from fedual.parts import Versioned

Carry = dict[str, Tensor]
"""What a solver carries from round to round: named tensors with a leading client axis."""


class Losses:
    """ℓ_1, …, ℓ_K, each a *sum* over the client's examples. Solvers define what else they require."""

    @property
    def dim(self) -> int | None:
        """P, if only one number of parameters fits."""
        return None

    @property
    def dtype(self) -> torch.dtype | None:
        """The type that λ must have, if only one fits."""
        return None

    @property
    def num_examples(self) -> Tensor:
        """N_k, `(K,)`; 1 for each client unless a subclass overrides it."""
        return torch.ones(len(self))

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, clients: Any, /) -> Any:
        """The losses of some of the clients (indices, a mask or a slice)."""
        raise NotImplementedError


class Subproblem(NamedTuple):
    """The clients' problems min_q E_q[ℓ_k]/τ_k + ⟨η_k, μ⟩ + ρ KL(q ‖ q_g), stacked along a client axis.

    With example weights w_k, the problem of client k is divided by w_k: τ_k and η_k are then w_kτ_k and η_k/w_k.
    """

    family: Family
    losses: Any
    eta: Tensor  # (K, R, P)
    lam_g: Tensor  # (R, P)
    rho: float
    tau: Tensor  # (K,): τ, or τN_k for mean losses
    carry: Carry
    start: Tensor | None = None  # (P,), where an iterative solver starts while the server is still at the prior
    weight: Tensor | None = None  # w_k, (K,); None: 1
    has_dual: bool = True  # False: η_k is always zero

    def select(self, clients: Any) -> "Subproblem":
        """The problems of some of the clients (indices, a mask or a slice)."""
        rows = {"losses": self.losses[clients], "eta": self.eta[clients], "tau": self.tau[clients]}
        weight = None if self.weight is None else self.weight[clients]
        return self._replace(**rows, carry=select(self.carry, clients), weight=weight)

    def unweighted(self, eta: Tensor) -> Tensor:
        """w_k η_k: duals as clients keep them."""
        return eta if self.weight is None else eta * self.weight[:, None, None]

    def tempered(self, x: Tensor) -> Tensor:
        """x/τ_k for x `(K, ...)`."""
        return x / self.tau.reshape(-1, *(1,) * (x.dim() - 1))


class Guards(NamedTuple):
    """Fraction of parameters affected by each safeguard of a solver: of each client `(K,)`, or a sum or a mean."""

    limited: Tensor | float = 0.0  # whose last step was cut to the step limit
    held: Tensor | float = 0.0  # whose mean was held to m_g by more than the proximal term

    def each(self, what: Callable[[Tensor | float], Tensor | float]) -> "Guards":
        """Apply a function to the fraction of every safeguard."""
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
        return Solution(self.lam[clients], select(self.carry, clients), pick(self.gradient), self.guards.each(pick))


class Solver(Protocol):
    """Line 1: the solver of the client's problem."""

    def init(self, family: Family, prior: Tensor, num_clients: int) -> Carry:
        """The state that the solver carries into the first round."""
        ...

    def __call__(self, problem: Subproblem) -> Solution:
        """Solve the stacked problems."""
        ...


class Dual(Protocol):
    """Line 2: the step of the dual."""

    uploads: ClassVar[int] = 1
    """How many vectors of λ's size a client sends: λ_k, and the change of η_k where the server cannot infer it."""
    centred: ClassVar[bool] = False
    """Whether the client's problem has η_k − mean_j η_j in the place of η_k; the mean is then sent to clients, too."""

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        """The new η_k."""
        ...

    def change(self, gap: Tensor, weight: Tensor) -> Tensor | None:
        """The change of η_k that follows from λ_k − λ_g `(K, R, P)` and w_k `(K,)`; None where it does not."""
        ...


@dataclass(frozen=True)
class Totals:
    """What the server learns in a round: which clients counted, and sums over them, but no single client's values."""

    counted: Tensor  # (K,) bool: took part, and its update is used; a sum of booleans is an "or"
    refused: Tensor  # (K,) bool: took part, and its update left the domain
    weight: float = 0.0  # Σ weights in the server's mean
    lam: Tensor | float = 0.0  # Σ weighted λ_k, (R, P)
    before: Tensor | float = 0.0  # Σ weighted λ_k as they were before this round, where the server asks for it
    eta: Tensor | float = 0.0  # Σ change of η_k
    gap: float = 0.0  # Σ ‖λ_k − λ_g‖²
    guarded: Guards = UNGUARDED  # Σ of the fractions

    @classmethod
    def none(cls, num_clients: int) -> "Totals":
        """The sums over no client."""
        nobody = torch.zeros(num_clients, dtype=torch.bool)
        return cls(nobody, nobody)

    def plus(self, other: "Totals") -> "Totals":
        """The sums over both sets of clients."""
        sums: dict[str, Any] = {name: value + getattr(other, name) for name, value in vars(self).items()}
        sums["guarded"] = Guards(*(a + b for a, b in zip(self.guarded, other.guarded, strict=True)))
        return Totals(**sums)

    @property
    def count(self) -> int:
        """|S|, the clients that count."""
        return int(self.counted.sum())

    @property
    def residual(self) -> float:
        """‖λ_k − λ_g‖, root mean square over the clients that count."""
        return math.sqrt(self.gap / self.count) if self.count else 0.0

    @property
    def guards(self) -> Guards:
        """Means over the clients that count."""
        return self.guarded.each(lambda fraction: fraction / max(1, self.count))


@dataclass(frozen=True)
class Gathered:
    """What a server step is computed from."""

    lam_g: Tensor
    prior: Tensor
    mean: Tensor  # of λ_k over the clients that count, weighted as the server asks
    before: Tensor | float  # the same mean of the λ_k they had before
    eta_sum: Tensor  # Σ_k η_k over all K clients, this round's changes included
    eta_change: Tensor | float  # what this round added to it
    count: int  # |S|
    num_clients: int  # K
    rho: float


class Server(Protocol):
    """Line 3: the step of the server."""

    prior: ClassVar[bool] = True
    """True if the step uses λ_0; a server without a prior starts at the network's initialisation."""
    weighted: ClassVar[bool] = False
    """True if clients are weighted by their number of examples."""
    remembers: ClassVar[bool] = False
    """True if the step needs the previous λ_k of each client."""

    def __call__(self, gathered: Gathered) -> Tensor:
        """The new λ_g."""
        ...


@dataclass(frozen=True)
class Method(Versioned):
    """Family × solver × dual × server, with the clients' inverse step size ρ and temperature τ: plain numbers only."""

    family: Family  # of every q
    solver: Solver
    dual: Dual
    server: Server
    rho: float  # 0 is no proximal term (FedAvg)
    tau: float = 1.0
    mean_loss: bool = False  # divide each client's loss by its number of examples
    delta: float | tuple[float, ...] = 1.0  # precision of the prior where none is given, or that of each parameter
    extrapolation: Extrapolation | None = None  # beyond the paper: clients get an extrapolated λ_g
    weighting: ExampleWeights | None = None  # beyond the paper: clients are weighted by their examples
    name: str = field(default="", compare=False)  # what `fedual.methods` calls it

    def __post_init__(self) -> None:
        if self.rho != 0:
            require_positive("rho", self.rho)
        require_positive("tau", self.tau)
        for precision in self.delta if isinstance(self.delta, tuple) else (self.delta,):
            require_positive("delta", precision)


def select(carry: Carry, clients: Any) -> Carry:
    """The carried state of some of the clients."""
    return {name: value[clients] for name, value in carry.items()}
