"""What calibration gives and what it costs: `python -m studies calibrated run`, then `draw`.

Every scenario is trained with no setting, once with `posterior="calibrated"` and, where that holds a tenth of the
examples out, once with "point", which trains on all of them: the difference at the mean is the price.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedual.calibration import AT, SMALL
from fedual.cli.run import Device, Root
from fedual.errors import InputError
from fedual.rundir.jsonable import without_nan
from fedual.rundir.provenance import environment
from fedual.scenarios import load
from fedual.scenarios.federation import execute
from studies.robustness import Tables, read

RECORD = Path("results/calibrated/runs.jsonl")
SCENARIOS = ("digits-heterog-10", "fmnist-heterog-10", "fmnist-homog-10")
SEEDS = (62, 63, 64)
FIGURES = {"accuracy": (100, 1), "nll": (1, 3), "ece": (1, 3)}

app = typer.Typer(name="calibrated", help=__doc__, no_args_is_help=True)


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="JSON-lines file of the runs.")] = RECORD,
    scenario: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default=", ".join(SCENARIOS))] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable.", show_default="62, 63, 64")] = None,
    device: Device = "cpu",
    root: Root = None,
) -> None:
    """Run what is not in OUT yet, and append each run to it.

    Example: python -m studies calibrated run --scenario digits-heterog-10
    """
    done = {(line["scenario"], line["seed"], line["posterior"]) for line in read(out)}
    out.parent.mkdir(parents=True, exist_ok=True)
    for number in seed or SEEDS:
        for name in scenario or SCENARIOS:
            for mode in ("calibrated", "point"):
                if (name, number, mode) in done or (mode == "point" and not _held_out(out, name, number)):
                    continue
                loaded, source = load(name, preset="default", sets=["train.evaluate_every=1000"]), environment()
                began = time.perf_counter()
                found = execute(loaded, number, root=root, device=device, posterior=mode)
                line = {
                    "scenario": name,
                    "seed": number,
                    "posterior": mode,
                    "examples": found.config["examples"],
                    "tau": found.method.tau,
                    "record": found.history[-1],
                    "calibration": found.calibration and found.calibration.to_dict(),
                    "seconds": round(time.perf_counter() - began, 1),
                    "environment": source,
                }
                with out.open("a") as file:
                    file.write(json.dumps(without_nan(line)) + "\n")
                typer.echo(f"{name} {number} {mode}: {found.posterior.about}")


def _held_out(out: Path, name: str, seed: int) -> bool:
    """True if the calibrated run held examples out of its training."""
    lines = [line for line in read(out) if (line["scenario"], line["seed"]) == (name, seed)]
    return any(line["calibration"] and not line["calibration"]["folds"] for line in lines)


@app.command()
def draw(
    file: Annotated[Path, typer.Argument(help="JSON-lines file of the runs.")] = RECORD,
    out: Tables = Path("docs/tables"),
) -> None:
    """Write the table of the runs.

    Example: python -m studies calibrated draw
    """
    if not (found := read(file)):
        raise InputError("There is no run to show: run `python -m studies calibrated run`.")
    path = out / "calibrated.md"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(table(found), encoding="utf-8")
    typer.echo(f"{table(found)}\nwrote {path}")


def table(found: Sequence[dict[str, Any]]) -> str:
    """The figures of every scenario, mean and range over seeds, as a Markdown page."""
    lines = [
        "| scenario | trained on | predictions | accuracy, % | NLL | ECE | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(line["scenario"] for line in found):
        for mode in ("point", "calibrated"):
            some = sorted(
                (line for line in found if (line["scenario"], line["posterior"]) == (name, mode)),
                key=lambda line: line["seed"],
            )
            if not some:
                continue
            share = "nine tenths" if some[0]["calibration"] and not some[0]["calibration"]["folds"] else "all"
            seeds = ", ".join(str(line["seed"]) for line in some)
            for end, words in AT.items():
                if all(f"nll{end}" in line["record"] for line in some):
                    cells = [
                        cell([line["record"][f"{key}{end}"] for line in some], *how) for key, how in FIGURES.items()
                    ]
                    lines.append(f"| {name} | {share} | {words} | {' | '.join(cells)} | {seeds} |")
    chosen = ["| scenario | seed | chosen | seconds of the choice | of the run |", "|---|---|---|---|---|"]
    for line in found:
        if own := line["calibration"]:
            width = f"τ′ = {own['tau']:.2g}" if own["tau"] else "the mean"
            how = f"{own['folds']} short runs" if own["folds"] else f"{own['examples']} held-out examples"
            chosen.append(
                f"| {line['scenario']} | {line['seed']} | {width}, T = {own['temperature']:.2f}, by {how} | "
                f"{line['record']['calibration_seconds']:.1f} | {line['seconds']:.1f} |"
            )
    where = found[0]["environment"]
    commits = sorted({line["environment"]["commit"] for line in found})
    note = (
        f"IVON-ADMM with no setting; mean and range over seeds. {where['threads']} thread of a machine with "
        f"{where['cpus']} cores, which other work shared; commit {', '.join(commits)}. Below {SMALL} examples nothing "
        "is held out of the run, so that there is no price in accuracy."
    )
    return "\n".join(["## Calibrated predictions", "", note, "", *lines, "", *chosen, ""])


def cell(values: list[float], scale: int, digits: int) -> str:
    """Mean and range."""
    mean, *span = (f"{scale * value:.{digits}f}" for value in (statistics.fmean(values), min(values), max(values)))
    return f"{mean} ({'–'.join(span)})"
