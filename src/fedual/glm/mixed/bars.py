"""The random part of a formula: `(1 + x | site)`, taken out before the rest is read."""

import re
from typing import NamedTuple

from fedual.errors import InputError

GROUP = "site"
"""The only groups that there are."""
REMEDY = "write (1 | site) or (1 + x | site)"
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`")


class Parts(NamedTuple):
    """A formula as its fixed part, at the same places in a text of the same length, and its random part."""

    fixed: str
    random: str | None  # what stands before the bar


def split(text: str) -> Parts:
    """Take the random part out of a formula, or raise `InputError` if there are several, or one of other groups."""
    plain = QUOTED.sub(lambda match: "_" * len(match.group()), text)
    found = [group for group in _groups(plain) if _bar(plain, *group) is not None]
    if not found:
        return Parts(text, None)
    if len(found) > 1:
        raise InputError(f"{_shown(text)} has {len(found)} random parts: {REMEDY}, once.")
    start, end = found[0]
    bar = _bar(plain, start, end)
    assert bar is not None
    terms, group = text[start + 1 : bar].strip(), text[bar + 1 : end - 1].strip()
    if group.startswith("|"):
        raise InputError(f"{_shown(text)}: effects of a site may depend on each other: {REMEDY}, with one bar.")
    if group != GROUP:
        raise InputError(f"{_shown(text)}: the groups are {group!r}, but only the sites can be: {REMEDY}.")
    if not terms:
        raise InputError(f"{_shown(text)} has nothing before its bar: {REMEDY}.")
    return Parts(_without(text, start, end), terms)


def _groups(text: str) -> list[tuple[int, int]]:
    """Where parentheses begin and end that are not those of a function."""
    found, opened = [], list[int]()
    for place, letter in enumerate(text):
        if letter in "([{":
            opened.append(place)
        elif letter in ")]}" and opened:
            start = opened.pop()
            if letter == ")" and not re.search(r"[\w.]\s*$", text[:start]):
                found.append((start, place + 1))
    return found


def _bar(text: str, start: int, end: int) -> int | None:
    """The place of the bar in a group, not in one within it."""
    depth = 0
    for place in range(start + 1, end - 1):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if text[place] == "|" and not depth:
            return place
    return None


def _without(text: str, start: int, end: int) -> str:
    """The formula with blanks for the random part and the plus that joined it; `y ~ 1` if no term is left."""
    before, after = text[:start].rstrip(), text[end:].lstrip()
    if before.endswith("~") and not after:
        return f"{text[:start]}1{' ' * (end - start - 1)}{text[end:]}"
    if before.endswith("~") and after.startswith("+"):
        end = text.index("+", end) + 1
    elif before.endswith("+") and after[:1] in ("", "+", "-"):
        start = len(before) - 1
    else:
        raise InputError(f"{_shown(text)}: the random part must be joined by +: write y ~ x + (1 | site).")
    return f"{text[:start]}{' ' * (end - start)}{text[end:]}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}…")
