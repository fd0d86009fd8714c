"""`python -m studies small`: run cells that have no record yet, try settings, and show the figures."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fedual.errors import InputError, hint
from fedual.rundir import environment
from fedual.rundir.jsonable import plain, without_nan
from studies.regression.commands import read
from studies.small import page
from studies.small.cells import METHODS, Cell
from studies.small.tables import OTHERS, REPORTED
from studies.tuning import grid

RECORDS = Path("results/small")
CELLS, TRIALS = "cells.jsonl", "trials.jsonl"
SEEDS, LEAST_TRIED = range(10), 100
Records = Annotated[Path, typer.Option(help="Folder of the records.")]
Only = Annotated[list[str] | None, typer.Option("--table", help="Only this table; repeatable.")]

app = typer.Typer(help="Small and noisy tables: the defaults beside FedAvg, FedProx and FedDyn.", no_args_is_help=True)


@app.command()
def run(table: Only = None, records: Records = RECORDS) -> None:
    """Run every method on the reported tables with ten seeds, and append a record of each cell that has none.

    A cell is run again if the numbers of its method have changed since.

    Example: python -m studies small run --table clinics
    """
    for name in _chosen(table, list(REPORTED)):
        for seed in SEEDS:
            for method, settings in METHODS.values():
                _run(Cell(name, method, settings, seed), records / CELLS, None)


@app.command("try")
def trial(
    specs: Annotated[list[str], typer.Argument(metavar="'METHOD KEY=A,B …'", help="A method and the values to try.")],
    table: Only = None,
    seeds: Annotated[int, typer.Option(help="How many seeds, from 100.")] = 2,
    series: Annotated[str, typer.Option(help="A word that all these trials have.")] = "",
    records: Records = RECORDS,
) -> None:
    """Try settings on the tables that are not reported, with seeds from 100.

    Example: python -m studies small try "ivon-admm tau=0.1,1" --table tree
    """
    for name in _chosen(table, list(OTHERS)):
        for seed in range(LEAST_TRIED, LEAST_TRIED + seeds):
            for method, trials in map(grid, specs):
                for sets in trials:
                    settings = {key: float(value) for key, _, value in (one.partition("=") for one in sets)}
                    _run(Cell(name, method, settings, seed), records / TRIALS, series)


@app.command()
def show(records: Records = RECORDS) -> None:
    """Print the table of the reported cells."""
    typer.echo(page.text(read(records / CELLS)))


def _chosen(names: list[str] | None, known: list[str]) -> list[str]:
    for name in names or ():
        if name not in known:
            raise InputError(f"--table {name!r}: {hint(name, known)}")
    return names or known


def _run(cell: Cell, path: Path, series: str | None) -> None:
    """Run a cell and append its record, unless there is one with the same numbers."""
    torch.set_num_threads(1)
    table = cell.load()
    about = {"table": cell.table, "seed": cell.seed, "resolved": plain(cell.resolved(table).to_dict())}
    if any(about.items() <= line.items() for line in read(path)):
        return
    line = cell.run(table)
    line |= {"environment": environment()} | ({} if series is None else {"series": series})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain(without_nan(line))) + "\n")
    typer.echo(f"{cell.table}, seed {cell.seed}, {cell.method} {cell.settings or ''}: {_figures(line)}")


def _figures(line: dict[str, Any]) -> str:
    if line["error"]:
        return line["error"]
    shown = [f"{key} {line[key]:.4g}" for key in ("accuracy", "rmse", "nll", "nll_mc") if key in line]
    return f"{', '.join(shown)}, {line['seconds']} s"
