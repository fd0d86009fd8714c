"""A round seen from both sides: what the server carries, what a client keeps, and Eq. 15–17 between them.

The simulator and the deployment on Flower stand on these functions: there is one implementation of every method.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor

from fedual import admm
from fedual.admm import Info, Update
from fedual.contracts import Method, Subproblem, Totals
from fedual.duals import Zero
from fedual.errors import InputError, require_positive
from fedual.families import Gaussian, is_point
from fedual.solvers import Stepper
from fedual.solvers.stochastic import Schedule

REST, EACH = 10, 600
"""The rate of a "harmonic" schedule is halved after so many rounds, or one for each 600 examples if those are more."""
Rows = dict[str, Tensor]
"""Named tensors that a client keeps from round to round; with a leading axis, those of several clients."""


class ServerState(NamedTuple):
    """The server's side of `admm.State`."""

    prior: Tensor  # λ_0, (R, P)
    lam_g: Tensor
    eta_sum: Tensor  # Σ_k η_k over all clients
    round: int
    start: Tensor | None  # (P,), the network's initialisation: clients start there until the server has moved
    moved: bool
    ahead: Tensor | None = None  # what clients are given, where that is not λ_g

    @property
    def given(self) -> Tensor:
        """What clients are given in the place of λ_g."""
        return self.lam_g if self.ahead is None else self.ahead

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, but for the two numbers."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}


def begin(method: Method, start: Tensor | None, prior: Tensor | None = None) -> ServerState:
    """The server before the first round.

    Args:
        method: What will be run.
        start: θ of the network as it was initialised, `(P,)`.
        prior: λ_0 `(R, P)`; N(0, I/δ) unless given.
    """
    if prior is None:
        assert start is not None
        family = cast(Gaussian, method.family)
        prior = family.natural(torch.zeros_like(start), None if is_point(family) else method.delta)
    lam_g = admm.server_start(method, prior, start)
    return ServerState(prior, lam_g, torch.zeros_like(prior), 0, start, False, admm.ahead(method, lam_g, lam_g))


def row(method: Method, first: Tensor) -> Rows:
    """What a client keeps that has not taken part yet: its dual is zero; `first` is the first λ_g, `(R, P)`.

    It holds what the method needs and no more: η_k unless there is no dual, λ_k where the server asks for its change,
    and what the solver carries.
    """
    rows: Rows = {} if isinstance(method.dual, Zero) else {"eta": torch.zeros_like(first)}
    if method.server.remembers:
        rows["lam"] = first
    carried = method.solver.init(method.family, first, 1)
    return rows | {f"solver.{name}": value[0] for name, value in carried.items()}


def problem_of(method: Method, server: ServerState, losses: Any, rows: Rows) -> Subproblem:
    """Eq. 15 for the clients of `losses`, whose rows these are."""
    rows = {name: value.to(server.lam_g.device) for name, value in rows.items()}
    eta = rows.get("eta", torch.zeros_like(server.lam_g).expand(len(losses), -1, -1))
    carry = {name.removeprefix("solver."): value for name, value in rows.items() if name.startswith("solver.")}
    return admm.subproblem(method, losses, eta, server.given, carry, None if server.moved else server.start)


def rows_of(update: Update, names: tuple[str, ...]) -> Rows:
    """What clients whose update counts keep."""
    found = {"eta": update.eta, "lam": update.lam, **{f"solver.{name}": value for name, value in update.carry.items()}}
    return {name: found[name][update.rows] for name in names}


def finish(
    method: Method, server: ServerState, totals: Totals, active: Tensor, counted: Tensor
) -> tuple[ServerState, Info]:
    """Line 3, from the sums over the clients that count; `counted` is a mask over all clients."""
    eta_sum = server.eta_sum + totals.eta
    lam_g, shortened = admm.server_update(method, server.lam_g, server.prior, eta_sum, totals, len(counted))
    took_part = torch.zeros_like(counted).index_fill(0, active, True)
    change = float((lam_g - server.lam_g).norm())
    info = Info(counted, took_part & ~counted, shortened, totals.residual, change, totals.guards)
    ahead = admm.ahead(method, server.lam_g if server.moved else lam_g, lam_g)
    moved = server.moved or totals.count > 0
    return server._replace(lam_g=lam_g, eta_sum=eta_sum, round=server.round + 1, moved=moved, ahead=ahead), info


def scheduled(
    method: Method, schedule: Schedule, round: int, rounds: int, decay: float = 1.0, examples: float = 0.0
) -> Method:
    """The method of round r = 0, 1, …: its learning rate times decayʳ, and the factor of the schedule.

    "cosine" is ½(1 + cos(πr/rounds)); "harmonic", which need not know how many rounds there will be, 1/(1 + r/R) with
    R = max(10, N/600): from few examples a network has soon learnt all that does not overfit.
    """
    if schedule not in get_args(Schedule):
        raise InputError(f"schedule = {schedule!r}: choose {', '.join(get_args(Schedule))}.")
    require_positive("decay", decay, most=1.0)
    rest = max(REST, examples / EACH)
    factors = {"cosine": (1 + math.cos(math.pi * round / rounds)) / 2, "harmonic": 1 / (1 + round / rest)}
    factor = decay**round * factors.get(schedule, 1.0)
    if factor == 1:
        return method
    assert isinstance(method.solver, Stepper)
    return replace(method, solver=method.solver.scaled(factor))
