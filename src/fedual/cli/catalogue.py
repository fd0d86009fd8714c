"""`fedual scenarios` and `fedual methods`: what there is to run."""

import inspect
import json
from typing import Annotated

import typer
from rich.table import Table

from fedual.cli.run import Json, console

Name = Annotated[str | None, typer.Argument(help="A method, to see its settings with their defaults.")]


def register(parent: typer.Typer) -> None:
    """Add `fedual scenarios` and `fedual methods` to the application."""
    parent.command()(scenarios)
    parent.command()(methods)


def scenarios(as_json: Json = False) -> None:
    """Show the scenarios that come with fedual.

    Example: fedual scenarios
    """
    from fedual.experiments import names, read

    rows = []
    for name in names():
        _, document = read(name)
        tables = {key: document[key] for key in ("title", "data", "split", "model", "train")}
        lists = {key: list(document.get(key, {})) for key in ("method", "preset", "sweep")}
        rows.append({"name": name, **tables, **lists})
    if as_json:
        typer.echo(json.dumps({"scenarios": rows}))
        return
    table = Table("scenario", "what it is", "rounds", "presets", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row["name"], row["title"], str(row["train"]["rounds"]), ", ".join(row["preset"]))
    console().print(table)


def methods(name: Name = None, as_json: Json = False) -> None:
    """Show the methods, or the settings of one.

    Example: fedual methods ivon-admm
    """
    from fedual.methods import METHODS, NETWORKS, settings

    if name is None:
        rows = [{"name": own, "networks": own in NETWORKS, "summary": _summary(own)} for own in METHODS]
        if as_json:
            typer.echo(json.dumps({"methods": rows}))
            return
        table = Table("method", "fedual run", "what it is", box=None, pad_edge=False)
        for row in rows:
            table.add_row(row["name"], "yes" if row["networks"] else "", row["summary"])
    else:
        plain = lambda value: type(value) in (bool, int, float, str, type(None))
        defaults = {key: value if plain(value) else str(value) for key, value in settings(name).items()}
        if as_json:
            typer.echo(json.dumps({"name": name, "summary": _summary(name), "settings": defaults}))
            return
        table = Table("setting", "default", box=None, pad_edge=False)
        for key, value in defaults.items():
            table.add_row(key, "–" if value is None else str(value))
        typer.echo(f"{name}: {_summary(name)}")
    console().print(table)


def _summary(name: str) -> str:
    """The first line of the method's docstring."""
    from fedual.methods import METHODS

    return (inspect.getdoc(METHODS[name]) or "").partition("\n")[0]
