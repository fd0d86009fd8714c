"""Settings in units of the federation: numbers that wait until its size is known.

Each client's problem, divided by N_k/τ, is (1/N_k) Σ_i E_q[ℓ_i] + (ρτ/N_k) KL(q ‖ q_g) + …: how far a client may go
from q_g depends on ρτ/N_k, and what the server makes of it on ρK (Eq. 17 with α = 1/(1 + ρK)). With ρ = c/K and τ = νN
the first is cν for a client of average size and the second is c, whatever K and N are. A multiplier that moves in every
tenth round only may move ten times as far: γ, where it is relative, is divided by the share of clients in a round.
"""

from dataclasses import replace
from typing import Any, Self

from fedual.contracts import Method


class Relative(float):
    """value · K^clients · N^examples, for a federation of K clients with N examples in all.

    >>> Relative(8.0, clients=-1)
    8/K
    >>> Relative(8.0, clients=-1).at(10, 6000)
    0.8
    """

    clients: int
    examples: int

    def __new__(cls, value: float, *, clients: int = 0, examples: int = 0) -> Self:
        """A number and its unit."""
        made = super().__new__(cls, value)
        made.clients, made.examples = clients, examples
        return made

    def at(self, num_clients: int, num_examples: float) -> float:
        """The number itself, for K clients with N examples."""
        return float(self) * float(num_clients) ** self.clients * float(num_examples) ** self.examples

    def __mul__(self, factor: float) -> Self:
        if not isinstance(factor, int | float):
            raise TypeError(f"{self} has no value before the federation is known: see `fedual.relative.settled`.")
        other = factor if isinstance(factor, Relative) else Relative(factor)
        unit = {"clients": self.clients + other.clients, "examples": self.examples + other.examples}
        return type(self)(float(self) * float(factor), **unit)

    __rmul__ = __mul__

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, int]]:
        return (float(self),), {"clients": self.clients, "examples": self.examples}

    def __repr__(self) -> str:
        above = [f"{float(self):g}", *["K"] * self.clients, *["N"] * self.examples]
        below = [*["K"] * -self.clients, *["N"] * -self.examples]
        return "/".join(["*".join(above), *below])

    __str__ = __repr__


def is_settled(method: Method) -> bool:
    """Whether all its numbers are plain."""
    return not any(isinstance(value, Relative) for value in (*_numbers(method), _decay(method)))


def taking_part(num_clients: int, participation: float) -> int:
    """How many of K clients are asked in a round."""
    return max(1, int(participation * num_clients + 0.5))


def settled(method: Method, num_clients: int, num_examples: float, participation: float = 1.0) -> Method:
    """The method with plain numbers, for K clients with N examples in all, of which a share takes part in a round."""
    if is_settled(method):
        return method
    at = lambda value: value.at(num_clients, num_examples) if isinstance(value, Relative) else value
    rho, tau, gamma = map(at, _numbers(method))
    if gamma is not None and isinstance(_numbers(method)[2], Relative):
        gamma = min(gamma * num_clients / taking_part(num_clients, participation), max(rho, gamma))
    dual: Any = method.dual
    solver: Any = method.solver
    if isinstance(decay := _decay(method), Relative):
        solver = replace(solver, weight_decay=at(decay))
    return replace(method, rho=rho, tau=tau, dual=dual if gamma is None else replace(dual, gamma=gamma), solver=solver)


def _decay(method: Method) -> float | None:
    return getattr(method.solver, "weight_decay", None)


def _numbers(method: Method) -> tuple[float, float, float | None]:
    return method.rho, method.tau, getattr(method.dual, "gamma", None)
