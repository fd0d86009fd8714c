"""The server's books: its state, and for every client which round of it counted last; one file, replaced as a whole.

A dual moves only when the server says that it counted (its *ack*), and the server says so only after this file is on
disk: so whoever is killed, and whenever, every round of every client counts once or not at all.
"""

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedual.admm import Info
from fedual.contracts import UNGUARDED, Guards, Method, Totals, counts
from fedual.duals import Natural, Zero
from fedual.errors import DataError, InputError
from fedual.families import finite, inner
from fedual.flower.payload import decode
from fedual.flower.wire import brief
from fedual.rounds import ServerState, finish
from fedual.runs.files import replace, writing

FORMAT = "fedual-ledger-1"


class Reply(NamedTuple):
    """What came back from a client, as it was sent."""

    client: str
    nonce: str
    payload: str
    tensors: Mapping[str, Tensor]
    examples: float
    guards: Guards = UNGUARDED


@dataclass
class Ledger:
    """The server of an experiment.

    Args:
        server: λ_0, λ_g, Σ_k η_k and the round.
        acks: For each client the nonce of the last round of it that counted.
        numbers: For each client its number, in the order in which they came.
        secrets: For each client the digest of the secret that it showed first.
        examples: For each client the number of its examples, where the method asks for it.
        forgotten: Clients that left for good.
        usual: The largest median of a round so far of the updates' sizes.
        id: Of these books, whatever the experiment is called.
        starts: How often a server began to work with them.
    """

    server: ServerState
    acks: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    examples: dict[str, float] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    usual: float = 0.0
    id: str = field(default_factory=lambda: token_hex(4))
    starts: int = 0

    def save(self, path: Path) -> None:
        """Replace the file, durably."""
        meta = {
            "round": self.server.round,
            "moved": self.server.moved,
            "acks": self.acks,
            "numbers": self.numbers,
            "secrets": self.secrets,
            "examples": self.examples,
            "forgotten": sorted(self.forgotten),
            "usual": self.usual,
            "id": self.id,
            "starts": self.starts,
        }
        tensors = {
            name: value.cpu().clone(memory_format=torch.contiguous_format)
            for name, value in self.server.tensors().items()
        }
        content = save(tensors, {"format": FORMAT, "ledger": json.dumps(meta)})
        with writing(path, len(content), "the last round is intact"):
            replace(path, content)

    @classmethod
    def load(cls, path: Path, like: ServerState) -> "Ledger":
        """Read what `save` wrote; it must have the tensors of `like`."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                meta = json.loads(about["ledger"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["format"] != FORMAT:
                raise KeyError(about["format"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise DataError(f"{path} is no checkpoint of a server ({error}): restore the file.") from error
        shapes = lambda named: {name: (value.shape, value.dtype) for name, value in named.items()}
        if shapes(tensors) != shapes(like.tensors()):
            raise InputError(f"{path} is of another model or method: choose another experiment or folder.")
        if not torch.equal(tensors["prior"], like.prior):
            raise InputError(f"{path} is of a run with another prior: choose another experiment or folder.")
        server = ServerState(**{"start": None, **tensors}, round=meta["round"], moved=meta["moved"])
        rest = {key: meta[key] for key in ("acks", "numbers", "secrets", "usual", "id", "starts")}
        return cls(server, forgotten=set(meta["forgotten"]), examples=meta.get("examples", {}), **rest)

    @property
    def nonce(self) -> str:
        """The name of this attempt at the next round, never used for another one, from which clients tell its age."""
        return f"{self.id}.{self.starts}.{self.server.round + 1}"

    @property
    def members(self) -> list[str]:
        """The clients that did not leave for good, by their numbers."""
        return [client for client in self.numbers if client not in self.forgotten]

    @property
    def total(self) -> float:
        """N, of the members."""
        return sum(self.examples.get(client, 0.0) for client in self.members)

    def admit(self, client: str, secret: str, examples: float | None = None) -> str | None:
        """Take a client in, or say why not; one that was here before must know its secret."""
        if client in self.forgotten:
            return "it was forgotten: re-admit it"
        if self.secrets.setdefault(client, secret) != secret:
            return "another site has this id, or it lost its state: if so, re-admit it"
        self.numbers.setdefault(client, len(self.numbers))
        if examples is not None:
            self.examples[client] = examples
        return None

    def close(
        self, method: Method, replies: Sequence[Reply], asked: Collection[str], nonce: str, ratio: float | None
    ) -> tuple[Info, list[str], dict[str, str]]:
        """Line 3 with the replies that hold; whose counted, and why others' did not.

        The size of an update is ⟨λ_k − λ_g, μ_k − μ_g⟩ = KL(q_k ‖ q_g) + KL(q_g ‖ q_k): in one direction alone, a
        precision a million times too large is a few nats. It is compared with the largest median of a round so far,
        since a federation that has converged moves by nothing, and whoever joins it does not.

        Args:
            method: Of this round.
            replies: What came.
            asked: The clients of this round.
            nonce: Of this round.
            ratio: An update counts only if its size is at most this many times the usual one; None is no limit.
        """
        refused: dict[str, str] = {}
        held: dict[str, Update] = {}
        mu_g = method.family.expectation(self.server.given)
        for reply in replies:
            try:
                held[reply.client] = self._judge(method, reply, nonce, mu_g)
            except (InputError, RuntimeError) as error:  # the second where linear algebra fails
                refused[reply.client] = brief(error)
        # of two, the smaller; of one, it is compared with earlier rounds
        median = lambda: statistics.median_low(update.size for update in held.values())
        usual = max(self.usual, median()) if len(held) > 2 else self.usual
        for client, update in list(held.items()):
            if ratio is not None and usual > 0 and update.size > ratio * usual:
                refused[client] = f"its update is too large: of size {update.size:.3g}, where {usual:.3g} is usual"
                del held[client]
        if held:
            self.usual = max(self.usual, median())
        counted = sorted(held, key=self.numbers.__getitem__)
        totals = Totals()
        for client in counted:  # whoever came first, the same sum
            totals = totals.plus(self._totals(method, held.pop(client)))
        place = {client: row for row, client in enumerate(self.members)}
        rows = lambda clients: torch.tensor([place[client] for client in clients], dtype=torch.int64)
        mask = torch.zeros(len(place), dtype=torch.bool).index_fill(0, rows(counted), True)
        self.server, info = finish(method, self.server, totals, rows(asked), mask)
        self.acks |= dict.fromkeys(counted, nonce)
        return info, counted, refused

    def recount(self, shares: Mapping[str, Tensor]) -> None:
        """Take Σ_k η_k anew from the clients that still have theirs; all others start anew, if they come.

        Raises:
            InputError: A share that is no dual; nothing changed.
        """
        total = torch.zeros_like(self.server.eta_sum)
        for client in sorted(shares, key=self.numbers.__getitem__):
            try:
                _check("dual", shares[client], total)
            except InputError as error:
                raise InputError(
                    f"Σ η cannot be counted anew with client {client}, for {error}: forget it, too."
                ) from None
            total += shares[client]
        self.server = self.server._replace(eta_sum=total)
        for client in self.acks.keys() - shares.keys():
            self.release(client)

    def release(self, client: str) -> None:
        """Let a client start anew, whoever it is: nothing of it may be left in Σ_k η_k."""
        self.acks.pop(client, None)
        self.secrets.pop(client, None)
        self.forgotten.discard(client)

    def _judge(self, method: Method, reply: Reply, nonce: str, mu_g: Tensor) -> "Update":
        """What a reply holds; refused with a reason."""
        lam_g, given = self.server.given, dict(reply.tensors)
        if reply.nonce != nonce:
            raise InputError("its reply is to another attempt at a round")
        expected = [] if isinstance(method.dual, Natural | Zero) else ["eta_change"]
        expected += ["before"] * method.server.remembers + ["lam"] * (reply.payload == "full")
        own = {name: given.pop(name, None) for name in expected}
        for name, value in own.items():
            _check(name, value, lam_g)
        if reply.payload == "full":
            if given:
                raise InputError(f"it sent {', '.join(sorted(given))}, for which nobody asked")
            lam = own["lam"]
        else:
            lam = lam_g + decode(given, reply.payload, lam_g)
        assert lam is not None
        if not method.family.inside(lam[None]):
            raise InputError(f"its λ is outside the domain of {method.family}: {method.family.domain}")
        size = float(inner(lam - lam_g, method.family.expectation(lam) - mu_g))
        if not math.isfinite(size):
            raise InputError("its update is too large: its size is not finite")
        return Update(lam, own.get("before"), own.get("eta_change"), reply.examples, size, reply.guards)

    def _totals(self, method: Method, update: "Update") -> Totals:
        """A client's part of the sums."""
        gap = update.lam - self.server.given
        weight = counts(method, update.examples)
        step = weight if method.unit else 1.0
        change = gap * (method.dual.gamma * step) if isinstance(method.dual, Natural) else update.change
        return Totals(
            1,
            weight,
            weight * update.lam,
            0.0 if update.before is None else weight * update.before,
            0.0 if change is None else change,
            float(gap.square().sum()),
            update.guards,
        )


class Update(NamedTuple):
    """A reply that holds, but may be too large."""

    lam: Tensor
    before: Tensor | None  # λ_k as it was, where the server asks for it
    change: Tensor | None  # of η_k, where the server cannot infer it
    examples: float
    size: float
    guards: Guards


def _check(name: str, value: Any, like: Tensor) -> None:
    if value is None:
        raise InputError(f"it sent no {name}")
    if value.shape != like.shape or value.dtype != like.dtype:
        shapes = f"{value.dtype} {tuple(value.shape)}, not {like.dtype} {tuple(like.shape)}"
        raise InputError(f"its {name} is {shapes}")
    if not finite(value):
        raise InputError(f"its {name} contains NaN or infinity")
