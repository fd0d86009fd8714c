"""The sites of a fit on Flower: who takes part, and at which node each one is now.

A site is known by its name, not by its node: it may be killed and return at another node.
"""

import math
import time
from collections.abc import Collection
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
from fedual.flower.roster import LONGEST_ID
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
        names: The sites that take part, once `gather` has found them.
        nodes: Site → node, of those that are connected.
    """

    grid: Grid
    named: Collection[str] = ()
    least: int = 2
    patience: Patience = Patience()
    names: tuple[str, ...] = ()
    nodes: dict[str, int] = field(default_factory=dict)
    _hellos: dict[str, tuple[int, float]] = field(default_factory=dict)  # message id → node, when it is asked again
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
        connected = set(self.grid.get_node_ids())
        self.nodes = {site: node for site, node in self.nodes.items() if node in connected}
        self._rejected = {node: why for node, why in self._rejected.items() if node in connected}
        recent = lambda node, expires: node in connected and now < expires
        self._hellos = {id: hello for id, hello in self._hellos.items() if recent(*hello)}
        asked = {node for node, _ in self._hellos.values()}
        new = connected - set(self.nodes.values()) - asked - self._rejected.keys()
        again = {node for node, (_, when) in self._rejected.items() if now >= when} - asked
        content = payload.pack(Message(HELLO))
        messages = [FlowerMessage(content, node, MessageType.QUERY) for node in sorted(new | again)]
        if messages:
            self.grid.push_messages(messages)
        expires = now + self.patience.resend  # an answer can be lost
        self._hellos |= {each.metadata.message_id: (each.metadata.dst_node_id, expires) for each in messages}
        return bool(new)

    def _hear(self, now: float) -> None:
        """Read the answers to hellos."""
        for message in self.grid.pull_messages(list(self._hellos)) if self._hellos else ():
            node, _ = self._hellos.pop(message.metadata.reply_to_message_id, (None, None))
            if node is None:
                continue
            site, why = self._welcome(message, node)
            if why is None:
                self.nodes[site] = node
                self._rejected.pop(node, None)
            else:
                said = f"{site} was turned away: {why}"
                if self._rejected.get(node, ("",))[0] != said:  # log it once
                    log(WARNING, said)
                self._rejected[node] = said, now + self.patience.grace

    def _welcome(self, message: FlowerMessage, node: int) -> tuple[str, str | None]:
        """The name of a site that said hello, and why it cannot take part, if so."""
        config: dict[str, Any] = {} if message.has_error() else wire.config_of(message.content)
        site = config.get("client")
        if not isinstance(site, str) or not site.isprintable() or not 0 < len(site) <= LONGEST_ID:
            why = wire.failure(message) or f"a site's name is a text of at most {LONGEST_ID} letters"
            return f"node {node}", why
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
        return site, None

    def _missing(self) -> str:
        """Which sites are missing, in words; empty if none is."""
        if self.named:
            absent = ", ".join(sorted({*self.named} - self.nodes.keys()))
            return f"{absent} must be there" if absent else ""
        few = len(self.nodes) < self.least
        return f"{len(self.nodes)} sites are there, {self.least} are needed" if few else ""
