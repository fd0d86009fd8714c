"""The command `fedual`.

The modules of this package import what needs torch inside the command functions, so that `fedual --help` answers at
once.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from typing import TYPE_CHECKING

from fedual._version import __version__
from fedual.errors import FedualError, in_one_line
from fedual.texts import printable

if TYPE_CHECKING:
    import typer

DEBUG = "--debug"


def build() -> typer.Typer:
    """Return the application with all its commands."""
    import typer

    from fedual.cli import catalogue, compare, data, doctor, flower, glm, init, predict, report, run

    about = "Federated learning that returns posteriors."
    app = typer.Typer(name="fedual", help=about, no_args_is_help=True, pretty_exceptions_enable=False)
    shown = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version.")

    traced = typer.Option(False, DEBUG, help="Show the traceback of an error; so does FEDUAL_DEBUG=1.")

    def root(version: bool = shown, debug: bool = traced) -> None:
        pass  # `main` looks for --debug itself, because it handles errors

    app.callback()(root)
    models = run.run, compare.compare, predict.predict, report.report, glm.glm
    for command in (*models, catalogue.scenarios, catalogue.methods, init.init, doctor.doctor):  # the order of --help
        app.command()(command)
    app.add_typer(data.app, name="data")
    app.add_typer(flower.app, name="flower")
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        import typer

        typer.echo(f"fedual {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line: an error is one line on stderr and exit code 2, a traceback only where one asks for it.

    The traceback of an error that nobody expected is kept in a file, which the line names.
    """
    try:
        build()()
    except FedualError as error:
        sys.exit(_complain(error, str(error)))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            sys.exit(_unexpected(error))
        sys.exit(_complain(error, f"the command line needs {package}, which is missing: pip install 'fedual[cli]'"))
    except Exception as error:
        sys.exit(_unexpected(error))


def _unexpected(error: Exception) -> int:
    """Tell an error that has no sentence of its own, and keep its traceback."""
    remedy = (
        "give it more memory, or less to do" if isinstance(error, MemoryError) else "please report it with that file"
    )
    try:
        handle, name = tempfile.mkstemp(prefix="fedual-", suffix=".log")  # readable by its owner alone
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(traceback.format_exception(error)))
        where = f"the traceback is in {name}"
    except OSError:
        where = f"there is no place for the traceback, which {DEBUG} shows"
    return _complain(error, f"stopped by an unexpected error, {in_one_line(error)}; {where}: {remedy}.")


def _complain(error: Exception, message: str) -> int:
    if DEBUG in sys.argv or os.environ.get("FEDUAL_DEBUG") == "1":
        traceback.print_exception(error)
    print(f"fedual: {printable(message)}", file=sys.stderr)
    return 2
