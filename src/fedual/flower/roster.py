"""The connected clients: the handshake with every node, the choice of a round's clients, messages with a deadline."""

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedual.errors import FedualError, InputError, require_count, require_positive
from fedual.flower import wire
from fedual.flower.handshake import LONGEST_ID, Badge, Hello, node_keys
from fedual.flower.identity import NETWORKS, known_keys, signed
from fedual.flower.ledger import Ledger
from fedual.flower.payload import KINDS
from fedual.networks.randomness import num_asked
from fedual.networks.targets import Sums

POLL = 0.2
"""Seconds between two checks for replies or nodes."""

ROBUST = ("share", "trimmed")
"""What `Policy.robust` may be."""
MOST_EXAMPLES = 1e12
"""More examples than any site has; beyond it arithmetic is no longer exact."""


@dataclass(frozen=True)
class Policy:
    """How the server treats sites: how long it waits, for which clients, and which updates it accepts.

    Args:
        min_clients: A round starts when so many clients are connected.
        wait: Seconds to wait for them; then the run stops.
        timeout: Seconds to wait for replies.
        enough: When this share of the replies has arrived, the others have `grace` seconds left.
        grace: Seconds for stragglers, for a new node before a round starts without it, and before a node that was
            turned away is asked again.
        largest: An update is cut where it would move q_g too far (`fedual.algorithm.influence`), and refused where it
            is more than so many times too large; None is no limit.
        robust: "share" cuts every update to what half of the sites do, "trimmed" leaves the largest and the smallest
            third of each coordinate out; None does neither (docs/how-to/dishonest-sites.md).
        keep_shares: Keep every site's η_k, which the server infers, so that forgetting and re-admitting a site needs
            nobody's word; None keeps them as long as they take at most 1 GiB in all.
        payload: "full", "bf16" or "int8": how λ_k − λ_g travels.
        evaluate_clients: Let the sites evaluate every round on their own data.
        readmit: Clients that lost their state, or were forgotten, and start again.
        forget: Clients that leave for good: their duals are removed from Σ_k η_k.
        known: The public keys of all clients that may take part, as a mapping or a TOML file; None binds every client
            to the key with which it comes first.
    """

    min_clients: int = 2
    wait: float = 600.0
    timeout: float = 3600.0
    enough: float = 1.0
    grace: float = 30.0
    largest: float | None = 100.0
    robust: str | None = None
    keep_shares: bool | None = None
    payload: str = "full"
    evaluate_clients: bool = False
    readmit: Sequence[str] = ()
    forget: Sequence[str] = ()
    known: Mapping[str, str] | str | Path | None = None

    def __post_init__(self) -> None:
        if self.known is not None:
            object.__setattr__(self, "known", known_keys(self.known))
        if self.payload not in KINDS:
            raise InputError(f"payload = {self.payload!r}: choose {', '.join(KINDS)}.")
        if both := {*self.readmit} & {*self.forget}:
            raise InputError(f"{', '.join(sorted(both))} cannot be re-admitted and forgotten at once: choose one.")
        require_count("min_clients", self.min_clients)
        require_positive("enough", self.enough, most=1.0)
        for name in ("wait", "timeout", "grace"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} = {getattr(self, name)!r}: it must be a number of seconds, at least 0.")
        if self.largest is not None:
            require_positive("largest", self.largest)
        if self.robust not in (None, *ROBUST):
            raise InputError(f"robust = {self.robust!r}: choose {' or '.join(ROBUST)}, or None.")


class Rejection(NamedTuple):
    """Why a node was turned away."""

    client: str  # the id that it claims
    why: str
    lost: bool = False  # it lost its state and can be re-admitted

    def __str__(self) -> str:
        return f"client {self.client} was turned away: {self.why}"


class Candidate(NamedTuple):
    """A node that passed the handshake and waits for admission."""

    node: int
    badge: Badge
    examples: float | None
    sums: Sums | None = None  # of a regression's targets


@dataclass
class Roster:
    """The connected clients and their nodes.

    Args:
        experiment: The name under which clients keep their state.
        facts: What every site must have in common with the server.
        policy: How long to wait.
        standardise: Sites tell sums of their targets.
        nodes: Client → node.
        rejected: Node → why it was turned away.
    """

    experiment: str
    facts: Mapping[str, str]
    policy: Policy
    standardise: bool = False
    nodes: dict[str, int] = field(default_factory=dict)
    rejected: dict[int, Rejection] = field(default_factory=dict)
    _hellos: dict[str, Hello] = field(default_factory=dict)  # by the message's id
    _keys: dict[int, str] = field(default_factory=dict)  # node → digest of its own key at Flower
    _candidates: dict[str, Candidate] = field(default_factory=dict)
    _retry: float = -math.inf  # when rejected nodes are asked again

    def gather(self, grid: Grid, ledger: Ledger, wanted: Collection[str] | None = None) -> None:
        """Shake hands with new nodes until there are enough clients.

        A node that does not answer delays one round at most; it is admitted when it answers later.

        Args:
            grid: Flower's grid.
            ledger: Admits the clients in the order of their ids, not of their answers.
            wanted: All of these clients must be connected (or have lost their state), instead of `min_clients`.
        """
        deadline, patience, logged = time.monotonic() + self.policy.wait, -math.inf, -1
        while True:
            now = time.monotonic()
            if self._greet(grid, now):
                patience = min(now + self.policy.grace, deadline)
            self._hear(grid, ledger)
            if (not self._hellos or now >= patience) and not self._missing(wanted):
                self._admit(ledger)
            missing = self._missing(wanted)  # again, because some may have been turned away
            if not missing and not self._candidates:
                return
            if missing and now >= deadline:
                rejected = "".join(f"; {rejection}" for rejection in self.rejected.values())
                raise FedualError(
                    f"After {self.policy.wait:g} s {missing}{rejected}: start the missing SuperNodes and submit the "
                    "run again."
                )
            if logged != (logged := len(self.nodes) + len(self._candidates)):
                log(INFO, "%s clients are connected; waiting for more", logged)
            time.sleep(POLL)

    def choose(self, ledger: Ledger, turn: Sequence[int], participation: float) -> list[str]:
        """The clients of a round: the first of `turn` (clients' numbers) that are connected."""
        names = {number: client for client, number in ledger.numbers.items()}
        count = num_asked(len(ledger.members), participation)
        connected = [names[number] for number in turn if names[number] in self.nodes]
        return sorted(connected[:count], key=ledger.numbers.__getitem__)

    def exchange(self, grid: Grid, messages: Sequence[Message], timeout: float, enough: float = 1.0) -> list[Message]:
        """Send messages and collect the replies that arrive in time; `enough` as in `Policy`."""
        if not messages:
            return []
        waiting = {id for id in grid.push_messages(messages) if id}
        replies, deadline = list[Message](), time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            new = list(grid.pull_messages(waiting))
            suffices = len(replies) < enough * len(messages) <= len(replies) + len(new)
            replies += new
            waiting -= {message.metadata.reply_to_message_id for message in new}
            if suffices:
                deadline = min(deadline, time.monotonic() + self.policy.grace)
            if waiting:
                time.sleep(POLL)
        return replies

    def dismiss(self, client: str) -> None:
        """Forget the handshakes with nodes that claim to be this client."""
        self.nodes.pop(client, None)
        self.rejected = {node: rejection for node, rejection in self.rejected.items() if rejection.client != client}

    def _greet(self, grid: Grid, now: float) -> bool:
        """Greet new nodes, and rejected ones again after a while; return True if there are new nodes."""
        self._keys = node_keys(grid)
        connected = self._keys.keys()
        self.nodes = {client: node for client, node in self.nodes.items() if node in connected}
        self._candidates = {client: each for client, each in self._candidates.items() if each.node in connected}
        self.rejected = {node: rejection for node, rejection in self.rejected.items() if node in connected}
        # an answer can be lost: after `wait` seconds another one is asked for
        recent = lambda hello: hello.node in connected and now < hello.sent + self.policy.wait
        self._hellos = {id: hello for id, hello in self._hellos.items() if recent(hello)}
        asked = {each.node for each in (*self._hellos.values(), *self._candidates.values())}
        new = connected - set(self.nodes.values()) - asked - self.rejected.keys()
        again = set[int]()
        if now >= self._retry:
            again, self._retry = self.rejected.keys() - asked, now + self.policy.grace
        common = {"action": "hello", "experiment": self.experiment}
        hellos = [Hello.to(node, now) for node in sorted(new | again)]
        content = lambda hello: wire.pack({}, {**common, "nonce": hello.challenge})
        messages = [Message(content(hello), hello.node, MessageType.QUERY) for hello in hellos]
        if messages:
            grid.push_messages(messages)
        self._hellos |= {each.metadata.message_id: hello for each, hello in zip(messages, hellos, strict=True)}
        return bool(new)

    def _hear(self, grid: Grid, ledger: Ledger) -> None:
        """Read the answers to hellos: sites that agree with the server become candidates, others are rejected."""
        for message in grid.pull_messages(list(self._hellos)) if self._hellos else ():
            hello = self._hellos.pop(message.metadata.reply_to_message_id, None)
            if hello is None or (node := hello.node) not in self._keys:
                continue
            config = {} if message.has_error() else wire.config_of(message.content)
            if rejection := self._reject(hello, message, config, ledger):
                self._turn_away(node, rejection)
            else:
                examples, sums = float(config["examples"]), self._sums(config) if self.standardise else None
                badge = Badge(config["key"], self._keys[node])
                self._candidates[config["client"]] = Candidate(node, badge, examples, sums)

    def _reject(self, hello: Hello, message: Message, config: Mapping[str, Any], ledger: Ledger) -> Rejection | None:
        """Why the site that sent this answer is turned away; None if it is not."""
        node, client, key, examples = hello.node, config.get("client"), config.get("key"), config.get("examples")
        if (why := wire.failure(message)) is not None:
            return Rejection(wire.brief(client or f"at node {node}"), why, config.get("lost") is True)
        if not isinstance(client, str) or not client.isprintable() or not 0 < len(client) <= LONGEST_ID:
            return Rejection(wire.brief(client), f"a client's id is a text of at most {LONGEST_ID} letters")
        facts = hello.challenge, self.experiment, client, node
        if not isinstance(key, str) or not signed(key, config.get("signature"), NETWORKS, *facts):
            return Rejection(client, "it does not show its key: its signature is missing or wrong")
        if (rejection := self._stranger(ledger, client, Badge(key, self._keys[node]))) is not None:
            return rejection
        if not (isinstance(examples, int | float) and 0 < examples < math.inf):
            return Rejection(client, "it does not say how many examples it has")
        if examples > MOST_EXAMPLES:
            return Rejection(client, f"it says that it has {examples:g} examples: nobody has that many")
        if (why := self._difference(config)) is not None:
            return Rejection(client, why)
        if self.standardise:
            try:
                self._sums(config)
            except InputError as error:
                return Rejection(client, str(error))
        if client in self._candidates or client in self.nodes:
            return Rejection(client, "another node has this id now")
        return None

    def _sums(self, config: Mapping[str, Any]) -> Sums:
        """The sums of a site's targets."""
        try:
            content = json.loads(str(config.get("targets")))
        except (ValueError, RecursionError):
            content = None
        return Sums.from_dict(content if isinstance(content, dict) else {})

    def _stranger(self, ledger: Ledger, client: str, badge: Badge) -> Rejection | None:
        """Why a site that showed its key may not take part as this client; None if it may."""
        given = None
        if isinstance(self.policy.known, Mapping) and (given := self.policy.known.get(client)) is None:
            return Rejection(client, "it is not on the list of known clients")
        if (why := ledger.stranger(client, badge, given)) is not None:
            return Rejection(client, why, client not in ledger.forgotten)
        return None

    def _admit(self, ledger: Ledger) -> None:
        """Admit the candidates whose keys are new or those of this client."""
        number = lambda client: (0, int(client), "") if client.isdecimal() else (1, 0, client)
        for client in sorted(self._candidates, key=number):
            node, badge, examples, sums = self._candidates.pop(client)
            before = ledger.examples.get(client, examples)
            rejection = self._stranger(ledger, client, badge)  # again, because others were admitted in the meantime
            if rejection is None and (why := ledger.admit(client, badge, examples, sums)) is not None:
                rejection = Rejection(client, why)
            if rejection is not None:
                self._turn_away(node, rejection)
            else:
                self.nodes[client] = node
                self.rejected.pop(node, None)
                if before != examples:
                    log(
                        WARNING,
                        "client %s says that it has %g examples, where it had %g",
                        client,
                        examples,
                        before,
                    )

    def _missing(self, wanted: Collection[str] | None) -> str:
        """Which clients are missing, in words; empty if none is."""
        present = self.nodes.keys() | self._candidates.keys()
        if wanted is None:
            few = len(present) < self.policy.min_clients
            return f"{len(present)} clients are there, {self.policy.min_clients} are needed" if few else ""
        absent = set(wanted) - present - {rejection.client for rejection in self.rejected.values() if rejection.lost}
        names = ", ".join(sorted(absent))
        return f"{names} must be there, or be forgotten, to count Σ η anew" if absent else ""

    def _difference(self, config: Mapping[str, Any]) -> str | None:
        """The first fact in which a site differs from the server."""
        try:
            facts = json.loads(str(config.get("facts")))
        except (ValueError, RecursionError):
            facts = None
        if not isinstance(facts, dict):
            return "it does not say what it runs"
        for key in sorted(self.facts.keys() | facts.keys()):
            if self.facts.get(key) != facts.get(key):
                return wire.brief(f"its {key} is {facts.get(key)}, the server's {self.facts.get(key)}")
        return None

    def _turn_away(self, node: int, rejection: Rejection) -> None:
        if self.rejected.get(node) != rejection:  # log it once
            log(WARNING, str(rejection))
        self.rejected[node] = rejection
