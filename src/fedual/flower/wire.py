"""Tensors and settings as Flower's records, and back: parsed, never unpickled, and no larger than announced."""

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedual.errors import InputError

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"


def pack(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], metrics: Mapping[str, float] | None = None
) -> RecordDict:
    """One record of each kind, so that Flower's mods can wrap the client."""
    arrays = ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})
    plain = ConfigRecord({key: value for key, value in config.items() if value is not None})
    return RecordDict({ARRAYS: arrays, METRICS: MetricRecord(dict(metrics or {})), CONFIG: plain})


def tensors_of(content: RecordDict, most: int | None = None) -> dict[str, Tensor]:
    """The tensors of a message, if they take no more than `most` bytes.

    Raises:
        InputError: Larger, or not arrays.
    """
    arrays = content.array_records.get(ARRAYS)
    if arrays is None:
        raise InputError("it sent no arrays")
    size = nbytes(arrays)
    if most is not None and size > most:
        raise InputError(f"it sent {size} bytes, where at most {most} were expected")
    try:
        return {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}
    except (TypeError, ValueError, EOFError, OSError) as error:
        raise InputError(f"its arrays cannot be read ({' '.join(str(error).split())[:100]})") from None


def nbytes(arrays: ArrayRecord) -> int:
    """Bytes of the arrays as they travel."""
    return sum(len(array.data) for array in arrays.values())


def config_of(content: RecordDict) -> dict[str, Any]:
    """The settings of a message."""
    return dict(content.config_records.get(CONFIG, {}))
