"""What commands print: nothing that comes from a file or a site reaches the terminal as a control character."""

from collections.abc import Iterable, Sequence

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedual.texts import printable, printable_lines


def echo(text: object) -> None:
    """Print a text of one or several lines on stdout."""
    typer.echo(printable_lines(text))


def show(rows: Iterable[Sequence[str | Text]], *headings: str) -> None:
    """Print a table on stdout, as wide as needed if stdout is not a terminal; cells are texts as they are."""
    plain = lambda cell: cell if isinstance(cell, Text) else Text(printable(cell))
    table = Table(*map(escape, headings), box=None, pad_edge=False, show_header=bool(headings))
    for row in rows:
        table.add_row(*map(plain, row))
    console = Console() if Console().is_terminal else Console(width=200)
    console.print(table)
