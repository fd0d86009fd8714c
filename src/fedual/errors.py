"""The exceptions that fedual raises, and checks of settings; a message names the value, the cause and the remedy."""

import difflib
import math
from collections.abc import Collection
from importlib import import_module
from itertools import islice
from typing import Any

from fedual.texts import printable

LISTED = 40
"""Most names that an error lists."""
LARGEST = 2**63 - 1
"""The largest whole number, that of 64 bits with a sign: others do not fit into a tensor."""
SINGLE = 3.4e38
"""The largest number of single precision, in which most models compute."""
LONGEST = 600
"""Most letters of a message: what a file holds can be long, and a sentence is to be read."""


class FedualError(Exception):
    """Base class of all errors that fedual raises on purpose; the command line prints them without a traceback.

    Messages quote files, sites and users: control characters in them are shown as escapes, and long ones are cut.
    """

    def __init__(self, *args: Any):
        super().__init__(*(sentence(arg) if isinstance(arg, str) else arg for arg in args))


class InputError(FedualError, ValueError):
    """An argument, setting or shape is unusable; raised before any work starts."""


class DataError(FedualError):
    """A data file is missing, damaged, truncated or not what its name says."""


class DomainError(FedualError, ArithmeticError):
    """Parameters are outside the domain of their family, e.g. a precision is not positive."""


class NotConvergedError(FedualError, ArithmeticError):
    """A solver used up its iterations before its stopping rule was met."""


class DivergedError(FedualError, ArithmeticError):
    """A run cannot continue: the updates of all clients, or that of the server, are outside the domain.

    `run`, if there is one, holds the last good posterior.
    """

    run: Any = None


def sentence(text: str) -> str:
    """A message on one line without control characters; of a long one the beginning, and the end with the remedy."""
    text = printable(" ".join(text.split("\n")))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 203]} … {text[-200:]}"


def hint(name: Any, known: Collection[str]) -> str:
    """Complete a message about an unknown name: suggest the nearest known name, or list all if none is near."""
    in_lower_case = {one.lower(): one for one in known}
    if near := difflib.get_close_matches(str(name).lower(), in_lower_case, n=1, cutoff=0.5):
        return f"did you mean {in_lower_case[near[0]]!r}?"
    more = f" and {len(known) - LISTED} others" if len(known) > LISTED else ""
    return f"choose one of {', '.join(islice(known, LISTED))}{more}." if known else "there are none."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_positive(name: str, value: Any, most: float = SINGLE) -> None:
    """Raise unless a setting is a positive, finite number of at most `most`, by default the largest of float32."""
    if not _is_number(value) or not 0 < value <= most:
        limit = (
            "" if most == SINGLE and not (_is_number(value) and SINGLE < value < math.inf) else f" of at most {most:g}"
        )
        raise InputError(f"{name} = {value!r}: it must be a positive, finite number{limit}.")


def require_count(name: str, value: Any, least: int = 1) -> int:
    """Return a setting, or raise unless it is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} = {value!r}: it must be a whole number of at least {least}.")
    if value > LARGEST:
        raise InputError(f"{name} has more than 64 bits: it must be a whole number of at most 2⁶³ − 1.")
    return value


def require_share(name: str, value: Any) -> None:
    """Raise unless a setting is a number in [0, 1)."""
    if not _is_number(value) or not 0 <= value < 1:
        raise InputError(f"{name} = {value!r}: it must be a number in [0, 1).")


def in_one_line(error: Exception) -> str:
    """What went wrong, for a sentence about an error of another library."""
    return f"{type(error).__name__}: {printable(' '.join(str(error).split()))[:200]}"


def import_optional(user: str, module: str, package: str, kind: type[FedualError] = InputError) -> Any:
    """Import a module of a package that only `user` needs, or raise with the command that installs the package."""
    try:
        return import_module(module)
    except ImportError as error:
        raise kind(f"{user} needs {error.name or module}, which is missing: pip install {package}") from None
