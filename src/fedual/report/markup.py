"""HTML that cannot be forgotten to be escaped: `tag` escapes every text but what `tag` itself has made."""

import html
from typing import Any

VOID = {"meta", "img", "input", "br"}


class Safe(str):
    """Markup: text that is escaped already."""

    __slots__ = ()


def escape(value: Any) -> Safe:
    """A value as markup."""
    return value if isinstance(value, Safe) else Safe(html.escape(str(value)))


def join(*parts: Any) -> Safe:
    """Parts one after the other, without those that are None."""
    return Safe("".join(escape(part) for part in parts if part is not None))


def tag(name: str, /, *inside: Any, **attributes: Any) -> Safe:
    """An element; `class_`, `aria_label` and their like lose or change their underscores, None leaves one out.

    >>> tag("p", "1 < 2", tag("b", "so"), class_="note")
    '<p class="note">1 &lt; 2<b>so</b></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Safe(f"<{name}{given}>" if name in VOID else f"<{name}{given}>{join(*inside)}</{name}>")


def table(head: list[Any], rows: list[list[Any]], caption: str) -> Safe:
    """A table that can be scrolled by keyboard where it is too large; each row's first cell is its heading."""
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    lines = (tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows)
    inside = tag("table", tag("caption", caption), top, tag("tbody", *lines))
    return tag("div", inside, class_="scroll", tabindex=0, role="region", aria_label=caption)


def folded(summary: Any, *inside: Any, open: bool = False, class_: str | None = None) -> Safe:
    """What is shown when asked for."""
    return tag("details", tag("summary", summary), *inside, open="" if open else None, class_=class_)
