"""Try settings on a validation part of the training data, never on the test set or on the seeds that are reported.

    python -m bench.tune mnist-2class-100 "ivon-admm rho=0.1,0.5 clip=1.0" "fedprox rho=0.001,0.01" --out results/tuning

Every combination of a method's values is a trial; a line of the output file is a trial, with the figures at some rounds
and how it was made.
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path

from fedual.errors import DivergedError
from fedual.experiments import load
from fedual.experiments.federation import execute
from fedual.experiments.reproduce import SEEDS
from fedual.runs import environment
from fedual.runs.values import without_nan


def trials(spec: str) -> tuple[str, list[list[str]]]:
    """A method, and the settings of each trial."""
    method, *words = spec.split()
    grid = [[f"{key}={value}" for value in values.split(",")] for key, values in (word.split("=") for word in words)]
    return method, [list(some) for some in product(*grid)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario")
    parser.add_argument("specs", nargs="+", metavar="'METHOD KEY=A,B …'")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--validation", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=5, help="evaluate in every n-th round")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, default=Path("results/tuning"))
    args = parser.parse_args()
    if reported := set(args.seed) & set(SEEDS):
        parser.error(f"--seed {min(reported)} is one of those that are reported: tune on others")
    if not 0 < args.validation < 1:
        parser.error(f"--validation {args.validation}: above 0 and below 1, or the test set would choose the settings")
    args.out.mkdir(parents=True, exist_ok=True)
    seeds: list[int] = args.seed
    common = ["train.samples=0", f"train.evaluate_every={args.every}"]
    common += [f"train.rounds={args.rounds}"] if args.rounds else []
    for spec in args.specs:
        method, grid = trials(spec)
        for sets, seed in product(grid, seeds):
            began, diverged = time.perf_counter(), None
            scenario = load(args.scenario, sets=[*common, *sets], method=method)
            try:
                done = execute(scenario, seed, root=args.root, validation=args.validation, device=args.device)
            except DivergedError as error:
                done, diverged = error.run, str(error)
            seen = [r for r in done.history if "nll" in r]  # type: ignore[union-attr]
            curve = {r["round"]: [round(r["accuracy"], 4), round(r["nll"], 4)] for r in seen}
            seconds = round(time.perf_counter() - began, 1)
            line = {
                "scenario": args.scenario, "method": method, "sets": sets, "seed": seed, "validation": args.validation,
                "accuracy and nll at rounds": curve, "diverged": diverged, "seconds": seconds,
                "environment": environment(),
            }  # fmt: skip
            with (args.out / f"{args.scenario}.jsonl").open("a") as file:
                file.write(json.dumps(without_nan(line)) + "\n")
            shown = {r: v for r, v in curve.items() if r in (10, 25, 50, 100) or r == max(curve)}
            print(method, *sets, seed, "diverged" if diverged else "", shown, f"{seconds} s", flush=True)


if __name__ == "__main__":
    main()
