"""The server's ledger: its state, and for every client which of its rounds counted last, in one file.

A client changes its dual only after the server has said that the round counted (its *ack*), and the server says so
only after this file is on disk. Whichever process is killed, and whenever, every round of every client counts once or
not at all.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedual.algorithm import (
    ExampleWeights,
    Info,
    Method,
    ServerState,
    Totals,
    Upload,
    Zero,
    server_step,
    total,
)  # fmt: skip
from fedual.algorithm.influence import trimmed
from fedual.calibration import Calibration, Fold
from fedual.errors import InputError
from fedual.flower.handshake import Badge, stranger
from fedual.flower.updates import UNSOUND, Reply, checked, judge, require, shortened, stacked
from fedual.flower.wire import brief
from fedual.forms import misfit
from fedual.networks.targets import Sums, Targets, pooled
from fedual.parsing import loads, parsing
from fedual.rundir.atomic import PRIVATE, store
from fedual.rundir.checksum import is_sealed, parse, seal, verify
from fedual.stored import LEDGER

MOST = 3.0
"""A site counts for at most so many times the examples of the smaller half of the sites together, from three sites on.

With sites of one size that is three fifths of N. A minority can neither raise it nor take a large site's data away.
"""
WINDOW = 5
"""Rounds whose updates say what size is usual; in a federation that converges sizes fall from round to round."""
MOST_KEPT = 2**30
"""Bytes that the η_k of all sites may take if nobody asked for them: they are written in every round."""
DUALS = "eta."
"""The prefix of the η_k in the ledger's file."""
FORMAT, UNSEALED = "fedual-ledger-2", "fedual-ledger-1"
"""Ledgers of the first format have no checksum."""
NO_LEDGER, RESTORE = "is damaged, or not the checkpoint of a server", "restore the file"


class Closed(NamedTuple):
    """A round after line 3."""

    info: Info
    counted: list[str]  # in the order of their numbers
    refused: dict[str, str]  # and why
    cut: dict[str, float]  # the factors c_k < 1


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
        sizes: Sizes of the updates of the last `WINDOW` rounds, with their sites' examples.
        factors: For each client the factor by which its last update that counted was cut, where it was.
        shares: For each client its η_k as the server infers it; None if they are not kept.
        id: A random name of this ledger.
        starts: When a server opened it last, in microseconds since 1970, and later than before: what a server did that
            was restored from a backup since then is older than what it does now.
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
    sizes: list[list[tuple[float, float]]] = field(default_factory=list)
    factors: dict[str, float] = field(default_factory=dict)
    shares: dict[str, Tensor] | None = field(default_factory=dict)
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
            "sizes": self.sizes,
            "factors": self.factors,
            "keeps": self.shares is not None,
            "id": self.id,
            "starts": self.starts,
        }
        shares = {f"{DUALS}{self.numbers[client]}": eta for client, eta in (self.shares or {}).items()}
        tensors = {
            name: value.cpu().clone(memory_format=torch.contiguous_format)
            for name, value in {**self.server.tensors(), **shares}.items()
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
        with parsing(path, NO_LEDGER, RESTORE):
            content = path.read_bytes()
            about, tensors = parse(content)
            if (about["format"], is_sealed(content)) not in ((FORMAT, True), (UNSEALED, False)):
                raise ValueError(f"its format is {about['format']}")
            if about["format"] == FORMAT and not verify(content):
                raise ValueError("its checksum is wrong")
            meta = loads(about["ledger"])
            if (found := misfit(meta, LEDGER)) is not None:
                raise ValueError(found)
            clients = {number: name for name, number in meta["numbers"].items()}
            if not meta["acks"].keys() <= meta["numbers"].keys() or len(clients) < len(meta["numbers"]):
                raise ValueError("its clients do not have numbers of their own")
        if run is not None and about.get("run") != run:
            raise InputError(f"{path} belongs to a run with another config: restore the file of this run.")
        shapes = lambda named: {name: (value.shape, value.dtype) for name, value in named.items()}
        kept = {name: tensors.pop(name) for name in list(tensors) if name.startswith(DUALS)}
        if shapes(tensors) != shapes(like.tensors()):
            raise InputError(f"{path} belongs to another model or method: choose another experiment or folder.")
        if not torch.equal(tensors["prior"], like.prior):
            raise InputError(f"{path} belongs to a run with another prior: choose another experiment or folder.")
        with parsing(path, NO_LEDGER, RESTORE):
            server = ServerState(**{"start": None, **tensors}, round=meta["round"], moved=meta["moved"])
            rest = {key: meta[key] for key in ("acks", "numbers", "id", "starts")}
            # an earlier fedual kept one usual size, and no shares
            rest["sizes"] = [[tuple(pair) for pair in pairs] for pairs in meta.get("sizes", [])]
            shares = {clients[int(name.removeprefix(DUALS))]: eta for name, eta in kept.items()}
            rest |= {"factors": meta.get("factors", {}), "shares": shares if meta.get("keeps", True) else None}
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
    def trained(self) -> dict[str, float]:
        """For each member N_k without what it holds out: as it said when it joined, and as its replies must say."""
        known = {client: self.examples.get(client, 0.0) for client in self.members}
        return {
            client: size - (0 if self.fold is None else self.fold.size(int(size))) for client, size in known.items()
        }

    @property
    def counts(self) -> dict[str, float]:
        """For each member the N_k with which it counts: at most `MOST` times the smaller half of the sites together."""
        trained = self.trained
        if len(trained) < 3:
            return trained
        most = MOST * sum(sorted(trained.values())[: (len(trained) + 1) // 2])
        return {client: min(size, most) for client, size in trained.items()}

    @property
    def total(self) -> float:
        """N, the examples on which the members train, as they count."""
        return sum(self.counts.values())

    @property
    def capped(self) -> dict[str, tuple[float, float]]:
        """The members that count for fewer examples than they said: both numbers."""
        counts = self.counts
        return {client: (size, counts[client]) for client, size in self.trained.items() if counts[client] < size}

    def method_of(self, client: str, method: Method) -> Method:
        """The method that a site is sent: a site whose examples are capped gets a larger unit, w_k is N_k/unit."""
        if method.weighting is None or client not in self.capped:
            return method
        said, counted = self.capped[client]
        return replace(method, weighting=ExampleWeights(method.weighting.unit * said / counted))

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
        if given is None and client in self.acks and client not in self.badges:
            return "an earlier fedual wrote this ledger, without its key: give it once, in Policy(known=…)"
        return stranger(self.badges, client, badge, given)

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
        self, method: Method, replies: Sequence[Reply], nonce: str, largest: float | None, robust: str | None = None
    ) -> Closed:
        """Run line 3 with the replies that are valid, each cut to what `fedual.algorithm.influence` allows.

        Args:
            method: The method of this round.
            replies: The replies.
            nonce: The name of this attempt at the round.
            largest: An update that is so many times too large is refused, and not cut; None is no limit.
            robust: As in `Policy`.
        """
        members, trained, counts = self.members, self.trained, self.counts
        broadcast = self.server.broadcast(method.dual, len(members))
        uploads, refused = dict[str, Upload](), dict[str, str]()
        for reply in sorted(replies, key=lambda reply: self.numbers[reply.client]):  # so that sums do not depend on
            try:  # who came first
                upload = checked(method, reply, nonce, broadcast.lam_g, trained[reply.client])
                examples = torch.tensor([counts[reply.client]], dtype=torch.float64)
                uploads[reply.client] = upload._replace(num_examples=examples)
            except UNSOUND as error:
                refused[reply.client] = brief(error)
        alone, earlier = len(members) < 2, [pair for pairs in self.sizes for pair in pairs]
        verdict = judge(method, broadcast.lam_g, uploads, earlier, None if alone else largest, robust)
        cut, refused = verdict.cut, refused | verdict.refused
        uploads = {client: upload for client, upload in uploads.items() if client not in refused}
        self.sizes = [*self.sizes, verdict.sizes][-WINDOW:] if uploads else self.sizes
        totals = Totals.none(len(members))
        for client in uploads:
            uploads[client] = shortened(uploads[client], broadcast.lam_g, cut.get(client, 1.0))
            row = torch.tensor([members.index(client)])
            own = total(method, broadcast, uploads[client], row, len(members))
            if not isinstance(method.dual, Zero):
                self._keep(client, cast(Tensor, own.eta))
            totals = totals.plus(own)
        if robust == "trimmed" and uploads:
            rows = torch.tensor([members.index(client) for client in uploads])
            totals = trimmed(method, broadcast, stacked([*uploads.values()]), rows, len(members))
        self.server, info = server_step(method, self.server, totals)
        self.acks |= dict.fromkeys(uploads, nonce)
        self.factors = {client: c for client, c in self.factors.items() if client not in uploads} | cut
        return Closed(info, [*uploads], refused, cut)

    def keep(self, shares: bool | None) -> None:
        """Keep every η_k from now on, or drop them; None keeps them as long as they take at most `MOST_KEPT` bytes."""
        shares = len(self.numbers) * self.server.eta_sum.nbytes <= MOST_KEPT if shares is None else shares
        if shares != (self.shares is not None):
            self.shares = {} if shares else None

    def _keep(self, client: str, change: Tensor) -> None:
        """Add to a client's η_k; where its beginning is unknown, nothing is kept."""
        if self.shares is not None and (client in self.shares or client not in self.acks):
            self.shares[client] = change + self.shares.get(client, torch.zeros_like(change))

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
                require("dual", shares[client], eta_sum)
            except InputError as error:
                raise InputError(
                    f"Σ η cannot be counted anew with client {client}, because {error}: forget it, too."
                ) from None
            eta_sum += shares[client]
        self.server = self.server._replace(eta_sum=eta_sum)
        self.shares = None if self.shares is None else dict(shares)
        for client in self.acks.keys() - shares.keys():
            self.release(client)

    def release(self, client: str) -> None:
        """Let a client start again; its dual must not be part of Σ_k η_k any more."""
        self.acks.pop(client, None)
        self.factors.pop(client, None)
        if self.shares is not None:
            self.shares.pop(client, None)
        self.forgotten.discard(client)
