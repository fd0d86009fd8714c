"""Settings and records as JSON, and what may differ between the settings of a run and of its continuation."""

import json
import math
from typing import Any

from fedual.errors import InputError

ADDED = {"decay": 1.0}
"""Settings that older runs do not name, and what they had."""


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
    """The value with None in the place of NaN and ±∞."""
    if isinstance(value, dict):
        return {key: without_nan(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def difference(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, str, str] | None:
    """The first setting that differs, with both values; `rounds` may have grown."""
    before, after = old.get("rounds"), new.get("rounds")
    if isinstance(before, int) and isinstance(after, int) and before <= after:
        new = {**new, "rounds": before}
    added = {**ADDED, "examples": new.get("examples")}  # whose number follows from `data`
    old = old | {key: value for key, value in added.items() if key in new and key not in old}
    return _difference(old, new, "")


def _difference(old: Any, new: Any, key: str) -> tuple[str, str, str] | None:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return None if old == new else (key, json.dumps(old), json.dumps(new))
    for name in {**old, **new}:
        own = f"{key}.{name}" if key else name
        if name not in old or name not in new:
            one, other = (json.dumps(side[name]) if name in side else "nothing" for side in (old, new))
            return own, one, other
        if found := _difference(old[name], new[name], own):
            return found
    return None
