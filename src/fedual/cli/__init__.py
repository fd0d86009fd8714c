"""The command `fedual`.

Each module of this package has a `register(app)` that adds its commands. They import what needs torch inside the
command functions, so that `fedual --help` answers at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fedual._version import __version__
from fedual.errors import FedualError

if TYPE_CHECKING:
    import typer


def build() -> typer.Typer:
    """Return the application with all its commands."""
    import typer

    from fedual.cli import bench, catalogue, compare, data, doctor, figure, init, predict, report, reproduce, run

    app = typer.Typer(
        name="fedual",
        help="Federated learning that returns posteriors.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"fedual {__version__}")
            raise typer.Exit

    def root(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        pass

    app.callback()(root)
    # every module with commands, in the order of --help
    for module in (run, compare, predict, report, reproduce, catalogue, data, figure, bench, init, doctor):
        module.register(app)
    return app


def main() -> None:
    """Run the command line: an expected error is one line on stderr and exit code 2, never a traceback."""
    try:
        app = build()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(_complain(f"the command line needs {package}, which is missing: pip install 'fedual[cli]'"))
    try:
        app()
    except FedualError as error:
        sys.exit(_complain(str(error)))


def _complain(message: str) -> int:
    print(f"fedual: {message}", file=sys.stderr)
    return 2
