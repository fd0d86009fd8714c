"""One request to all sites of a fit: sent again to those that are gone or late, until all have answered.

A site answers as a deterministic function of the request and of its table. The request can therefore be sent again
without harm, and the first answer counts, whichever attempt it belongs to.
"""

import time
from collections.abc import Mapping
from logging import INFO, WARNING
from typing import NamedTuple

from flwr.app import Message as FlowerMessage
from flwr.app import MessageType
from flwr.common.logger import log

from fedual.errors import FedualError, InputError
from fedual.flower import wire
from fedual.glm.flower import payload
from fedual.glm.flower.sites import POLL, Sites
from fedual.glm.messages import Message

ATTEMPTS = 5
"""How often the app of a connected site may fail on one request."""


class Attempt(NamedTuple):
    """The last time that a site was sent the request."""

    id: str  # of the message
    node: int
    number: int
    expires: float  # when the request is sent again


class Exchange:
    """One request on its way.

    Args:
        sites: Who is asked.
        request: What.

    Attributes:
        replies: The answers so far.
    """

    def __init__(self, sites: Sites, request: Message):
        self.sites, self.request = sites, request
        self.replies = dict[str, Message]()
        self._content = payload.pack(request)
        self._sent = dict[str, str]()  # message id → site
        self._attempts = dict[str, Attempt]()
        self._failures = dict[str, int]()
        self._away = set[str]()

    def run(self) -> Mapping[str, Message]:
        """The answers of all sites.

        Raises:
            FedualError: A site refused, or answered something unusable, or did not answer in time.
        """
        began = time.monotonic()
        while missing := self._missing:
            if (spent := time.monotonic() - began) >= self.sites.patience.timeout:
                raise FedualError(
                    f"After {spent:.0f} s {', '.join(missing)} did not answer '{self.request.kind}': start the missing "
                    "SuperNodes and submit the run again."
                )
            self.sites.look()
            self._follow()
            self._send()
            self._receive()
            if self._missing:
                time.sleep(POLL)
        for site, why in payload.misfits(self.replies).items():
            raise self._unusable(site, why)
        log(INFO, "%s: %s answered, %.1f s", self.request.kind, ", ".join(self.replies), time.monotonic() - began)
        return {site: self.replies[site] for site in self.sites.names}

    @property
    def _missing(self) -> list[str]:
        return [site for site in self.sites.names if site not in self.replies]

    def _follow(self) -> None:
        """Say who is away and who is back; the latter are sent the request at once."""
        for site in self._missing:
            if site not in self.sites.nodes and site not in self._away:
                self._away.add(site)
                log(WARNING, "%s is gone; waiting until its SuperNode is back", site)
            elif site in self.sites.nodes and site in self._away:
                self._away.remove(site)
                log(INFO, "%s is back", site)
                self._retry(site, 0.0)

    def _send(self) -> None:
        """Send the request where that is due."""
        now, messages = time.monotonic(), dict[str, FlowerMessage]()
        for site in self._missing:
            node, last = self.sites.nodes.get(site), self._attempts.get(site)
            if node is None or (last is not None and last.node == node and now < last.expires):
                continue
            number = 0 if last is None else last.number + 1
            if number:
                log(WARNING, "'%s' is sent to %s again", self.request.kind, site)
            self._attempts[site] = Attempt("", node, number, now + self.sites.patience.resend * 2**number)
            messages[site] = FlowerMessage(self._content, node, MessageType.QUERY)
        if messages:
            self.sites.grid.push_messages(list(messages.values()))
        for site, message in messages.items():
            self._attempts[site] = self._attempts[site]._replace(id=message.metadata.message_id)
            self._sent[message.metadata.message_id] = site

    def _receive(self) -> None:
        """Read the answers that have arrived."""
        for message in self.sites.grid.pull_messages(list(self._sent)) if self._sent else ():
            id = message.metadata.reply_to_message_id
            site = self._sent.pop(id, None)
            if site is None or site in self.replies:
                continue
            if not message.has_error():
                self.replies[site] = self._read(site, message)
            elif id == self._attempts[site].id:  # an earlier attempt does not matter any more
                self._failed(site, message)

    def _failed(self, site: str, message: FlowerMessage) -> None:
        """A node is gone, or its app ended without an answer: ask again soon, unless that happened too often."""
        why = wire.failure(message)
        self._failures[site] = self._failures.get(site, 0) + (site in self.sites.nodes)
        if self._failures[site] >= ATTEMPTS:
            raise FedualError(
                f"{site} failed {ATTEMPTS} times at '{self.request.kind}', {why}: look at the log of its SuperNode, "
                "then submit the run again."
            )
        log(WARNING, "%s did not answer: %s", site, why)
        self._retry(site, min(self.sites.patience.grace, self.sites.patience.resend))

    def _retry(self, site: str, seconds: float) -> None:
        """Send the request again in some seconds."""
        if site in self._attempts:
            self._attempts[site] = self._attempts[site]._replace(expires=time.monotonic() + seconds)

    def _read(self, site: str, message: FlowerMessage) -> Message:
        """A site's answer, checked."""
        if (why := wire.failure(message)) is not None:
            raise FedualError(f"The fit ends with '{self.request.kind}' at {site}: {why}")
        claimed = wire.config_of(message.content).get("client")
        if claimed != site:
            raise self._unusable(site, f"it says that it is {wire.brief(claimed)}")
        try:
            reply = payload.unpack(message.content)
        except InputError as error:
            raise self._unusable(site, str(error)) from None
        if reply.kind != self.request.kind:
            raise self._unusable(site, f"it answers '{wire.brief(reply.kind)}'")
        return reply

    def _unusable(self, site: str, why: str) -> FedualError:
        return FedualError(
            f"The answer of {site} to '{self.request.kind}' cannot be used, {why}: look at the log of its SuperNode, "
            "then submit the run again."
        )
