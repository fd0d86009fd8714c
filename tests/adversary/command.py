"""Campaigns by command, and their records in results/adversary/."""

import argparse
import json
import subprocess
import time
from pathlib import Path

import torch

from adversary import harness, mutants, schedules
from adversary.fuzzers import FUZZERS, SHARES
from fedual.rundir import environment

RESULTS = Path(__file__).parent.parent.parent / "results" / "adversary"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversary")
    parser.add_argument("campaign", choices=["fuzz", "schedules", "mutants"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200, help="of each fuzzer; slow ones take a part of it")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run this case alone, and show what happens")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--record", action="store_true", help="append the result to results/adversary/")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in given.only.split(",") if name]
    cases = range(given.first, given.first + given.cases)
    if given.case is not None:
        cases = range(given.case, given.case + 1)
    if given.campaign == "fuzz":
        return fuzz(names or list(FUZZERS), given.seed, cases, given.record)
    if given.campaign == "schedules":
        return simulate(given.seed, cases, given.record)
    return hunt(names or list(mutants.MUTANTS), given.seed, given.record)


def fuzz(names: list[str], seed: int, cases: range, record: bool) -> int:
    """Run fuzzers one after the other; 1 if one of them fails."""
    failed = 0
    for name in names:
        most = max(1, int(len(cases) * SHARES.get(name, 1.0)))
        report = harness.run(name, FUZZERS[name], seed, cases[:most])
        failed += bool(report.failures)
        rate = report.cases / max(report.seconds, 1e-9)
        print(
            f"{name}: {report.cases} cases, {rate:.0f}/s, {report.peak_mib:.0f} MiB, {report.outcomes}, "
            f"{len(report.failures)} failures",
            flush=True,
        )
        for failure, count in report.kinds():
            print(f"  case {failure['case']} ({count} like it): {failure['what'][:300]}", flush=True)
            if len(cases) == 1:
                print(failure.get("stack", ""))
        if record:
            keep("fuzz.jsonl", {**report.to_dict(), "memory_limit_mib": harness.MEMORY >> 20})
    return int(failed > 0)


def simulate(seed: int, cases: range, record: bool) -> int:
    """Run random schedules of faults; 1 if one of them ends wrong."""
    report = harness.run("schedules", schedules.schedule, seed, cases, 60.0)
    rate = report.cases / max(report.seconds, 1e-9)
    print(f"{report.cases} schedules, {rate:.1f}/s, {report.counts}, {len(report.failures)} failures")
    for failure in report.failures:
        print(f"  schedule {failure['case']}: {failure['what'][:500]}")
    if record:
        keep("schedules.jsonl", report.to_dict())
    return int(bool(report.failures))


def hunt(names: list[str], seed: int, record: bool) -> int:
    """Run schedules of each mutant until one is wrong; 1 if a mutant survives."""
    found = {}
    for name in names:
        report = mutants.hunt(name, seed)
        found[name] = report.cases if report.failures else None
        what = report.failures[0]["what"][:150] if report.failures else f"SURVIVED {report.cases} schedules"
        print(f"{name}: schedule {report.cases}: {what}", flush=True)
    if record:
        keep("mutants.jsonl", {"seed": seed, "caught_by_schedule": found})
    return int(None in found.values())


def keep(name: str, record: dict) -> None:
    """Append a record with the time, the commit and the hardware."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS).stdout.strip()
    about = {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit, "machine": environment()}
    with (RESULTS / name).open("a") as file:
        file.write(json.dumps(about | record) + "\n")
