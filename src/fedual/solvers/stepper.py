"""Solvers that take minibatch steps: what a step needs, and the loop over a stack of clients.

Eq. 15 divided by N_k/τ_k is, for Gaussians with means m, precisions s and duals η = (v, −½u), an average over examples
plus a quadratic:

    E_q[ (1/N_k) Σ_i ℓ_i(θ) ] + c (⟨v, m⟩ − ½ u m² + ρ/2 s_g (m − m_g)²) + …,        c = τ_k/N_k

so that the gradient in m is ĝ + A + B m, with A = c (v − ρ s_g m_g) and B = c (ρ s_g − u). A solver is a `Stepper`: it
turns the problem into such tensors once a round, and a minibatch gradient into a step. Steppers are pure functions of
tensors with a client axis. Called as a solver, a stepper runs the plain loop `walk`; the backends run the same `take`
with compiled code, or one client at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor

from fedual.algorithm.method import Carry, Losses, Solution, Subproblem
from fedual.errors import InputError
from fedual.families import Diagonal, Family, FixedPrecision, Gaussian, Isotropic

Variables = dict[str, Tensor]
"""A stepper's variables within a round, each with a leading client axis."""
Schedule = Literal["constant", "cosine", "harmonic"]
"""How a learning rate changes over rounds, see `fedual.settings.LocalTraining`."""


class Gradients(ABC):
    """The noise and the gradients that a step needs from the losses."""

    @abstractmethod
    def noise(self, step: int, sample: int, like: Tensor) -> Tensor:
        """Standard-normal noise for the means `like` `(n, P)` of the first n clients: `(1, P)` or `(n, P)`."""

    @abstractmethod
    def gradient(self, theta: Tensor, step: int, out: Tensor | None = None) -> Tensor:
        """∇ of the minibatch mean of the loss at θ `(n, P)` for the first n clients, `(n, P)`, in `out` if given."""


class Batches(Losses, Gradients):
    """Losses that are seen one minibatch at a time; `fedual.networks.Minibatches` makes them from networks."""

    network: Any
    """The `fedual.networks.Network`: the rules of `fedual.solvers.adaptive` use its layers."""
    steps: list[int]
    """How many steps each client takes in this round."""

    def some_inputs(self, count: int) -> Tensor:
        """The first `count` examples of each client as the network sees them, one client after the other."""
        raise NotImplementedError

    def curvature(self, theta: Tensor) -> Tensor:
        """The diagonal of the generalised Gauss–Newton matrix of the whole loss ℓ_k at θ, `(K, P)`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Stepper(ABC):
    """A solver by minibatch steps."""

    lr: Any = 1e-3
    """The learning rate: a number, or a rule that clients evaluate (`fedual.solvers.adaptive`)."""

    @property
    def draws(self) -> int:
        """Monte-Carlo samples a step; 0 takes the gradient at the mean."""
        return 0

    @property
    def schedule(self) -> Schedule:
        """How the learning rate changes over rounds if no schedule is chosen."""
        return "constant"

    @abstractmethod
    def init(self, family: Family, prior: Tensor, num_clients: int) -> Carry:
        """The state that the solver carries into the first round."""

    @abstractmethod
    def begin(self, problem: Subproblem) -> Variables:
        """The variables at the start of a round."""

    def place(self, variables: Variables, noise: Tensor) -> Tensor:
        """Where the gradient is taken, θ `(n, P)`, for noise `(n, P)` or `(1, P)`."""
        raise NotImplementedError

    @abstractmethod
    def update(self, variables: Variables, gradient: Tensor, correlation: Tensor | None) -> Variables:
        """One step from ĝ `(n, P)` and ĝ·ε, each averaged over the samples; the correlation is None without noise."""

    @abstractmethod
    def end(self, problem: Subproblem, variables: Variables) -> Solution:
        """The solution at the end of a round."""

    def scaled(self, factor: float) -> Self:
        """The same with the learning rate times a factor, for schedules."""
        return replace(self, lr=self.lr * factor)

    def __call__(self, problem: Subproblem) -> Solution:
        """Run every client for its own number of steps, all clients at once."""
        return solve(self, problem, walk)


def solve(stepper: Stepper, problem: Subproblem, run: Callable[[Stepper, Batches, Variables], Variables]) -> Solution:
    """Sort clients by their number of steps, so that those still at work are always the first n, and `run` them.

    `run` takes all steps of the sorted clients, in place or not, and returns their variables.
    """
    if not isinstance(problem.losses, Batches):
        raise InputError(f"{type(stepper).__name__} takes minibatch steps: its losses must be `Minibatches`.")
    order = torch.tensor(problem.losses.steps).argsort(descending=True, stable=True)
    if (order.diff() > 0).all():
        return stepper.end(problem, run(stepper, problem.losses, stepper.begin(problem)))
    place = order.to(problem.eta.device)
    some = problem.select(place)
    variables, back = run(stepper, some.losses, stepper.begin(some)), order.argsort().to(place.device)
    return stepper.end(problem, {name: value[back] for name, value in variables.items()})


def advance(
    stepper: Stepper,
    variables: Variables,
    gradient: Tensor,
    correlation: Tensor | None = None,
    noise: Tensor | None = None,
    ahead: Tensor | None = None,
    theta: Tensor | None = None,
) -> None:
    """Do the elementwise work of a step in place, from ĝ `(n, P)` and either ĝε or the noise ε of one sample.

    `theta` is set to the point where the next step takes its gradient; `ahead` is the noise of that step.
    """
    if noise is not None:
        correlation = gradient * noise
    moved = stepper.update(variables, gradient, correlation)
    for name, value in moved.items():
        if value is not variables[name]:
            variables[name].copy_(value)
    if theta is not None:
        assert ahead is not None
        theta.copy_(stepper.place(moved, ahead))


def walk(
    stepper: Stepper,
    losses: Batches,
    variables: Variables,
    advance: Callable[..., None] = advance,
    cut: Callable[[Tensor, int], Tensor] = lambda value, n: value[:n],
) -> Variables:
    """Take all steps in place, for clients whose numbers of steps do not increase.

    With one sample a step, noise is drawn one step ahead. `advance` may be compiled; then `cut` gives it the first n
    rows of a tensor.
    """
    work = {"gradient": aligned(variables["mean"])}
    noise = ahead = None
    if stepper.draws == 1:
        noise = losses.noise(0, 0, variables["mean"])
        work["theta"] = aligned(variables["mean"]).copy_(stepper.place(variables, noise))
    for n, steps in segments(losses.steps):
        first, memory = ({name: cut(value, n) for name, value in all.items()} for all in (variables, work))
        noise = None if noise is None else cut(noise, n)
        for step in steps:
            if noise is not None:
                last = step + 1 == losses.steps[0]
                ahead = cut(noise.clone() if last else losses.noise(step + 1, 0, first["mean"]), n)
            take(stepper, losses, advance, first, memory, step, noise, ahead)
            noise = ahead
    return variables


def segments(steps: list[int]) -> Iterator[tuple[int, range]]:
    """Yield (n, the steps that only the first n clients take), for numbers of steps that do not increase."""
    for n in range(len(steps), 0, -1):
        first = steps[n] if n < len(steps) else 0
        if first < steps[n - 1]:
            yield n, range(first, steps[n - 1])


def take(
    stepper: Stepper,
    losses: Gradients,
    advance: Callable[..., None],
    variables: Variables,
    memory: Variables,
    step: int,
    noise: Tensor | None,
    ahead: Tensor | None,
) -> None:
    """Take one step of n clients in place.

    With one sample a step, one pass over memory updates q and computes where the next gradient is taken. `memory` holds
    `gradient` `(n, P)` and, in this case, `theta`, where this step's gradient is taken; the call replaces it by the
    point of the next one. `noise` is ε of this step and `ahead` that of the next.
    """
    if stepper.draws > 1:
        advance(stepper, variables, *estimate(stepper, losses, variables, step))
    elif noise is None:
        advance(stepper, variables, losses.gradient(variables["mean"], step, memory["gradient"]))
    else:
        gradient = losses.gradient(memory["theta"], step, memory["gradient"])
        advance(stepper, variables, gradient, None, noise, ahead, memory["theta"])


def estimate(stepper: Stepper, losses: Gradients, variables: Variables, step: int) -> tuple[Tensor, Tensor | None]:
    """ĝ and ĝ·ε, averaged over the stepper's samples."""
    mean = variables["mean"]
    if stepper.draws == 0:
        return losses.gradient(mean, step), None
    gradients, correlations = torch.zeros_like(mean), torch.zeros_like(mean)
    for sample in range(stepper.draws):
        noise = losses.noise(step, sample, mean)
        gradient = losses.gradient(stepper.place(variables, noise), step)
        gradients, correlations = gradients + gradient, correlations + gradient * noise
    return gradients / stepper.draws, correlations / stepper.draws


def aligned(like: Tensor) -> Tensor:
    """Memory `(n, P)` whose rows begin at multiples of 128 bytes: tensor cores want matrices within θ aligned."""
    columns = like.shape[-1]
    return like.new_empty(len(like), columns + -columns % 32)[:, :columns]


def quadratic(problem: Subproblem) -> tuple[Tensor, Tensor]:
    """A and B of A + B m, the part of the gradient that is not the loss's, each `(K, P)` or `(K, 1)`."""
    family, c = problem.family, scale(problem)
    if problem.rho == 0 and not problem.has_dual:  # FedAvg
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
    return (problem.tau / problem.losses.num_examples.to(problem.tau))[:, None]


def start_mean(problem: Subproblem) -> Tensor:
    """m_g for every client, or the network's initialisation while the server is at the prior, `(K, P)`."""
    mean = cast(Gaussian, problem.family).mean(problem.lam_g) if problem.start is None else problem.start
    return mean.expand(len(problem.eta), -1).clone()
