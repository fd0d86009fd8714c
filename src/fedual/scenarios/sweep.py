"""Compare methods on a scenario: equal rounds, the same seeds, and with a sweep the same number of trials each.

Settings are chosen on a validation part, with a seed that is not reported, by the NLL at the mean after the last round
(the one number that every method has); the reported runs then train on all the training data. A run that diverges is a
result, not an error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedual.comparison import distinct, outcome, summary
from fedual.errors import InputError
from fedual.rundir import environment
from fedual.scenarios.federation import execute
from fedual.scenarios.scenario import Scenario, Table

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
    """Run the same scenario, given once for each method, with every seed, and report all runs and their summaries.

    With `sweep`, each method's settings are first chosen among the trials of its [sweep] table. The folder `out` gets
    a run directory for each method and seed, and none for trials. `changed` is called with the report after every run,
    so that nothing is lost when the comparison is interrupted; `watch` makes a run's callbacks from its label and
    number of rounds. Methods that cannot be compared are refused before any run starts.
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
        return outcome(lambda: execute(scenario, seed, callbacks=callbacks, **more, **options), seed)[1]

    for scenario in scenarios:
        tried = trials[scenario.method]
        row: Table = {"method": scenario.method, "trials": [], "chosen": None, "runs": [], "summary": summary([])}
        rows.append(row)
        for number, (settings, trial) in enumerate(tried, 1):
            done = one(trial, TUNING_SEED, f"trial {number}/{len(tried)}", validation=VALIDATION, posterior="point")
            row["trials"].append({"settings": settings, **done})
            changed(report)
        if sweep:
            losses = [_loss(trial) for trial in row["trials"]]
            if math.isinf(min(losses)):
                continue  # every trial diverged: there are no settings to report
            row["chosen"] = losses.index(min(losses))
            scenario = tried[row["chosen"]][1]
        row["description"] = scenario.describe()
        for seed in seeds:
            folder = out / f"{scenario.method}-{seed}" if out else None
            row["runs"].append(one(scenario, seed, f"seed {seed}", out=folder))
            row["summary"] = summary(row["runs"])
            changed(report)
    return report


def _loss(done: Mapping[str, Any]) -> float:
    """The validation NLL at the mean, or the loss if there is no NLL; ∞ if the run diverged."""
    record = done["record"]
    return record.get("nll", record.get("loss")) if record else math.inf


def _check(
    scenarios: Sequence[Scenario], trials: Mapping[str, Sequence[Any]], seeds: Sequence[int], sweep: bool
) -> None:
    distinct("method", [scenario.method for scenario in scenarios])
    distinct("seed", seeds)
    if sweep and TUNING_SEED in seeds:
        raise InputError(f"Seed {TUNING_SEED} chooses the settings of a sweep: report other seeds.")
    counts = {method: len(tried) for method, tried in trials.items()}
    if sweep and (0 in counts.values() or len(set(counts.values())) > 1):
        listed = ", ".join(f"{method} {count}" for method, count in counts.items())
        raise InputError(f"Trials of the sweep: {listed}: give every method a [sweep] table with equally many.")
    for scenario in scenarios:
        for candidate in [trial for _, trial in trials[scenario.method]] or [scenario]:
            candidate.spec()  # settings out of range are refused before the first run
