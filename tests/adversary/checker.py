"""The checker: from what sites answered and what the server's ledger says that it counted, in NumPy, the only posterior
that the server may have, and the only dual that each site may go on with.

    every answer counts once or not at all: its nonce, and what was sent with it, are on the checker's own list
    λ_g and Σ η are those of the answers that counted, after Eq. 15 to 17, each cut by the factor that its site is told
    a site goes on from the dual of its last answer that counted, or says that it is lost, if somebody harmed it
    the records of the folder name those that counted
"""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from federation import GAMMA, RHO, Federation

from fedual.flower.ledger import Ledger
from fedual.flower.vault import OtherRun, StateLost, opened, set_aside
from fedual.rundir.checksum import parse

RTOL, ATOL = 1e-8, 1e-10


class Wrong(AssertionError):
    """The federation is not in the state that follows from what counted."""


@dataclass
class State:
    """What follows from a ledger that was on disk."""

    round: int
    lam_g: np.ndarray
    eta: dict[str, np.ndarray] = field(default_factory=dict)
    acks: dict[str, str] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)  # by which the last updates were cut
    log: list[list[str]] = field(default_factory=list)


class Checker:
    """Follows a federation of conjugate problems.

    Attributes:
        liars: Clients whose answers are taken as they were sent, because nobody can know what they computed.
        harmed: Clients whose state was lost, set back or used by others, or whose server was: they may be lost.
        posed: Clients in whose place another may come when the operator re-admits them, so that they stay harmed.
        counted: Answers that counted, in all histories of the server, in so many `rounds`.
    """

    def __init__(self, sites: Federation):
        self.sites, self.prior, self.c = sites, np.asarray(sites.prior), np.asarray(sites.c)
        self.state = State(0, self.prior.copy())
        self.answers: dict[tuple[str, str], np.ndarray | None] = {}
        self.liars, self.harmed, self.posed = set[str](), set[str](), set[str]()
        self.counted = self.rounds = 0
        self._like = sites.server(1).ledger.server

    def answered(self, client: str, nonce: str, lam: np.ndarray | None) -> None:
        """A site has answered an attempt at a round, whether or not its answer arrives."""
        self.answers[client, nonce] = lam

    def saved(self, path: Path) -> None:
        """The server's ledger is on disk."""
        told = json.loads(parse(path.read_bytes())[0]["ledger"])
        old, acks, round = self.state, told["acks"], told["round"]
        new = copy.deepcopy(old)
        for client in old.acks.keys() - acks.keys():
            del new.acks[client], new.eta[client], new.factors[client]
            self.harmed -= {client} - self.posed
        fresh = sorted(client for client, nonce in acks.items() if old.acks.get(client) != nonce)
        if round == old.round:
            if fresh:
                raise Wrong(f"{fresh} were acknowledged without a round")
        elif round != old.round + 1:
            raise Wrong(f"round {round} follows round {old.round}")
        else:
            self._step(new, {client: acks[client] for client in fresh}, told["factors"])
        self.state = new

    def _step(self, new: State, fresh: dict[str, str], factors: dict[str, float]) -> None:
        """Lines 1 to 3 for the clients that counted."""
        if len(set(fresh.values())) > 1:
            raise Wrong(f"two attempts counted in one round: {fresh}")
        solved = {}
        for client, nonce in fresh.items():
            if (client, nonce) not in self.answers:
                raise Wrong(f"client {client} counted in {nonce}, but never answered it")
            eta = new.eta.setdefault(client, np.zeros_like(self.prior))
            own = self.c[int(client)] if client.isdecimal() else 0
            solved[client] = new.lam_g + (own - eta) / RHO
            if client in self.liars:
                sent = self.answers[client, nonce]
                if sent is None:
                    raise Wrong(f"client {client} counted in {nonce} without a readable λ")
                solved[client] = sent
            if not 0 < (factor := factors.get(client, 1.0)) <= 1:
                raise Wrong(f"client {client} was cut by {factor}")
            solved[client] = new.lam_g + factor * (solved[client] - new.lam_g)
            new.factors[client] = factor
        if solved:
            for client, lam in solved.items():
                new.eta[client] = new.eta[client] + GAMMA * (lam - new.lam_g)
            alpha = 1 / (1 + RHO * len(solved))
            new.lam_g = (1 - alpha) * sum(solved.values()) / len(solved) + alpha * (self.prior + sum(new.eta.values()))
        new.acks |= fresh
        new.round += 1
        new.log.append(sorted(fresh))
        self.counted += len(fresh)
        self.rounds += 1

    def check(self) -> None:
        """Raise `Wrong` unless server, sites and records are what follows from the answers that counted."""
        if not (self.sites.out / "server.safetensors").exists():
            return
        ledger = self.ledger
        server = ledger.server
        for name, found, expected in (
            ("λ_g", server.lam_g.numpy(), self.state.lam_g),
            ("Σ η", server.eta_sum.numpy(), sum(self.state.eta.values(), np.zeros_like(self.prior))),
        ):
            if not np.allclose(found, expected, rtol=RTOL, atol=ATOL):
                raise Wrong(f"{name} is off by {np.abs(found - expected).max():.3g} after {self.state.log}")
        told = [sorted(record["clients"]) for record in self.sites.history]
        if told[: len(self.state.log)] != self.state.log:
            raise Wrong(f"the records name {told}, what counted is {self.state.log}")
        for client, eta in (ledger.shares or {}).items():
            if not np.allclose(eta, self.state.eta[client], rtol=RTOL, atol=ATOL):
                raise Wrong(f"the server keeps another dual of client {client} than the one that counted")
        for client, ack in self.state.acks.items():
            if client not in self.liars:
                self._check_site(client, ack)

    @property
    def ledger(self) -> Ledger:
        """The server's, as it is on disk."""
        return Ledger.load(self.sites.out / "server.safetensors", self._like)

    def is_lost(self, client: str) -> bool:
        """Whether a site cannot go on from what the server counted; its operator sets another run's state aside."""
        folder, ack = self.sites.path / f"site{client}", self.state.acks.get(client)
        try:
            with opened(folder, "e", client) as vault:
                return vault.settle(ack, 1.0, self.ledger.id) is None and ack is not None
        except StateLost:
            return True
        except OtherRun:
            set_aside(folder, "e", client)
            return False

    def _check_site(self, client: str, ack: str) -> None:
        try:
            rows = self.dual(client, ack)
        except StateLost:
            if client not in self.harmed:
                raise Wrong(f"client {client} lost its state though nobody harmed it") from None
            return
        if rows is None or not np.allclose(rows, self.state.eta[client], rtol=RTOL, atol=ATOL):
            raise Wrong(f"client {client} would go on from another dual than the one of {ack}")

    def dual(self, client: str, ack: str | None) -> Any:
        """The η_k that a site would go on with; None if it starts from zero."""
        with opened(self.sites.path / f"site{client}", "e", client) as vault:
            rows = vault.settle(ack, self.state.factors.get(client, 1.0))
        return None if rows is None else rows["eta"].numpy()
