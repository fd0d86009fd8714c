"""What fedual raises: every error is a `FedualError` whose message names the value, the cause and the remedy."""

import difflib
import math
from collections.abc import Collection
from typing import Any


class FedualError(Exception):
    """Base of all errors that fedual raises on purpose; the command line prints it without a traceback."""


class InputError(FedualError, ValueError):
    """An argument, a setting or a shape that cannot be used, refused before any work starts."""


class DataError(FedualError):
    """A data file that is missing, damaged, truncated or not what its name says."""


class DomainError(FedualError, ArithmeticError):
    """Parameters outside the domain of their family, e.g. a precision that is not positive."""


class NotConvergedError(FedualError, ArithmeticError):
    """A solver that used up its iterations before its stopping rule was met."""


class DivergedError(FedualError, ArithmeticError):
    """A run that cannot go on: no client's update, or not the server's, is inside the domain.

    `run`, where there is one, has the last good posterior.
    """

    run: Any = None


def hint(name: Any, known: Collection[str]) -> str:
    """The end of the sentence about an unknown name: the nearest known one, or all of them where none is near."""
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
    return (
        f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}." if known else "there are none."
    )


def require_positive(name: str, value: Any, most: float = math.inf) -> None:
    """Refuse a setting that is not a positive, finite number, or is larger than `most`."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not (0 < value <= most and math.isfinite(value))
    ):
        limit = "" if most == math.inf else f" of at most {most:g}"
        raise InputError(f"{name} = {value!r}: it must be a positive, finite number{limit}.")


def require_count(name: str, value: Any, least: int = 1) -> int:
    """Refuse a setting that is not a whole number of at least `least`; it comes back for use in a condition."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} = {value!r}: it must be a whole number of at least {least}.")
    return value


def require_share(name: str, value: Any) -> None:
    """Refuse a setting that is not a number in [0, 1)."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise InputError(f"{name} = {value!r}: it must be a number in [0, 1).")
