"""Robustness of IVON-ADMM to its settings: the paper's settings against the defaults.

A trial multiplies ρ, γ, τ, lr and δ by factors drawn log-uniformly from [1/10, 10], and the scenario's local epochs by
one from [1/2, 2]. The same factors are applied to the paper's settings and to the defaults. A trial learns from nine
tenths of the training data and is evaluated on the rest; it is a line of `results/tuning/robustness.jsonl`.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedual import methods
from fedual.cli.run import Device, Root
from fedual.defaults import RULES, Federation
from fedual.errors import DataError, DivergedError, InputError
from fedual.fitting import fit
from fedual.methods import MethodSpec
from fedual.rundir import environment
from fedual.rundir.jsonable import without_nan
from fedual.scenarios import load
from fedual.scenarios.federation import materialise
from fedual.settings import split
from studies.figures.common import BLUE, FAINT, RED, canvas

SCENARIOS = {"mnist-2class-100": 25, "fmnist-heterog-10": 25, "cifar10-resnet20-heterog-10": 5}
"""The rounds of a trial of each scenario."""
PRESETS = {
    "paper": "the paper's settings",
    "default": "the defaults",
    "no hold": "the defaults without a hold on means",
    "no unit": "the defaults with clients that all count the same",
}
WITHOUT = {"no hold": {"hold": 0.0}, "no unit": {"unit": 0.0}}
VARIED = ("rho", "damping", "tau", "lr", "delta")
SEED, VALIDATION = 1, 0.1
EPOCHS = 10  # of which the factors' epochs are multiples
NEAR = 0.03  # a trial is near the best if its accuracy is less than this below it

TRIALS = Path("results/tuning/robustness.jsonl")

Trial = dict[str, Any]
Tables = Annotated[Path, typer.Option(help="Folder of the tables.")]

app = typer.Typer(help="Settings far from the usual ones: run the trials, or draw them.", no_args_is_help=True)


def factors(count: int) -> list[dict[str, float]]:
    """Draw the factors of each setting, and its number of local epochs."""
    rng = np.random.default_rng(2026)
    drawn = [
        {key: 10 ** rng.uniform(-1, 1) for key in VARIED} | {"epochs": 5 * 4 ** rng.uniform()} for _ in range(count)
    ]
    return [{key: float(f"{value:.3g}") for key, value in some.items()} for some in drawn]


def scaled(settings: dict[str, Any], by: dict[str, float], federation: Federation) -> MethodSpec:
    """Return IVON-ADMM with the given settings, or its defaults, times the factors.

    If ρ or γ is a default, γ is at most ρ/3, as its rule says.
    """
    rules = {name: rule.value(federation) for name, rule in RULES["ivon-admm"].items() if name not in settings}
    known = {**methods.settings("ivon-admm"), **rules, **settings}
    numbers = {key: by[key] * known[key] for key in VARIED if key != "lr"}
    rate = known["lr"]
    numbers["lr"] = by["lr"] * rate if isinstance(rate, float) else replace(rate, gain=by["lr"] * rate.gain)
    if not {"rho", "damping"} <= settings.keys():
        numbers["damping"] = min(numbers["damping"], max(1 / 3, 1 / federation.clients))
    return methods.spec("ivon-admm", **{**rules, **settings, **numbers})


def trial(name: str, preset: str, by: dict[str, float], device: str, root: Path | None) -> Trial:
    """Train with one setting; return the metrics of the last round."""
    scenario = load(name, preset="paper" if preset == "paper" else "default", method="ivon-admm")
    model, clients, test = materialise(scenario, SEED, root, VALIDATION)
    rounds, epochs = SCENARIOS[name], max(1, round(scenario.train["local_epochs"] * by["epochs"] / EPOCHS))
    sections = split({**scenario.train, "local_epochs": epochs, "evaluate_every": rounds, "samples": 0})
    local, examples = sections["training"], float(sum(clients.sizes))
    federation = Federation(len(clients), examples, steps=local.average_steps(len(clients), examples))
    method = scaled(scenario.settings | WITHOUT.get(preset, {}), by, federation)
    execution, evaluation = replace(sections["execution"], device=device), sections["evaluation"]
    try:
        run = fit(
            model, clients, method, rounds, test=test, seed=SEED, posterior="point",
            local=local, execution=execution, evaluation=evaluation,
        )  # fmt: skip
        last = run.history[-1]
    except DivergedError as error:
        ended = error.run.server.round if error.run else None
        last = {"round": ended, "accuracy": None, "nll": None, "stopped": str(error)}
    kept = {key: last[key] for key in ("round", "accuracy", "nll", "limited", "held", "stopped") if key in last}
    return {"scenario": name, "preset": preset, "factors": by, **kept}


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="JSON-lines file of the trials.")] = TRIALS,
    scenario: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default=", ".join(SCENARIOS))] = None,
    preset: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default=", ".join(PRESETS))] = None,
    count: Annotated[int, typer.Option(help="Number of settings.")] = 60,
    part: Annotated[str, typer.Option(help="Share I/N of the work, for several processes.")] = "1/1",
    device: Device = "auto",
    root: Root = None,
) -> None:
    """Run the trials that are not in OUT yet, and append each to it.

    Example: python -m studies robustness run --part 1/8
    """
    mine, _, shares = part.partition("/")
    if not (mine.isdigit() and shares.isdigit() and 1 <= int(mine) <= int(shares)):
        raise InputError(f"--part {part}: write I/N, share I of N, as in 1/8.")
    for option, given, known in (("preset", preset, PRESETS), ("scenario", scenario, SCENARIOS)):
        if unknown := set(given or ()) - set(known):
            raise InputError(f"--{option} {unknown.pop()}: choose among {', '.join(known)}.")
    done = {(line["scenario"], line["preset"], json.dumps(line["factors"])) for line in read(out)}
    todo = [*product(factors(count), scenario or SCENARIOS, preset or PRESETS)]
    out.parent.mkdir(parents=True, exist_ok=True)
    for by, name, around in todo[int(mine) - 1 :: int(shares)]:
        if (name, around, json.dumps(by)) in done:
            continue
        source = {"seed": SEED, "environment": environment()}
        line = trial(name, around, by, device, root) | source
        with out.open("a") as file:
            file.write(json.dumps(without_nan(line)) + "\n")
        typer.echo(f"{name} {around} {by} {line['accuracy']} {line['nll']}")


def read(path: Path) -> list[Trial]:
    """Read the trials of a file; none if it does not exist."""
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"line {number} of {path} is no trial ({error}): delete it to repeat the trial.") from None
    return found


def diverged(line: Trial) -> bool:
    """Return whether a trial ended worse than a uniform guess among ten classes."""
    return line["nll"] is None or not line["nll"] < math.log(10)


def accuracies(found: Iterable[Trial]) -> list[float]:
    """Return the accuracies of the trials that did not diverge, best first."""
    return sorted((line["accuracy"] for line in found if not diverged(line)), reverse=True)


def table(found: Sequence[Trial]) -> str:
    """Count the trials near the best, as a Markdown page."""
    lines = ["| scenario | IVON-ADMM around | runs | diverged | within 3 points of the best | best | commit |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, (best, by_preset) in _grouped(found).items():
        for preset, some in by_preset.items():
            good = accuracies(some)
            lost, near = sum(map(diverged, some)), sum(value > best - NEAR for value in good)
            top = f"{100 * good[0]:.1f}" if good else ""
            commits = {line["environment"]["commit"] for line in some}  # a tree with uncommitted changes has a "+"
            source = ", ".join(sorted({commit[:7] + "+" * commit.endswith("+") for commit in commits}))
            lines.append(f"| {name} | {PRESETS[preset]} | {len(some)} | {lost} | {near} | {top} | {source} |")
    return "\n".join(["## Settings far from the usual ones", "", *lines, "", "![robustness](robustness.svg)", ""])


@app.command()
def draw(
    file: Annotated[Path, typer.Argument(help="JSON-lines file of the trials.")] = TRIALS,
    out: Tables = Path("docs/tables"),
) -> None:
    """Write the table of the trials, and the picture of their accuracies from best to worst.

    Example: python -m studies robustness draw
    """
    found = read(file)
    groups, paths = _grouped(found), [out / "robustness.md", out / "robustness.svg"]
    if not groups:
        raise InputError("There is no trial to draw: run `python -m studies robustness run`.")
    out.mkdir(parents=True, exist_ok=True)
    with canvas(4.2 * len(groups), 3.0) as figure:
        axes = figure.subplots(1, len(groups), squeeze=False)[0]
        for axis, (name, (best, by_preset)) in zip(axes, groups.items(), strict=True):
            axis.axhspan(100 * (best - NEAR), 100 * best, color=FAINT)
            for preset, colour in (("paper", BLUE), ("default", RED)):
                good = [100 * value for value in accuracies(by_preset.get(preset, []))]
                axis.plot(range(1, len(good) + 1), good, ".-", color=colour, label=PRESETS[preset])
            axis.set(
                title=name,
                xlabel="settings that did not diverge, best first",
                ylabel=f"% after {SCENARIOS[name]} rounds",
            )
            axis.legend()
        figure.savefig(paths[1], metadata={"Date": None})
    paths[0].write_text(table(found), encoding="utf-8")
    typer.echo("\n".join([table(found), *(f"wrote {path}" for path in paths)]))


def _grouped(found: Sequence[Trial]) -> dict[str, tuple[float, dict[str, list[Trial]]]]:
    """Group trials by scenario and preset; return each scenario's best accuracy, and its trials."""
    names = [name for name in SCENARIOS if any(line["scenario"] == name for line in found)]
    of = lambda name, preset: [line for line in found if (line["scenario"], line["preset"]) == (name, preset)]
    groups = {name: {preset: some for preset in PRESETS if (some := of(name, preset))} for name in names}
    best = lambda by: max(accuracies(chain(*by.values())), default=math.nan)
    return {name: (best(by), by) for name, by in groups.items()}
