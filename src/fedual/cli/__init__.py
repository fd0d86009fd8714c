"""The command `fedual`.

The modules of this package import what needs torch inside the command functions, so that `fedual --help` answers at
once.
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

    from fedual.cli import catalogue, compare, data, doctor, glm, init, predict, report, run

    about = "Federated learning that returns posteriors."
    app = typer.Typer(name="fedual", help=about, no_args_is_help=True, pretty_exceptions_enable=False)
    shown = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version.")

    def root(version: bool = shown) -> None:
        pass

    app.callback()(root)
    models = run.run, compare.compare, predict.predict, report.report, glm.glm
    for command in (*models, catalogue.scenarios, catalogue.methods, init.init, doctor.doctor):  # the order of --help
        app.command()(command)
    app.add_typer(data.app, name="data")
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        import typer

        typer.echo(f"fedual {__version__}")
        raise typer.Exit


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
