"""Try settings of a method on validation data: never on the test set, never with the seeds that are reported.

Every combination of a method's values is a trial, and every trial is a line of `results/tuning/SCENARIO.jsonl`.
"""

import json
import time
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from fedual.cli.run import Device, Root
from fedual.errors import DivergedError, InputError
from fedual.rundir import environment
from fedual.rundir.jsonable import without_nan
from fedual.scenarios import load
from fedual.scenarios.federation import execute
from studies.tables import SEEDS

SHOWN = (10, 25, 50, 100)  # the rounds that are printed, besides the last; the file has all evaluated rounds


def grid(spec: str) -> tuple[str, list[list[str]]]:
    """Parse "fedprox rho=1,2 lr=3,4": return the method, and the settings of each trial."""
    method, *words = spec.split()
    values = [word.partition("=") for word in words]
    choices = [[f"{key}={value}" for value in some.split(",")] for key, _, some in values]
    return method, [list(some) for some in product(*choices)]


def tuning(
    scenario: Annotated[str, typer.Argument(help="A name of `fedual scenarios`.")],
    specs: Annotated[list[str], typer.Argument(metavar="'METHOD KEY=A,B …'", help="A method and the values to try.")],
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable; not a reported one.", show_default="1")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds.", show_default="the scenario's")] = None,
    validation: Annotated[float, typer.Option(help="Share of the training data that is held out.")] = 0.1,
    every: Annotated[int, typer.Option(help="Evaluate in every n-th round.")] = 5,
    device: Device = "auto",
    root: Root = None,
    out: Annotated[Path, typer.Option(help="Folder of the trials.")] = Path("results/tuning"),
) -> None:
    """Try every combination of settings on validation data; append each trial to OUT/SCENARIO.jsonl.

    Example: python -m studies tuning mnist-2class-100 "ivon-admm rho=0.1,0.5 clip=1.0" "fedprox rho=0.001,0.01"
    """
    seeds = seed or [1]
    if reported := set(seeds) & set(SEEDS):
        raise InputError(f"--seed {min(reported)} is one of those that are reported: tune on others.")
    if not 0 < validation < 1:
        raise InputError(
            f"--validation {validation} must be above 0 and below 1, or the test set would choose the settings."
        )
    out.mkdir(parents=True, exist_ok=True)
    common = ["train.samples=0", f"train.evaluate_every={every}", *([f"train.rounds={rounds}"] if rounds else [])]
    for method, trials in map(grid, specs):
        for sets, one in product(trials, seeds):
            start, diverged = time.perf_counter(), None
            loaded = load(scenario, sets=[*common, *sets], method=method)
            try:
                done = execute(loaded, one, root=root, validation=validation, device=device, posterior="point")
            except DivergedError as error:
                done, diverged = error.run, str(error)
            evaluated = [r for r in done.history if "nll" in r]  # type: ignore[union-attr]
            curve = {r["round"]: [round(r["accuracy"], 4), round(r["nll"], 4)] for r in evaluated}
            seconds = round(time.perf_counter() - start, 1)
            line = {
                "scenario": scenario, "method": method, "sets": sets, "seed": one, "validation": validation,
                "accuracy and nll at rounds": curve, "diverged": diverged, "seconds": seconds,
                "environment": environment(),
            }  # fmt: skip
            with (out / f"{scenario}.jsonl").open("a") as file:
                file.write(json.dumps(without_nan(line)) + "\n")
            shown = {r: metrics for r, metrics in curve.items() if r in SHOWN or r == max(curve)}
            typer.echo(f"{method} {' '.join(sets)} {one} {'diverged' if diverged else ''} {shown} {seconds} s")
