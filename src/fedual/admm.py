"""Bayesian-ADMM: three lines over any exponential family (paper Eq. 15–17).

    client   λ_k ← argmin_q  E_q[ℓ_k]/τ + ⟨η_k, μ⟩ + ρ KL(q ‖ q_g)              (Eq. 15)
    dual     η_k ← η_k + γ (λ_k − λ_g)                                         (Eq. 16)
    server   λ_g ← (1−α) · mean_k λ_k + α (λ_0 + Σ_k η_k),   α = 1/(1 + ρK)      (Eq. 17)

A `Method` says how each line is done: a family, a solver for the client's problem, a dual step, a server step.
`client_update` is lines 1 and 2 for some clients, `Totals` what they send, `server_update` line 3. With momentum,
clients are given a point `ahead` of λ_g, which is λ_g itself once it rests. `step` runs all three on tensors that hold
every client, or those that take part in a round: only they move, the mean is over them, and Σ_k η_k over all clients
is kept as a running sum.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedual.contracts import (
    UNGUARDED,
    Carry,
    Gathered,
    Guards,
    Losses,
    Method,
    Solution,
    Subproblem,
    Totals,
    counts,
    num_examples,
    rows_of,
)
from fedual.errors import InputError
from fedual.families import Gaussian, check, finite
from fedual.relative import settled

__all__ = [
    "Info",
    "Method",
    "State",
    "Subproblem",
    "Update",
    "ahead",
    "client_update",
    "dual_update",
    "init",
    "readmit",
    "server_start",
    "server_update",
    "step",
    "subproblem",
    "total",
]


class State(NamedTuple):
    """All that is carried from round to round."""

    prior: Tensor  # λ_0, (R, P)
    lam_g: Tensor  # (R, P)
    lam: Tensor  # (K, R, P)
    eta: Tensor  # (K, R, P)
    eta_sum: Tensor  # Σ_k η_k over all clients, (R, P)
    solver: Carry
    round: int
    start: Tensor | None = None  # (P,), the mean at which iterative solvers start until the server has moved
    ahead: Tensor | None = None  # (R, P), what clients are given, where that is not λ_g

    @property
    def given(self) -> Tensor:
        """What clients are given in the place of λ_g."""
        return self.lam_g if self.ahead is None else self.ahead


class Update(NamedTuple):
    """Lines 1 and 2 done by a stack of clients."""

    ok: Tensor  # (K,) bool: inside the domain
    lam: Tensor  # (K, R, P); rows that are not ok mean nothing
    eta: Tensor
    carry: Carry
    guards: Guards = UNGUARDED

    @property
    def rows(self) -> Tensor | slice:
        """What selects the clients that are ok: without a copy, if that is all of them."""
        return slice(None) if self.ok.all() else self.ok


class Info(NamedTuple):
    """What happened in a round; nothing here is carried on."""

    counted: Tensor  # (K,) bool: took part, and its update was used
    refused: Tensor  # (K,) bool: took part, and its update left the domain
    shortened: float  # the part of the server's step that was taken: 1, unless it would have left the domain
    primal: float  # ‖λ_k − λ_g‖, root mean square over the counted clients
    dual: float  # ‖change of λ_g‖
    guards: Guards = UNGUARDED  # means over the counted clients


def init(method: Method, prior: Tensor, num_clients: int, start: Tensor | None = None) -> State:
    """Every client and the server at the prior, all duals zero.

    Args:
        method: What will be run.
        prior: λ_0, `(R, P)`, e.g. `family.natural(mean, precision)`.
        num_clients: K.
        start: A mean `(P,)`, such as a network's random initialisation: clients start there until the server has
            moved, and so does the server of a method without a prior (FedAvg).
    """
    if not isinstance(num_clients, int) or num_clients < 1:
        raise InputError(f"num_clients = {num_clients}: a federation needs at least one client.")
    lam_g = server_start(method, prior, start)
    lam = lam_g.expand(num_clients, *prior.shape).clone()
    carry = method.solver.init(method.family, prior, num_clients)
    eta, eta_sum = torch.zeros_like(lam), torch.zeros_like(prior)
    return State(prior, lam_g, lam, eta, eta_sum, carry, 0, start, ahead(method, lam_g, lam_g))


def server_start(method: Method, prior: Tensor, start: Tensor | None) -> Tensor:
    """The first λ_g: the prior, or, for a server without one, `start`."""
    if prior.dim() != 2:
        raise InputError(f"The prior has shape {tuple(prior.shape)}: give one (R, P), the same for all clients.")
    check(method.family, prior, "the prior λ_0")
    if method.server.prior or start is None:
        return prior
    return cast(Gaussian, method.family).natural(start)


def step(method: Method, state: State, losses: Losses, active: Tensor | None = None) -> tuple[State, Info]:
    """One round with the clients in `active` (indices or a mask; all of them if None)."""
    _check_losses(losses, state)
    clients = _clients(active, len(state.lam)).to(state.lam.device)
    share = len(clients) / len(state.lam)
    steps = getattr(losses, "average_steps", 0.0)
    method = settled(method, len(state.lam), float(num_examples(losses).sum()), share, steps)
    refused = counted = torch.zeros(len(state.lam), dtype=torch.bool, device=state.lam.device)
    if not len(clients):
        return state._replace(round=state.round + 1), Info(counted, refused, 1.0, 0.0, 0.0)

    problem = subproblem(
        method, losses[clients], state.eta[clients], state.given, rows_of(state.solver, clients), state.start
    )
    update = client_update(method, problem)
    before = state.lam[clients] if method.server.remembers else None
    totals = total(method, problem, update, before)
    eta_sum = state.eta_sum + totals.eta
    lam_g, shortened = server_update(method, state.lam_g, state.prior, eta_sum, totals, len(state.lam))

    kept = clients[update.ok]
    counted = counted.index_fill(0, kept, True)
    refused = refused.index_fill(0, clients[~update.ok], True)
    put = lambda old, new: old.index_copy(0, kept, new[update.ok])
    after = state._replace(
        lam_g=lam_g,
        lam=put(state.lam, update.lam),
        eta=put(state.eta, update.eta),
        eta_sum=eta_sum,
        solver={name: put(old, update.carry[name]) for name, old in state.solver.items()},
        round=state.round + 1,
        start=None if totals.count else state.start,
        ahead=ahead(method, state.lam_g if state.round and state.start is None else lam_g, lam_g),
    )
    change = float((lam_g - state.lam_g).norm())
    return after, Info(counted, refused, shortened, totals.residual, change, totals.guards)


def subproblem(
    method: Method, losses: Losses, eta: Tensor, lam_g: Tensor, carry: Carry, start: Tensor | None
) -> Subproblem:
    """Eq. 15 for a stack of clients; τ_k = τN_k where the method's losses are means."""
    tau, weight = torch.full((len(losses),), method.tau, dtype=eta.dtype, device=eta.device), None
    if method.mean_loss:
        tau = tau * num_examples(losses).to(tau)
    if method.unit:
        weight = counts(method, num_examples(losses)).to(tau)
        tau, eta = tau * weight, eta / weight[:, None, None]
    return Subproblem(method.family, losses, eta, lam_g, method.rho, tau, carry, start, weight)


def client_update(method: Method, problem: Subproblem) -> Update:
    """Lines 1 and 2; an update that leaves the domain is marked, and its client keeps what it had."""
    solution = method.solver(problem)
    ok = method.family.inside(solution.lam)
    if ok.all():
        eta = dual_update(method, problem, solution)
    else:
        eta = torch.full_like(problem.eta, torch.nan)
        eta[ok] = dual_update(method, problem.select(ok), solution.select(ok))
    return Update(ok & finite(eta), solution.lam, eta, solution.carry, solution.guards)


def dual_update(method: Method, problem: Subproblem, solution: Solution) -> Tensor:
    """Line 2."""
    return problem.whole(method.dual(problem, solution))


def total(method: Method, problem: Subproblem, update: Update, before: Tensor | None = None) -> Totals:
    """The sums that a stack of clients contributes; `before` are the λ_k that they had."""
    ok = update.rows
    weight = counts(method, num_examples(problem.losses)).to(update.lam)
    weighted_sum = lambda x: torch.einsum("k,k...->...", weight[ok], x[ok])
    parts = lambda x: float(x[ok].sum()) if isinstance(x, Tensor) else x
    gap = (update.lam[ok] - problem.lam_g).square_().sum()
    return Totals(
        int(update.ok.sum()),
        float(weight[ok].sum()),
        weighted_sum(update.lam),
        0.0 if before is None else weighted_sum(before),
        (update.eta - problem.whole(problem.eta))[ok].sum(0),
        float(gap),
        update.guards.each(parts),
    )


def server_update(
    method: Method, lam_g: Tensor, prior: Tensor, eta_sum: Tensor, totals: Totals, num_clients: int
) -> tuple[Tensor, float]:
    """Line 3, with the clients that count; without any, λ_g stays.

    Where it would leave the domain, the multipliers count less: it goes only a part of the way from mean_k λ_k, which
    is inside. Returns λ_g and that part.
    """
    if not totals.count:
        return lam_g, 1.0
    assert isinstance(totals.lam, Tensor)
    mean, before = totals.lam / totals.weight, totals.before / totals.weight
    rho = method.rho * (totals.weight / totals.count if method.unit else 1.0)  # the mean of ρ_k
    target = method.server(Gathered(lam_g, prior, mean, before, eta_sum, totals.eta, totals.count, num_clients, rho))
    if method.family.inside(target):
        return target, 1.0
    return method.family.backtrack(mean, target) if finite(target) else (lam_g, 0.0)


def ahead(method: Method, before: Tensor, lam_g: Tensor) -> Tensor | None:
    """λ_g + β (λ_g − λ_g⁻), as far as the domain goes; None without momentum.

    The way from the prior to the first λ_g is none to go on: there λ_g itself is given as `before`.
    """
    if not method.momentum:
        return None
    return method.family.backtrack(lam_g, torch.lerp(before, lam_g, 1 + method.momentum))[0]


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
