"""`fedual compare`: several methods on one scenario, over seeds, with or without tuning."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedual.cli.output import echo, show
from fedual.cli.run import Device, Engine, Json, Preset, Root, Rounds, Scenarios, free
from fedual.errors import InputError

Methods = Annotated[str, typer.Option(metavar="A,B,…", help="Names of `fedual methods`.")]
Seeds = Annotated[str, typer.Option(metavar="0,1,…", help="The seeds that are reported.")]
Sweep = Annotated[
    bool, typer.Option("--sweep", help="First choose each method's settings by equally many validation trials.")
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for compare.json and the runs.", show_default="runs/SCENARIO-compare, the next one free"),
]


def compare(
    scenario: Scenarios = "digits-heterog-10",
    methods: Methods = "ivon-admm,fedavg,fedprox,feddyn,fedlap",
    seeds: Seeds = "0,1,2,3,4",
    rounds: Rounds = None,
    sweep: Sweep = False,
    preset: Preset = None,
    device: Device = "auto",
    engine: Engine = "vectorised",
    out: Out = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Run methods on a scenario at equal rounds, and show mean and standard deviation over seeds.

    With --sweep, settings are chosen by the validation NLL on a fifth of every client's training examples, with a seed
    that is not reported; the test set is not touched.

    Example: fedual compare digits-heterog-10 --methods ivon-admm,fedavg --seeds 0,1,2
    """
    from fedual.cli.progress import progress
    from fedual.comparison import table
    from fedual.rundir.atomic import replace, writing
    from fedual.rundir.jsonable import without_nan
    from fedual.rundir.locking import in_use
    from fedual.scenarios import load
    from fedual.scenarios.sweep import compare as run_sweep

    sets = [] if rounds is None else [f"train.rounds={rounds}"]
    named = [name.strip() for name in methods.split(",") if name.strip()]
    scenarios = [load(scenario, preset=preset, sets=sets, method=name) for name in named]
    numbers = _numbers(seeds)
    folder = out or free(Path("runs") / f"{Path(scenario).stem}-compare")
    path = folder / "compare.json"

    def save(report: Mapping[str, Any]) -> None:
        content = json.dumps(without_nan(report), indent=1).encode()
        with writing(path, len(content), "the last report is intact"):
            replace(path, content)

    with in_use(folder), progress() as watch:  # refused before the first trial
        if path.exists():
            raise InputError(f"{path} is the result of another comparison: name another folder with --out.")
        calls: dict[str, Any] = {"changed": save, "watch": lambda label, rounds: [watch(label, rounds)]}
        options = {"root": root, "device": device, "engine": engine}
        report = run_sweep(scenarios, numbers, sweep=sweep, out=folder, **calls, **options)
    if sweep:
        show(_trials(report), "method", "settings", "validation NLL", "")
    echo(f"{report['scenario']}, round {report['rounds']}: mean ± standard deviation over seeds {seeds}")
    headings, *rows = table({row["method"]: row["summary"] for row in report["methods"]})
    show(rows, *headings)
    for row in report["methods"]:
        if note := next((run["about"] for run in row["runs"] if run.get("about")), ""):
            echo(f"{row['method']}: {note}")
    echo(f"wrote {path}")
    if as_json:
        echo(json.dumps(without_nan({**report, "path": str(path)})))


def _numbers(seeds: str) -> list[int]:
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise InputError(f"--seeds {seeds}: give whole numbers, separated by commas, e.g. 0,1,2.") from None


def _trials(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in report["methods"]:
        for number, trial in enumerate(row["trials"]):
            settings = ", ".join(f"{key}={value}" for key, value in trial["settings"].items())
            loss = f"{trial['record']['nll']:.4f}" if trial["record"] else "diverged"
            yield row["method"], settings, loss, "chosen" if number == row["chosen"] else ""
