"""What a scenario file may say: its tables, their keys and the types of their values."""

import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from fedual.errors import InputError, hint

Keys = Mapping[str, type | None]
"""What a table may hold: the type of each key's value; None for any."""

DATA: Keys = {"name": str, "fraction": float}
SPLIT: Keys = {
    "kind": str,
    "clients": int,
    "client_concentration": float,
    "class_concentration": float,
    "per_class": int,
    "max_uses": int,
}
SPLITS = {
    "dirichlet": ("client_concentration", "class_concentration"),
    "homogeneous": (),
    "two-class": ("per_class", "max_uses"),
}
"""The kinds of split, and what each may be told beside the number of clients."""
TRAIN: Keys = {
    "rounds": int,
    "batch_size": int,
    "local_epochs": int,
    "local_steps": int,
    "schedule": str,
    "decay": float,
    "noise": str,
    "order": str,
    "participation": float,
    "evaluate_every": int,
    "samples": int,
    "chunk": int,
    "compile": bool,
    "precision": str,
}
REQUIRED = {"data": ("name",), "split": ("kind", "clients"), "model": ("name",), "train": ("rounds",)}
LAYERED = (*REQUIRED, "method")
"""The tables that a preset may change."""


def check_file(document: Mapping[str, Any], where: str) -> None:
    """Refuse a scenario file whose tables are not those that scenarios have; settings of methods are checked later."""
    for name, value in document.items():
        known("table", name, ("title", *LAYERED, "preset", "sweep"), where)
        check_type(name, value, str if name == "title" else dict, where)
    for table, keys in (("", ("title",)), *REQUIRED.items()):
        for key in keys:
            if key not in (document.get(table, {}) if table else document):
                raise InputError(
                    f"{where}: {key} is missing{f' from [{table}]' if table else ''}: every scenario has one."
                )
    _check_layer(document, where)
    for name, layer in document.get("preset", {}).items():
        check_type(f"preset.{name}", layer, dict, where)
        for table, value in layer.items():
            known("table of a preset", table, LAYERED, where)
            check_type(f"preset.{name}.{table}", value, dict, where)
        _check_layer(layer, where)
    for method, table in document.get("sweep", {}).items():
        check_type(f"sweep.{method}", table, dict, where)
        for key, values in table.items():
            if not isinstance(values, list) or not values:
                raise InputError(f"{where}: sweep.{method}.{key} = {values!r}: give a list of the values to try.")


def _check_layer(layer: Mapping[str, Any], where: str) -> None:
    for table, keys in (("data", DATA), ("split", SPLIT), ("train", TRAIN)):
        check_table(table, layer.get(table, {}), keys, where)
    for method, settings in layer.get("method", {}).items():
        check_type(f"method.{method}", settings, dict, where)
        own = settings.get("train", {})
        check_type(f"method.{method}.train", own, dict, where)
        if "rounds" in own:
            raise InputError(f"{where}: rounds in [method.{method}.train]: set them in [train], equal for all methods.")
        check_table(f"method.{method}.train", own, TRAIN, where)


def check_table(table: str, values: Mapping[str, Any], keys: Keys, where: str) -> None:
    """Refuse keys that a table does not have, and values of the wrong type."""
    for key, value in values.items():
        known(f"setting of [{table}]", key, keys, where)
        check_type(key, value, keys[key], where)


def check_type(key: str, value: Any, kind: type | None, where: str) -> None:
    """Refuse a value of another type than `kind` (None: any); whole numbers pass for floats, NaN and ∞ for nothing."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where}: {key} = {value}: it must be a finite number.")
    if kind is None:
        return
    fits = isinstance(value, int | float if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{where}: {key} = {value!r}: it must be {_TYPES.get(kind, kind.__name__)}.")


_TYPES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "a table",
}


def known(what: str, name: str, names: Iterable[str], where: str) -> None:
    """Refuse a name that is not among `names`, suggesting the nearest that is."""
    names = list(names)
    if name not in names:
        raise InputError(f"{where}: unknown {what} {name!r}: {hint(name, names)}")


def parse_setting(text: str) -> tuple[str, Any]:
    """Split `key=value`; the value is one of TOML, and what TOML does not know as a value is a bare word.

    Example:
        >>> parse_setting("lr=1e-3"), parse_setting("train.noise=shared-fixed")
        (('lr', 0.001), ('train.noise', 'shared-fixed'))
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise InputError(f"{text!r}: give a setting as key=value, e.g. lr=0.01 or train.batch_size=16.")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key, value
    return key, parsed["value"] if len(parsed) == 1 else value
