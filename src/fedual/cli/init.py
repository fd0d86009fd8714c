"""`fedual init`: a project to start from."""

from pathlib import Path
from typing import Annotated

import typer

from fedual.errors import DataError, InputError

Folder = Annotated[Path, typer.Argument(help="A new folder.")]
Flower = Annotated[bool, typer.Option("--flower", help="A Flower app, for sites on machines of their own.")]


def register(parent: typer.Typer) -> None:
    """Add `fedual init` to the application."""
    parent.command()(init)


def init(folder: Folder, flower: Flower = False) -> None:
    """Write a project that runs as it is: ten sites with scikit-learn's digits, to be replaced by your own.

    Example: fedual init my-federation --flower
    """
    from importlib.resources import files

    if not flower:
        raise InputError("Say what kind of project: --flower is the only one so far.")
    if folder.exists():
        raise InputError(f"{folder} exists: choose a folder that does not.")
    template = files("fedual") / "flower" / "template"
    try:
        folder.mkdir(parents=True)
        for name in ("pyproject.toml", "app.py"):
            (folder / name).write_text((template / name).read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror}): choose another place.") from None
    typer.echo(f"wrote {folder}/app.py and {folder}/pyproject.toml; see docs/how-to/deploy.md")
