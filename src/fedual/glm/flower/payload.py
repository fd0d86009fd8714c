"""A `Message` as Flower's records, and back: one array record, one config record, facts as one JSON text.

Whoever sent it may have sent anything: it is parsed, never executed, limited in size, and its numbers are finite.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import RecordDict

from fedual.errors import InputError
from fedual.flower import wire
from fedual.glm.messages import Message

MOST_BYTES = 1 << 28
"""Largest size of a message's arrays: some ten symmetric matrices of 2,500 columns."""
MOST_LETTERS = 1 << 22
"""Largest length of a message's facts."""
LARGEST = 1e150
"""Largest number of a message; its square is finite."""
NULL = "null"


def pack(message: Message, **envelope: str) -> RecordDict:
    """The content of a Flower message; `envelope` has further settings, such as the site's name."""
    facts = json.dumps(dict(message.facts))
    return wire.pack(message.tensors, {**envelope, "kind": message.kind, "facts": facts})


def unpack(content: RecordDict) -> Message:
    """The message in the content of a Flower message.

    Raises:
        InputError: It is too large, cannot be read, or contains a number that is not finite or beyond `LARGEST`.
    """
    config = wire.config_of(content)
    kind, facts = config.get("kind"), _parse(config.get("facts"))
    if not isinstance(kind, str):
        raise InputError("it does not say what it is")
    tensors = wire.tensors_of(content, MOST_BYTES)
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float64:
            raise InputError(f"its {wire.brief(name)} is {tensor.dtype}, not torch.float64")
        if not (tensor.abs() <= LARGEST).all():  # False for NaN, too
            raise InputError(f"its {wire.brief(name)} contains NaN, or a number beyond {LARGEST:g}")
    return Message(kind, facts, tensors)


def misfits(replies: Mapping[str, Message]) -> dict[str, str]:
    """Sites whose answers to one request have other parts than those of most sites, and the first such part.

    Parts are tensors with their shapes, and facts with their kinds. A fact may be null, such as an infinite loss.
    """
    layouts = {site: _layout(reply) for site, reply in replies.items()}
    found = dict[str, str]()
    for part in sorted({part for layout in layouts.values() for part in layout}):
        kinds = {site: layout.get(part, "none") for site, layout in layouts.items() if layout.get(part) != NULL}
        usual, _ = Counter(kinds.values() or [NULL]).most_common(1)[0]
        for site, kind in kinds.items():
            if kind != usual:
                found.setdefault(site, f"its '{wire.brief(part[1])}' is {kind}, where others sent {usual}")
    return found


def _layout(message: Message) -> dict[tuple[str, str], str]:
    """The kind of each part; a tensor and a fact can have one name."""
    tensors = {("array", name): f"an array of shape {tuple(each.shape)}" for name, each in message.tensors.items()}
    return tensors | {("fact", name): _kind(value) for name, value in message.facts.items()}


def _kind(value: Any) -> str:
    """The kind of a JSON value in words."""
    if isinstance(value, list):
        numbers = all(_kind(each) in ("a number", NULL) for each in value)
        return f"{len(value)} numbers" if value and numbers else "a list"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text", dict: "an object"}
    return kinds.get(type(value), NULL)


def _parse(text: Any) -> dict[str, Any]:
    if not isinstance(text, str):
        raise InputError("it has no facts")
    if len(text) > MOST_LETTERS:
        raise InputError(f"its facts have {len(text)} letters, where at most {MOST_LETTERS} were expected")
    try:
        facts = json.loads(text)
        _check_numbers(facts)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"its facts are no JSON ({wire.brief(error)})") from None
    if not isinstance(facts, dict):
        raise InputError("its facts are no JSON object")
    return facts


def _check_numbers(value: Any) -> None:
    """Refuse NaN and infinity, which Python's JSON accepts."""
    if isinstance(value, dict):
        for each in value.values():
            _check_numbers(each)
    elif isinstance(value, list):
        for each in value:
            _check_numbers(each)
    elif isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise InputError(f"its facts contain NaN, or a number beyond {LARGEST:g}")
