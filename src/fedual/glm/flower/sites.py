"""The sites of a fit on Flower: who takes part, and at which node each one is now.

A site is known by its name, not by its node: it may be killed and return at another node.
"""

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.app import MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedual._version import __version__
from fedual.errors import FedualError, InputError, require_count
from fedual.flower import wire
from fedual.flower.handshake import LONGEST_ID, Badge, Hello, node_keys, stranger
from fedual.flower.identity import REGRESSIONS, signed
from fedual.glm.flower import payload
from fedual.glm.messages import Message

POLL = 0.2
"""Seconds between two looks for answers and nodes."""
HELLO = "hello"


@dataclass(frozen=True)
class Patience:
    """How long the server waits, in seconds.

    Args:
        wait: For enough sites at the start.
        grace: For further sites once there are enough, and before a node that was turned away is asked again.
        resend: For an answer before the request is sent again; twice as long each time.
        timeout: For all answers to one request, even while sites are restarted.
    """

    wait: float = 600.0
    grace: float = 30.0
    resend: float = 120.0
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise InputError(f"{name} = {value!r}: it must be a number of seconds, at least 0.")


@dataclass
class Sites:
    """The sites of one fit.

    Args:
        grid: Flower's grid.
        named: The names of the sites; without names, all that answer take part, at least `least`.
        least: How many sites there must be.
        patience: How long to wait.
        known: The public keys of the sites that may take part; with None, anybody under any name, but each key and
            each node under one name alone.
        names: The sites that take part, once `gather` has found them.
        nodes: Site → node, of those that are connected.
    """

    grid: Grid
    named: Collection[str] = ()
    least: int = 2
    patience: Patience = Patience()
    known: Mapping[str, str] | None = None
    names: tuple[str, ...] = ()
    nodes: dict[str, int] = field(default_factory=dict)
    _badges: dict[str, Badge] = field(default_factory=dict)  # site → by what it is known
    _keys: dict[int, str] = field(default_factory=dict)  # node → digest of its own key at Flower
    _hellos: dict[str, Hello] = field(default_factory=dict)  # by the message's id
    _rejected: dict[int, tuple[str, float]] = field(default_factory=dict)  # node → why, when it is asked again

    def __post_init__(self) -> None:
        require_count("min-sites", self.least)

    def gather(self) -> None:
        """Wait until enough sites, or those that were named, have said hello: they take part in the fit.

        Raises:
            FedualError: They did not in time.
        """
        deadline, patience, logged = time.monotonic() + self.patience.wait, -math.inf, ""
        while True:
            now = time.monotonic()
            if self.look():
                patience = min(now + self.patience.grace, deadline)
            missing = self._missing()
            if not missing and (self.named or not self._hellos or now >= patience):
                self.names = tuple(sorted(self.named or self.nodes))
                log(INFO, "%s sites take part: %s", len(self.names), ", ".join(self.names))
                return
            if missing and now >= deadline:
                why = "".join(f"; {why}" for why, _ in self._rejected.values())
                raise FedualError(
                    f"After {self.patience.wait:g} s {missing}{why}: start the missing SuperNodes and submit the run "
                    "again."
                )
            if logged != (logged := missing or "more nodes are connected; waiting until they say hello"):
                log(INFO, logged)
            time.sleep(POLL)

    def look(self) -> bool:
        """Notice which nodes have gone and which have come, and let those say hello; return True if some are new."""
        now = time.monotonic()
        new = self._greet(now)
        self._hear(now)
        return new

    def _greet(self, now: float) -> bool:
        """Say hello to nodes that are new, or were turned away a while ago."""
        self._keys = node_keys(self.grid)
        connected = self._keys.keys()
        self.nodes = {site: node for site, node in self.nodes.items() if node in connected}
        self._rejected = {node: why for node, why in self._rejected.items() if node in connected}
        recent = lambda hello: hello.node in connected and now < hello.sent + self.patience.resend
        self._hellos = {id: hello for id, hello in self._hellos.items() if recent(hello)}
        asked = {hello.node for hello in self._hellos.values()}
        new = connected - set(self.nodes.values()) - asked - self._rejected.keys()
        again = {node for node, (_, when) in self._rejected.items() if now >= when} - asked
        hellos = [Hello.to(node, now) for node in sorted(new | again)]
        content = lambda hello: payload.pack(Message(HELLO), nonce=hello.challenge)
        messages = [FlowerMessage(content(hello), hello.node, MessageType.QUERY) for hello in hellos]
        if messages:
            self.grid.push_messages(messages)
        self._hellos |= {each.metadata.message_id: hello for each, hello in zip(messages, hellos, strict=True)}
        return bool(new)

    def _hear(self, now: float) -> None:
        """Read the answers to hellos."""
        for message in self.grid.pull_messages(list(self._hellos)) if self._hellos else ():
            hello = self._hellos.pop(message.metadata.reply_to_message_id, None)
            if hello is None or (node := hello.node) not in self._keys:
                continue
            site, why = self._welcome(message, hello)
            if why is None:
                self.nodes[site] = node
                self._rejected.pop(node, None)
            else:
                said = f"{site} was turned away: {why}"
                if self._rejected.get(node, ("",))[0] != said:  # log it once
                    log(WARNING, said)
                self._rejected[node] = said, now + self.patience.grace

    def _welcome(self, message: FlowerMessage, hello: Hello) -> tuple[str, str | None]:
        """The name of a site that said hello, and why it cannot take part, if so."""
        config: dict[str, Any] = {} if message.has_error() else wire.config_of(message.content)
        site = config.get("client")
        if not isinstance(site, str) or not site.isprintable() or not 0 < len(site) <= LONGEST_ID:
            why = wire.failure(message) or f"a site's name is a text of at most {LONGEST_ID} letters"
            return f"node {hello.node}", why
        if (why := wire.failure(message)) is not None:
            return site, why
        if (theirs := config.get("fedual")) != __version__:
            return site, f"its fedual is {wire.brief(theirs)}, the server's {__version__}"
        if self.names and site not in self.names:
            return site, "it came after the fit had begun"
        if self.named and site not in self.named:
            return site, "it is not one of the sites that were named"
        if site in self.nodes:
            return site, "another node has this name now"
        return site, self._stranger(site, config, hello)

    def _stranger(self, site: str, config: Mapping[str, Any], hello: Hello) -> str | None:
        """Why a site may not take part under this name, by its keys; None if it may, and its keys are kept then."""
        key, facts = config.get("key"), (hello.challenge, site, hello.node)
        if not isinstance(key, str) or not signed(key, config.get("signature"), REGRESSIONS, *facts):
            return "it does not show its key: its signature is missing or wrong"
        if self.known is not None and site not in self.known:
            return "it is not on the list of known sites"
        badge, given = Badge(key, self._keys[hello.node]), None if self.known is None else self.known[site]
        others = {other: its for other, its in self._badges.items() if other != site}
        if (why := stranger(others, site, badge, given)) is None:
            self._badges[site] = badge  # without a list it may come back with another key, if it lost its state
        return why

    def _missing(self) -> str:
        """Which sites are missing, in words; empty if none is."""
        if self.named:
            absent = ", ".join(sorted({*self.named} - self.nodes.keys()))
            return f"{absent} must be there" if absent else ""
        few = len(self.nodes) < self.least
        return f"{len(self.nodes)} sites are there, {self.least} are needed" if few else ""
