"""How far from its settings IVON-ADMM still works: the paper's method against the defaults.

    python -m bench.robust run --out results/robustness.jsonl [--part 1/8]
    python -m bench.robust draw results/robustness.jsonl --out results/tables

A setting multiplies ρ, γ, τ, lr and δ by factors drawn log-uniformly from [1/10, 10], and has 5 to 20 local epochs; the
same settings are tried around the paper's values and around the defaults. A line of the file is a run; those that are
there already are left out. It learns on nine tenths of the training data and is judged by the rest.
"""

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedual import methods
from fedual.admm import Method
from fedual.errors import DivergedError
from fedual.experiments import load
from fedual.experiments.federation import materialise
from fedual.figures.common import BLUE, FAINT, RED, canvas
from fedual.runs import environment
from fedual.runs.values import without_nan
from fedual.training import fit

SCENARIOS = ("mnist-2class-100", "fmnist-heterog-10")
PRESETS = ("paper", "default")
VARIED = ("rho", "damping", "tau", "lr", "delta")
SEED, VALIDATION, ROUNDS, NEAR = 1, 0.1, 25, 0.03


def settings(count: int) -> list[dict[str, float]]:
    """Factors, and a number of local epochs."""
    rng = np.random.default_rng(2026)
    drawn = [
        {key: 10 ** rng.uniform(-1, 1) for key in VARIED} | {"epochs": 5 * 4 ** rng.uniform()} for _ in range(count)
    ]
    return [{key: float(f"{value:.3g}") for key, value in some.items()} for some in drawn]


def around(scenario: Any, factors: dict[str, float]) -> Method:
    """IVON-ADMM with its numbers times the factors: those of the scenario, or of the defaults, which are rules."""
    known = {**methods.settings("ivon-admm"), **scenario.settings}
    return methods.build("ivon-admm", **scenario.settings | {key: factors[key] * known[key] for key in VARIED})


def trial(name: str, preset: str, factors: dict[str, float], device: str, root: str | None) -> dict[str, Any]:
    scenario = load(name, preset=preset, method="ivon-admm")
    model, clients, test, scale, _ = materialise(scenario, SEED, root, VALIDATION)
    epochs = round(factors["epochs"])
    given: dict[str, Any] = scenario.train | {
        "rounds": ROUNDS,
        "local_epochs": epochs,
        "evaluate_every": ROUNDS,
        "samples": 0,
    }
    try:
        run = fit(model, clients, around(scenario, factors), test=test, scale=scale, seed=SEED, device=device, **given)
        last = run.history[-1]
    except DivergedError as error:
        last = {"round": getattr(error.run, "round", None), "accuracy": None, "nll": None, "stopped": str(error)}
    kept = {key: last[key] for key in ("round", "accuracy", "nll", "limited", "held", "stopped") if key in last}
    return {"scenario": name, "preset": preset, "factors": factors, **kept}


def run(args: argparse.Namespace) -> None:
    mine, parts = map(int, args.part.split("/"))
    done = {(line["scenario"], line["preset"], json.dumps(line["factors"])) for line in lines(args.out)}
    todo = [
        (name, preset, factors) for factors in settings(args.count) for name in args.scenario for preset in args.preset
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name, preset, factors in todo[mine - 1 :: parts]:
        if (name, preset, json.dumps(factors)) in done:
            continue
        source = {"seed": SEED, "environment": environment()}
        line = trial(name, preset, factors, args.device, args.root) | source
        with args.out.open("a") as file:
            file.write(json.dumps(without_nan(line)) + "\n")
        print(name, preset, factors, line["accuracy"], line["nll"], flush=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def diverged(line: dict[str, Any]) -> bool:
    return line["nll"] is None or not line["nll"] < math.log(10)


def accuracies(found: Iterable[dict[str, Any]]) -> list[float]:
    """Of the runs that did not diverge, best first."""
    return sorted((line["accuracy"] for line in found if not diverged(line)), reverse=True)


def _short(commit: str) -> str:
    """Seven digits, and the mark of a tree with changes."""
    return commit[:7] + "+" * commit.endswith("+")


def draw(args: argparse.Namespace) -> None:
    """Accuracies from best to worst, and how many of them are near the best of both."""
    found = lines(args.file)
    names = [name for name in SCENARIOS if any(line["scenario"] == name for line in found)]
    text = ["| scenario | IVON-ADMM around | runs | diverged | within 3 points of the best of both | best | commit |"]
    text.append("|---|---|---|---|---|---|---|")
    with canvas(4.2 * len(names), 3.0) as figure:
        for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            here = {p: [line for line in found if (line["scenario"], line["preset"]) == (name, p)] for p in PRESETS}
            best = max(accuracies(here["paper"] + here["default"]))
            axis.axhspan(100 * (best - NEAR), 100 * best, color=FAINT)
            for preset, colour in zip(PRESETS, (BLUE, RED), strict=True):
                good, some = accuracies(here[preset]), here[preset]
                lost, near = sum(map(diverged, some)), sum(value > best - NEAR for value in good)
                label = {"paper": "the paper's settings", "default": "the defaults"}[preset]
                axis.plot(range(1, len(good) + 1), [100 * value for value in good], ".-", color=colour, label=label)
                top = f"{100 * good[0]:.1f}" if good else ""
                source = ", ".join(sorted({_short(line["environment"]["commit"]) for line in some}))
                text.append(f"| {name} | {label} | {len(some)} | {lost} | {near} | {top} | {source} |")
            axis.set(title=name, xlabel="settings that did not diverge, best first", ylabel=f"% after {ROUNDS} rounds")
            axis.legend()
        args.out.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.out / "robustness.svg")
    page = "\n".join(["## Settings far from the usual ones", "", *text, "", "![robustness](robustness.svg)"])
    (args.out / "robustness.md").write_text(page + "\n")
    print(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, default=Path("results/robustness.jsonl"))
    runs.add_argument("--scenario", nargs="+", default=SCENARIOS)
    runs.add_argument("--preset", nargs="+", default=PRESETS)
    runs.add_argument("--count", type=int, default=60)
    runs.add_argument("--part", default="1/1", help="which of how many shares of the work, for several processes")
    runs.add_argument("--device", default="auto")
    runs.add_argument("--root")
    runs.set_defaults(do=run)
    drawn = commands.add_parser("draw")
    drawn.add_argument("file", type=Path)
    drawn.add_argument("--out", type=Path, default=Path("results/tables"))
    drawn.set_defaults(do=draw)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
