"""What stored values must look like: a checksum says that a file is whole, not that its author was honest.

    CALIBRATION = {"tau": Number(0.0), "examples": Whole(), "missing?": [str]}
    require(path, value, CALIBRATION, "save it again")

A form is one of

    str, bool, None, ANY       a value of this kind
    Number(), Whole()          a finite number, a whole one, within limits
    [form]                     a list
    {"key": form, "key?": …}   a table, where a key with a question mark may be missing, and others may be there
    {...: form}                a table with any keys
    Row(form, form, …)         a list of so many values
    (form, form, …)            any of these
    "text"                     this text
"""

import math
from dataclasses import dataclass
from typing import Any

from fedual.errors import DataError

ANY = object()


@dataclass(frozen=True)
class Number:
    """A number of at least `least`, or above it, and at most `most`; NaN and ±∞ only where it need not be finite."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    finite: bool = True

    def fits(self, value: Any) -> bool:
        """True for a number within the limits; whole ones must fit into floating point."""
        if isinstance(value, float) and not math.isfinite(value):
            return not self.finite
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > LARGEST:
            return False
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        limits = "" if self.least == -math.inf else f" {'above' if self.above else 'of at least'} {self.least:g}"
        return f"a {'finite ' * self.finite}number{limits}" + (
            "" if self.most == math.inf else f" and at most {self.most:g}"
        )


@dataclass(frozen=True)
class Whole:
    """A whole number of 64 bits, of at least `least` and at most `most`."""

    least: int = 0
    most: int = 2**63 - 1

    def fits(self, value: Any) -> bool:
        """True for a whole number within the limits."""
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a whole number of at least {self.least}" + ("" if self.most >= 2**62 else f" and at most {self.most}")


class Row(tuple):
    """A list of as many values as there are forms."""

    def __new__(cls, *forms: Any) -> "Row":
        """The forms of its values, in order."""
        return super().__new__(cls, forms)


LARGEST = 1e300
"""The largest number that is computed with: sums of more overflow."""
POSITIVE = Number(0.0, above=True)


def require(where: object, value: Any, form: Any, remedy: str) -> None:
    """Raise `DataError` with the first place at which a value has not its form."""
    if (found := misfit(value, form)) is not None:
        raise DataError(f"{where} has other content than fedual writes, {found}: {remedy}.")


def misfit(value: Any, form: Any, place: str = "") -> str | None:
    """Where and how a value differs from a form; None if it does not."""
    match form:
        case Row():
            if not isinstance(value, list) or len(value) != len(form):
                return _say(place, value, f"a list of {len(form)}")
            return _first(
                misfit(item, own, f"{place}[{i}]") for i, (item, own) in enumerate(zip(value, form, strict=True))
            )
        case tuple():
            found = [misfit(value, own, place) for own in form]
            return None if None in found else found[-1]
        case list():
            if not isinstance(value, list):
                return _say(place, value, "a list")
            return _first(misfit(item, form[0], f"{place}[{i}]") for i, item in enumerate(value))
        case dict():
            return _misfit_of_table(value, form, place)
        case Number() | Whole():
            return None if form.fits(value) else _say(place, value, str(form))
        case str():
            return None if value == form else _say(place, value, repr(form))
        case None:
            return None if value is None else _say(place, value, "null")
    if form is ANY or (isinstance(form, type) and isinstance(value, form)):
        return None
    return _say(place, value, {str: "a text", bool: "true or false"}.get(form, form.__name__))


def _misfit_of_table(value: Any, form: dict[Any, Any], place: str) -> str | None:
    if not isinstance(value, dict):
        return _say(place, value, "a table")
    below = lambda key: f"{place}.{key}" if place else str(key)
    if ... in form:
        return _first(misfit(item, form[...], below(key)) for key, item in value.items())
    for key, own in form.items():
        name = key.removesuffix("?")
        if name not in value and name == key:
            return f"{below(name)} is missing"
        if name in value and (found := misfit(value[name], own, below(name))) is not None:
            return found
    return None


def _first(found: Any) -> str | None:
    return next((text for text in found if text is not None), None)


def _say(place: str, value: Any, wanted: str) -> str:
    shown = repr(value)
    return f"{place or 'all of it'} = {shown if len(shown) < 60 else shown[:57] + '…'} is not {wanted}"
