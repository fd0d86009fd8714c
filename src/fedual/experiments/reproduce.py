"""The cells of the paper's tables, and how they are run: each once, its record kept.

| name   | the paper's                         | scenarios                                                  |
|--------|-------------------------------------|------------------------------------------------------------|
| table1 | Table 1: 10, 25, 50 rounds          | FMNIST (100 clients; 10 homogeneous), CIFAR-10             |
| table2 | Table 2: 25, 50, 100 rounds         | MNIST, CIFAR-100                                           |
| table3 | Table 3: more on 10 clients         | FMNIST (10 clients, heterogeneous)                         |
| pvi    | Table 4: IVON-PVI and IVON-ADMM     | CIFAR-100; here also FMNIST and MNIST                      |
| tau    | Table 5: temperature                | CIFAR-100; here also FMNIST and MNIST                      |
| rho    | Table 6: clients' inverse step size | CIFAR-100; here also FMNIST and MNIST                      |
| fig2   | Figure 2: convergence               | those of the first three tables                            |

Two are not the paper's. `calibration`: ECE, and what the predictive entropy says of images from another data set.
`why`: from the authors' settings to ours, one thing at a time. CIFAR-100 cannot be had everywhere; ResNet-20 on
CIFAR-10, shortened, stands beside it.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from fedual import data
from fedual.errors import DataError, DivergedError, InputError, hint
from fedual.evaluate import auroc
from fedual.experiments import records
from fedual.experiments.federation import execute
from fedual.experiments.records import Cell, Record
from fedual.posterior import Prediction
from fedual.runs import environment
from fedual.runs.run import Run

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
"""Baselines whose settings the authors published; only MNIST's are cheap enough to be run with both."""
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
"""The images that a network has not seen, by what it was trained on: stored alike, so that it can be shown them."""
DIGITS = ("digits-heterog-10", (10, 20))
SHARES, SHARING = (0.1, 0.3, 1.0), (("ivon-admm", "default"), ("fedavg", ""), ("feddyn", ""))
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
"""What is taken away from the defaults, one at a time, and the setting that stands in for it."""
CHANGES = ("train.batch_size=32", "train.noise=shared", "train.order=shared", "clip=1.0", "rho=0.1,clip=1.0")


class Part(NamedTuple):
    """A block of a table: one scenario, the rounds at which it is read, and what is run on it."""

    scenario: str
    rounds: tuple[int, ...]
    runs: tuple[tuple[str, str], ...]  # method, variant


def _whole(scenario: str, rounds: tuple[int, ...], *more: tuple[str, str]) -> Part:
    every = [(method, "") for method in METHODS]
    return Part(scenario, rounds, (*every, ("ivon-admm", "paper"), *more, ("fedavg", "central")))


def _alone(place: tuple[str, tuple[int, ...]], *variants: str) -> Part:
    return Part(*place, tuple(("ivon-admm", variant) for variant in variants))


def _sharing(method: str, preset: str, share: float) -> tuple[str, str]:
    """A run with a share of the clients in each round."""
    return method, ",".join(filter(None, (preset, f"train.participation={share}" if share < 1 else "")))


def _varied(key: str) -> tuple[Part, ...]:
    return tuple(_alone(place, *(f"{key}={value}" for value in some)) for place, some in VARIED[key].items())


TABLES: dict[str, tuple[Part, ...]] = {
    "table1": tuple(_whole(*place) for place in FIRST),
    "table2": (
        _whole(*MNIST, *PUBLISHED),
        Part(*SHORTENED, (("ivon-admm", ""), ("fedavg", ""))),
        _whole(*CIFAR100),
    ),
    "table3": (_whole(*FMNIST),),
    "pvi": tuple(Part(*place, (("ivon-pvi", ""), ("ivon-admm", ""))) for place in (FMNIST, MNIST, CIFAR100)),
    "tau": _varied("tau"),
    "rho": _varied("rho"),
    "defaults": (
        *(_alone(place, "default", "", "paper") for place in (*FIRST, FMNIST, MNIST)),
        _alone(DIGITS, "default", ""),
    ),
    "participation": (Part(*MNIST, tuple(_sharing(*run, share) for share in SHARES for run in SHARING)),),
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
    """The blocks of a table."""
    if name not in TABLES:
        raise InputError(f"There is no table {name!r}: choose one of {', '.join(TABLES)}.")
    return TABLES[name]


def cells(
    name: str, scenarios: Sequence[str] = (), methods: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Cell]:
    """The runs that a table needs, seed by seed, so that every method has one before any has two.

    Args:
        name: One of `TABLES`.
        scenarios: Only these, if any are named; so with `methods` and `seeds`.
        methods: "ivon-admm", or with its variant "ivon-admm:paper".
        seeds: The paper's if none.
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
    """Those without a record of their present settings."""
    there = lambda path: path.exists() and records.current(records.read(path))
    return [cell for cell in wanted if not there(cell.path(results))]


def absent(wanted: Sequence[Cell], root: Any = None) -> dict[str, list[Cell]]:
    """Those whose data, or the other images that they are shown, cannot be loaded, by the reason.

    Asked before any of them is run: what is missed after a run would take the run with it.
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
    """Run a cell and keep its record; that it diverged is a result.

    Args:
        cell: What to run.
        results: Folder of the records.
        watch: Given a label and the number of rounds, the run's callback.
        options: Further arguments of `execute`: root, device.
    """
    scenario, began, diverged = cell.load(), time.perf_counter(), None
    source = environment()  # now: the source tree may be another one when it ends
    callbacks = [watch(str(cell), scenario.train["rounds"])]
    try:
        done = execute(scenario, cell.seed, callbacks=callbacks, **options)
    except DivergedError as error:
        done, diverged = error.run, str(error)
    content = {
        "diverged": diverged,
        "total_seconds": round(time.perf_counter() - began, 2),
        "outliers": {} if diverged else outliers(done, scenario.data["name"], options.get("root")),
        "environment": source,
        "config": done.config,
    }
    return records.write(cell, results, content, done.history)


def outliers(done: Run, trained_on: str, root: Any = None) -> dict[str, Any]:
    """AUROC of the predictive entropy: images of another data set (MNIST, FMNIST) against the test set.

    The other images are stored like the network's own, and are divided by the same scale.
    """
    if trained_on not in OTHERS:
        return {}
    posterior, found = done.posterior, dict[str, Any](data=OTHERS[trained_on])
    known, strange = (data.load(name, root).x_test for name in (trained_on, OTHERS[trained_on]))
    entropy = lambda x, samples: cast(Prediction, posterior.predict(x, samples)).entropy
    for key, samples in (("auroc", 0), ("auroc_mc", 32)):
        found[key] = auroc(entropy(strange, samples), entropy(known, samples))
    return found
