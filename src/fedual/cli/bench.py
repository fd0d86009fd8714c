"""`fedual bench`: how fast this machine is, and how the cost of a round grows."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedual.cli.run import Device, Json, console
from fedual.errors import InputError

if TYPE_CHECKING:
    from fedual.scaling import Curves

SCENARIO, SETS = "digits-heterog-10", ("train.rounds=2",)

Out = Annotated[Path, typer.Option(help="Folder for scaling.svg, scaling.png and scaling.json.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and smaller points: under a minute.")]

app = typer.Typer(invoke_without_command=True)


def register(parent: typer.Typer) -> None:
    """Add `fedual bench` to the application."""
    parent.add_typer(app, name="bench")


@app.callback()
def bench(context: typer.Context, device: Device = "auto", as_json: Json = False) -> None:
    """Measure how fast this machine is: all clients at once against one by one, in under a minute.

    `fedual bench scale` draws how time and memory grow with clients, parameters and local steps, in some minutes.

    Example: fedual bench
    """
    if context.invoked_subcommand is not None:
        if device != "auto" or as_json:
            raise InputError(f"Options stand before {context.invoked_subcommand}: write them after it.")
        return
    from fedual.runs.provenance import environment

    record = environment()
    found = engines(device)
    ms = found["ms_per_client_step"]
    typer.echo(
        f"{SCENARIO}, ivon-admm: {found['client_steps']} steps of {found['clients']} clients in a round, "
        f"{found['device']}, {record['threads']} threads, torch {record['torch']}"
    )
    for engine, value in ms.items():
        typer.echo(f"{engine:10}  {value:7.3f} ms a step of a client")
    typer.echo(f"All clients at once: {found['ratio']:.1f} times the speed of one by one.")
    if as_json:
        typer.echo(json.dumps({**found, "environment": record}))


def engines(device: str) -> dict[str, Any]:
    """Both engines on the same rounds of digits, the faster round of two."""
    from fedual.experiments import load
    from fedual.experiments.federation import execute

    scenario, found = load(SCENARIO, sets=SETS), {}
    for engine in ("vectorised", "sequential"):
        run = execute(scenario, 0, device=device, engine=engine)
        steps = sum(run.losses.steps)
        found[engine] = 1000 * min(record["seconds"] for record in run.history) / steps
    return {
        "scenario": SCENARIO,
        "device": str(run.losses.network.device),
        "clients": len(run.losses.data),
        "client_steps": steps,
        "ms_per_client_step": found,
        "ratio": found["sequential"] / found["vectorised"],
    }


@app.command()
def scale(
    device: Device = "auto", out: Out = Path("out/bench-scale"), quick: Quick = False, as_json: Json = False
) -> None:
    """Measure and draw how a round's time and memory grow with clients, parameters and local steps.

    Each point is a process of its own; all of them take some minutes.

    Example: fedual bench scale --quick
    """
    import time

    from fedual import scaling
    from fedual.figures.common import canvas, save
    from fedual.figures.scaling import draw
    from fedual.runs.files import writing
    from fedual.training import resolve

    began, device, tasks = time.perf_counter(), str(resolve(device)), scaling.plan(quick)
    with canvas(1, 1):  # refused before anything is measured where matplotlib is missing
        pass
    with writing(out, 0, "nothing was measured"):
        out.mkdir(parents=True, exist_ok=True)
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bars:
        bar = bars.add_task("", total=sum(map(len, tasks.values())), completed=-1)
        curves = scaling.sweep(tasks, device, lambda line: bars.update(bar, description=line, advance=1))
    drawing = draw(curves, device)
    paths = save(drawing, "scaling", out, time.perf_counter() - began)
    console().print(_points(curves))
    for finding in drawing.findings:
        typer.echo(finding)
    for path in paths:
        typer.echo(f"wrote {path}")
    if as_json:
        typer.echo(json.dumps({**drawing.numbers, "files": [str(path) for path in paths]}))


def _points(curves: "Curves") -> Table:
    columns = ("clients", "parameters", "steps of all", "s/round", "first", "set-up", "memory MB", "GPU MB", "disk MB")
    table = Table(*columns, box=None, pad_edge=False)
    for number, points in enumerate(curves.values()):
        if number:
            table.add_row()
        for p in points:
            counts = [f"{value:,}" for value in (p.clients, p.parameters, p.client_steps)]
            seconds = [f"{value:.3f}" for value in (p.seconds, p.first_seconds, p.setup_seconds)]
            memory = [f"{value / 1e6:.0f}" if value else "–" for value in (p.memory, p.device_bytes, p.state_bytes)]
            table.add_row(*counts, *seconds, *memory)
    return table
