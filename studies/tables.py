"""The tables of the study: which cells each has, and how a cell is run.

The paper's Tables 1 to 6 are `table1`, `table2`, `table3`, `pvi`, `tau` and `rho`, its Figure 2 is `fig2`. The last
three are on CIFAR-100 in the paper, here also on FMNIST and MNIST. The other tables are the study's own. CIFAR-100 is
not available everywhere; a shorter run of ResNet-20 on CIFAR-10 stands beside it.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from fedual import data
from fedual.errors import DataError, DivergedError, InputError, hint
from fedual.metrics import auroc
from fedual.posterior import Prediction
from fedual.run import Run
from fedual.rundir import environment
from fedual.scenarios.federation import execute
from studies import records
from studies.records import Cell, Record

SEEDS = (62, 63, 64)
METHODS = ("ivon-admm", "fedavg", "fedprox", "feddyn", "fedlap", "fedlap-cov", "ivon-pvi")
TENTHS, HUNDREDTHS = (10, 25, 50), (25, 50, 100)
FMNIST, MNIST = ("fmnist-heterog-10", TENTHS), ("mnist-2class-100", HUNDREDTHS)
FIRST = tuple(
    (name, TENTHS)
    for name in ("fmnist-heterog-100", "fmnist-homog-10", "cifar10-zenke-heterog-10", "cifar10-acar-heterog-10")
)
CIFAR100, SHORTENED = ("cifar100-resnet20-heterog-10", HUNDREDTHS), ("cifar10-resnet20-heterog-10", (5, 10))
PUBLISHED = tuple((method, "paper") for method in ("fedprox", "feddyn", "fedlap"))
"""Baselines with settings published by the authors, which run beside ours on MNIST, where that is cheap."""
VARIED = {
    "tau": {
        CIFAR100: ("0.02", "0.05", "0.1", "0.2", "0.5", "1.0"),
        FMNIST: ("0.0003", "0.001", "0.003", "0.01", "0.03"),
        MNIST: ("0.001", "0.003", "0.01", "0.03", "0.1"),
    },
    "rho": {
        CIFAR100: ("0.1", "0.2", "0.5", "1.0", "2.0", "5.0"),
        FMNIST: ("0.01", "0.02", "0.05", "0.1", "0.2", "0.5"),
        MNIST: ("0.02", "0.05", "0.1", "0.2", "0.5", "5.0"),
    },
}
OTHERS = {"mnist": "fmnist", "fmnist": "mnist"}
"""For each training set, another data set of the same image format, whose images a network has not seen."""
DIGITS = ("digits-heterog-10", (10, 20))
SHARES = ("train.participation=0.1", "train.participation=0.3", "")
SHARING = (("ivon-admm", "default"), ("fedavg", ""), ("feddyn", ""))
WITHOUT = {
    "the limit on a step": "clip=0.0",
    "the hold on means": "hold=0.0",
    "the falling rate": "train.schedule=constant",
    "h0 from the network": "h0=0.01",
    "the rate from the number of steps": "lr=0.01",
    "rho from the number of clients": "rho=1.0",
    "tau from the number of examples": "tau=0.01",
    "the slow dual": "damping=1.0",
    "momentum": "momentum=0.0",
    "clients counted by their examples": "unit=0.0",
    "the decay of hidden layers": "weight_decay=0.0",
    "shared noise": "train.noise=independent",
}
"""The parts of the defaults that `ablation` removes one at a time, and the setting that replaces each."""
CHANGES = ("train.batch_size=32", "train.noise=shared", "train.order=shared", "clip=1.0", "rho=0.1,clip=1.0")


class Part(NamedTuple):
    """One scenario of a table: the rounds whose metrics are shown, and the methods with their variants."""

    scenario: str
    rounds: tuple[int, ...]
    runs: tuple[tuple[str, str], ...]  # method, variant


def _whole(scenario: str, rounds: tuple[int, ...], *more: tuple[str, str]) -> Part:
    every = [(method, "") for method in METHODS]
    return Part(scenario, rounds, (*every, ("ivon-admm", "paper"), *more, ("fedavg", "central")))


def _alone(place: tuple[str, tuple[int, ...]], *variants: str) -> Part:
    return Part(*place, tuple(("ivon-admm", variant) for variant in variants))


def _varied(key: str) -> tuple[Part, ...]:
    return tuple(_alone(place, *(f"{key}={value}" for value in some)) for place, some in VARIED[key].items())


TABLES: dict[str, tuple[Part, ...]] = {
    "table1": tuple(_whole(*place) for place in FIRST),
    "table2": (_whole(*MNIST, *PUBLISHED), Part(*SHORTENED, (("ivon-admm", ""), ("fedavg", ""))), _whole(*CIFAR100)),
    "table3": (_whole(*FMNIST),),
    "pvi": tuple(Part(*place, (("ivon-pvi", ""), ("ivon-admm", ""))) for place in (FMNIST, MNIST, CIFAR100)),
    "tau": _varied("tau"),
    "rho": _varied("rho"),
    "defaults": (
        *(_alone(place, "default", "", "paper") for place in (*FIRST, FMNIST, MNIST)),
        _alone(DIGITS, "default", ""),
    ),
    "participation": (Part(*MNIST, tuple((m, f"{v},{share}".strip(",")) for share in SHARES for m, v in SHARING)),),
    "ablation": tuple(
        _alone((name, rounds), "default", *(f"default,{some},train.rounds={rounds[-1]}" for some in WITHOUT.values()))
        for name, rounds in ((FMNIST[0], (10, 25)), (MNIST[0], (10, 25)))
    ),
    "why": (_alone(MNIST, "paper", *(f"paper,{change}" for change in CHANGES), ""),),
}
TABLES["fig2"] = TABLES["calibration"] = tuple(part for name in ("table1", "table2", "table3") for part in TABLES[name])
TITLES = {
    "table1": "Table 1: after 10, 25 and 50 rounds",
    "table2": "Table 2: after 25, 50 and 100 rounds",
    "table3": "Table 3: 10 clients, a tenth of Fashion-MNIST",
    "pvi": "IVON-PVI and IVON-ADMM",
    "tau": "Temperature τ of IVON-ADMM",
    "rho": "Inverse step size ρ of IVON-ADMM's clients",
    "defaults": "IVON-ADMM without a setting",
    "participation": "A tenth, a third, and all of 100 clients a round",
    "ablation": "The defaults of IVON-ADMM, one thing taken away at a time",
    "why": "From the authors' settings to ours",
    "fig2": "Convergence",
    "calibration": "Calibration, and images of another kind",
}


def parts(name: str) -> tuple[Part, ...]:
    """Return the scenarios of a table."""
    if name not in TABLES:
        raise InputError(f"There is no table {name!r}: choose one of {', '.join(TABLES)}.")
    return TABLES[name]


def cells(
    name: str, scenarios: Sequence[str] = (), methods: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Cell]:
    """Return the cells of a table, seed by seed, so that every method has one run before any has two.

    Args:
        name: One of `TABLES`.
        scenarios: Keep only these scenarios; all if empty.
        methods: Keep only these methods, each "ivon-admm" or, with its variant, "ivon-admm:paper"; all if empty.
        seeds: The paper's if empty.
    """
    runs = [(part.scenario, f"{m}:{v}".rstrip(":"), m, v) for part in parts(name) for m, v in part.runs]
    for what, asked, column in (("scenario", scenarios, 0), ("method", methods, 1)):
        known = list(dict.fromkeys(run[column] for run in runs))
        for one in asked:
            if one not in known:
                raise InputError(f"{name} has no {what} {one!r}: {hint(one, known)}")
    kept = [run for run in runs if (not scenarios or run[0] in scenarios) and (not methods or run[1] in methods)]
    if not kept:
        there = ", ".join(run[1] for run in runs if run[0] in scenarios)
        raise InputError(f"{name} has no {', '.join(methods)} on {', '.join(scenarios)}: choose among {there}.")
    some = [Cell(place, method, seed, variant).own() for seed in seeds or SEEDS for place, _, method, variant in kept]
    return list(dict.fromkeys(some))


def missing(wanted: Sequence[Cell], results: Path) -> list[Cell]:
    """Return the cells without a record of their present settings."""
    stored = [record for path in {cell.path(results) for cell in wanted} for record in records.read(path)]
    done = {cell for record in stored if (cell := records.cell_of(record)) in wanted and records.current(record)}
    return [cell for cell in wanted if cell not in done]


def unavailable(wanted: Sequence[Cell], root: Any = None) -> dict[str, list[Cell]]:
    """Return the cells whose data cannot be loaded, by reason.

    This covers the images of the other data set, too. It is called before the first run, because data that turn out
    to be missing after a run would waste it.
    """

    @cache
    def trouble(name: str) -> str | None:
        try:
            data.load(name, root)
        except DataError as error:
            return str(error)

    found: dict[str, list[Cell]] = {}
    for cell in wanted:
        own = cell.load().data["name"]
        if reason := trouble(own) or (own in OTHERS and trouble(OTHERS[own])):
            found.setdefault(reason, []).append(cell)
    return found


def run(cell: Cell, results: Path, *, watch: Callable[[str, int], Any], **options: Any) -> Record:
    """Run a cell and store its record in `results`; a run that diverges is a result, too.

    `watch` returns the run's callback from a label and the number of rounds; `options` go to `execute`.
    """
    scenario, start, diverged = cell.load(), time.perf_counter(), None
    source = environment()  # before the run: the source tree may have changed when it ends
    callbacks = [watch(str(cell), scenario.train["rounds"])]
    try:
        done = execute(scenario, cell.seed, callbacks=callbacks, posterior="point", **options)  # as in the paper
    except DivergedError as error:
        done, diverged = error.run, str(error)
    content = {
        "diverged": diverged,
        "total_seconds": round(time.perf_counter() - start, 2),
        "outliers": {} if diverged else outliers(done, scenario.data["name"], options.get("root")),
        "environment": source,
        "config": done.config,
    }
    return records.write(cell, results, content, done.history)


def outliers(done: Run, trained_on: str, root: Any = None) -> dict[str, Any]:
    """Return how well the predictive entropy tells another data set's images from the test set, as AUROC.

    The other images have the network's own format and are divided by the same scale.
    """
    if trained_on not in OTHERS:
        return {}
    posterior, found = done.posterior, dict[str, Any](data=OTHERS[trained_on])
    known, strange = (data.load(name, root).x_test for name in (trained_on, OTHERS[trained_on]))
    entropy = lambda x, samples: cast(Prediction, posterior.predict(x, samples)).entropy
    for key, samples in (("auroc", 0), ("auroc_mc", 32)):
        found[key] = auroc(entropy(strange, samples), entropy(known, samples))
    return found
