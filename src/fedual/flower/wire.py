"""Tensors and settings as Flower's records, and back: parsed, never unpickled, and no larger than announced."""

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedual.errors import InputError

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"


def arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as they travel; messages to many clients share one record."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})


def pack(
    tensors: Mapping[str, Tensor] | ArrayRecord, config: Mapping[str, Any], metrics: Mapping[str, float] | None = None
) -> RecordDict:
    """One record of each kind, so that Flower's mods can wrap the client."""
    record = tensors if isinstance(tensors, ArrayRecord) else arrays(tensors)
    plain = ConfigRecord({key: value for key, value in config.items() if value is not None})
    return RecordDict({ARRAYS: record, METRICS: MetricRecord(dict(metrics or {})), CONFIG: plain})


def tensors_of(content: RecordDict, most: int | None = None) -> dict[str, Tensor]:
    """The tensors of a message, if they take no more than `most` bytes.

    Raises:
        InputError: Larger, or not arrays.
    """
    found = content.array_records.get(ARRAYS)
    if found is None:
        raise InputError("it sent no arrays")
    size = nbytes(found)
    if most is not None and size > most:
        raise InputError(f"it sent {size} bytes, where at most {most} were expected")
    try:
        return {name: torch.from_numpy(array.numpy()) for name, array in found.items()}
    except Exception as error:  # a parser of bytes that somebody made up may raise anything, MemoryError for one
        raise InputError(f"its arrays cannot be read ({brief(error)})") from None


def nbytes(record: ArrayRecord) -> int:
    """Bytes of the arrays as they travel."""
    return sum(len(array.data) for array in record.values())


def config_of(content: RecordDict) -> dict[str, Any]:
    """The settings of a message."""
    return dict(content.config_records.get(CONFIG, {}))


def metrics_of(content: RecordDict) -> dict[str, Any]:
    """The figures of a message."""
    return dict(content.metric_records.get(METRICS, {}))


def failure(message: Message) -> str | None:
    """Why a message is no answer: what failed, or what its client says that it refuses."""
    if message.has_error():
        return f"its app failed ({brief(message.error.reason or message.error.code)})"
    refusal = config_of(message.content).get("refusal")
    return None if refusal is None else brief(refusal)


def brief(text: Any) -> str:
    """A text that somebody else wrote, fit for one line of a log."""
    plain = "".join(letter if letter.isprintable() else " " for letter in str(text)[:2000])
    short = " ".join(plain.split())
    return short if len(short) <= 500 else f"{short[:499]}…"
