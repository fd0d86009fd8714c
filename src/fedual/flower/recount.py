"""Clients that start anew, and clients that leave: Σ_k η_k is taken anew from those that still have their η_k.

The server knows a sum, not its parts. A client that lost its η_k, or leaves for good, still counts in it, and its part
can be taken off only by adding up all others. They are asked for theirs this once; nothing changes at the clients, so
that a server killed in between starts over.
"""

import secrets
from collections.abc import Collection
from logging import INFO

from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from fedual.contracts import Method
from fedual.duals import Zero
from fedual.errors import FedualError, InputError
from fedual.flower import wire
from fedual.flower.ledger import Ledger
from fedual.flower.replies import by_client
from fedual.flower.roster import Roster


def recount(
    grid: Grid, ledger: Ledger, roster: Roster, method: Method, readmit: Collection[str], forget: Collection[str]
) -> None:
    """Let clients start anew that lost their state or were forgotten, and take others off for good.

    Asked for again, it does nothing: a client that has its state is not re-admitted, and one that left has no part.

    Args:
        grid: Flower's.
        ledger: Changed, not saved.
        roster: Who is there.
        method: Without a dual there is nothing to count.
        readmit: Clients that may start anew; they must be there.
        forget: Clients that leave for good, there or not.

    Raises:
        FedualError: A client is missing whose dual is needed; nothing changed.
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
    ledger.forgotten |= set(forget)


def _ask(grid: Grid, ledger: Ledger, roster: Roster, clients: Collection[str]) -> tuple[dict[str, Tensor], list[str]]:
    """The duals that clients have as the server counted them, and the clients that lost theirs."""
    told = {
        "action": "share",
        "experiment": roster.experiment,
        "nonce": secrets.token_hex(8),
        "wait": roster.policy.timeout,
    }
    own = lambda client: {**told, "number": ledger.numbers[client], "ack": ledger.acks[client]}
    asked = {
        client: Message(wire.pack({}, own(client)), roster.nodes[client], MessageType.QUERY)
        for client in clients
        if client in roster.nodes
    }
    shares, lost = dict[str, Tensor](), [client for client in clients if client not in asked]
    silent = dict.fromkeys(asked, "no reply in time")
    replies = roster.exchange(grid, [*asked.values()], roster.policy.timeout)
    for client, message in by_client(replies, asked):
        try:
            if (why := wire.failure(message)) is not None:
                raise InputError(why)
            if wire.config_of(message.content).get("nonce") != told["nonce"]:
                raise InputError("its reply is to another question")
            sent = wire.tensors_of(message.content, ledger.server.lam_g.nbytes + 4096)
            if "eta" not in sent:
                raise InputError("it sent no dual")
            shares[client] = sent["eta"]
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
