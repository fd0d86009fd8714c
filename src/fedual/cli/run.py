"""`fedual run`: train one method on a scenario."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedual.cli.output import echo, show
from fedual.errors import InputError

if TYPE_CHECKING:
    from fedual.scenarios import Scenario

Scenarios = Annotated[str, typer.Argument(metavar="SCENARIO", help="A name of `fedual scenarios`, or a .toml file.")]
Method = Annotated[str, typer.Option(help="A name of `fedual methods`.")]
Rounds = Annotated[int | None, typer.Option(help="Rounds.", show_default="the scenario's")]
Seed = Annotated[int, typer.Option(help="Random seed for initialisation, split and training.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting: lr=0.01, train.batch_size=16, split.clients=20."
    ),
]
Preset = Annotated[str | None, typer.Option(help="Named settings of the scenario, e.g. paper, or default.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Engine = Annotated[
    str, typer.Option(help="vectorised (all clients at once), sequential (one by one) or flower (Flower's simulation).")
]
Out = Annotated[
    Path | None, typer.Option(help="The run's folder.", show_default="runs/SCENARIO-METHOD-SEED, the next one free")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out, or in runs/SCENARIO-METHOD-SEED.")]
Root = Annotated[Path | None, typer.Option(help="Folder of the data sets.", show_default="as `fedual data list` says")]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Log to tensorboard, mlflow or wandb, in the run's folder; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")]


def run(
    scenario: Scenarios = "digits-heterog-10",
    method: Method = "ivon-admm",
    rounds: Rounds = None,
    seed: Seed = 0,
    sets: Sets = None,
    preset: Preset = None,
    device: Device = "auto",
    engine: Engine = "vectorised",
    out: Out = None,
    resume: Resume = False,
    root: Root = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train one method on a scenario and keep the posterior, its figures and a checkpoint in a folder.

    Example: fedual run digits-heterog-10 --rounds 5 --set lr=0.05
    """
    from fedual import trackers
    from fedual.cli.progress import progress
    from fedual.rundir.jsonable import without_nan
    from fedual.scenarios import load
    from fedual.scenarios.federation import execute, execute_on_flower

    given = [*(sets or ()), *([] if rounds is None else [f"train.rounds={rounds}"])]
    loaded = load(scenario, preset=preset, sets=given, method=method)
    folder = out or Path("runs") / f"{loaded.name}-{method}-{seed}"
    if out is None and not resume:
        folder = free(folder)
    if track and engine == "flower":
        raise InputError(f"--track {track[0]}: runs on Flower are not tracked; choose another engine.")
    tracked = [trackers.inside(folder, name) for name in dict.fromkeys(track or ())]
    began = time.perf_counter()
    with progress() as watch:
        callbacks = [watch(f"{loaded.name}, {method}", loaded.train["rounds"]), *tracked]
        if engine == "flower":
            done = execute_on_flower(loaded, seed, folder, resume, root)
        else:
            options = {"device": device, "engine": engine, "out": folder, "resume": resume, "callbacks": callbacks}
            done = execute(loaded, seed, root=root, **options)
    seconds = time.perf_counter() - began
    report(loaded, done.history, done.posterior.about, done.method.name)
    path, spent = done.path or folder, times(done.history, seconds)
    parts = f"training {spent['training']:.1f}, evaluation {spent['evaluation']:.1f}"
    parts += f", calibration {spent['calibration']:.1f}" if "calibration" in spent else ""
    echo(f"{len(done.history)} rounds, {seconds:.1f} s ({parts}), in {path}")
    if as_json:
        last = done.history[-1] if done.history else None
        rest = {"rounds": len(done.history), "last": last, "path": str(path), "seconds": seconds, "times": spent}
        echo(json.dumps(without_nan({"scenario": loaded.name, "method": method, "seed": seed, **rest})))


def times(history: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """How a run's seconds were spent; the time of the first round beyond that of the second counts as compilation."""
    rounds = [record["seconds"] for record in history]
    compilation = max(0.0, rounds[0] - rounds[1]) if len(rounds) > 1 else 0.0
    training = sum(rounds) - compilation
    evaluation = sum(record.get("evaluation_seconds", 0.0) for record in history)
    known = {"training": training, "evaluation": evaluation, "compilation": compilation}
    if calibration := sum(record.get("calibration_seconds", 0.0) for record in history):
        known["calibration"] = calibration
    return {**known, "start and files": max(0.0, seconds - sum(known.values()))}


def report(scenario: "Scenario", history: Sequence[Mapping[str, Any]], about: str, method: str = "") -> None:
    """Print the last round's figures, what they rest on, and how many updates were refused and steps shortened."""
    from fedual.calibration import AT

    if not history:
        return
    last = history[-1]
    echo(f"{scenario.title}: {method or scenario.method}, round {last['round']}")
    headings = {"accuracy": "accuracy", "rmse": "RMSE", "r2": "R²", "loss": "loss", "nll": "NLL", "ece": "ECE"}
    known = [name for name in headings if last.get(name) is not None]
    rows = []
    for suffix, label in AT.items():
        row = [(name, last.get(f"{name}{suffix}")) for name in known]
        if known and not any(value is None for _, value in row):
            rows.append([label, *(f"{value:.1%}" if name == "accuracy" else f"{value:.3f}" for name, value in row)])
    if rows:
        show(rows, "", *(headings[name] for name in known))
    if about:
        echo(about)
    guessing = math.log(scenario.model.get("outputs", math.inf))
    if "accuracy" in last and last["nll"] > guessing:
        echo(f"The NLL is above {guessing:.2f}, that of guessing: the run did not converge; try a lower lr.")
    explained = last.get("r2_mc", last.get("r2"))
    if explained is not None and explained <= 0:
        echo(f"R² is {explained:.2f}: the run predicts worse than the mean; check the scale of the inputs.")
    refused, shortened = sum(r["refused"] for r in history), sum(r["shortened"] < 1 for r in history)
    if refused or shortened:
        echo(f"{refused} updates of clients were refused, {shortened} steps of the server shortened.")


def free(folder: Path) -> Path:
    """The first of folder, folder-2, folder-3, … that does not exist."""
    candidates = chain([folder], (folder.with_name(f"{folder.name}-{number}") for number in count(2)))
    return next(path for path in candidates if not path.exists())
