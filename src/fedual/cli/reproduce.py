"""`fedual reproduce`: the paper's tables, run here or rebuilt from records."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedual.cli.run import Device, Json, Root
from fedual.errors import InputError

Name = Annotated[
    str,
    typer.Argument(
        help="table1, table2, table3, pvi, tau, rho, why, defaults, participation, ablation, fig2 or calibration."
    ),
]
Scenarios = Annotated[list[str] | None, typer.Option("--scenario", help="Run only cells of this scenario; repeatable.")]
Methods = Annotated[
    list[str] | None, typer.Option("--method", help="Run only this method, e.g. fedavg or ivon-admm:paper; repeatable.")
]
Seeds = Annotated[
    list[int] | None, typer.Option("--seed", help="Run only this seed; repeatable.", show_default="62, 63, 64")
]
Results = Annotated[Path, typer.Option(help="Folder of the records and of the tables.")]
From = Annotated[
    Path | None, typer.Option("--from", help="Only rebuild the tables of this folder from its records: no training.")
]
Dry = Annotated[bool, typer.Option("--list", help="Only say which cells would be run.")]


def register(parent: typer.Typer) -> None:
    """Add `fedual reproduce` to the application."""
    parent.command()(reproduce)


def reproduce(
    name: Name,
    scenario: Scenarios = None,
    method: Methods = None,
    seed: Seeds = None,
    results: Results = Path("results"),
    source: From = None,
    dry: Dry = False,
    device: Device = "auto",
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Run the cells of one of the paper's tables that have no record yet, and show the table beside the paper's.

    A cell whose record is in RESULTS/records is not run again, unless its settings have changed; a record of other
    settings than now is in no table. The tables are written to RESULTS/tables as Markdown, CSV and pictures.

    Example: fedual reproduce table3 --method fedavg --seed 62
    """
    from fedual.cli.progress import progress
    from fedual.experiments import records
    from fedual.experiments.report import write
    from fedual.experiments.reproduce import absent, cells, missing, run

    wanted = cells(name, scenario or (), method or (), seed or ())
    folder = source or results
    if source is not None and not (source / "records").is_dir():
        raise InputError(f"{source} has no records: name the folder that holds records/SCENARIO/….")
    todo = missing(wanted, folder)
    if dry:
        for cell in todo:
            typer.echo(str(cell))
        typer.echo(f"{len(todo)} of {len(wanted)} cells have no record in {folder}")
        if as_json:
            typer.echo(json.dumps({"table": name, "missing": [str(cell) for cell in todo]}))
        return
    todo = [] if source is not None else todo
    left_out = absent(todo, root)  # by reason
    todo = [cell for cell in todo if not any(cell in some for some in left_out.values())]
    with progress() as watch:
        for number, cell in enumerate(todo, 1):
            label = lambda text, rounds, number=number: watch(f"{number}/{len(todo)} {text}", rounds)
            typer.echo(_line(run(cell, folder, watch=label, device=device, root=root)), err=True)
    found = records.read_all(folder)
    now = [record for record in found if records.current(record)]
    text, paths = write(name, now, folder / "tables")
    typer.echo(text)
    if len(now) < len(found):
        typer.echo(f"left out: {len(found) - len(now)} records of settings that have changed since")
    for reason, some in left_out.items():
        typer.echo(f"left out: {len(some)} cells, from {some[0]} on: {reason}")
    for path in paths:
        typer.echo(f"wrote {path}")
    if as_json:
        missed = {reason: [str(cell) for cell in some] for reason, some in left_out.items()}
        done = {"table": name, "run": len(todo), "left_out": missed, "files": [str(path) for path in paths]}
        typer.echo(json.dumps(done))


def _line(record: dict[str, Any]) -> str:
    """A cell that was just run, in words."""
    history = record["history"]
    last = {key: (history.get(key) or [None])[-1] for key in ("accuracy", "nll", "nll_mc")}
    figures = [f"{key} {value:.4f}" for key, value in last.items() if value is not None]
    words = [record["scenario"], record["method"], record["variant"], f"seed {record['seed']}", *figures]
    words += [f"{record['total_seconds']:.0f} s", record["diverged"] or ""]
    return ", ".join(filter(None, words))
