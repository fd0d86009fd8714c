"""Settings in units of the federation: numbers that wait until its size is known.

Each client's problem, divided by N_k/τ, is (1/N_k) Σ_i E_q[ℓ_i] + (ρ_kτ/N_k) KL(q ‖ q_g) + …: how far a client may go
from q_g depends on ρ_kτ/N_k, and what the server makes of it on Σ_k ρ_k (Eq. 17 with α = 1/(1 + Σ_k ρ_k)). With
ρ_k = ρ N_k/(N/K), ρ = c/K and τ = νN the first is cν for every client and the second is c, whatever K and N are. And
ρ_kλ_g outweighs the client's multiplier, which has about the share N_k/N of Σ_j η_j ≈ λ_g, or its problem would have no
solution; not in every weight, though: see `hold` of IVON.

A multiplier that moves in every tenth round only may move ten times as far: γ, where it is relative, is divided by the
share of clients in a round, but it ends at ρ/3 (with fewer than three clients at ρ/K): nearer to ρ, multipliers run
ahead of the clients, and diverge.

The more steps a client takes in a round, the further it drifts. L is the length of a round: the steps of a client of
average size in multiples of 200, at least 1. In long rounds τ, which holds clients at q_g, is L² times as large, the
rate L² times smaller, and the limit on a step L times, as are the steps of multipliers, which add up how far clients
went; weights decay L times as fast.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

from fedual.contracts import Method

LONG = 200
"""Steps of a round that is not long yet."""


@runtime_checkable
class Lasting(Protocol):
    """What a rule makes that depends on the length of a round by more than a power."""

    def within(self, length: float) -> float:
        """The same, for rounds of length L."""
        ...


class Relative(float):
    """value · K^clients · N^examples · L^length, for a federation of K clients with N examples in all.

    >>> Relative(8.0, clients=-1)
    8/K
    >>> Relative(8.0, clients=-1).at(10, 6000)
    0.8
    """

    rule: Callable[[float], float]
    clients: int
    examples: int
    length: int

    def __new__(
        cls,
        value: float,
        rule: Callable[[float], float] = float,
        *,
        clients: int = 0,
        examples: int = 0,
        length: int = 0,
    ) -> Self:
        """A number and its unit; where it has a rule of its own, too, that gets the number."""
        made = super().__new__(cls, value)
        made.rule, made.clients, made.examples, made.length = rule, clients, examples, length
        return made

    def at(self, num_clients: int, num_examples: float, length: float = 1.0) -> float:
        """The number itself, for K clients with N examples and rounds of length L."""
        powers = float(num_clients) ** self.clients * float(num_examples) ** self.examples * length**self.length
        made = self.rule(float(self) * powers)
        return made.within(length) if isinstance(made, Lasting) else made

    @property
    def unit(self) -> dict[str, int]:
        """The powers of K, N and L."""
        return {"clients": self.clients, "examples": self.examples, "length": self.length}

    def __mul__(self, factor: float) -> Self:
        if not isinstance(factor, int | float):
            raise TypeError(f"{self} has no value before the federation is known: see `fedual.relative.settled`.")
        other = factor if isinstance(factor, Relative) else Relative(factor)
        unit = {name: power + other.unit[name] for name, power in self.unit.items()}
        return type(self)(float(self) * float(factor), self.rule, **unit)

    __rmul__ = __mul__

    def __getnewargs_ex__(self) -> tuple[tuple[float, Callable[[float], float]], dict[str, int]]:
        return (float(self), self.rule), self.unit

    def __repr__(self) -> str:
        powers = dict(zip("KNL", self.unit.values(), strict=True))
        number = f"{float(self):g}" if self.rule is float else str(self.rule(float(self)))
        above = [number, *(name for name, power in powers.items() for _ in range(power))]
        below = [name for name, power in powers.items() for _ in range(-power)]
        return "/".join(["*".join(above), *below])

    __str__ = __repr__


def is_settled(method: Method) -> bool:
    """Whether all its numbers are plain."""
    return not _waiting(method.solver) and not any(isinstance(value, Relative) for value in _numbers(method))


def taking_part(num_clients: int, participation: float) -> int:
    """How many of K clients are asked in a round."""
    return max(1, int(participation * num_clients + 0.5))


def average_steps(
    num_clients: int, num_examples: float, *, batch_size: int, local_epochs: int, local_steps: int | None
) -> float:
    """The steps in a round of a client of average size."""
    return local_steps or local_epochs * num_examples / (max(num_clients, 1) * batch_size)


def settled(
    method: Method, num_clients: int, num_examples: float, participation: float = 1.0, steps: float = 0.0
) -> Method:
    """The method with plain numbers, for K clients with N examples in all.

    Args:
        method: With numbers that wait, or without.
        num_clients: K.
        num_examples: N.
        participation: The share of clients in a round.
        steps: See `average_steps`.
    """
    if is_settled(method):
        return method
    length = max(1.0, steps / LONG)
    at = lambda value: value.at(num_clients, num_examples, length) if isinstance(value, Relative) else value
    rho, tau, gamma, unit = map(at, _numbers(method))
    if gamma is not None and isinstance(_numbers(method)[2], Relative):
        gamma = min(gamma * num_clients / taking_part(num_clients, participation), rho * max(1 / 3, 1 / num_clients))
    dual: Any = method.dual
    solver: Any = method.solver
    if waiting := _waiting(solver):
        solver = replace(solver, **{name: at(value) for name, value in waiting.items()})
    dual = dual if gamma is None else replace(dual, gamma=gamma)
    return replace(method, rho=rho, tau=tau, dual=dual, solver=solver, unit=unit)


def _waiting(solver: Any) -> dict[str, Relative]:
    """The solver's settings that wait, too."""
    found = {field.name: getattr(solver, field.name) for field in fields(solver)} if is_dataclass(solver) else {}
    return {name: value for name, value in found.items() if isinstance(value, Relative)}


def _numbers(method: Method) -> tuple[float, float, float | None, float]:
    return method.rho, method.tau, getattr(method.dual, "gamma", None), method.unit
