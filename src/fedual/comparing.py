"""Compare methods: the same model, data and seeds for each, and a run that diverges is a result, not an error."""

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedual.contracts import Method
from fedual.errors import DivergedError, InputError
from fedual.runs import packages
from fedual.runs.run import Run
from fedual.solvers import Clients
from fedual.training import fit, for_networks

if TYPE_CHECKING:
    import pandas

Table = dict[str, Any]
COLUMNS = {
    "accuracy": ("accuracy %", 1, 100),
    "rmse": ("RMSE", 3, 1),
    "loss": ("loss", 3, 1),
    "nll": ("NLL", 3, 1),
    "ece": ("ECE", 3, 1),
}
"""Figures in tables: heading, digits after the point, and what they are multiplied by."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Methods compared; printed, it is a table of all of them in the order in which they were given.

    Attributes:
        runs: For each label and seed the run; one that diverged has its last good state.
        outcomes: For each label what `outcome` says of every seed.
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
        pandas = packages.load("Comparison.frame", "pandas", "pandas")
        table: Table = {}
        for label, found in self.summaries().items():
            row = table[label] = {key: value for key, value in found.items() if not isinstance(value, dict)}
            for key, value in found.items():
                if isinstance(value, dict):
                    row |= {key: value["mean"], f"{key}_sd": value["sd"]}
        return pandas.DataFrame.from_dict(table, orient="index").rename_axis("method")

    def __repr__(self) -> str:
        found = self.summaries()
        keys = [key for key in COLUMNS if any(key in row for row in found.values())]
        lines = [["method", "at", *(COLUMNS[key][0] for key in keys), "s/round", "rounds", "diverged"]]
        notes = []
        for label, row in found.items():
            runs = self.runs[label].values()
            done = sorted({len(run.history) for run in runs})
            rest = ["–".join(map(str, dict.fromkeys([done[0], done[-1]]))), f"{row['diverged']} of {row['runs']}"]
            shown = rows(label, row, keys)
            lines += [[*cells, *rest] for cells in shown]
            tau = next(iter(runs)).method.tau
            if len(shown) > 1 and tau < 1:
                notes.append(f"{label}: q_g is tempered, τ = {tau:g}; it counts every example {1 / tau:g} times.")
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in lines]
        seeds = list(map(str, next(iter(self.runs.values()))))
        head = f"mean ± standard deviation over seeds {', '.join(seeds)}" if len(seeds) > 1 else f"seed {seeds[0]}"
        return "\n".join([head, *table, *notes])


def compare(
    methods: Sequence[str | Method] | Mapping[str, str | Method],
    model: nn.Module,
    clients: Sequence[Any] | Clients,
    *,
    test: tuple[Tensor, Tensor],
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> Comparison:
    """Train with every method and every seed, from the same model and on the same data.

    The model's initialisation is the same for all seeds, too: the spread over seeds is that of batches, noise and
    participation alone.

    Args:
        methods: Names or what `fedual.methods` made, in a list, or in a dict with labels of your own.
        model: As in `fedual.fit`.
        clients: As in `fedual.fit`.
        test: `(x, y)` on which all are evaluated.
        seeds: One run of each method with each.
        options: Further arguments of `fedual.fit`, for every run: `rounds`, `loss`, …; `out` has one folder a run,
            LABEL-SEED; callbacks see all runs; `progress` is off unless asked for.

    Returns:
        The runs and their summary.

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
            given: Table = {"progress": False, **options, "test": test, "seed": seed, "out": folder}
            run, found = outcome(lambda given=given, method=method: fit(model, clients, method, **given), seed)
            assert run is not None  # `fit` says with which run it diverged
            runs[label][seed] = run
            outcomes[label].append(found)
    return Comparison(runs, outcomes)


def outcome(train: Callable[[], Run], seed: int) -> tuple[Run | None, Table]:
    """A run, and its last record; where it diverged the record is None, and there is the reason."""
    began = time.perf_counter()
    try:
        run = train()
    except DivergedError as error:
        spent = time.perf_counter() - began
        return error.run, {"seed": seed, "record": None, "diverged": str(error), "seconds": spent}
    record, diverged = run.history[-1] if run.history else {}, None
    if not math.isfinite(record.get("nll", 0.0)):
        record, diverged = None, f"The NLL is {record['nll']} after round {record['round']}."
    return run, {
        "seed": seed,
        "record": record,
        "diverged": diverged,
        "seconds": time.perf_counter() - began,
        "seconds_per_round": statistics.fmean(r["seconds"] for r in run.history) if run.history else None,
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Mean and standard deviation (n − 1) over the runs that did not diverge, of every number of the last record."""
    kept = [run for run in runs if run["record"] is not None]
    found: Table = {"runs": len(runs), "diverged": len(runs) - len(kept)}
    figures = [f"{name}{suffix}" for suffix in ("", "_mc") for name in (*COLUMNS, "brier")]
    for key in ("seconds_per_round", *figures):
        values = [value for run in kept if (value := {**run, **run["record"]}.get(key)) is not None]
        if values:
            found[key] = _spread(values)
    return found


def rows(label: str, found: Mapping[str, Any], keys: Sequence[str]) -> list[list[str]]:
    """The rows of a method in a table: its label, where it is evaluated, the figures `keys`, seconds a round."""
    seconds = f"{found['seconds_per_round']['mean']:.2f}" if "seconds_per_round" in found else "–"
    lines = []
    for at, suffix in (("mean", ""), ("q_g", "_mc")):
        if suffix and not any(f"{key}{suffix}" in found for key in keys):
            continue  # a method that learns a point
        cells = [_cell(found.get(f"{key}{suffix}"), *COLUMNS[key][1:]) for key in keys]
        lines.append([label, at, *cells, seconds])
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
        labels = list(map(str, methods))
        methods = list(methods.values())
    else:
        solver = lambda method: type(getattr(method, "solver", method)).__name__
        labels = [m if isinstance(m, str) else f"{place}: {solver(m)}" for place, m in enumerate(methods)]
    distinct("method", labels)
    return dict(zip(labels, methods, strict=True))


def _spread(values: Sequence[float]) -> Table:
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}


def _cell(spread: Mapping[str, Any] | None, digits: int, scale: int) -> str:
    if spread is None:
        return "–"
    sd = "" if spread["sd"] is None else f" ± {scale * spread['sd']:.{digits}f}"
    return f"{scale * spread['mean']:.{digits}f}{sd}"
