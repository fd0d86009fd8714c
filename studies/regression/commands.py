"""`python -m studies regression`: measure tables and coverage, append records, and write the page."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedual.errors import DataError, InputError, hint
from fedual.rundir import environment
from fedual.rundir.jsonable import without_nan
from studies.regression import baselines, coverage, federated, mixed, page, survival
from studies.regression.pooled import pooled
from studies.regression.tables import SEEDS, Table, tables

ROUNDS, COVERAGE, MIXED, SURVIVAL = "rounds.jsonl", "coverage.jsonl", "mixed.jsonl", "survival.jsonl"
Records = Annotated[Path, typer.Option(help="Folder of the records.")]
RECORDS = Path("results/regression")

app = typer.Typer(help="Regressions: error against rounds, and coverage.", no_args_is_help=True)


def measure(table: Table) -> dict[str, Any]:
    """Fedual's errors on a table, and those of other methods."""
    oracle = pooled(table)
    about = {
        "table": table.name, "group": table.group, "family": table.family, "link": oracle.whole.link,
        "penalised": table.penalised, "rows": len(oracle.whole.y), "sites": len(table.sites),
        "columns": len(oracle.terms), "smallest": min(map(len, table.sites.values())), "left": oracle.left,
    }  # fmt: skip
    return {**about, "fedual": federated.errors(table, oracle), "others": baselines.errors(oracle)}


@app.command()
def run(
    only: Annotated[str, typer.Option(help="Tables whose names contain this.")] = "",
    records: Records = RECORDS,
) -> None:
    """Measure every table that has no record with a seed, and append one for each.

    Example: python -m studies regression run --only wine
    """
    done = {(line["table"], line["seed"]) for line in read(records / ROUNDS)}
    for seed in SEEDS:
        known = tables(seed)
        chosen = [table for table in known if only in table.name]
        if not chosen:
            raise InputError(f"--only {only!r} is in no name: {hint(only, [table.name for table in known])}")
        for table in chosen:
            if (table.name, seed) not in done:
                line = measure(table)
                _append(records / ROUNDS, {**line, "seed": seed})
                typer.echo(f"{table.name}, seed {seed}: " + " ".join(f"{e:.0e}" for e in line["fedual"]["error"]))


@app.command("coverage")
def measure_coverage(records: Records = RECORDS) -> None:
    """Measure the coverage of every setting without a record, and append one."""
    done = {(line["setting"], line["seed"]) for line in read(records / COVERAGE)}
    for setting in coverage.SETTINGS:
        if (setting.name, coverage.SEED) not in done:
            line = coverage.measure(setting)
            _append(records / COVERAGE, line)
            typer.echo(f"{setting.name}: {line['coverage']}")


@app.command("mixed")
def measure_mixed(records: Records = RECORDS) -> None:
    """Measure the coverage of mixed models at few sites, for every setting without a record, and append one."""
    done = {(line["setting"], line["seed"]) for line in read(records / MIXED)}
    for setting in mixed.SETTINGS:
        if (setting.name, mixed.SEED) not in done:
            line = mixed.measure(setting)
            _append(records / MIXED, line)
            typer.echo(f"{setting.name}: {line['coverage']}")


@app.command("survival")
def measure_survival(
    tables: Annotated[Path, typer.Option(help="The folder lifelines/datasets of an installed lifelines.")],
    records: Records = RECORDS,
) -> None:
    """Measure survival models beside a pooled Cox regression, for every table without a record, and append one."""
    done = {(line["table"], line["seed"]) for line in read(records / SURVIVAL)}
    for table in survival.TABLES:
        for seed in survival.SEEDS:
            if (table.name, seed) not in done:
                line = survival.measure(table, tables, seed)
                _append(records / SURVIVAL, line)
                typer.echo(f"{table.name}, seed {seed}: {line['stratified']}, {line['pieces']}")


@app.command()
def draw(
    records: Records = RECORDS, out: Annotated[Path, typer.Option(help="Folder of the page.")] = Path("docs/tables")
) -> None:
    """Write the page and its picture from the records."""
    rounds = read(records / ROUNDS)
    if not rounds:
        raise InputError(f"{records} has no records: run `python -m studies regression run`.")
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "regression.md", out / "regression.svg"]
    paths[0].write_text(page.text(rounds, read(records / COVERAGE)), encoding="utf-8")
    page.picture(rounds).savefig(paths[1], metadata={"Date": None})
    for path in paths:
        typer.echo(f"wrote {path}")


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file; none if it does not exist."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    except json.JSONDecodeError as error:
        raise DataError(f"{path} has a line that is no record ({error}): delete it to measure again.") from None


def texts(records: Path) -> dict[str, str]:
    """The pages that the records make, by file name; none without records."""
    rounds = read(records / ROUNDS)
    return {"regression.md": page.text(rounds, read(records / COVERAGE))} if rounds else {}


def _append(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(without_nan({**line, "environment": environment()})) + "\n")
