"""Bayesian-ADMM: three lines over any exponential family (paper Eq. 15–17).

    client   λ_k ← argmin_q  E_q[ℓ_k]/τ + ⟨η_k, μ⟩ + ρ KL(q ‖ q_g)              (Eq. 15)
    dual     η_k ← η_k + γ (λ_k − λ_g)                                         (Eq. 16)
    server   λ_g ← (1−α) · mean_k λ_k + α (λ_0 + Σ_k η_k),   α = 1/(1 + ρK)      (Eq. 17)

A `Method` says how each line is done: a family, a solver for the client's problem, a dual step, a server step.
`step` runs the three lines for all clients, or for those that take part in a round: only they move,
the mean is over them, and Σ_k η_k over all clients is kept as a running sum.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedual.errors import InputError, require_positive
from fedual.families import Family, check, in_domain

Carry = dict[str, Tensor]
"""What a solver carries from round to round: named tensors with a leading client axis."""


class Losses(Protocol):
    """ℓ_1, …, ℓ_K, each a *sum* over the client's examples: what a solver makes of them is its own affair.

    Where they have a `dim` or a `dtype`, it is compared with the prior's.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, clients: Any, /) -> "Losses": ...


class Subproblem(NamedTuple):
    """The clients' problems min_q E_q[ℓ_k]/τ + ⟨η_k, μ⟩ + ρ KL(q ‖ q_g), stacked along a client axis."""

    family: Family
    losses: Any
    eta: Tensor  # (K, R, P)
    lam_g: Tensor  # (R, P)
    lam: Tensor  # (K, R, P), where each client stopped the last time
    rho: float
    tau: float
    carry: Carry

    def select(self, clients: Any) -> "Subproblem":
        """The problems of some of the clients (indices, a mask or a slice)."""
        rows = {"losses": self.losses[clients], "eta": self.eta[clients], "lam": self.lam[clients]}
        return self._replace(**rows, carry=_rows(self.carry, clients))


class Solution(NamedTuple):
    """λ_k of every client; `gradient` is ∇_μ E[ℓ_k]/τ where the solver knows it and the dual asks for it."""

    lam: Tensor
    carry: Carry
    gradient: Tensor | None = None

    def select(self, clients: Any) -> "Solution":
        """The solutions of some of the clients."""
        gradient = None if self.gradient is None else self.gradient[clients]
        return Solution(self.lam[clients], _rows(self.carry, clients), gradient)


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

    def __call__(self, problem: Subproblem, solution: Solution) -> Tensor:
        """The new η_k."""
        ...


class Server(Protocol):
    """Line 3."""

    def __call__(self, lam_g: Tensor, lam: Tensor, prior: Tensor, eta_sum: Tensor, rho: float) -> Tensor:
        """The new λ_g from the λ_k of the clients that count in this round and Σ_k η_k over all."""
        ...


@dataclass(frozen=True)
class Method:
    """Family × solver × dual × server, with the clients' inverse step size ρ and temperature τ."""

    family: Family
    solver: Solver
    dual: Dual
    server: Server
    rho: float
    tau: float = 1.0

    def __post_init__(self):
        require_positive("rho", self.rho)
        require_positive("tau", self.tau)


class State(NamedTuple):
    """All that is carried from round to round."""

    prior: Tensor  # λ_0, (R, P)
    lam_g: Tensor  # (R, P)
    lam: Tensor  # (K, R, P)
    eta: Tensor  # (K, R, P)
    eta_sum: Tensor  # Σ_k η_k over all clients, (R, P)
    solver: Carry
    round: int


class Info(NamedTuple):
    """What happened in a round; nothing here is carried on."""

    counted: Tensor  # (K,) bool: took part, and its update was used
    refused: Tensor  # (K,) bool: took part, and its update left the domain
    shortened: float  # the part of the server's step that was taken: 1, unless it would have left the domain
    primal: float  # ‖λ_k − λ_g‖, root mean square over the counted clients
    dual: float  # ‖change of λ_g‖


def init(method: Method, prior: Tensor, num_clients: int) -> State:
    """Every client and the server at the prior, all duals zero.

    Args:
        method: What will be run.
        prior: λ_0, `(R, P)`, e.g. `family.natural(mean, precision)`.
        num_clients: K.
    """
    if not isinstance(num_clients, int) or num_clients < 1:
        raise InputError(f"num_clients = {num_clients}: a federation needs at least one client.")
    if prior.dim() != 2:
        raise InputError(f"The prior has shape {tuple(prior.shape)}: give one (R, P), the same for all clients.")
    check(method.family, prior, "the prior λ_0")
    lam = prior.expand(num_clients, *prior.shape).clone()
    carry = method.solver.init(method.family, prior, num_clients)
    return State(prior, prior, lam, torch.zeros_like(lam), torch.zeros_like(prior), carry, 0)


def step(method: Method, state: State, losses: Losses, active: Tensor | None = None) -> tuple[State, Info]:
    """One round with the clients in `active` (indices or a mask; all of them if None)."""
    _check_losses(losses, state)
    clients = _clients(active, len(state.lam)).to(state.lam.device)
    moved, counted = client_step(method, state, losses, clients)
    after, shortened = server_step(method, moved, counted)
    took_part = torch.zeros(len(state.lam), dtype=torch.bool, device=state.lam.device)
    took_part[clients] = True
    gap = (after.lam[counted] - state.lam_g).square().sum((-2, -1))
    return after, Info(
        counted,
        took_part & ~counted,
        shortened,
        float(gap.mean().sqrt()) if counted.any() else 0.0,
        float((after.lam_g - state.lam_g).norm()),
    )


def client_step(method: Method, state: State, losses: Losses, clients: Tensor) -> tuple[State, Tensor]:
    """Lines 1 and 2 for `clients` (indices); the server stays where it is.

    An update that leaves the domain is left out: that client keeps its λ_k, η_k and carry.
    Returns the state, and which of all K clients count.
    """
    counted = torch.zeros(len(state.lam), dtype=torch.bool, device=state.lam.device)
    if not len(clients):
        return state, counted
    problem = Subproblem(
        method.family, losses, state.eta, state.lam_g, state.lam, method.rho, method.tau, state.solver
    ).select(clients)
    solution = method.solver(problem)

    ok = in_domain(method.family, solution.lam)
    eta = torch.full_like(problem.eta, torch.nan)
    eta[ok] = method.dual(problem.select(ok), solution.select(ok))
    ok = ok & eta.isfinite().all(-1).all(-1)

    kept = clients[ok]
    counted[kept] = True
    put = lambda old, new: old.index_copy(0, kept, new[ok])
    moved = state._replace(
        lam=put(state.lam, solution.lam),
        eta=put(state.eta, eta),
        eta_sum=state.eta_sum + (eta[ok] - problem.eta[ok]).sum(0),
        solver={name: put(old, solution.carry[name]) for name, old in state.solver.items()},
    )
    return moved, counted


def server_step(method: Method, state: State, counted: Tensor) -> tuple[State, float]:
    """Line 3, with the clients that count; without any, λ_g stays.

    The domain is convex and λ_g is inside, so a step that would leave it is halved until it does not.
    Returns the state and the part of the step that was taken.
    """
    if not counted.any():
        return state._replace(round=state.round + 1), 1.0
    target = method.server(state.lam_g, state.lam[counted], state.prior, state.eta_sum, method.rho)
    shortened, lam_g = 1.0, target
    while not in_domain(method.family, lam_g) and shortened > 0:
        shortened = shortened / 2 if shortened > 1e-6 and target.isfinite().all() else 0.0
        lam_g = torch.lerp(state.lam_g, target, shortened) if shortened else state.lam_g
    return state._replace(lam_g=lam_g, round=state.round + 1), shortened


def readmit(method: Method, state: State, lost: Tensor) -> State:
    """Let clients whose η_k is lost start again, at q_g and η_k = 0, without corrupting Σ_k η_k.

    The lost duals still count in the running sum, so a client that simply restarted at zero would be counted
    twice. The sum is therefore taken anew over the clients that still have theirs.

    Args:
        method: What is run; its solver starts anew for these clients.
        state: The state before the next round.
        lost: Indices or a mask of the clients that lost their state.
    """
    clients = _clients(lost, len(state.lam)).to(state.lam.device)
    lam, eta = state.lam.clone(), state.eta.clone()
    lam[clients], eta[clients] = state.lam_g, 0
    solver = {name: value.clone() for name, value in state.solver.items()}
    for name, value in method.solver.init(method.family, state.prior, len(lam)).items():
        solver[name][clients] = value[clients]
    return state._replace(lam=lam, eta=eta, eta_sum=eta.sum(0), solver=solver)


def _rows(carry: Carry, clients: Any) -> Carry:
    return {name: value[clients] for name, value in carry.items()}


def _check_losses(losses: Losses, state: State) -> None:
    num_clients, dim = len(state.lam), state.lam.shape[-1]
    if len(losses) != num_clients:
        raise InputError(f"{len(losses)} losses for {num_clients} clients: give one loss to each client.")
    for what, own in (("dim", dim), ("dtype", state.lam.dtype)):
        if getattr(losses, what, own) != own:
            raise InputError(f"The losses have {what} {getattr(losses, what)}, the prior {own}: make them the same.")


def _clients(active: Tensor | None, num_clients: int) -> Tensor:
    """The indices of the clients that take part, each once."""
    if active is None:
        return torch.arange(num_clients)
    active = torch.as_tensor(active)
    if not active.numel():
        return torch.arange(0)
    if active.is_floating_point():
        raise InputError(f"active = {active.tolist()}: give client numbers or a mask of booleans.")
    if active.dtype == torch.bool:
        if active.shape != (num_clients,):
            raise InputError(f"active is a mask of shape {tuple(active.shape)} for {num_clients} clients.")
        return active.nonzero()[:, 0]
    clients = active.long().unique()
    if len(clients) != active.numel() or (len(clients) and not 0 <= int(clients[0]) <= int(clients[-1]) < num_clients):
        raise InputError(f"active = {active.tolist()}: name each of the clients 0 … {num_clients - 1} at most once.")
    return clients
