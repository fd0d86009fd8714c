"""The variance of a regression's noise after the last round, from the sites' squared residuals at the mean of q_g."""

import json
import secrets
from logging import WARNING
from typing import Any, cast

from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from fedual.algorithm import Method
from fedual.errors import InputError
from fedual.families import Gaussian
from fedual.flower import wire
from fedual.flower.ledger import Ledger
from fedual.flower.replies import by_client
from fedual.flower.roster import Roster
from fedual.networks.targets import effective_parameters, noise_variance
from fedual.parts import encode

MOST = 2**20
"""Bytes that a reply may take."""


def learn_noise(grid: Grid, ledger: Ledger, roster: Roster, method: Method, common: dict[str, Any]) -> Tensor | None:
    """σ² from the sites that answer, see `noise_variance`; None if none does.

    Args:
        grid: Flower's grid.
        ledger: The server's state, the unit of the targets and the sites' numbers of examples.
        roster: The sites that are connected.
        method: The method with the numbers of the last round.
        common: The settings of every message.
    """
    nonce, family = secrets.token_hex(8), cast(Gaussian, method.family)
    question = {**common, "action": "residuals", "nonce": nonce, "family": json.dumps(encode(family))}
    content, targets = wire.arrays({"lam_g": ledger.server.lam_g}), ledger.targets
    assert targets is not None
    asked = {
        client: Message(wire.pack(content, question), node, MessageType.QUERY) for client, node in roster.nodes.items()
    }
    found: dict[str, Tensor] = {}
    for client, message in by_client(roster.exchange(grid, [*asked.values()], roster.policy.timeout), asked):
        try:
            if (why := wire.failure(message)) is not None:
                raise InputError(why)
            if wire.config_of(message.content).get("nonce") != nonce:
                raise InputError("its reply is to another question")
            squares = wire.tensors_of(message.content, MOST).get("squares")
            if squares is None or squares.shape != targets.mean.shape or squares.dtype != targets.mean.dtype:
                raise InputError("it sent no squared residuals of each output")
            if not (squares.isfinite().all() and (squares >= 0).all()):
                raise InputError("its squared residuals are negative or not finite")
            found[client] = squares
        except InputError as error:
            log(WARNING, "client %s does not count in the noise: %s", client, wire.brief(error))
    if not found:
        return None
    parameters = effective_parameters(family, ledger.server.lam_g, ledger.server.prior, method.tau)
    weight = sum(ledger.examples[client] for client in found)
    total = sum((found[client] for client in sorted(found)), start=0 * targets.mean)
    return noise_variance(total, weight, parameters)
