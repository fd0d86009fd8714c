"""What clients answer, looked at before anything is made of it: a reply may come from anybody and hold anything."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Message

from fedual.contracts import Guards
from fedual.errors import InputError
from fedual.flower import wire
from fedual.flower.ledger import Reply


def by_client(replies: Iterable[Message], asked: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
    """Replies with the client that was asked; an error that Flower reports in a node's place has no other mark."""
    clients = {message.metadata.message_id: client for client, message in asked.items()}
    for message in replies:
        if (client := clients.get(message.metadata.reply_to_message_id)) is not None:
            yield client, message


def reply_of(client: str, message: Message, payload: str, most: int) -> Reply:
    """A reply as the ledger takes it.

    Args:
        client: Who was asked.
        message: What came.
        payload: In which form it must be.
        most: Bytes of its arrays.

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
    figures = wire.metrics_of(message.content)
    examples = figures.get("num-examples")
    if not isinstance(examples, int | float) or not 0 < examples < 2**63:
        raise InputError(f"its number of examples is {wire.brief(examples)}")
    part = lambda value: float(value) if isinstance(value, int | float) and 0 <= value <= 1 else 0.0
    guards = Guards(*(part(figures.get(name)) for name in Guards._fields))
    tensors = wire.tensors_of(message.content, most)
    return Reply(client, str(config.get("nonce")), payload, tensors, float(examples), guards)


def averaged(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures that most clients have, weighted by `num-examples`; what is no finite number is left out."""
    sound = lambda value: isinstance(value, int | float) and math.isfinite(value)
    clients = [one for one in found if sound(one.get("num-examples")) and one["num-examples"] > 0]
    figures: dict[str, float] = {}
    for key in sorted({key for one in clients for key in one} - {"num-examples"}):
        having = [one for one in clients if sound(one.get(key))]
        if 2 * len(having) > len(clients):
            total = sum(one["num-examples"] for one in having)
            figures[key] = float(sum(one[key] * one["num-examples"] for one in having) / total)
    return figures
