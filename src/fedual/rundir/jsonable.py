"""Settings and records as JSON values."""

import json
import math
from typing import Any

from fedual.errors import InputError


def dumps(value: Any, name: str) -> str:
    """Write a value as JSON on one line; `name` is what an error calls it."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} = {value} cannot be written as JSON ({error}): use only JSON values.") from None


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """The config as it will be read back: tuples become lists, floats stay the same."""
    return json.loads(dumps(config, "config"))


def without_nan(value: Any) -> Any:
    """The value with None in place of NaN and ±∞, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
