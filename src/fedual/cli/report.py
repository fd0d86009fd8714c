"""`fedual report`: one HTML page about a run, or about several."""

from pathlib import Path
from typing import Annotated

import typer

from fedual.cli.output import echo

Runs = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option(help="The file to write.", show_default="RUN/report.html; report.html here for several runs"),
]
Open = Annotated[bool, typer.Option("--open", help="Show the page in the browser.")]


def report(runs: Runs, out: Out = None, show: Open = False) -> None:
    """Write one self-contained HTML page about a run, or about several side by side.

    Example: fedual report runs/digits-heterog-10-ivon-admm-0 --open
    """
    from fedual.report import write

    path = write(runs, out)
    echo(f"wrote {path}")
    if show:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            echo(f"There is no browser here: open {path} on another machine.")
