"""What a simulation carries from round to round: the server's tensors, and a row for each client in a store."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedual import admm
from fedual.admm import Info, Method, Subproblem, Totals, Update
from fedual.duals import Zero
from fedual.errors import InputError
from fedual.simulate.store import Rows, Store, create
from fedual.solvers import Minibatches, Stepper

Schedule = Literal["constant", "cosine"]
NOTHING = Totals(0, 0.0, 0.0, 0.0, 0.0, 0.0)


class ServerState(NamedTuple):
    """The server's side of `admm.State`."""

    prior: Tensor  # λ_0, (R, P)
    lam_g: Tensor
    eta_sum: Tensor  # Σ_k η_k over all clients
    round: int
    start: Tensor | None  # (P,), the network's initialisation until the server has moved

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""
        named = {"prior": self.prior, "lam_g": self.lam_g, "eta_sum": self.eta_sum}
        return named if self.start is None else named | {"start": self.start}

    @staticmethod
    def restored(tensors: dict[str, Tensor], round: int, device: torch.device) -> "ServerState":
        """The inverse of `tensors`."""
        of = lambda name: tensors[name].to(device)
        start = of("start") if "start" in tensors else None
        return ServerState(of("prior"), of("lam_g"), of("eta_sum"), round, start)


def begin(method: Method, start: Tensor, num_clients: int, folder: Path | None = None) -> tuple[ServerState, Store]:
    """The state before the first round: the prior N(0, I/δ), a network's initialisation `start` `(P,)`, duals zero.

    A client's row holds what the method needs and no more: η_k unless there is no dual, λ_k where the server asks for
    its change, and what the solver carries.

    Args:
        method: What will be run.
        start: θ of the network as it was initialised.
        num_clients: K.
        folder: Keeps the rows on disk, there, rather than in memory.
    """
    family = method.family
    zero = torch.zeros_like(start)
    prior = family.natural(zero, torch.full_like(zero, method.delta)) if family.rows(1) > 1 else family.natural(zero)  # type: ignore[attr-defined]
    lam_g = admm.server_start(method, prior, start)
    rows: Rows = {} if isinstance(method.dual, Zero) else {"eta": torch.zeros_like(prior)}
    if method.server.remembers:
        rows["lam"] = lam_g
    carried = method.solver.init(family, prior, 1)
    rows |= {f"solver.{name}": value[0] for name, value in carried.items()}
    return ServerState(prior, lam_g, torch.zeros_like(prior), 0, start), create(rows, num_clients, folder=folder)


def problem_of(method: Method, server: ServerState, losses: Minibatches, rows: Rows) -> Subproblem:
    """Eq. 15 for the clients of `losses`, whose rows these are."""
    eta = rows.get("eta", torch.zeros_like(server.lam_g).expand(len(losses), -1, -1))
    carry = {name.removeprefix("solver."): value for name, value in rows.items() if name.startswith("solver.")}
    return admm.subproblem(method, losses, eta, server.lam_g, carry, server.start)


def rows_of(update: Update, names: tuple[str, ...]) -> Rows:
    """What clients whose update counts keep."""
    found = {"eta": update.eta, "lam": update.lam, **{f"solver.{name}": value for name, value in update.carry.items()}}
    return {name: found[name][update.ok] for name in names}


def finish(
    method: Method, server: ServerState, totals: Totals, active: Tensor, counted: Tensor
) -> tuple[ServerState, Info]:
    """Line 3, from the sums over the clients that count."""
    eta_sum = server.eta_sum + totals.eta
    lam_g, shortened = admm.server_update(method, server.lam_g, server.prior, eta_sum, totals, len(counted))
    took_part = torch.zeros_like(counted).index_fill(0, active, True)
    moved = float((lam_g - server.lam_g).norm())
    info = Info(counted, took_part & ~counted, shortened, admm.residual(totals), moved)
    start = None if totals.count else server.start
    return ServerState(server.prior, lam_g, eta_sum, server.round + 1, start), info


def scheduled(method: Method, schedule: Schedule, round: int, rounds: int) -> Method:
    """The method of a round: the learning rate times 1, or ½(1 + cos(π·round/rounds))."""
    if schedule not in ("constant", "cosine"):
        raise InputError(f"schedule = {schedule!r}: choose constant or cosine.")
    if schedule == "constant":
        return method
    assert isinstance(method.solver, Stepper)
    return replace(method, solver=method.solver.scaled((1 + math.cos(math.pi * round / rounds)) / 2))
