"""The server's ledger: its state, and for every client which of its rounds counted last, in one file.

A client changes its dual only after the server has said that the round counted (its *ack*), and the server says so
only after this file is on disk. Whichever process is killed, and whenever, every round of every client counts once or
not at all.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import torch
from torch import Tensor

from fedual.algorithm import Guards, Info, Method, Natural, ServerState, Totals, Upload, Zero, server_step, total
from fedual.calibration import Calibration, Fold
from fedual.errors import DataError, InputError
from fedual.families import finite, inner
from fedual.flower.payload import decode
from fedual.flower.wire import brief
from fedual.networks.targets import Sums, Targets, pooled
from fedual.rundir.atomic import PRIVATE, store
from fedual.rundir.checksum import is_sealed, parse, seal, verify

FORMAT, UNSEALED = "fedual-ledger-2", "fedual-ledger-1"
"""Ledgers of the first format have no checksum."""


class Reply(NamedTuple):
    """A client's reply as it was sent."""

    client: str
    nonce: str
    payload: str
    tensors: Mapping[str, Tensor]
    examples: float
    guards: Guards = Guards()


class Badge(NamedTuple):
    """By what a site is known."""

    key: str  # public, of its identity (`fedual.flower.identity`)
    node: str  # a digest of its node's own key at Flower


@dataclass
class Ledger:
    """The state of an experiment's server.

    Args:
        server: λ_0, λ_g, Σ_k η_k and the round.
        acks: For each client the nonce of its last round that counted.
        numbers: For each client its number, in the order of admission.
        badges: For each client its public key, and a digest of the key of the node at which it was last.
        examples: For each client its number of examples.
        forgotten: Clients that left for good.
        sums: For each client the sums of its targets, where a regression is standardised.
        targets: Mean and sd of the targets of the first round's members, with which all rounds are trained.
        fold: What sites leave out of training, decided with the members of the first round.
        calibration: Of the posterior after the round `calibrated`.
        calibrated: The round after which calibration was last tried, with or without an answer.
        noise: The variance of the noise that was learnt after the last round, in units of the targets' variance.
        usual: The largest median size of a round's updates so far.
        id: A random name of this ledger.
        starts: How often a server has opened it.
        run: The digest of the run's config; None if an earlier version began the run.
    """

    server: ServerState
    acks: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    badges: dict[str, Badge] = field(default_factory=dict)
    examples: dict[str, float] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    sums: dict[str, Sums] = field(default_factory=dict)
    targets: Targets | None = None
    fold: Fold | None = None
    calibration: Calibration | None = None
    calibrated: int | None = None
    noise: Tensor | None = None
    usual: float = 0.0
    id: str = field(default_factory=lambda: token_hex(4))
    starts: int = 0
    run: str | None = None

    def save(self, path: Path) -> None:
        """Replace the file; it is on disk when this returns."""
        meta = {
            "round": self.server.round,
            "moved": self.server.moved,
            "acks": self.acks,
            "numbers": self.numbers,
            "badges": self.badges,
            "examples": self.examples,
            "forgotten": sorted(self.forgotten),
            "sums": {client: sums.to_dict() for client, sums in self.sums.items()},
            "targets": None if self.targets is None else self.targets.to_dict(),
            "noise": None if self.noise is None else self.noise.tolist(),
            "fold": self.fold,
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "calibrated": self.calibrated,
            "usual": self.usual,
            "id": self.id,
            "starts": self.starts,
        }
        tensors = {
            name: value.cpu().clone(memory_format=torch.contiguous_format)
            for name, value in self.server.tensors().items()
        }
        about = {"format": FORMAT, "ledger": json.dumps(meta)} | ({} if self.run is None else {"run": self.run})
        content = seal(tensors, about)
        store(path, content, "the last round is intact", PRIVATE)

    @classmethod
    def load(cls, path: Path, like: ServerState, run: str | None = None) -> "Ledger":
        """Read what `save` wrote.

        Args:
            path: The file.
            like: The server at the start of this run: its tensors must have the same shapes, and its prior the same
                values.
            run: The digest of the run's config, which the file must have, if it is known.

        Raises:
            DataError: The file cannot be read or is damaged.
            InputError: The file belongs to another model, method or prior.
        """
        try:
            content = path.read_bytes()
            about, tensors = parse(content)
            meta = json.loads(about["ledger"])
            if (about["format"], is_sealed(content)) not in ((FORMAT, True), (UNSEALED, False)):
                raise ValueError(f"its format is {about['format']}")
        except (OSError, KeyError, ValueError) as error:
            raise DataError(f"{path} is not the checkpoint of a server ({error}): restore the file.") from error
        if about["format"] == FORMAT and not verify(content):
            raise DataError(f"{path} is damaged (its checksum is wrong): restore the file.")
        if run is not None and about.get("run") != run:
            raise InputError(f"{path} belongs to a run with another config: restore the file of this run.")
        shapes = lambda named: {name: (value.shape, value.dtype) for name, value in named.items()}
        if shapes(tensors) != shapes(like.tensors()):
            raise InputError(f"{path} belongs to another model or method: choose another experiment or folder.")
        if not torch.equal(tensors["prior"], like.prior):
            raise InputError(f"{path} belongs to a run with another prior: choose another experiment or folder.")
        server = ServerState(**{"start": None, **tensors}, round=meta["round"], moved=meta["moved"])
        rest = {key: meta[key] for key in ("acks", "numbers", "usual", "id", "starts")}
        rest["badges"] = {client: Badge(*badge) for client, badge in meta.get("badges", {}).items()}
        rest |= {"examples": meta.get("examples", {}), "targets": Targets.from_dict(meta.get("targets"))}
        rest["noise"] = None if meta.get("noise") is None else torch.tensor(meta["noise"], dtype=torch.float64)
        rest |= {"fold": Fold(*meta["fold"]) if meta.get("fold") else None, "calibrated": meta.get("calibrated")}
        rest["calibration"] = Calibration.from_dict(meta.get("calibration"))
        sums = {client: Sums.from_dict(content) for client, content in meta.get("sums", {}).items()}
        return cls(server, forgotten=set(meta["forgotten"]), sums=sums, run=about.get("run"), **rest)

    @property
    def nonce(self) -> str:
        """The unique name of this attempt at the next round; clients can tell which of two attempts is older."""
        return f"{self.id}.{self.starts}.{self.server.round + 1}"

    @property
    def members(self) -> list[str]:
        """The clients that have not left for good, in the order of their numbers."""
        return [client for client in self.numbers if client not in self.forgotten]

    @property
    def total(self) -> float:
        """N, the examples on which the members train."""
        known = [self.examples.get(client, 0.0) for client in self.members]
        return sum(known) - (0 if self.fold is None else sum(self.fold.size(int(size)) for size in known))

    def standardise(self) -> None:
        """Fix the unit of the targets before the first round, from the sums of the members at that time."""
        if self.targets is None and self.server.round == 0:
            self.targets = pooled([self.sums[client] for client in self.members if client in self.sums])

    def stranger(self, client: str, badge: Badge, given: str | None = None) -> str | None:
        """Why a site may not take part as this client, by its keys; None if it may.

        Args:
            client: The client's id.
            badge: What the site showed. A client may come to another node: its own key proves who it is.
            given: The public key that the operator gave for this client, which takes the place of an earlier one.
        """
        if client in self.forgotten:
            return "it was forgotten: re-admit it"
        expected = given or (self.badges[client].key if client in self.badges else None)
        if expected is None and client in self.acks:
            return "an earlier fedual wrote this ledger, without its key: give it once, in Policy(known=…)"
        if expected not in (None, badge.key):
            return "another site has this id, or it lost its state and its key: if so, re-admit it"
        for other, its in self.badges.items():
            if other != client and badge.key == its.key:
                return f"its key is that of client {other}: each client has a key of its own"
            if other != client and badge.node == its.node:
                return f"its node takes part as client {other}: one node is one client"
        return None

    def admit(self, client: str, badge: Badge, examples: float | None = None, sums: Sums | None = None) -> str | None:
        """Admit a client that is no stranger, or return why it is refused."""
        if sums is not None:
            outputs, known = len(sums.total), {len(other.total) for other in self.sums.values()}
            if known and outputs not in known:
                return f"its targets have {outputs} outputs, those of others {known.pop()}"
            self.sums[client] = sums
        self.numbers.setdefault(client, len(self.numbers))
        if examples is not None:
            self.examples[client] = examples
        self.badges[client] = badge
        return None

    def close(
        self, method: Method, replies: Sequence[Reply], nonce: str, ratio: float | None
    ) -> tuple[Info, list[str], dict[str, str]]:
        """Run line 3 with the replies that are valid; return its diagnostics, who counted, and why others did not.

        The size of an update is ⟨λ_k − λ_g, μ_k − μ_g⟩ = KL(q_k ‖ q_g) + KL(q_g ‖ q_k), because in one direction alone
        a precision that is a million times too large costs only a few nats. It is compared with the largest median of
        any round so far: in a federation that has converged updates are tiny, but that of a new client is not.

        Args:
            method: The method of this round.
            replies: The replies.
            nonce: The name of this attempt at the round.
            ratio: An update counts only if its size is at most this many times the usual one; None is no limit.
        """
        uploads, sizes, refused = dict[str, Upload](), dict[str, float](), dict[str, str]()
        broadcast = self.server.broadcast(method.dual, len(self.members))
        mu_g = method.family.expectation(broadcast.lam_g)
        for reply in replies:
            try:
                uploads[reply.client], sizes[reply.client] = self._checked(method, reply, nonce, broadcast.lam_g, mu_g)
            except (InputError, RuntimeError) as error:  # linear algebra fails with a RuntimeError
                refused[reply.client] = brief(error)
        # the lower median, so that one of two cannot set the scale; a single update is compared with earlier rounds
        median = lambda: statistics.median_low(sizes[client] for client in uploads)
        usual = max(self.usual, median()) if len(uploads) > 2 else self.usual
        for client in list(uploads):
            if ratio is not None and usual > 0 and sizes[client] > ratio * usual:
                refused[client] = f"its update is too large: of size {sizes[client]:.3g}, where {usual:.3g} is usual"
                del uploads[client]
        if uploads:
            self.usual = max(self.usual, median())
        counted = sorted(uploads, key=self.numbers.__getitem__)
        members = self.members
        totals = Totals.none(len(members))
        for client in counted:  # in the order of their numbers, so that the sum does not depend on who came first
            row = torch.tensor([members.index(client)])
            totals = totals.plus(total(method, broadcast, uploads.pop(client), row, len(members)))
        self.server, info = server_step(method, self.server, totals)
        self.acks |= dict.fromkeys(counted, nonce)
        return info, counted, refused

    def recount(self, shares: Mapping[str, Tensor]) -> None:
        """Compute Σ_k η_k anew from the clients that still have their dual; all others start again.

        Args:
            shares: η_k of these clients.

        Raises:
            InputError: A share is not a dual; nothing was changed.
        """
        eta_sum = torch.zeros_like(self.server.eta_sum)
        for client in sorted(shares, key=self.numbers.__getitem__):
            try:
                _require("dual", shares[client], eta_sum)
            except InputError as error:
                raise InputError(
                    f"Σ η cannot be counted anew with client {client}, because {error}: forget it, too."
                ) from None
            eta_sum += shares[client]
        self.server = self.server._replace(eta_sum=eta_sum)
        for client in self.acks.keys() - shares.keys():
            self.release(client)

    def release(self, client: str) -> None:
        """Let a client start again; its dual must not be part of Σ_k η_k any more."""
        self.acks.pop(client, None)
        self.forgotten.discard(client)

    def _checked(self, method: Method, reply: Reply, nonce: str, lam_g: Tensor, mu_g: Tensor) -> tuple[Upload, float]:
        """The upload in a reply, and its size; an InputError says why it is refused."""
        rest = dict(reply.tensors)
        if reply.nonce != nonce:
            raise InputError("its reply is to another attempt at a round")
        expected = [] if isinstance(method.dual, Natural | Zero) else ["eta_change"]
        expected += ["before"] * method.server.remembers + ["lam"] * (reply.payload == "full")
        sent = {name: _require(name, rest.pop(name, None), lam_g) for name in expected}
        if reply.payload == "full":
            if rest:
                raise InputError(f"it sent {', '.join(sorted(rest))}, for which nobody asked")
            lam = sent["lam"]
        else:
            lam = lam_g + decode(rest, reply.payload, lam_g)
        if not method.family.inside(lam[None]):
            raise InputError(f"its λ is outside the domain of {method.family}: {method.family.domain}")
        size = float(inner(lam - lam_g, method.family.expectation(lam) - mu_g))
        if not math.isfinite(size):
            raise InputError("its update is too large: its size is not finite")
        stack = lambda name: sent[name][None] if name in sent else None
        examples = torch.tensor([reply.examples], dtype=torch.float64)
        guards = reply.guards.each(lambda fraction: torch.tensor([fraction]))
        upload = Upload(torch.tensor([True]), lam[None], stack("eta_change"), stack("before"), examples, guards)
        return upload, size


def _require(name: str, value: Tensor | None, like: Tensor) -> Tensor:
    """A tensor that a client sent, if it has the shape and the type of `like` and finite values."""
    if value is None:
        raise InputError(f"it sent no {name}")
    if value.shape != like.shape or value.dtype != like.dtype:
        shapes = f"{value.dtype} {tuple(value.shape)}, not {like.dtype} {tuple(like.shape)}"
        raise InputError(f"its {name} is {shapes}")
    if not finite(value):
        raise InputError(f"its {name} contains NaN or infinity")
    return value
