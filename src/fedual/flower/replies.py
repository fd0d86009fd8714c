"""Checks of the clients' replies: a reply may come from anybody and contain anything."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Message

from fedual.algorithm import Guards
from fedual.errors import InputError
from fedual.flower import wire
from fedual.flower.updates import Reply


def by_client(replies: Iterable[Message], asked: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
    """Pair replies with the client that was asked, even errors that Flower reports in place of a node."""
    clients = {message.metadata.message_id: client for client, message in asked.items()}
    for message in replies:
        if (client := clients.get(message.metadata.reply_to_message_id)) is not None:
            yield client, message


def reply_of(client: str, message: Message, payload: str, most: int) -> Reply:
    """A client's reply for the ledger: it must have this kind of payload, and arrays of at most `most` bytes.

    Raises:
        InputError: The client failed or refused, or this is no reply to the question.
    """
    if (why := wire.failure(message)) is not None:
        raise InputError(why)
    config = wire.config_of(message.content)
    if config.get("client") != client:
        raise InputError(f"it says that it is client {wire.brief(config.get('client'))}")
    if config.get("payload") != payload:
        raise InputError(f"its payload is {wire.brief(config.get('payload'))}, not {payload}")
    metrics = wire.metrics_of(message.content)
    examples = metrics.get("num-examples")
    if not isinstance(examples, int | float) or not 0 < examples < 2**63:
        raise InputError(f"its number of examples is {wire.brief(examples)}")
    fraction = lambda value: float(value) if isinstance(value, int | float) and 0 <= value <= 1 else 0.0
    guards = Guards(*(fraction(metrics.get(name)) for name in Guards._fields))
    tensors = wire.tensors_of(message.content, most)
    return Reply(client, str(config.get("nonce")), payload, tensors, float(examples), guards)


def averaged(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Average the metrics that most clients have, weighted by `num-examples`; only finite numbers count."""
    finite = lambda value: isinstance(value, int | float) and math.isfinite(value)
    clients = [each for each in metrics if finite(each.get("num-examples")) and each["num-examples"] > 0]
    averages: dict[str, float] = {}
    for key in sorted({key for each in clients for key in each} - {"num-examples"}):
        having = [each for each in clients if finite(each.get(key))]
        if 2 * len(having) > len(clients):
            total = sum(each["num-examples"] for each in having)
            averages[key] = float(sum(each[key] * each["num-examples"] for each in having) / total)
    return averages
