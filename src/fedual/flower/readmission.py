"""Clients that start anew or leave: Σ_k η_k is summed again from the clients that still have their η_k.

The server knows only the sum. A client that lost its η_k or leaves for good still counts in it, and its part can be
removed only by adding up all others, which are asked for their η_k this once. Nothing changes at the clients, so that a
server that is killed in between can start over.
"""

import secrets
from collections.abc import Collection
from logging import INFO

from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from fedual.algorithm import Method, Zero
from fedual.errors import FedualError, InputError
from fedual.flower import wire
from fedual.flower.ledger import Ledger
from fedual.flower.replies import by_client
from fedual.flower.roster import Roster

HEADERS = 4096
"""Bytes that a reply may take beyond its numbers."""


def recount(
    grid: Grid, ledger: Ledger, roster: Roster, method: Method, readmit: Collection[str], forget: Collection[str]
) -> None:
    """Re-admit clients that lost their state or were forgotten, and remove others for good.

    A second call does nothing: a client that has its state is not re-admitted, and one that left has no part.

    Args:
        grid: Flower's grid.
        ledger: Changed, but not saved.
        roster: The clients that are connected.
        method: The method; without duals nothing is summed.
        readmit: Clients that may start anew; they must be connected.
        forget: Clients that leave for good, connected or not.

    Raises:
        FedualError: A client whose dual is needed is missing; nothing changed.
    """
    concerned = ledger.acks.keys() & {*readmit, *forget}
    shares: dict[str, Tensor] = {}
    if concerned and not isinstance(method.dual, Zero):
        others = [client for client in ledger.acks if client not in forget]
        roster.gather(grid, ledger, others)
        shares, lost = _ask(grid, ledger, roster, others)
        if gone := [client for client in lost if client not in readmit]:
            raise FedualError(
                f"Σ η cannot be counted anew without {', '.join(gone)}, whose state is lost: re-admit or forget them, "
                "too."
            )
        if intact := [client for client in readmit if client in shares]:
            log(INFO, "not re-admitted, for their state is intact: %s", ", ".join(intact))
        if concerned - shares.keys():
            ledger.recount(shares)
    for client in {*readmit, *forget} - shares.keys():
        ledger.release(client)
        roster.dismiss(client)
        if client in readmit:
            ledger.badges.pop(client, None)  # it may come with another key; one that was forgotten keeps its own
    ledger.forgotten |= set(forget)


def _ask(grid: Grid, ledger: Ledger, roster: Roster, clients: Collection[str]) -> tuple[dict[str, Tensor], list[str]]:
    """The clients' duals of their last round that counted, and the clients that lost theirs."""
    nonce, timeout = secrets.token_hex(8), roster.policy.timeout
    common = {"action": "share", "experiment": roster.experiment, "nonce": nonce, "wait": timeout}
    question = lambda client: {**common, "number": ledger.numbers[client], "ack": ledger.acks[client]}
    asked = {
        client: Message(wire.pack({}, question(client)), roster.nodes[client], MessageType.QUERY)
        for client in clients
        if client in roster.nodes
    }
    shares, lost = dict[str, Tensor](), [client for client in clients if client not in asked]
    silent = dict.fromkeys(asked, "no reply in time")
    for client, message in by_client(roster.exchange(grid, [*asked.values()], timeout), asked):
        try:
            if (why := wire.failure(message)) is not None:
                raise InputError(why)
            if wire.config_of(message.content).get("nonce") != nonce:
                raise InputError("its reply is to another question")
            tensors = wire.tensors_of(message.content, ledger.server.lam_g.nbytes + HEADERS)
            if "eta" not in tensors:
                raise InputError("it sent no dual")
            shares[client] = tensors["eta"]
        except InputError as error:
            silent[client] = wire.brief(error)
            if not message.has_error() and wire.config_of(message.content).get("lost") is True:
                lost.append(client)
    if absent := [f"{client} ({why})" for client, why in silent.items() if client not in {*shares, *lost}]:
        raise FedualError(
            f"Σ η cannot be counted anew without the duals of {', '.join(absent)}: submit the run again, or forget "
            "them, too."
        )
    return shares, lost
