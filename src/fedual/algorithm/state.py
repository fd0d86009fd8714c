"""The data of a round: states of the server and of clients, broadcasts, uploads and diagnostics."""

from typing import NamedTuple, cast

from torch import Tensor

from fedual.algorithm.method import UNGUARDED, Carry, Dual, Guards, select

CARRIED = "solver."
"""The prefix of what a solver carries, in the rows that a client keeps."""


class ServerState(NamedTuple):
    """What the server carries from round to round."""

    prior: Tensor  # λ_0, (R, P)
    lam_g: Tensor
    eta_sum: Tensor  # Σ_k η_k over all clients
    round: int = 0
    start: Tensor | None = None  # (P,), the mean at which iterative solvers start until λ_g has moved
    moved: bool = False  # True once an update has counted
    ahead: Tensor | None = None  # the extrapolated λ_g, where the method has one

    def broadcast(self, dual: Dual, num_clients: int) -> "Broadcast":
        """What clients are sent; K counts those that do not take part, too."""
        eta_mean = self.eta_sum / num_clients if dual.centred else None
        return Broadcast(self.lam_g if self.ahead is None else self.ahead, None if self.moved else self.start, eta_mean)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, for files."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}


class Broadcast(NamedTuple):
    """What the server sends to clients."""

    lam_g: Tensor  # (R, P)
    start: Tensor | None = None  # (P,), where iterative solvers start in the first round
    eta_mean: Tensor | None = None  # mean_j η_j over all clients, (R, P), where the dual asks for it


class ClientState(NamedTuple):
    """What clients keep from round to round, with a leading client axis; None where the method needs none of it."""

    eta: Tensor | None  # η_k, (K, R, P)
    lam: Tensor | None  # λ_k, (K, R, P)
    carry: Carry

    def select(self, clients: Tensor) -> "ClientState":
        """The states of some of the clients."""
        pick = lambda value: None if value is None else value[clients]
        return ClientState(pick(self.eta), pick(self.lam), select(self.carry, clients))

    def replaced(self, clients: Tensor, new: "ClientState") -> "ClientState":
        """With the states of some clients replaced."""
        put = lambda old, value: None if old is None else old.index_copy(0, clients, value)
        carry = {name: put(old, new.carry[name]) for name, old in self.carry.items()}
        return ClientState(put(self.eta, new.eta), put(self.lam, new.lam), cast(Carry, carry))

    def rows(self) -> dict[str, Tensor]:
        """The tensors by name, for stores and files."""
        kept = {"eta": self.eta, "lam": self.lam}
        rows = {name: value for name, value in kept.items() if value is not None}
        return rows | {CARRIED + name: value for name, value in self.carry.items()}

    @classmethod
    def from_rows(cls, rows: dict[str, Tensor]) -> "ClientState":
        """The inverse of `rows`."""
        carry = {name.removeprefix(CARRIED): value for name, value in rows.items() if name.startswith(CARRIED)}
        return cls(rows.get("eta"), rows.get("lam"), carry)


class Upload(NamedTuple):
    """What clients send, with a leading client axis; rows that are not ok are undefined."""

    ok: Tensor  # (K,) bool: the update is inside the domain
    lam: Tensor  # λ_k, (K, R, P)
    eta_change: Tensor | None  # the change of η_k; None if the server infers it from λ_k
    before: Tensor | None  # the previous λ_k, if the server needs it
    num_examples: Tensor  # N_k, (K,)
    guards: Guards = UNGUARDED


class Info(NamedTuple):
    """Diagnostics of a round; nothing here is carried on."""

    counted: Tensor  # (K,) bool: took part, and its update was used
    refused: Tensor  # (K,) bool: took part, and its update left the domain
    shortened: float  # fraction of the server's step that was taken: 1 unless it would have left the domain
    primal: float  # ‖λ_k − λ_g‖, root mean square over the counted clients
    dual: float  # ‖change of λ_g‖
    guards: Guards = UNGUARDED  # means over the counted clients


class State(NamedTuple):
    """A whole federation in memory: the server, and every client."""

    server: ServerState
    clients: ClientState

    @property
    def lam_g(self) -> Tensor:
        """λ_g, `(R, P)`."""
        return self.server.lam_g

    @property
    def lam(self) -> Tensor:
        """Every λ_k, `(K, R, P)`."""
        return cast(Tensor, self.clients.lam)

    @property
    def eta(self) -> Tensor:
        """Every η_k, `(K, R, P)`."""
        return cast(Tensor, self.clients.eta)
