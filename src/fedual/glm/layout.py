"""Numbers as people read them, and blocks of facts, tables and sentences as plain text or HTML.

Names of terms, levels and sites come from elsewhere: HTML escapes all text, and plain text shows no control characters.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 100  # columns of plain text
_KEY = 20  # width of a fact's name in plain text
_NONE = "–"


def number(value: float | None) -> str:
    """A figure of a fit: 1,234.57, 12.35, 0.0123."""
    if value is None or math.isnan(value):
        return _NONE
    size = abs(value)
    if not size:
        return "0"
    if size < 0.01 or size >= 1e9:
        return f"{value:.3g}"
    return f"{value:,.{2 if size >= 1 else 4}f}"


def rounded(value: float, se: float) -> str:
    """A coefficient, to the place of the third significant digit of its standard error."""
    if math.isnan(value):
        return _NONE
    if not (se > 0 and math.isfinite(se) and math.isfinite(value)):
        return f"{value:.4g}"
    places = 2 - math.floor(math.log10(se))
    if places > 6 or abs(value) >= 1e7:
        digits = places + 1 + math.floor(math.log10(abs(value))) if value else 2
        return f"{value:.{min(max(digits, 2), 6) - 1}e}"
    return f"{value:.{max(places, 0)}f}"


def ratio(value: float, se: float) -> str:
    """A ratio exp(β), to three significant digits, and to two of its standard error, which is `se` times the ratio."""
    if math.isnan(value):
        return _NONE
    if not 1e-3 <= value < 1e5:
        return f"{value:.2e}"
    places = 2 - math.floor(math.log10(value))
    if 1e-6 < se * value < math.inf:
        places = max(places, 1 - math.floor(math.log10(se * value)))
    return f"{value:.{max(0, places)}f}"


def p_value(p: float) -> str:
    """A p-value to three places."""
    if math.isnan(p):
        return _NONE
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def p_words(p: float) -> str:
    """A p-value in a sentence: p = 0.018."""
    shown = p_value(p)
    return f"p {shown[0]} {shown[1:]}" if shown.startswith("<") else f"p = {shown}"


def percent(share: float) -> str:
    """A share as a percentage: 95 %, 99.9 %."""
    return f"{100 * share:.4g} %"


@dataclass(frozen=True)
class Facts:
    """Names and values, one pair a line."""

    rows: Sequence[tuple[str, str]]
    title: str = ""


@dataclass(frozen=True)
class Grid:
    """A table: its first column holds names, the others numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Notes:
    """Sentences, one a paragraph."""

    sentences: Sequence[str]
    title: str = ""


Block = Facts | Grid | Notes


class Page:
    """What is shown as blocks: as text by `print`, as HTML in notebooks."""

    def blocks(self) -> list[Block]:
        """Everything, in order."""
        raise NotImplementedError

    def html(self) -> str:
        """A fragment of HTML that loads nothing; all names are escaped."""
        return html(self.blocks())

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        return text(self.blocks())


def text(blocks: Sequence[Block]) -> str:
    """The blocks as plain text of at most `WIDTH` columns."""
    shown = []
    for block in blocks:
        lines = _wrapped(_clean(block.title), "", "") if block.title else []
        if isinstance(block, Facts):
            for key, value in block.rows:
                lines += _wrapped(_clean(value), f"{_clean(key):<{_KEY}}", " " * _KEY)
        elif isinstance(block, Notes):
            for sentence in block.sentences:
                lines += _wrapped(_clean(sentence), "- ", "  ") if block.title else _wrapped(_clean(sentence), "", "")
        else:
            lines += _grid([[_clean(cell) for cell in row] for row in (block.header, *block.rows)])
        shown.append("\n".join(lines))
    return "\n\n".join(shown)


def _wrapped(words: str, first: str, later: str) -> list[str]:
    lines = textwrap.wrap(words, WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
    return lines or [first.rstrip()]


def _clean(words: str) -> str:
    """Text on one line, with a mark for each character that a terminal would obey rather than show."""
    return "".join(letter if letter.isprintable() else "�" for letter in " ".join(words.split()))


def _grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns; a name that is too long for its column has a line of its own."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[1:]]
    room = max(WIDTH - sum(width + 2 for width in widths), 2)
    first = min(max(len(row[0]) for row in rows), room)
    lines = []
    for name, *cells in rows:
        numbers = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        if len(name) > first:
            lines += textwrap.wrap(name, WIDTH)
            name = ""
        lines.append(f"{name:<{first}}{numbers}".rstrip())
    return lines


def html(blocks: Sequence[Block]) -> str:
    """The blocks as a fragment of HTML that loads nothing."""
    shown = []
    for block in blocks:
        title = f"<p><b>{escape(block.title)}</b></p>" if block.title else ""
        if isinstance(block, Facts):
            rows = [_row("th", [key]) + _row("td", [value], "left") for key, value in block.rows]
            shown.append(title + _table(rows))
        elif isinstance(block, Notes):
            shown.append(title + "".join(f"<p>{escape(sentence)}</p>" for sentence in block.sentences))
        else:
            head = _row("th", block.header[:1]) + _row("th", block.header[1:], "right")
            rows = [_row("th", row[:1]) + _row("td", row[1:], "right") for row in block.rows]
            shown.append(title + _table([head, *rows]))
    return f'<div style="font-variant-numeric: tabular-nums">{"".join(shown)}</div>'


def _row(tag: str, cells: Sequence[str], align: str = "left") -> str:
    return "".join(f'<{tag} style="text-align: {align}; padding: 1px 8px">{escape(cell)}</{tag}>' for cell in cells)


def _table(rows: Sequence[str]) -> str:
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table style="border-collapse: collapse">{body}</table>'
