"""The study's command line: `python -m studies --help`, from the root of a clone."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedual.cli.progress import progress
from fedual.cli.run import Device, Json, Root
from fedual.errors import FedualError, InputError
from studies import calibrated, figures, pages, personal, records, robustness, scaling, tables, tuning
from studies.attacks import commands as attacks
from studies.figures.common import Options
from studies.regression import commands as regression
from studies.robustness import Tables
from studies.small import commands as small

Scenarios = Annotated[list[str] | None, typer.Option("--scenario", help="Run only cells of this scenario; repeatable.")]
Methods = Annotated[
    list[str] | None, typer.Option("--method", help="Run only this method, e.g. fedavg or ivon-admm:paper; repeatable.")
]
Seeds = Annotated[
    list[int] | None, typer.Option("--seed", help="Run only this seed; repeatable.", show_default="62, 63, 64")
]
Results = Annotated[Path, typer.Option(help="Folder of the records.")]
From = Annotated[
    Path | None, typer.Option("--from", help="Only rebuild the table from the records of this folder: no training.")
]
Dry = Annotated[bool, typer.Option("--list", help="Only print the cells that would be run.")]
Full = Annotated[bool, typer.Option("--full", help="The paper's problem sizes: hours for `logistic`, not minutes.")]

app = typer.Typer(
    name="python -m studies",
    help="The study that reproduces the paper: its tables and figures, and the trials behind the defaults.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def table(
    context: typer.Context,
    scenario: Scenarios = None,
    method: Methods = None,
    seed: Seeds = None,
    results: Results = Path("results"),
    source: From = None,
    out: Tables = Path("docs/tables"),
    dry: Dry = False,
    device: Device = "auto",
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Run the cells of a table that have no record yet, and show the table beside the paper's.

    A cell is run again if its settings have changed since; a record of other settings is in no table. The table is
    written as Markdown, CSV and pictures.

    Example: python -m studies table3 --method fedavg --seed 62
    """
    name = str(context.info_name)
    wanted = tables.cells(name, scenario or (), method or (), seed or ())
    folder = source or results
    if source is not None and not any(source.glob("*.jsonl")):
        raise InputError(f"{source} has no records: name the folder that holds SCENARIO.jsonl.")
    todo = tables.missing(wanted, folder)
    if dry:
        for cell in todo:
            typer.echo(str(cell))
        typer.echo(f"{len(todo)} of {len(wanted)} cells have no record in {folder}")
        if as_json:
            typer.echo(json.dumps({"table": name, "missing": [str(cell) for cell in todo]}))
        return
    todo = [] if source is not None else todo
    left_out = tables.unavailable(todo, root)
    todo = [cell for cell in todo if not any(cell in some for some in left_out.values())]
    with progress() as watch:
        for number, cell in enumerate(todo, 1):
            label = lambda text, rounds, number=number: watch(f"{number}/{len(todo)} {text}", rounds)
            typer.echo(_summary(tables.run(cell, folder, watch=label, device=device, root=root)), err=True)
    found = records.read_all(folder)
    current = [record for record in found if records.current(record)]
    text, paths = pages.write(name, current, out)
    typer.echo(text)
    if len(current) < len(found):
        typer.echo(f"left out: {len(found) - len(current)} records of settings that have changed since")
    for reason, some in left_out.items():
        typer.echo(f"left out: {len(some)} cells, from {some[0]} on: {reason}")
    _wrote(paths)
    if as_json:
        missed = {reason: [str(cell) for cell in some] for reason, some in left_out.items()}
        done = {"table": name, "run": len(todo), "left_out": missed, "files": [str(path) for path in paths]}
        typer.echo(json.dumps(done))


for _name, _title in tables.TITLES.items():
    app.command(_name, short_help=_title, rich_help_panel="Tables")(table)


@app.command()
def check(results: Results = Path("results"), out: Tables = Path("docs/tables")) -> None:
    """Rebuild all tables from the records and compare them with those in OUT; the exit code is 1 if one differs.

    Pictures are not compared, since their bytes depend on the version of matplotlib.
    """
    current = [record for record in records.read_all(results) if records.current(record)]
    if not current:
        raise InputError(f"{results} has no records of present settings: name the folder that holds SCENARIO.jsonl.")
    trials = robustness.read(results / "tuning" / "robustness.jsonl")
    calibrations = calibrated.read(results / "calibrated" / "runs.jsonl")
    others = {"robustness.md": robustness.table(trials), **regression.texts(results / "regression")}
    assaults = robustness.read(results / "attacks" / "runs.jsonl")
    others |= {"attacks.md": attacks.table(assaults)} if assaults else {}
    others |= {"calibrated.md": calibrated.table(calibrations)} if calibrations else {}
    personals = personal.read(results / "personal" / "runs.jsonl")
    others |= {"personal.md": personal.table(personals)} if personals else {}
    wrong = pages.differences(current, others, out)
    for line in wrong:
        typer.echo(line)
    same = "rebuild them with `python -m studies NAME --from`" if wrong else "all tables have the same digits"
    typer.echo(f"{len(current)} records: {same}")
    raise typer.Exit(bool(wrong))


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="outlier, ridge, logistic, duality or expfam.")],
    out: Annotated[Path, typer.Option(help="Folder for NAME.svg, NAME.png and NAME.json.")] = Path("figures"),
    full: Full = False,
    root: Root = None,
    device: Annotated[str, typer.Option(help="Where `logistic` and `ridge` compute: cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Draw a figure of the paper as SVG and PNG, with its numbers in a JSON file.

    Example: python -m studies figure outlier --out figures
    """
    console = Console(stderr=True)
    with console.status(f"{name} …") as status:
        say = lambda line: status.update(f"{name}: {line}")
        drawing, paths = figures.draw(name, out, Options(full, str(root) if root else None, device, say))
    for finding in drawing.findings:
        typer.echo(finding)
    _wrote(paths)
    if as_json:
        typer.echo(json.dumps({"figure": name, "files": [str(p) for p in paths], "findings": drawing.findings}))


app.command()(scaling.scaling)
app.command()(tuning.tuning)
app.add_typer(robustness.app, name="robustness")
app.add_typer(attacks.app, name="attacks")
app.add_typer(calibrated.app, name="calibrated")
app.add_typer(personal.app, name="personal")
app.add_typer(regression.app, name="regression")
app.add_typer(small.app, name="small")


def main() -> None:
    """Run the command line: an expected error is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except FedualError as error:
        print(f"studies: {error}", file=sys.stderr)
        sys.exit(2)


def _wrote(paths: list[Path]) -> None:
    for path in paths:
        typer.echo(f"wrote {path}")


def _summary(record: dict[str, Any]) -> str:
    """Describe a cell that was just run."""
    history = record["history"]
    last = {key: (history.get(key) or [None])[-1] for key in ("accuracy", "nll", "nll_mc")}
    metrics = [f"{key} {value:.4f}" for key, value in last.items() if value is not None]
    words = [record["scenario"], record["method"], record["variant"], f"seed {record['seed']}", *metrics]
    words += [f"{record['total_seconds']:.0f} s", record["diverged"] or ""]
    return ", ".join(filter(None, words))


if __name__ == "__main__":
    main()
