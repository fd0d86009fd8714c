"""Solvers that take minibatch steps: what a step needs, and the loop over a stack of clients.

Eq. 15 divided by N_k/τ_k is, for Gaussians with means m, precisions s and duals η = (v, −½u), an average over examples
and a quadratic:

    E_q[ (1/N_k) Σ_i ℓ_i(θ) ] + c (⟨v, m⟩ − ½ u m² + ρ/2 s_g (m − m_g)²) + …,        c = τ_k/N_k

so that the gradient in m is ĝ + A + B m, with A = c (v − ρ s_g m_g) and B = c (ρ s_g − u). A solver is a `Stepper`: it
turns the problem into such tensors once a round, and a minibatch gradient into a step. Steppers are pure functions of
tensors with a client axis; the loops (`descend` here; one client at a time in `fedual.simulate.sequential`) own the
order of things.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, cast

import torch
from torch import Tensor

from fedual.contracts import Carry, Solution, Subproblem, num_examples
from fedual.errors import InputError
from fedual.families import Diagonal, Family, FixedPrecision, Gaussian, Isotropic
from fedual.solvers import fused
from fedual.solvers.draws import counted
from fedual.solvers.fused import Inner, aligned

Schedule = Literal["constant", "cosine", "harmonic"]
"""Of the learning rate over rounds, see `fedual.rounds.scheduled`."""


class Gradients(Protocol):
    """What a step needs to know of the losses."""

    def noise(self, step: int, sample: int, like: Tensor) -> Tensor:
        """Standard-normal noise for the means `like` `(n, P)` of the first n clients: `(1, P)` or `(n, P)`."""
        ...

    def gradient(self, theta: Tensor, step: int, out: Tensor | None = None) -> Tensor:
        """∇ of the minibatch mean of the loss at θ `(n, P)` for the first n clients, `(n, P)`, in `out` if given."""
        ...


class Batches(Gradients, Protocol):
    """Losses that are seen one minibatch at a time; `fedual.solvers.minibatches` makes them from networks."""

    @property
    def compile(self) -> bool:
        """Whether the elementwise work of a step is compiled."""
        ...

    @property
    def steps(self) -> list[int]:
        """How many steps each client takes in this round."""
        ...

    def curvature(self, theta: Tensor) -> Tensor:
        """The diagonal of the generalised Gauss–Newton matrix of the whole loss ℓ_k at θ, `(K, P)`."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, clients: Any, /) -> "Batches": ...


@dataclass(frozen=True)
class Stepper(ABC):
    """A solver by minibatch steps.

    Args:
        lr: The learning rate.
    """

    lr: float = 1e-3

    @property
    def draws(self) -> int:
        """Monte-Carlo samples a step; 0 takes the gradient at the mean."""
        return 0

    @property
    def schedule(self) -> Schedule:
        """Of the learning rate, where nobody chooses one."""
        return "constant"

    @abstractmethod
    def init(self, family: Family, prior: Tensor, num_clients: int) -> Carry:
        """What is carried into the first round."""

    @abstractmethod
    def begin(self, problem: Subproblem) -> Inner:
        """The variables at the start of a round."""

    def place(self, inner: Inner, noise: Tensor) -> Tensor:
        """Where the gradient is taken, θ `(n, P)`, for noise `(n, P)` or `(1, P)`."""
        raise NotImplementedError

    @abstractmethod
    def update(self, inner: Inner, gradient: Tensor, correlation: Tensor | None) -> Inner:
        """One step from ĝ `(n, P)` and ĝ·ε, each averaged over the samples; the correlation is None without noise."""

    @abstractmethod
    def end(self, problem: Subproblem, inner: Inner) -> Solution:
        """The solution at the end of a round."""

    def scaled(self, factor: float) -> Self:
        """The same with the learning rate times a factor, for schedules."""
        return replace(self, lr=self.lr * factor)

    def __call__(self, problem: Subproblem) -> Solution:
        """All clients of the stack at once."""
        if not hasattr(problem.losses, "steps"):
            raise InputError(f"{type(self).__name__} takes minibatch steps: its losses must be `Minibatches`.")
        return self.end(problem, descend(self, problem))


def descend(stepper: Stepper, problem: Subproblem) -> Inner:
    """Run every client for its own number of steps.

    Clients are sorted by that number, so that those still at work are always the first n: the variables of the others
    stay what they are.
    """
    order = torch.tensor(problem.losses.steps).argsort(descending=True, stable=True)
    sorted = bool((order.diff() > 0).all())  # as the engine gives them: nothing to copy
    if not sorted:
        problem = problem.select(order.to(problem.eta.device))
    losses, inner = problem.losses, stepper.begin(problem)
    if losses.compile and counted(inner["mean"].device):
        from fedual.solvers import graphs

        inner = graphs.descend(stepper, losses, inner)
    else:
        _walk(stepper, losses, inner)
    if sorted:
        return inner
    back = order.argsort().to(problem.eta.device)
    return {name: value[back] for name, value in inner.items()}


def segments(steps: list[int]) -> Iterator[tuple[int, range]]:
    """(n, the steps that the first n clients take), from numbers of steps that do not increase."""
    for n in range(len(steps), 0, -1):
        first = steps[n] if n < len(steps) else 0
        if first < steps[n - 1]:
            yield n, range(first, steps[n - 1])


def _walk(stepper: Stepper, losses: Batches, inner: Inner) -> None:
    """Step after step, in place; with one sample a step, noise is drawn a step ahead."""
    advance = fused.compiled(replace(stepper, lr=1.0), inner["mean"].device.type) if losses.compile else fused.advance
    cut = fused.window if losses.compile else lambda value, n: value[:n]
    work = {"found": aligned(inner["mean"])}
    noise = ahead = None
    if stepper.draws == 1:
        noise = losses.noise(0, 0, inner["mean"])
        work["theta"] = aligned(inner["mean"]).copy_(stepper.place(inner, noise))
    for n, steps in segments(losses.steps):
        mine, memory = ({name: cut(value, n) for name, value in all.items()} for all in (inner, work))
        noise = None if noise is None else cut(noise, n)
        for step in steps:
            if noise is not None:
                last = step + 1 == losses.steps[0]
                ahead = cut(noise.clone() if last else losses.noise(step + 1, 0, mine["mean"]), n)
            take(stepper, losses, advance, mine, memory, step, noise, ahead)
            noise = ahead


def take(
    stepper: Stepper,
    losses: Gradients,
    advance: Callable[..., None],
    inner: Inner,
    memory: Inner,
    step: int,
    noise: Tensor | None,
    ahead: Tensor | None,
) -> None:
    """One step of n clients, in place.

    With one sample a step, one pass over memory moves q and says where the next gradient is taken.

    Args:
        stepper: What to do.
        losses: Where gradients come from.
        advance: `fedual.solvers.fused.advance`, compiled or not.
        inner: The stepper's variables.
        memory: `found` `(n, P)` for a gradient; `theta`, if a step takes one sample: where this step's gradient is
            taken, and then where the next one's is.
        step: Its number.
        noise: ε of this step, if it takes one sample.
        ahead: ε of the next one.
    """
    if stepper.draws > 1:
        advance(stepper, inner, *estimate(stepper, losses, inner, step))
    elif noise is None:
        advance(stepper, inner, losses.gradient(inner["mean"], step, memory["found"]))
    else:
        gradient = losses.gradient(memory["theta"], step, memory["found"])
        advance(stepper, inner, gradient, None, noise, ahead, memory["theta"])


def estimate(stepper: Stepper, losses: Gradients, inner: Inner, step: int) -> tuple[Tensor, Tensor | None]:
    """ĝ and ĝ·ε, averaged over the stepper's samples."""
    mean = inner["mean"]
    if stepper.draws == 0:
        return losses.gradient(mean, step), None
    gradient = correlation = 0.0
    for sample in range(stepper.draws):
        noise = losses.noise(step, sample, mean)
        found = losses.gradient(stepper.place(inner, noise), step)
        gradient, correlation = gradient + found, correlation + found * noise
    assert isinstance(gradient, Tensor)
    assert isinstance(correlation, Tensor)
    return gradient / stepper.draws, correlation / stepper.draws


def quadratic(problem: Subproblem) -> tuple[Tensor, Tensor]:
    """A and B of the gradient's part A + B m that is not the loss, each `(K, P)` or `(K, 1)`."""
    family, c = problem.family, scale(problem)
    if problem.rho == 0 and not problem.eta.any():  # FedAvg
        return torch.zeros_like(c), torch.zeros_like(c)
    offset = (problem.eta[:, 0] - problem.rho * problem.lam_g[0]).mul_(c)
    if isinstance(family, Diagonal):
        return offset, (2 * problem.eta[:, 1]).add_(family.precision(problem.lam_g), alpha=problem.rho).mul_(c)
    if isinstance(family, Isotropic):
        return offset, c * problem.rho * family.delta
    if isinstance(family, FixedPrecision) and family.matrix.dim() == 1:
        return offset, c * problem.rho * family.matrix
    raise InputError(f"Minibatch solvers need a diagonal precision (Isotropic, Diagonal), not {family}.")


def scale(problem: Subproblem) -> Tensor:
    """c = τ_k/N_k, `(K, 1)`."""
    return (problem.tau / num_examples(problem.losses).to(problem.tau))[:, None]


def start_mean(problem: Subproblem) -> Tensor:
    """m_g for every client, or the network's initialisation while the server sits at the prior, `(K, P)`."""
    mean = cast(Gaussian, problem.family).mean(problem.lam_g) if problem.start is None else problem.start
    return mean.expand(len(problem.eta), -1).clone()
