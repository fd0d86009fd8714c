"""Clients that start anew or leave: their η_k no longer counts in Σ_k η_k.

A client that lost its η_k or leaves for good still counts in the sum. Where the server keeps each η_k (`Ledger.shares`)
it adds up those of the others and believes nobody. Otherwise it knows only the sum, and asks all others for their η_k
this once. Nothing changes at the clients, so that a server that is killed in between can start over.
"""

import math
import secrets
from collections.abc import Collection, Mapping
from logging import INFO

import torch
from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from fedual.algorithm import Method, Zero, influence
from fedual.errors import FedualError, InputError
from fedual.flower import wire
from fedual.flower.ledger import Ledger
from fedual.flower.replies import by_client
from fedual.flower.roster import Roster
from fedual.flower.updates import UNSOUND, require

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
        knows = ledger.shares is not None and ledger.shares.keys() >= ledger.acks.keys()
        others = [client for client in ledger.acks if client not in forget and (client in readmit or not knows)]
        roster.gather(grid, ledger, others)
        shares, lost = _ask(grid, ledger, roster, others)
        if gone := [client for client in lost if client not in readmit]:
            raise FedualError(
                f"Σ η cannot be counted anew without {', '.join(gone)}, whose state is lost: re-admit or forget them, "
                "too."
            )
        if intact := [client for client in readmit if client in shares]:
            log(INFO, "not re-admitted, for their state is intact: %s", ", ".join(intact))
        if knows:
            kept = ledger.shares or {}
            shares = {client: kept[client] for client in ledger.acks if client not in {*lost, *forget}}
        else:
            _check(ledger, method, shares)
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
    question = lambda client: (
        {**common, "number": ledger.numbers[client], "ack": ledger.acks[client]}
        | ({"factor": ledger.factors[client]} if client in ledger.factors else {})
    )
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


def _check(ledger: Ledger, method: Method, shares: Mapping[str, Tensor]) -> None:
    """Refuse the η_k of sites that would move q_g much further than those of most sites, or out of its domain.

    The sum of all η_k is known: without the clients that are missing, λ_0 + Σ η must still be inside.

    Raises:
        FedualError: A site is named, or the sum is wrong; nothing changed.
    """
    family, lam_g, counts = method.family, ledger.server.lam_g, ledger.counts
    moves, wrong = {client: eta / len(ledger.members) for client, eta in shares.items()}, dict[str, str]()
    for client, move in moves.items():
        try:
            require("dual", shares[client], lam_g)
            if not float(influence.sizes(family, lam_g, move[None])[0]) < math.inf:
                raise InputError("its dual is too large: its size is not finite")
        except UNSOUND as error:
            wrong[client] = wire.brief(error)
    if not wrong and len(moves) > 1:
        stack, examples = torch.stack([*moves.values()]), torch.tensor([counts[client] for client in moves]).double()
        found = influence.sizes(family, lam_g, stack)
        cut, _ = influence.factors(family, lam_g, stack, examples, found, 0.0, influence.DEFAULT)
        wrong = {client: "its dual is too large" for client, c in zip(moves, cut.tolist(), strict=True) if c < 1}
    for client, why in wrong.items():
        raise FedualError(f"Σ η cannot be counted anew with client {client}, because {why}: forget it, too.")
    rest = ledger.server.prior + sum(shares.values(), torch.zeros_like(lam_g))
    if not family.inside(rest):
        raise FedualError("Σ η cannot be counted anew: λ_0 + Σ η is outside the domain; choose another experiment.")
