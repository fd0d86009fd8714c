"""Compare methods on the same model, data and seeds; a run that diverges is a result, not an error."""

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedual.algorithm import Method
from fedual.errors import DivergedError, InputError, import_optional
from fedual.fitting import fit, for_networks
from fedual.methods import MethodSpec
from fedual.networks import Clients
from fedual.run import Run
from fedual.settings import Execution

if TYPE_CHECKING:
    import pandas

Table = dict[str, Any]
_HEADINGS = {"rmse": "RMSE", "loss": "loss", "nll": "NLL", "ece": "ECE"}
AT = {"": "mean", "_mc": "q_g", "_cal": "calibrated", "_bayes": "τ = 1"}
"""The suffixes of `fedual.calibration.AT`, in as few words as a table has room for."""
COLUMNS = {"accuracy": ("accuracy %", 1, 100), **{key: (heading, 3, 1) for key, heading in _HEADINGS.items()}}
"""Figures in tables: heading, digits after the point, and what they are multiplied by."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Methods compared; printed, it is a table of all of them in the order in which they were given.

    Attributes:
        runs: For each label and seed the run; a diverged run has its last good state.
        outcomes: For each label the `outcome` of every seed.
    """

    runs: dict[str, dict[int, Run]]
    outcomes: dict[str, list[Table]]

    def summaries(self) -> dict[str, Table]:
        """For each label mean and standard deviation over seeds, see `summary`."""
        return {label: summary(found) for label, found in self.outcomes.items()}

    def frame(self) -> "pandas.DataFrame":
        """One row a label: each figure's mean, its standard deviation with the suffix `_sd`, runs and diverged.

        Raises:
            InputError: pandas is missing.
        """
        pandas = import_optional("Comparison.frame", "pandas", "pandas")
        table: Table = {}
        for label, found in self.summaries().items():
            table[label] = {key: value["mean"] if isinstance(value, dict) else value for key, value in found.items()}
            table[label] |= {f"{key}_sd": value["sd"] for key, value in found.items() if isinstance(value, dict)}
        return pandas.DataFrame.from_dict(table, orient="index").rename_axis("method")

    def __repr__(self) -> str:
        found, rounds, notes = self.summaries(), {}, []
        for label, runs in self.runs.items():
            done = [len(run.history) for run in runs.values()]
            rounds[label] = "–".join(map(str, dict.fromkeys([min(done), max(done)])))
            if about := next(iter(runs.values())).posterior.about:
                notes.append(f"{label}: {about}")
        lines = table(found, rounds)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in lines]
        seeds = list(map(str, next(iter(self.runs.values()))))
        head = f"mean ± standard deviation over seeds {', '.join(seeds)}" if len(seeds) > 1 else f"seed {seeds[0]}"
        return "\n".join([head, *shown, *notes])


def compare(
    methods: Sequence[str | MethodSpec | Method] | Mapping[str, str | MethodSpec | Method],
    model: nn.Module,
    clients: Sequence[Any] | Clients,
    *,
    test: tuple[Tensor, Tensor],
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> Comparison:
    """Train with every method and every seed, from the same model and on the same data.

    The model's initialisation is the same for all seeds, too: the spread over seeds is that of batches, noise and
    participation alone. `methods` are names or what `fedual.methods` made, in a list, or in a dict with labels of your
    own; `model`, `clients`, `test` and `options` are the arguments of `fedual.fit` for every run. `out` has a folder
    for each run, LABEL-SEED; callbacks see all runs; progress is not shown unless `execution` asks for it.

    Raises:
        InputError: Arguments that cannot be used, before any training.
    """
    if "seed" in options:
        raise InputError(f"seed = {options['seed']!r}: a comparison takes seeds=(0, 1, …).")
    labelled = {label: for_networks(method) for label, method in _labelled(methods).items()}
    distinct("seed", seeds)
    out = options.pop("out", None)
    runs: dict[str, dict[int, Run]] = {label: {} for label in labelled}
    outcomes: dict[str, list[Table]] = {label: [] for label in labelled}
    for label, method in labelled.items():
        for seed in seeds:
            folder = None if out is None else Path(out) / re.sub(r"[^\w.-]+", "-", f"{label}-{seed}")
            given: Table = {
                "execution": Execution(progress=False),
                **options,
                "test": test,
                "seed": seed,
                "out": folder,
            }
            run, found = outcome(lambda given=given, method=method: fit(model, clients, method, **given), seed)
            assert run is not None  # `fit` says with which run it diverged
            runs[label][seed] = run
            outcomes[label].append(found)
    return Comparison(runs, outcomes)


def outcome(train: Callable[[], Run], seed: int) -> tuple[Run | None, Table]:
    """A run and its last record; for a diverged run the record is None and `diverged` the reason."""
    began = time.perf_counter()
    try:
        run = train()
    except DivergedError as error:
        spent = time.perf_counter() - began
        return error.run, {"seed": seed, "record": None, "diverged": str(error), "seconds": spent}
    spent, record, diverged = time.perf_counter() - began, run.history[-1] if run.history else {}, None
    if not math.isfinite(record.get("nll", 0.0)):
        record, diverged = None, f"The NLL is {record['nll']} after round {record['round']}."
    mean = statistics.fmean(r["seconds"] for r in run.history) if run.history else None
    times = {"seconds": spent, "seconds_per_round": mean}
    return run, {
        "seed": seed,
        "record": record,
        "diverged": diverged,
        "tau": run.method.tau,
        "about": run.posterior.about,
        **times,
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Mean and standard deviation (n − 1) over the runs that did not diverge, of every number of the last record."""
    kept = [run for run in runs if run["record"] is not None]
    found: Table = {"runs": len(runs), "diverged": len(runs) - len(kept)}
    figures = [f"{name}{suffix}" for suffix in AT for name in (*COLUMNS, "brier")]
    for key in ("seconds_per_round", *figures):
        values = [value for run in kept if (value := {**run, **run["record"]}.get(key)) is not None]
        if values:
            found[key] = {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}
    return found


def table(summaries: Mapping[str, Table], rounds: Mapping[str, str] | None = None) -> list[list[str]]:
    """Headings and rows of a table of summaries by label: at the mean, under q_g and as handed over, where they are.

    `rounds`, by label, gives the table a column of that name.
    """
    keys = [key for key in COLUMNS if any(key in found for found in summaries.values())]
    more = ["rounds"] if rounds else []
    lines = [["method", "at", *(COLUMNS[key][0] for key in keys), "s/round", *more, "diverged"]]
    for label, found in summaries.items():
        seconds = f"{found['seconds_per_round']['mean']:.2f}" if "seconds_per_round" in found else "–"
        diverged = f"{found['diverged']} of {found['runs']}" if found["runs"] else "every trial"
        rest = [seconds, *([rounds[label]] if rounds else []), diverged]
        for suffix, at in AT.items():
            if not suffix or any(f"{key}{suffix}" in found for key in keys):
                cells = [_cell(found.get(f"{key}{suffix}"), *COLUMNS[key][1:]) for key in keys]
                lines.append([label, at, *cells, *rest])
    return lines


def distinct(what: str, values: Sequence[Any]) -> None:
    """Refuse a comparison of nothing, or one that names something twice."""
    if not values:
        raise InputError(f"There is no {what} to compare: name at least one.")
    if len(set(values)) < len(values):
        raise InputError(f"A {what} is named twice in {', '.join(map(str, values))}: name each once.")


def _labelled(methods: Any) -> dict[str, Any]:
    """Methods by label: their name, or position and solver where they have none."""
    if isinstance(methods, str) or not isinstance(methods, Sequence | Mapping):
        raise InputError(f"methods = {methods!r}: give a list, or a dict from labels to methods.")
    if isinstance(methods, Mapping):
        labels, methods = list(map(str, methods)), list(methods.values())
    else:
        solver = lambda method: type(getattr(method, "solver", method)).__name__
        plain = lambda m: isinstance(m, str) or (isinstance(m, MethodSpec) and not m.settings)
        name = lambda m: m if isinstance(m, str) else getattr(m, "name", "") if isinstance(m, MethodSpec) else solver(m)
        labels = [name(m) if plain(m) else f"{place}: {name(m)}" for place, m in enumerate(methods)]
    distinct("method", labels)
    return dict(zip(labels, methods, strict=True))


def _cell(spread: Mapping[str, Any] | None, digits: int, scale: int) -> str:
    if spread is None:
        return "–"
    sd = "" if spread["sd"] is None else f" ± {scale * spread['sd']:.{digits}f}"
    return f"{scale * spread['mean']:.{digits}f}{sd}"
