"""Texts of others on their way out: nothing that a terminal or a spreadsheet would obey."""

import re
import unicodedata
from typing import Any

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""How a cell begins that a spreadsheet computes; the wide forms count in some languages."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def printable(text: object) -> str:
    r"""A text on one line, with control characters as escapes: \x1b for ESC, \n for the end of a line.

    So are characters that have no form of their own, such as those that reverse the direction of what follows.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or unicodedata.category(letter) == "Zs" else _escape(letter) for letter in text
    )


def printable_lines(text: object) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(printable, str(text).split("\n")))


def cell(value: Any) -> Any:
    """A value for a CSV file: a text that a spreadsheet would take for a formula gets an apostrophe in front.

    Numbers, and texts that are numbers, stay as they are.
    """
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    text = printable(value)
    return f"'{text}" if value.lstrip().startswith(FORMULA) or value[:1] in ("\t", "\r", "\n") else text


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
