"""Conversion of settings and parts of methods to dicts of JSON values, which are stored and sent, and back.

A part is a frozen dataclass that was given to `register`. It becomes `{"type": its name, field: value, …}`, with
tensors as nested lists, and comes back as an equal object. Nothing is ever evaluated: a name that nobody registered
is refused.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedual.errors import InputError, hint, in_one_line

VERSION = 1
"""The version of the form that `to_dict` writes; it is raised when an older reader could misunderstand it."""

_PARTS: dict[str, type] = {}


def register(*classes: type) -> None:
    """Register frozen dataclasses, so that `decode` finds them by name."""
    _PARTS.update({cls.__name__: cls for cls in classes})


def encode(value: Any) -> Any:
    """A part, a tensor or a plain value as JSON values."""
    if isinstance(value, Tensor):
        return {"type": "tensor", "dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **encode_fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def encode_fields(value: Any) -> dict[str, Any]:
    """The fields that a dataclass is made from, by name."""
    return {field.name: encode(getattr(value, field.name)) for field in fields(value) if field.init}


def decode(value: Any) -> Any:
    """The inverse of `encode`; refuse parts that are not registered or have other fields, and broken tensors."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    if "type" not in value:
        return {key: decode(item) for key, item in value.items()}
    kind, rest = str(value["type"]), {key: item for key, item in value.items() if key != "type"}
    if kind == "tensor":
        try:
            return torch.tensor(rest["values"], dtype=getattr(torch, rest["dtype"]))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"A tensor cannot be read ({in_one_line(error)}): give its dtype and values.") from None
    if kind not in _PARTS:
        raise InputError(
            f"The part {kind!r} is not known here: {hint(kind, _PARTS)} Parts of your own are registered with "
            "`fedual.parts.register`."
        )
    return decode_fields(_PARTS[kind], rest)


def decode_fields(cls: type, values: Mapping[str, Any]) -> Any:
    """A dataclass from its fields; missing fields keep their defaults."""
    known = {field.name: field for field in fields(cast(Any, cls)) if field.init}
    for name in values:
        if name not in known:
            raise InputError(f"{cls.__name__} has no setting {name!r}: {hint(name, known)}")
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{cls.__name__} comes without its setting {name!r}, which has no default: add it.")
    try:
        return cls(**{name: decode(value) for name, value in values.items()})
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{cls.__name__} cannot have these settings ({in_one_line(error)}): correct them.") from None


class Versioned:
    """`to_dict` and `from_dict` for a frozen dataclass of settings."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the version of their form."""
        return {"version": VERSION, **encode_fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any:
        """The inverse of `to_dict`; refuse another version, and settings that do not exist."""
        rest = dict(values)
        if (version := rest.pop("version", None)) != VERSION:
            raise InputError(
                f"These settings of {cls.__name__} have version {version!r}, this fedual reads {VERSION}: "
                "use the fedual that wrote them, or convert them."
            )
        return decode_fields(cls, rest)
