"""Who is there: the handshake with every node, the choice of a round's clients, and messages with a deadline."""

import json
import math
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, NamedTuple

from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedual.errors import FedualError, InputError, require_count, require_positive
from fedual.flower import wire
from fedual.flower.ledger import Ledger
from fedual.relative import taking_part

POLL = 0.2
"""Seconds between two looks for replies or nodes."""


@dataclass(frozen=True)
class Policy:
    """How long the server waits, for whom, and what it takes.

    Args:
        min_clients: A round starts only when so many are there.
        wait: Seconds to wait for them; then the run stops.
        timeout: Seconds to wait for replies.
        enough: When this share of the replies is there, the others have `grace` seconds left.
        grace: For stragglers, for a newcomer before a round starts without it, and before one that was turned away is
            asked again.
        largest: An update counts only if its size KL(q_k ‖ q_g) + KL(q_g ‖ q_k) is at most this many times the usual
            one: the median of the round (of three or more), or the largest such median so far; None is no limit.
    """

    min_clients: int = 2
    wait: float = 600.0
    timeout: float = 3600.0
    enough: float = 1.0
    grace: float = 30.0
    largest: float | None = 1e4

    def __post_init__(self) -> None:
        require_count("min_clients", self.min_clients)
        require_positive("enough", self.enough, most=1.0)
        for name in ("wait", "timeout", "grace"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} = {getattr(self, name)!r}: it must be a number of seconds, at least 0.")
        if self.largest is not None:
            require_positive("largest", self.largest)


class Stranger(NamedTuple):
    """A node that is no client."""

    client: str  # which it says it is
    why: str
    lost: bool = False  # its state: it can be re-admitted


@dataclass
class Roster:
    """The clients that are there, and the nodes at which they are.

    Args:
        experiment: Under which clients keep their state.
        facts: What every site must have as the server has it.
        policy: How long to wait.
        count: Whether to ask sites how many examples they have.
        nodes: Client → node.
        strangers: Node → why it was turned away.
    """

    experiment: str
    facts: Mapping[str, str]
    policy: Policy
    count: bool = False
    nodes: dict[str, int] = field(default_factory=dict)
    strangers: dict[int, Stranger] = field(default_factory=dict)
    _hellos: dict[str, tuple[int, float]] = field(default_factory=dict)  # message id → node, when
    _come: dict[str, tuple[int, str, float | None]] = field(default_factory=dict)  # node, secret, examples: to admit
    _again: float = -math.inf  # when strangers are asked again

    def gather(self, grid: Grid, ledger: Ledger, wanted: Collection[str] | None = None) -> None:
        """Shake hands with nodes that are new, until there are enough clients.

        Nobody holds up a round twice: whoever does not answer is waited for when it is new, and heard when it does.

        Args:
            grid: Flower's.
            ledger: Where clients are admitted, in the order of their ids, not of their answers.
            wanted: All of these must be there (or come without their state) in the place of `min_clients`.
        """
        deadline, patience, told = time.monotonic() + self.policy.wait, -math.inf, -1
        while True:
            now = time.monotonic()
            if self._greet(grid, now):
                patience = min(now + self.policy.grace, deadline)
            self._hear(grid)
            if (not self._hellos or now >= patience) and not self._missing(wanted):
                self._admit(ledger)
            missing = self._missing(wanted)  # some may have been turned away
            if not missing and not self._come:
                return
            if missing and now >= deadline:
                turned = "".join(f"; {self._words(stranger)}" for stranger in self.strangers.values())
                raise FedualError(
                    f"After {self.policy.wait:g} s {missing}{turned}: start the missing SuperNodes and submit the run "
                    "again."
                )
            if told != (told := len(self.nodes) + len(self._come)):
                log(INFO, "%s clients are there, and more are waited for", told)
            time.sleep(POLL)

    def choose(self, ledger: Ledger, turn: Sequence[int], participation: float) -> list[str]:
        """The clients of a round: the first in `turn`; the places of those that are not there are taken by others."""
        names = {number: client for client, number in ledger.numbers.items()}
        most = taking_part(len(ledger.members), participation)
        there = [names[number] for number in turn if names[number] in self.nodes]
        return sorted(there[:most], key=ledger.numbers.__getitem__)

    def exchange(self, grid: Grid, messages: Sequence[Message], timeout: float, enough: float = 1.0) -> list[Message]:
        """Send, and gather replies until all are there, or it takes too long; `enough` as in `Policy`."""
        if not messages:
            return []
        waiting = {id for id in grid.push_messages(messages) if id}
        found, deadline = list[Message](), time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            new = list(grid.pull_messages(waiting))
            late = len(found) < enough * len(messages) <= len(found) + len(new)
            found += new
            waiting -= {message.metadata.reply_to_message_id for message in new}
            if late:
                deadline = min(deadline, time.monotonic() + self.policy.grace)
            if waiting:
                time.sleep(POLL)
        return found

    def dismiss(self, client: str) -> None:
        """Shake hands anew with whoever says that it is this client."""
        self.nodes.pop(client, None)
        self.strangers = {node: stranger for node, stranger in self.strangers.items() if stranger.client != client}

    def _greet(self, grid: Grid, now: float) -> bool:
        """Ask nodes that are new who they are, and after a while those again that were turned away; is any new?"""
        there = set(grid.get_node_ids())
        self.nodes = {client: node for client, node in self.nodes.items() if node in there}
        self._come = {client: own for client, own in self._come.items() if own[0] in there}
        self.strangers = {node: stranger for node, stranger in self.strangers.items() if node in there}
        # an answer can be lost: in time, another one is asked for
        fresh = lambda node, when: node in there and now < when + self.policy.wait
        self._hellos = {id: own for id, own in self._hellos.items() if fresh(*own)}
        asked = {own[0] for own in (*self._hellos.values(), *self._come.values())}
        new = there - set(self.nodes.values()) - asked - self.strangers.keys()
        again = set[int]()
        if now >= self._again:
            again, self._again = self.strangers.keys() - asked, now + self.policy.grace
        messages = [Message(wire.pack({}, self._hello()), node, MessageType.QUERY) for node in sorted(new | again)]
        if messages:
            grid.push_messages(messages)
        self._hellos |= {one.metadata.message_id: (one.metadata.dst_node_id, now) for one in messages}
        return bool(new)

    def _hello(self) -> dict[str, str | bool]:
        return {"action": "hello", "experiment": self.experiment, "nonce": secrets.token_hex(8), "count": self.count}

    def _hear(self, grid: Grid) -> None:
        """Tell the sites that agree with the server on everything from those that do not, which are named."""
        for message in grid.pull_messages(list(self._hellos)) if self._hellos else ():
            node, _ = self._hellos.pop(message.metadata.reply_to_message_id, (None, None))
            if node is None:
                continue
            config = {} if message.has_error() else wire.config_of(message.content)
            client, secret, examples = config.get("client"), config.get("secret"), config.get("examples")
            if (why := wire.failure(message)) is not None:
                self._turn_away(
                    node, Stranger(wire.brief(client or f"at node {node}"), why, config.get("lost") is True)
                )
            elif not isinstance(client, str) or not client.isprintable() or not 0 < len(client) <= 200:
                self._turn_away(node, Stranger(wire.brief(client), "a client's id is a text of at most 200 letters"))
            elif not isinstance(secret, str) or not secret:
                self._turn_away(node, Stranger(client, "it shows no secret"))
            elif self.count and not (isinstance(examples, int | float) and 0 < examples < math.inf):
                self._turn_away(node, Stranger(client, "it does not say how many examples it has"))
            elif (why := self._differs(config)) is not None:
                self._turn_away(node, Stranger(client, why))
            elif client in self._come or client in self.nodes:
                self._turn_away(node, Stranger(client, "another node has this id now"))
            else:
                self._come[client] = node, secret, examples if self.count else None

    def _admit(self, ledger: Ledger) -> None:
        """Take in those that have come, if they are who they were before."""
        number = lambda client: (0, int(client), "") if client.isdecimal() else (1, 0, client)
        for client in sorted(self._come, key=number):
            node, secret, examples = self._come.pop(client)
            if (why := ledger.admit(client, secret, examples)) is not None:
                self._turn_away(node, Stranger(client, why, client not in ledger.forgotten))
            else:
                self.nodes[client] = node
                self.strangers.pop(node, None)

    def _missing(self, wanted: Collection[str] | None) -> str:
        """What is still missing, in words."""
        there = self.nodes.keys() | self._come.keys()
        if wanted is None:
            few = len(there) < self.policy.min_clients
            return f"{len(there)} clients are there, {self.policy.min_clients} are needed" if few else ""
        absent = set(wanted) - there - {stranger.client for stranger in self.strangers.values() if stranger.lost}
        names = ", ".join(sorted(absent))
        return f"{names} must be there, or be forgotten, to count Σ η anew" if absent else ""

    def _differs(self, config: Mapping[str, Any]) -> str | None:
        """In what a site differs from the server."""
        try:
            theirs = json.loads(str(config.get("facts")))
        except (ValueError, RecursionError):
            theirs = None
        if not isinstance(theirs, dict):
            return "it does not say what it runs"
        for key in sorted(self.facts.keys() | theirs.keys()):
            if self.facts.get(key) != theirs.get(key):
                return wire.brief(f"its {key} is {theirs.get(key)}, the server's {self.facts.get(key)}")
        return None

    def _turn_away(self, node: int, stranger: Stranger) -> None:
        if self.strangers.get(node) != stranger:  # say it once
            log(WARNING, self._words(stranger))
        self.strangers[node] = stranger

    @staticmethod
    def _words(stranger: Stranger) -> str:
        return f"client {stranger.client} was turned away: {stranger.why}"
