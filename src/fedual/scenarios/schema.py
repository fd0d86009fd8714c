"""What a scenario file may contain: its tables, their keys and the types of their values."""

import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_origin

from fedual.errors import LARGEST, InputError, hint
from fedual.parsing import parsing, require_depth

Table = Mapping[str, Any]
Keys = Mapping[str, type | None]
"""What a table may hold: the type of each key's value; None for any."""

DATA: Keys = {
    **dict.fromkeys(("name", "file", "target", "test"), str),
    **dict.fromkeys(("fraction", "test_fraction", "scale"), float),
    **{"sites": None, "drop": list, "standardise": bool},
}
SOURCES = ("name", "file", "sites")
"""The source of the data, exactly one of: a data set of fedual's, a file of the user's, one file for each client."""
SPLIT: Keys = {
    **dict.fromkeys(("kind", "column"), str),
    **dict.fromkeys(("clients", "per_class", "max_uses"), int),
    **dict.fromkeys(("client_concentration", "class_concentration"), float),
}
SPLITS = {
    "dirichlet": ("client_concentration", "class_concentration"),
    "homogeneous": (),
    "two-class": ("per_class", "max_uses"),
    "sites": (),
    "column": ("column",),
}
"""The kinds of split, and the settings of each besides the number of clients."""
NATURAL = ("sites", "column")
"""The kinds whose clients are in the data."""
REQUIRED = {"data": (SOURCES,), "split": (("kind",),), "model": (("name", "function"),), "train": (("rounds",),)}
LAYERED = (*REQUIRED, "method")
"""The tables that a preset may change."""


def train_keys() -> Keys:
    """What [train] may contain: the settings of a run (`fedual.settings`), its rounds, its loss and its posterior."""
    from fedual import settings

    literals = {name: str if get_origin(kind) is Literal else kind for name, kind in settings.flat_kinds().items()}
    return {"rounds": int, **literals, "loss": str, "posterior": str}


def check_file(document: Table, where: str) -> None:
    """Refuse a file whose tables are wrong; [train] and the settings of methods need torch and are checked later."""
    for name, value in document.items():
        known("table", name, ("title", *LAYERED, "preset", "sweep"), where)
        check_type(name, value, str if name == "title" else dict, where)
    for table, choices in (("", (("title",),)), *REQUIRED.items()):
        for key, *others in choices:
            if not {key, *others} & (document.get(table, {}) if table else document).keys():
                place = f" from [{table}]" if table else ""
                instead = f" (or {', '.join(others)})" if others else ""
                raise InputError(f"{where}: {key} is missing{place}{instead}: every scenario has one.")
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


def _check_layer(layer: Table, where: str) -> None:
    for table, keys in (("data", DATA), ("split", SPLIT)):
        check_table(table, layer.get(table, {}), keys, where)
    for method, settings in layer.get("method", {}).items():
        check_type(f"method.{method}", settings, dict, where)
        own = settings.get("train", {})
        check_type(f"method.{method}.train", own, dict, where)
        if "rounds" in own:
            raise InputError(f"{where}: rounds in [method.{method}.train]: set them in [train], equal for all methods.")


def check_training(document: Table, where: str) -> None:
    """Refuse settings of a run that do not exist or have the wrong type, in every [train] table of a file."""
    keys = train_keys()
    for layer in (document, *document.get("preset", {}).values()):
        check_table("train", layer.get("train", {}), keys, where)
        for method, settings in layer.get("method", {}).items():
            check_table(f"method.{method}.train", settings.get("train", {}), keys, where)


def check_sources(data: Table, split: Table, model: Table, where: str) -> None:
    """Refuse data, a split and a model that do not go together."""
    for name, table, choices in (("data", data, SOURCES), ("model", model, ("name", "function"))):
        if len(given := [key for key in choices if key in table]) > 1:
            raise InputError(f"{where}: [{name}] has {' and '.join(given)}: give one of them.")
    if "name" in data:
        for key in data.keys() - {"name", "fraction"}:
            raise InputError(f"{where}: data.{key} is for files of your own, not for {data['name']}: leave it out.")
    else:
        _check_files(data, where)
    fraction = data.get("fraction", 1.0)
    if not 0 < fraction <= 1:
        raise InputError(f"{where}: data.fraction = {fraction}: it must be above 0 and at most 1.")
    kind = split["kind"]
    known("kind of split", kind, SPLITS, where)
    for key in split.keys() - {"kind", *(() if kind in NATURAL else ("clients",)), *SPLITS[kind]}:
        raise InputError(f"{where}: a {kind} split has no {key}: leave it out.")
    if (wanted := "column" if kind == "column" else "clients" if kind != "sites" else "kind") not in split:
        raise InputError(f"{where}: {wanted} is missing from [split]: a {kind} split has one.")
    if (kind == "sites") != ("sites" in data):
        raise InputError(f'{where}: split.kind = {kind!r}: data.sites and split.kind = "sites" need each other.')
    if kind == "column" and not str(data.get("file", "")).endswith((".csv", ".parquet")):
        raise InputError(f"{where}: split.column needs data.file to be a .csv or .parquet file: name one.")


def _check_files(data: Table, where: str) -> None:
    sites = data.get("sites", [data.get("file")])
    for key, values in (("sites", sites if isinstance(sites, list) else [sites]), ("drop", data.get("drop", []))):
        if (key == "sites" and not values) or not all(isinstance(value, str) for value in values):
            raise InputError(f"{where}: data.{key} = {data[key]!r}: it must be a list of texts.")
    arrays = str(sites[0] if isinstance(sites, list) else sites).endswith(".npz")
    if arrays and (odd := data.keys() & {"target", "drop"}):
        raise InputError(f"{where}: data.{min(odd)}: an .npz file has arrays x and y, no columns: leave it out.")
    if not arrays and "target" not in data:
        raise InputError(f"{where}: target is missing from [data]: name the column to predict.")
    for one, other in (("test", "test_fraction"), ("scale", "standardise")):
        if data.get(one) and data.get(other):
            raise InputError(f"{where}: [data] has {one} and {other}: give one of them.")
    if "test_fraction" in data and not 0 < data["test_fraction"] < 1:
        raise InputError(f"{where}: data.test_fraction = {data['test_fraction']}: it must be above 0 and below 1.")
    if "scale" in data and not data["scale"] > 0:
        raise InputError(f"{where}: data.scale = {data['scale']}: it must be above 0.")


def check_table(table: str, values: Table, keys: Keys, where: str) -> None:
    """Refuse keys that a table does not have, and values of the wrong type."""
    for key, value in values.items():
        known(f"setting of [{table}]", key, keys, where)
        check_type(key, value, keys[key], where)


def check_type(key: str, value: Any, kind: type | None, where: str) -> None:
    """Refuse a value of another type than `kind` (None: any), NaN and ∞; whole numbers are accepted as floats."""
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise InputError(f"{where}: {key} = {value}: it must be a finite number.")
        if isinstance(number, int) and not -LARGEST <= number <= LARGEST:
            raise InputError(f"{where}: {key} has a number of {len(str(number))} digits: give one of at most 64 bits.")
    if kind is None:
        return
    fits = isinstance(value, int | float if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a table"}
        raise InputError(f"{where}: {key} = {value!r}: it must be {words.get(kind, f'a {kind.__name__}')}.")


def known(what: str, name: str, names: Iterable[str], where: str) -> None:
    """Refuse a name that is not among `names`, suggesting the nearest that is."""
    names = list(names)
    if name not in names:
        raise InputError(f"{where}: unknown {what} {name!r}: {hint(name, names)}")


def parse_setting(text: str) -> tuple[str, Any]:
    """Split `key=value`; the value is parsed as TOML, or taken as a text if it is not a TOML value.

    Example:
        >>> parse_setting("lr=1e-3"), parse_setting("train.noise=shared-fixed")
        (('lr', 0.001), ('train.noise', 'shared-fixed'))
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise InputError(f"{text!r}: give a setting as key=value, e.g. lr=0.01 or train.batch_size=16.")
    with parsing(f"{key}:", "its value is no TOML", "give a number, a text or a short list", InputError):
        try:
            parsed = tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            return key, value
        require_depth(parsed)
    return key, parsed["value"] if len(parsed) == 1 else value
