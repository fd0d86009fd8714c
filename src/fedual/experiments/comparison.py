"""Compare methods on a scenario: equal rounds, the same seeds, and with a sweep the same number of trials each.

Settings are chosen on a validation part, with a seed that is not reported, by the NLL at the mean after the last round
(the one number that every method has); the reported runs then train on all the training data. A run that diverges is a
result, not an error.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedual.errors import DivergedError, InputError
from fedual.experiments.federation import execute
from fedual.experiments.scenario import Scenario, Table
from fedual.runs import environment

VALIDATION = 0.2
TUNING_SEED = 1000


def compare(
    scenarios: Sequence[Scenario],
    seeds: Sequence[int],
    *,
    sweep: bool = False,
    out: Path | None = None,
    changed: Callable[[Table], None] = lambda report: None,
    watch: Callable[[str, int], Sequence[Callable[..., None]]] = lambda label, rounds: (),
    **options: Any,
) -> Table:
    """Run every method with every seed.

    Args:
        scenarios: the same scenario, once for each method.
        seeds: the seeds that are reported.
        sweep: choose each method's settings first, among the trials of its [sweep] table.
        out: folder for the run directories, one for each method and seed; trials leave none.
        changed: called with the report after every run, so that nothing is lost when the comparison is interrupted.
        watch: given a label and the number of rounds, the callbacks of that run.
        options: further arguments of `execute`: root, device, engine.

    Returns:
        The report: scenario, environment and, for each method, its settings, trials, runs and summary.

    Raises:
        InputError: methods that cannot be compared, before any run starts.
    """
    trials = {scenario.method: scenario.trials() if sweep else [] for scenario in scenarios}
    _check(scenarios, trials, seeds, sweep)
    rows: list[Table] = []
    report: Table = {
        "scenario": scenarios[0].name,
        "rounds": scenarios[0].train["rounds"],
        "seeds": list(seeds),
        "sweep": {"seed": TUNING_SEED, "validation": VALIDATION, "by": "nll"} if sweep else None,
        "environment": environment(),
        "methods": rows,
    }

    def one(scenario: Scenario, seed: int, label: str, **more: Any) -> Table:
        callbacks = watch(f"{scenario.method} {label}", scenario.train["rounds"])
        return _run(scenario, seed, callbacks=callbacks, **more, **options)

    for scenario in scenarios:
        tried = trials[scenario.method]
        row: Table = {"method": scenario.method, "trials": [], "chosen": None, "runs": [], "summary": summary([])}
        rows.append(row)
        for number, (settings, trial) in enumerate(tried, 1):
            done = one(trial, TUNING_SEED, f"trial {number}/{len(tried)}", validation=VALIDATION)
            row["trials"].append({"settings": settings, **done})
            changed(report)
        losses = [_loss(trial) for trial in row["trials"]]
        if sweep and math.isinf(min(losses)):
            continue  # every trial diverged: there are no settings to report
        if sweep:
            row["chosen"] = losses.index(min(losses))
            scenario = tried[row["chosen"]][1]
        row["description"] = scenario.describe()
        for seed in seeds:
            folder = out / f"{scenario.method}-{seed}" if out else None
            row["runs"].append(one(scenario, seed, f"seed {seed}", out=folder))
            row["summary"] = summary(row["runs"])
            changed(report)
    return report


def summary(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Mean and standard deviation (n − 1) over the runs that did not diverge, of every number of the last record."""
    records = [run["record"] for run in runs if run["record"] is not None]
    found: Table = {"runs": len(runs), "diverged": len(runs) - len(records)}
    if records:
        found["seconds_per_round"] = _spread([run["seconds_per_round"] for run in runs if run["record"] is not None])
    for key in ("accuracy", "nll", "brier", "ece", "accuracy_mc", "nll_mc", "brier_mc", "ece_mc"):
        values = [record[key] for record in records if record.get(key) is not None]
        if values:
            found[key] = _spread(values)
    return found


def _spread(values: Sequence[float]) -> Table:
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}


def _run(scenario: Scenario, seed: int, **options: Any) -> Table:
    """One run's last record; None, with the reason, where it diverged."""
    began = time.perf_counter()
    try:
        run = execute(scenario, seed, **options)
    except DivergedError as error:
        return {"seed": seed, "record": None, "diverged": str(error), "seconds": time.perf_counter() - began}
    record, diverged = run.history[-1], None
    if not math.isfinite(record["nll"]):
        record, diverged = None, f"The NLL is {record['nll']} after round {record['round']}."
    return {
        "seed": seed,
        "record": record,
        "diverged": diverged,
        "seconds": time.perf_counter() - began,
        "seconds_per_round": statistics.fmean(r["seconds"] for r in run.history),
    }


def _loss(done: Mapping[str, Any]) -> float:
    """The validation NLL at the mean; ∞ where the run diverged."""
    return done["record"]["nll"] if done["record"] else math.inf


def _check(
    scenarios: Sequence[Scenario], trials: Mapping[str, Sequence[Any]], seeds: Sequence[int], sweep: bool
) -> None:
    methods = [scenario.method for scenario in scenarios]
    for what, values in (("method", methods), ("seed", seeds)):
        if not values:
            raise InputError(f"There is no {what} to compare: name at least one.")
        if len(set(values)) < len(values):
            raise InputError(f"A {what} is named twice in {', '.join(map(str, values))}: name each once.")
    if sweep and TUNING_SEED in seeds:
        raise InputError(f"Seed {TUNING_SEED} chooses the settings of a sweep: report other seeds.")
    counts = {method: len(tried) for method, tried in trials.items()}
    if sweep and (0 in counts.values() or len(set(counts.values())) > 1):
        listed = ", ".join(f"{method} {count}" for method, count in counts.items())
        raise InputError(f"Trials of the sweep: {listed}: give every method a [sweep] table with equally many.")
    for scenario in scenarios:
        for candidate in [trial for _, trial in trials[scenario.method]] or [scenario]:
            candidate.build()  # settings out of range are refused before the first run
