"""Tensors and settings as Flower's records, and back: parsed, never unpickled, and limited in size."""

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedual.errors import InputError

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"
READ, SHOWN = 2000, 500
"""How many letters of a foreign text are read, and how many are shown."""


def arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as a record, which messages to many clients can share."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})


def pack(
    tensors: Mapping[str, Tensor] | ArrayRecord, config: Mapping[str, Any], metrics: Mapping[str, float] | None = None
) -> RecordDict:
    """Make a message's content: one record of each kind, as Flower's mods expect; settings of None are left out."""
    record = tensors if isinstance(tensors, ArrayRecord) else arrays(tensors)
    plain = ConfigRecord({key: value for key, value in config.items() if value is not None})
    return RecordDict({ARRAYS: record, METRICS: MetricRecord(dict(metrics or {})), CONFIG: plain})


def tensors_of(content: RecordDict, most: int | None = None) -> dict[str, Tensor]:
    """The tensors of a message.

    Raises:
        InputError: There are no arrays, they cannot be read, or they take more than `most` bytes.
    """
    record = content.array_records.get(ARRAYS)
    if record is None:
        raise InputError("it sent no arrays")
    size = nbytes(record)
    if most is not None and size > most:
        raise InputError(f"it sent {size} bytes, where at most {most} were expected")
    try:
        return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}
    except Exception as error:  # parsing foreign bytes may raise anything, even a MemoryError
        raise InputError(f"its arrays cannot be read ({brief(error)})") from None


def nbytes(record: ArrayRecord) -> int:
    """Bytes of the arrays on the wire."""
    return sum(len(array.data) for array in record.values())


def config_of(content: RecordDict) -> dict[str, Any]:
    """The settings of a message."""
    return dict(content.config_records.get(CONFIG, {}))


def metrics_of(content: RecordDict) -> dict[str, Any]:
    """The metrics of a message."""
    return dict(content.metric_records.get(METRICS, {}))


def failure(message: Message) -> str | None:
    """Why a message is not an answer: its app failed, or its client refused; None if it is an answer."""
    if message.has_error():
        return f"its app failed ({brief(message.error.reason or message.error.code)})"
    refusal = config_of(message.content).get("refusal")
    return None if refusal is None else brief(refusal)


def brief(text: Any) -> str:
    """A foreign text, made safe and short enough for one line of a log."""
    printable = "".join(letter if letter.isprintable() else " " for letter in str(text)[:READ])
    line = " ".join(printable.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"
