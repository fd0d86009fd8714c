"""`fedual figure`: draw the paper's illustrative figures."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

Name = Annotated[str, typer.Argument(help="outlier, ridge, logistic, duality or expfam.")]
Out = Annotated[Path, typer.Option(help="Folder for NAME.svg, NAME.png and NAME.json.")]
Full = Annotated[bool, typer.Option("--full", help="The paper's problem sizes: hours for `logistic`, not minutes.")]
Root = Annotated[Path | None, typer.Option(help="Folder of the data sets.", show_default="as `fedual data list` says")]
Device = Annotated[str, typer.Option(help="Where `logistic` and `ridge` compute: cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")]


def register(parent: typer.Typer) -> None:
    """Add `fedual figure` to the application."""
    parent.command()(figure)


def figure(
    name: Name,
    out: Out = Path("figures"),
    full: Full = False,
    root: Root = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Draw a figure of the paper to SVG and PNG, with its numbers in a JSON file beside them.

    Example: fedual figure outlier --out figures
    """
    from fedual.figures import draw
    from fedual.figures.common import Options

    console = Console(stderr=True)
    with console.status(f"{name} …") as status:
        say = lambda line: status.update(f"{name}: {line}")
        drawing, paths = draw(name, out, Options(full, str(root) if root else None, device, say))
    for finding in drawing.findings:
        typer.echo(finding)
    for path in paths:
        typer.echo(f"wrote {path}")
    if as_json:
        typer.echo(json.dumps({"figure": name, "files": [str(p) for p in paths], "findings": drawing.findings}))
