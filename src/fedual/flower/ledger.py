"""The server's books: its state, and for every client which round of it counted last; one file, replaced as a whole.

A dual moves only when the server says that it counted (its *ack*), and the server says so only after this file is on
disk: so whoever is killed, and whenever, every round of every client counts once or not at all.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedual.admm import Info, Method, Totals
from fedual.duals import Natural, Zero
from fedual.errors import DataError, InputError
from fedual.families import finite, kl
from fedual.flower.payload import decode
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


@dataclass
class Ledger:
    """The server of an experiment.

    Args:
        server: λ_0, λ_g, Σ_k η_k and the round.
        acks: For each client the nonce of the last round of it that counted.
        numbers: For each client its number, in the order in which they came.
        secrets: For each client the digest of the secret that it showed first.
        forgotten: Clients that left for good.
        typical: The median KL(q_k ‖ q_g) of the last round with an update that counted.
    """

    server: ServerState
    acks: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    typical: float | None = None

    def save(self, path: Path) -> None:
        """Replace the file, durably."""
        meta = {
            "round": self.server.round,
            "moved": self.server.moved,
            "acks": self.acks,
            "numbers": self.numbers,
            "secrets": self.secrets,
            "forgotten": sorted(self.forgotten),
            "typical": self.typical,
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
        server = ServerState(**{"start": None, **tensors}, round=meta["round"], moved=meta["moved"])
        rest = {key: meta[key] for key in ("acks", "numbers", "secrets", "typical")}
        return cls(server, forgotten=set(meta["forgotten"]), **rest)

    def admit(self, client: str, secret: str) -> str | None:
        """Take a client in, or say why not; one that was here before must know its secret."""
        if client in self.forgotten:
            return "it was forgotten: re-admit it"
        if self.secrets.setdefault(client, secret) != secret:
            return "another site has this id, or it lost its state: if so, re-admit it"
        self.numbers.setdefault(client, len(self.numbers))
        return None

    def close(
        self, method: Method, replies: Sequence[Reply], asked: Sequence[str], nonce: str, ratio: float | None
    ) -> tuple[Info, list[str], dict[str, str]]:
        """Line 3 with the replies that hold; whose counted, and why others' did not.

        Args:
            method: Of this round.
            replies: What came.
            asked: The clients of this round.
            nonce: Of this round.
            ratio: An update counts only if its KL(q_k ‖ q_g) is at most this many times the median; None is no limit.
        """
        refused: dict[str, str] = {}
        held: dict[str, Totals] = {}
        sizes: dict[str, float] = {}
        for reply in replies:
            try:
                held[reply.client], sizes[reply.client] = self._judge(method, reply, nonce)
            except InputError as error:
                refused[reply.client] = str(error)
        middle = statistics.median(sizes.values()) if len(sizes) > 2 else self.typical
        for client, size in sizes.items():
            if ratio is not None and middle is not None and size > ratio * middle:
                refused[client] = f"its update is too large: KL to q_g {size:.3g}, where {middle:.3g} is usual"
                del held[client]
        if held:
            self.typical = statistics.median(sizes[client] for client in held)
        counted = sorted(held, key=self.numbers.__getitem__)
        totals = Totals()
        for client in counted:  # whoever came first, the same sum
            totals = totals.plus(held[client])
        rows = lambda clients: torch.tensor([self.numbers[client] for client in clients], dtype=torch.int64)
        mask = torch.zeros(len(self.numbers), dtype=torch.bool).index_fill(0, rows(counted), True)
        self.server, info = finish(method, self.server, totals, rows(asked), mask)
        self.acks |= dict.fromkeys(counted, nonce)
        return info, counted, refused

    def recount(self, shares: Mapping[str, Tensor]) -> None:
        """Take Σ_k η_k anew from the clients that still have theirs; the acks of all others are void."""
        total = torch.zeros_like(self.server.eta_sum)
        for client in sorted(shares, key=self.numbers.__getitem__):
            try:
                _check("dual", shares[client], total)
            except InputError as error:
                raise InputError(f"Client {client} cannot be counted anew: {error}.") from None
            total += shares[client]
        self.server = self.server._replace(eta_sum=total)
        self.acks = {client: ack for client, ack in self.acks.items() if client in shares}

    def _judge(self, method: Method, reply: Reply, nonce: str) -> tuple[Totals, float]:
        """A client's part of the sums, and the size of its update; refused with a reason."""
        lam_g, given = self.server.lam_g, dict(reply.tensors)
        if reply.nonce != nonce:
            raise InputError("its reply is to another attempt at a round")
        if not 0 < reply.examples < math.inf:
            raise InputError(f"it has {reply.examples} examples")
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
        gap = lam - lam_g
        weight = reply.examples if method.server.weighted else 1.0
        before, change = own.get("before"), own.get("eta_change")
        if isinstance(method.dual, Natural):
            change = gap * method.dual.gamma
        totals = Totals(
            1,
            weight,
            weight * lam,
            0.0 if before is None else weight * before,
            0.0 if change is None else change,
            float(gap.square().sum()),
        )
        return totals, float(kl(method.family, lam, lam_g))


def _check(name: str, value: Any, like: Tensor) -> None:
    if value is None:
        raise InputError(f"it sent no {name}")
    if value.shape != like.shape or value.dtype != like.dtype:
        shapes = f"{value.dtype} {tuple(value.shape)}, not {like.dtype} {tuple(like.shape)}"
        raise InputError(f"its {name} is {shapes}")
    if not finite(value):
        raise InputError(f"its {name} contains NaN or infinity")
