"""`fedual scenarios` and `fedual methods`: list what `fedual run` accepts."""

import inspect
import json
from typing import Annotated, Any

import typer

from fedual.cli.output import echo, show
from fedual.cli.run import Json

Name = Annotated[str | None, typer.Argument(help="A method, to see its settings with their defaults.")]


def scenarios(as_json: Json = False) -> None:
    """Show the scenarios that come with fedual.

    Example: fedual scenarios
    """
    from fedual.scenarios import names, read

    rows = []
    for name in names():
        _, document = read(name)
        tables = {key: document[key] for key in ("title", "data", "split", "model", "train")}
        lists = {key: list(document.get(key, {})) for key in ("method", "preset", "sweep")}
        rows.append({"name": name, **tables, **lists})
    cells = [(row["name"], row["title"], str(row["train"]["rounds"]), ", ".join(row["preset"])) for row in rows]
    _show(as_json, {"scenarios": rows}, ("scenario", "what it is", "rounds", "presets"), cells)


def methods(name: Name = None, as_json: Json = False) -> None:
    """Show the methods, or the settings of one.

    Example: fedual methods ivon-admm
    """
    from fedual.defaults import settings
    from fedual.methods import METHODS, NAMES

    if name is None:
        rows = [{"name": key, "networks": key in NAMES, "summary": _summary(key)} for key in METHODS]
        cells = [(row["name"], "yes" if row["networks"] else "", row["summary"]) for row in rows]
        _show(as_json, {"methods": rows}, ("method", "fedual run", "what it is"), cells)
        return
    defaults = settings(name)
    if not as_json:
        echo(f"{name}: {_summary(name)}")
    cells = [(key, "–" if value is None else str(value)) for key, value in defaults.items()]
    document = {"name": name, "summary": _summary(name), "settings": defaults}
    _show(as_json, document, ("setting", "default"), cells)


def _summary(name: str) -> str:
    """Return the first line of the method's docstring."""
    from fedual.methods import METHODS

    return (inspect.getdoc(METHODS[name]) or "").partition("\n")[0]


def _show(as_json: bool, document: dict[str, Any], headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a document as JSON, or rows as a table."""
    if as_json:
        echo(json.dumps(document))
    else:
        show(rows, *headings)
