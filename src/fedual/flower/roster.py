"""Who is there: the handshake with every node, the choice of a round's clients, and messages with a deadline."""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedual.errors import FedualError
from fedual.flower import wire
from fedual.flower.ledger import Ledger

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
        grace: For stragglers.
        largest: An update counts only if its KL(q_k ‖ q_g) is at most this many times the median of the round (of the
            last round, with fewer than three updates); None is no limit.
    """

    min_clients: int = 2
    wait: float = 600.0
    timeout: float = 3600.0
    enough: float = 1.0
    grace: float = 30.0
    largest: float | None = 1e4


@dataclass
class Roster:
    """The clients that are there, and the nodes at which they are.

    Args:
        experiment: Under which clients keep their state.
        facts: What every site must have as the server has it.
        policy: How long to wait.
        welcome: Clients that may come with another secret than they had.
        nodes: Client → node.
        strangers: Node → why it was turned away.
    """

    experiment: str
    facts: Mapping[str, str]
    policy: Policy
    welcome: frozenset[str] = frozenset()
    nodes: dict[str, int] = field(default_factory=dict)
    strangers: dict[int, str] = field(default_factory=dict)

    def gather(self, grid: Grid, ledger: Ledger) -> None:
        """Shake hands with nodes that are new; wait until there are enough clients."""
        deadline, told = time.monotonic() + self.policy.wait, -1
        while True:
            there = set(grid.get_node_ids())
            self.nodes = {client: node for client, node in self.nodes.items() if node in there}
            if new := there - set(self.nodes.values()) - self.strangers.keys():
                self._greet(grid, ledger, sorted(new))
            if len(self.nodes) >= self.policy.min_clients:
                return
            if time.monotonic() > deadline:
                turned = "".join(f"; {why}" for why in self.strangers.values())
                raise FedualError(
                    f"{len(self.nodes)} clients after {self.policy.wait:g} s, {self.policy.min_clients} are needed"
                    f"{turned}: start the missing SuperNodes and submit the run again."
                )
            if told != len(self.nodes):
                told = len(self.nodes)
                log(INFO, "%s of %s clients are there", told, self.policy.min_clients)
            time.sleep(POLL)

    def choose(self, ledger: Ledger, turn: Sequence[int], participation: float) -> list[str]:
        """The clients of a round: the first in `turn`; the places of those that are not there are taken by others."""
        names = {number: client for client, number in ledger.numbers.items()}
        most = max(1, int(participation * len(names) + 0.5))
        there = [names[number] for number in turn if names[number] in self.nodes]
        return sorted(there[:most], key=ledger.numbers.__getitem__)

    def exchange(self, grid: Grid, messages: Sequence[Message], timeout: float) -> list[Message]:
        """Send, and gather replies until all are there, or it takes too long."""
        if not messages:
            return []
        waiting = {id for id in grid.push_messages(messages) if id}
        found, deadline = list[Message](), time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            new = list(grid.pull_messages(waiting))
            late = len(found) < self.policy.enough * len(messages) <= len(found) + len(new)
            found += new
            waiting -= {message.metadata.reply_to_message_id for message in new}
            if late:
                deadline = min(deadline, time.monotonic() + self.policy.grace)
            if waiting:
                time.sleep(POLL)
        return found

    def by_client(self, replies: Iterable[Message], asked: Sequence[str]) -> Iterator[tuple[str, Message]]:
        """Replies with the client that was asked."""
        clients = {self.nodes[client]: client for client in asked if client in self.nodes}
        for message in replies:
            if (node := message.metadata.src_node_id) in clients:
                yield clients[node], message

    def _greet(self, grid: Grid, ledger: Ledger, nodes: Sequence[int]) -> None:
        """Take in the sites that agree with the server on everything; name those that do not."""
        told = {"action": "hello", "experiment": self.experiment, "nonce": secrets.token_hex(8), "number": 0}
        messages = [Message(wire.pack({}, told), node, MessageType.QUERY) for node in nodes]
        come: dict[str, tuple[int, str]] = {}
        for message in self.exchange(grid, messages, self.policy.wait):
            if message.has_error():
                continue  # it is asked again
            node, config = message.metadata.src_node_id, wire.config_of(message.content)
            client = str(config.get("client"))
            if (why := config.get("refusal") or self._differs(config)) is not None:
                self._turn_away(node, client, str(why))
            elif client in come or client in self.nodes:
                self._turn_away(node, client, "another node has this id now")
            else:
                come[client] = node, str(config.get("secret"))
        number = lambda client: (0, int(client), "") if client.isdecimal() else (1, 0, client)
        for client in sorted(come, key=number):  # numbers do not depend on who answered first
            node, secret = come[client]
            if client in self.welcome and client not in ledger.acks:
                ledger.secrets.pop(client, None)
            if (why := ledger.admit(client, secret)) is not None:
                self._turn_away(node, client, why)
            else:
                self.nodes[client] = node

    def _differs(self, config: Mapping[str, Any]) -> str | None:
        """In what a site differs from the server."""
        try:
            theirs = dict(json.loads(str(config.get("facts"))))
        except (ValueError, TypeError):
            return "it does not say what it runs"
        for key in sorted(self.facts.keys() | theirs.keys()):
            if self.facts.get(key) != theirs.get(key):
                return f"its {key} is {theirs.get(key)}, the server's {self.facts.get(key)}"
        return None

    def _turn_away(self, node: int, client: str, why: str) -> None:
        self.strangers[node] = f"client {client} was turned away: {why}"
        log(WARNING, self.strangers[node])
