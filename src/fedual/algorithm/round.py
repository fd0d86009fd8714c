"""One round of Bayesian-ADMM over any exponential family (paper Eq. 15–17).

    client   λ_k ← argmin_q  E_q[ℓ_k]/τ + ⟨η_k, μ⟩ + ρ KL(q ‖ q_g)              (Eq. 15)
    dual     η_k ← η_k + γ (λ_k − λ_g)                                         (Eq. 16)
    server   λ_g ← (1−α) · mean_k λ_k + α (λ_0 + Σ_k η_k),   α = 1/(1 + ρK)      (Eq. 17)

`client_step` is lines 1 and 2 for some clients, `total` the sums that their uploads contribute, `server_step` line 3.
Conjugate problems, both backends and Flower call these and nothing else. With partial participation only the clients
of the round move; the mean is over them, and Σ_k η_k over all clients is kept as a running sum. `step` runs a whole
round on tensors that hold every client.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from fedual.algorithm.duals import Zero
from fedual.algorithm.method import Gathered, Losses, Method, Solution, Subproblem, Totals
from fedual.algorithm.state import Broadcast, ClientState, Info, ServerState, State, Upload
from fedual.errors import InputError
from fedual.families import Gaussian, check, finite, is_point


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
    server = server_init(method, start, prior)
    lam = server.lam_g.expand(num_clients, *prior.shape).clone()
    carry = method.solver.init(method.family, prior, num_clients)
    return State(server, ClientState(torch.zeros_like(lam), lam, carry))


def server_init(method: Method, start: Tensor | None, prior: Tensor | None = None) -> ServerState:
    """The server before the first round; the prior is N(0, I/δ) if none is given, `start` the initial mean, if any."""
    if prior is None:
        assert start is not None
        family = cast(Gaussian, method.family)
        delta = torch.as_tensor(method.delta, dtype=start.dtype, device=start.device)
        prior = family.natural(torch.zeros_like(start), None if is_point(family) else delta)
    lam_g = first_lam(method, prior, start)
    ahead = None if method.extrapolation is None else method.extrapolation.ahead(method.family, lam_g, lam_g)
    return ServerState(prior, lam_g, torch.zeros_like(prior), start=start, ahead=ahead)


def first_lam(method: Method, prior: Tensor, start: Tensor | None) -> Tensor:
    """The first λ_g: the prior, or, for a server without one, `start`."""
    if prior.dim() != 2:
        raise InputError(f"The prior has shape {tuple(prior.shape)}: give one (R, P), the same for all clients.")
    check(method.family, prior, "the prior λ_0")
    if method.server.prior or start is None:
        return prior
    return cast(Gaussian, method.family).natural(start)


def client_init(method: Method, first: Tensor) -> ClientState:
    """One client that has not taken part yet: the dual is zero; `first` is the first λ_g, `(R, P)`.

    It keeps only what the method needs: η_k unless there is no dual, λ_k if the server needs its change, and what the
    solver carries.
    """
    eta = None if isinstance(method.dual, Zero) else torch.zeros_like(first)[None]
    lam = first[None] if method.server.remembers else None
    return ClientState(eta, lam, method.solver.init(method.family, first, 1))


def step(method: Method, state: State, losses: Losses, active: Tensor | None = None) -> tuple[State, Info]:
    """One round with the clients in `active` (indices or a mask; all of them if None)."""
    num_clients = len(state.lam)
    _check_losses(losses, state.lam)
    clients = _indices(active, num_clients).to(state.lam.device)
    totals = Totals.none(num_clients)
    if len(clients):
        broadcast, rows = state.server.broadcast(method.dual, num_clients), state.clients.select(clients)
        upload, rows = client_step(method, broadcast, rows, losses[clients])
        totals = total(method, broadcast, upload, clients, num_clients)
        state = state._replace(clients=state.clients.replaced(clients, rows))
    server, info = server_step(method, state.server, totals)
    return state._replace(server=server), info


def client_step(
    method: Method,
    broadcast: Broadcast,
    clients: ClientState,
    losses: Losses,
    transmit: Callable[[Tensor], Tensor] | None = None,
    solve: Callable[[Subproblem], Solution] | None = None,
) -> tuple[Upload, ClientState]:
    """Lines 1 and 2 for a stack of clients; a client whose update leaves the domain keeps its state.

    Where λ_k `(K, R, P)` is compressed on its way to the server by `transmit`, the dual step uses what the server sees.
    `solve` replaces the method's solver, if given.
    """
    problem = subproblem(method, broadcast, clients, losses)
    solution = (solve or method.solver)(problem)
    if transmit is not None:
        solution = solution._replace(lam=transmit(solution.lam))
    ok = method.family.inside(solution.lam)
    if ok.all():
        eta = problem.unweighted(method.dual(problem, solution))
    else:
        eta, inside = torch.full_like(problem.eta, torch.nan), problem.select(ok)
        eta[ok] = inside.unweighted(method.dual(inside, solution.select(ok)))
    ok = ok & finite(eta)
    before = clients.lam if method.server.remembers else None
    change = eta - (problem.unweighted(problem.eta) if broadcast.eta_mean is None else cast(Tensor, clients.eta))
    upload = Upload(ok, solution.lam, change, before, losses.num_examples, solution.guards)
    lam = None if clients.lam is None else solution.lam
    new = ClientState(None if clients.eta is None else eta, lam, solution.carry)
    if not ok.all():
        kept = ok.nonzero()[:, 0]
        new = clients.replaced(kept, new.select(kept))
    return upload, new


def subproblem(method: Method, broadcast: Broadcast, clients: ClientState, losses: Losses) -> Subproblem:
    """Eq. 15 for a stack of clients; τ_k = τN_k where the method's losses are means."""
    lam_g = broadcast.lam_g
    eta = torch.zeros_like(lam_g).expand(len(losses), -1, -1) if clients.eta is None else clients.eta
    if method.dual.centred:
        eta = eta - cast(Tensor, broadcast.eta_mean)
    tau, weight = torch.full((len(losses),), method.tau, dtype=eta.dtype, device=eta.device), None
    if method.mean_loss:
        tau = tau * losses.num_examples.to(tau)
    if method.weighting is not None:
        weight = method.weighting(losses.num_examples).to(tau)
        tau, eta = tau * weight, eta / weight[:, None, None]
    start, has_dual = broadcast.start, not isinstance(method.dual, Zero)
    return Subproblem(method.family, losses, eta, lam_g, method.rho, tau, clients.carry, start, weight, has_dual)


def total(method: Method, broadcast: Broadcast, upload: Upload, clients: Tensor, num_clients: int) -> Totals:
    """The sums that the uploads of some clients contribute; `clients` are their numbers among all K."""
    rows = slice(None) if upload.ok.all() else upload.ok  # a slice makes no copy
    examples = upload.num_examples
    weight = torch.ones_like(examples) if method.weighting is None else method.weighting(examples)
    counts = (examples if method.weighting is None and method.server.weighted else weight).to(upload.lam)[rows]
    weighted_sum = lambda x: torch.einsum("k,k...->...", counts, x[rows])
    gap = upload.lam[rows] - broadcast.lam_g
    change = upload.eta_change
    change = method.dual.change(gap, weight.to(gap)[rows]) if change is None else change[rows]
    assert change is not None  # clients send a change that the server cannot infer
    fraction = lambda x: float(x[rows].sum()) if isinstance(x, Tensor) else x
    mask = lambda ok: torch.zeros(num_clients, dtype=torch.bool).index_fill(0, clients.cpu()[ok.cpu()], True)
    return Totals(
        mask(upload.ok),
        mask(~upload.ok),
        float(counts.sum()),
        weighted_sum(upload.lam),
        0.0 if upload.before is None else weighted_sum(upload.before),
        change.sum(0),
        float(gap.square_().sum()),
        upload.guards.each(fraction),
    )


def server_step(method: Method, server: ServerState, totals: Totals) -> tuple[ServerState, Info]:
    """Line 3, with the clients that count; if there are none, λ_g stays.

    Where λ_g would leave the domain, the step is shortened: it goes only part of the way from mean_k λ_k, which is
    inside, to its target.
    """
    family, count = method.family, totals.count
    eta_sum, lam_g, shortened = server.eta_sum + totals.eta, server.lam_g, 1.0
    if count:
        assert isinstance(totals.lam, Tensor)
        mean, before = totals.lam / totals.weight, totals.before / totals.weight
        rho = method.rho if method.weighting is None else method.rho * (totals.weight / count)  # the mean of ρ_k
        target = method.server(
            Gathered(server.lam_g, server.prior, mean, before, eta_sum, totals.eta, count, len(totals.counted), rho)
        )
        if family.inside(target):
            lam_g = target
        else:
            lam_g, shortened = family.backtrack(mean, target) if finite(target) else (lam_g, 0.0)
    ahead = None
    if method.extrapolation is not None:  # the first jump, from the prior, is not extrapolated
        ahead = method.extrapolation.ahead(family, server.lam_g if server.moved else lam_g, lam_g)
    info = Info(
        totals.counted, totals.refused, shortened, totals.residual, float((lam_g - server.lam_g).norm()), totals.guards
    )
    moved = server.moved or count > 0
    return server._replace(lam_g=lam_g, eta_sum=eta_sum, round=server.round + 1, moved=moved, ahead=ahead), info


def readmit(method: Method, state: State, lost: Tensor) -> State:
    """Let clients whose η_k is lost start again, at q_g and η_k = 0, without corrupting Σ_k η_k.

    The lost duals still count in the running sum, so a client that simply restarted at zero would be counted
    twice. The sum is therefore taken again over the clients that still have theirs. `lost` are their indices or a mask.
    """
    server, clients = state.server, _indices(lost, len(state.lam)).to(state.lam.device)
    lam_g = server.lam_g.expand(len(clients), -1, -1)
    carry = method.solver.init(method.family, server.prior, len(clients))
    rows = state.clients.replaced(clients, ClientState(torch.zeros_like(lam_g), lam_g, carry))
    return State(server._replace(eta_sum=cast(Tensor, rows.eta).sum(0)), rows)


def _check_losses(losses: Losses, lam: Tensor) -> None:
    num_clients, dim = len(lam), lam.shape[-1]
    if len(losses) != num_clients:
        raise InputError(f"{len(losses)} losses for {num_clients} clients: give one loss to each client.")
    for what, expected in (("dim", dim), ("dtype", lam.dtype)):
        if getattr(losses, what) not in (None, expected):
            has = getattr(losses, what)
            raise InputError(f"The losses have {what} {has}, the prior {expected}: make them the same.")


def _indices(active: Tensor | None, num_clients: int) -> Tensor:
    """The numbers of the clients that take part, each once."""
    if active is None:
        return torch.arange(num_clients)
    active = torch.as_tensor(active)
    if not active.numel():
        return torch.arange(0)
    if active.is_floating_point():
        raise InputError(f"active = {active.tolist()}: give client numbers or a mask of booleans.")
    if active.dtype == torch.bool:
        if active.shape != (num_clients,):
            raise InputError(f"active is a mask {tuple(active.shape)}, not {(num_clients,)}: give one entry a client.")
        return active.nonzero()[:, 0]
    clients = active.long().unique()
    if len(clients) != active.numel() or not 0 <= int(clients[0]) <= int(clients[-1]) < num_clients:
        raise InputError(f"active = {active.tolist()}: name each of the clients 0 … {num_clients - 1} at most once.")
    return clients
