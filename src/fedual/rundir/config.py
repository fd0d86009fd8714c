"""A run's config: its digest, and its comparison with the config with which the run is resumed."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fedual import settings
from fedual.algorithm import Method
from fedual.errors import InputError

Difference = tuple[str, str, str]
"""A setting by its path, and its values in the old and the new config as JSON."""


def digest(config: dict[str, Any]) -> str:
    """What a run's files say of its config, except for `rounds`, which may grow; stored when the run begins."""
    text = json.dumps({key: value for key, value in config.items() if key != "rounds"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """The settings that differ, in the order of the old config.

    `rounds` may have grown, and settings without influence on the result may differ. A setting that did not exist yet
    counts as its default.
    """
    before, after = old.get("rounds"), new.get("rounds")
    if isinstance(before, int) and isinstance(after, int) and before <= after:
        new = {**new, "rounds": before}
    if "posterior" in new:  # older runs handed q_g over as it was trained
        old = {"posterior": "point", **old}
    if "examples" in new:  # older runs did not store it; the number of examples follows from `data`
        old = {**old, "examples": old.get("examples", new["examples"])}
    return list(_differences(_comparable(old), _comparable(new), ""))


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """A config with all settings of this version except those that may change."""
    config = dict(config)
    for name, section in settings.SECTIONS.items():
        if isinstance(config.get(name), dict):
            complete = section().to_dict() | config[name]
            config[name] = {key: value for key, value in complete.items() if key not in settings.FREE}
    if isinstance(method := config.get("method"), dict) and "family" in method:
        with suppress(InputError):  # parts that are not registered in this process
            method = Method.from_dict(method).to_dict()
        config["method"] = {key: value for key, value in method.items() if key != "name"}
    return config


def _differences(old: Any, new: Any, key: str) -> Iterator[Difference]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield key, json.dumps(old), json.dumps(new)
        return
    for name in {**old, **new}:
        path = f"{key}.{name}" if key else name
        if name in old and name in new:
            yield from _differences(old[name], new[name], path)
        else:
            before, after = (json.dumps(config[name]) if name in config else "nothing" for config in (old, new))
            yield path, before, after
