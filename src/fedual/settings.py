"""Settings of a run as data, for `fit`, scenario files, the command line, Flower and config.json.

A new option is a new field here: scenario files and `--set` accept it, config.json and records store it, a resumed run
must agree in it, and Flower sends it to the sites.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fedual.algorithm import Method
from fedual.errors import InputError, require_count, require_positive
from fedual.networks.randomness import Mode
from fedual.parts import Versioned
from fedual.solvers.stepper import Schedule, Stepper

Engine = Literal["vectorised", "sequential"]
Precision = Literal["auto", "float32", "tf32", "bfloat16"]
Place = Literal["auto", "memory", "disk"]


MOST_SAMPLES = 10**6
"""Draws of θ in an evaluation: the error of their average is a thousandth of one draw's."""


class _Settings(Versioned):
    """Settings that check their fields: a `Literal` takes one of its values, an int a whole number."""

    def __post_init__(self) -> None:
        for name, kind in kinds(type(self)).items():
            value = getattr(self, name)
            if choices := get_args(kind) if get_origin(kind) is Literal else ():
                if value is not None and value not in choices:
                    raise InputError(f"{name} = {value!r}: choose {', '.join(choices)}.")
            elif kind is int and value is not None:
                require_count(name, value, 0 if name == "samples" else 1)


@dataclass(frozen=True)
class LocalTraining(_Settings):
    """What clients do in a round.

    Args:
        batch_size: Examples in a minibatch.
        local_epochs: Passes over its own data that a client makes in a round.
        local_steps: Batches that a client sees in a round, instead of `local_epochs`.
        participation: The fraction of clients that take part in a round, drawn at random.
        schedule: How the learning rate changes over rounds: "constant"; "cosine", ½(1 + cos(πr/rounds)), which ends
            with the run; or "harmonic", 1/(1 + r/rest), which does not need to know the number of rounds. None: the
            schedule of the method's learning rate.
        rest: The rounds after which a harmonic rate is halved. None: the rule of `fedual.defaults`.
        decay: The learning rate of the r-th round is multiplied by decayʳ, r = 0, 1, …, on top of the schedule.
        noise: Which clients and rounds share Monte-Carlo noise; see `fedual.networks.randomness`.
        order: Which clients and rounds share the order of batches.
    """

    batch_size: int = 32
    local_epochs: int = 10
    local_steps: int | None = None
    participation: float = 1.0
    schedule: Schedule | None = None
    rest: float | None = None
    decay: float = 1.0
    noise: Mode = "shared"
    order: Mode = "shared"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("participation", "decay"):
            require_positive(name, getattr(self, name), most=1.0)
        if self.rest is not None:
            require_positive("rest", self.rest)

    def average_steps(self, num_clients: int, num_examples: float) -> float:
        """The steps in a round of a client of average size."""
        return self.local_steps or self.local_epochs * num_examples / (max(num_clients, 1) * self.batch_size)

    def in_round(self, method: Method, round: int, rounds: int) -> Method:
        """The method of round r = 0, 1, …, with its learning rate times the factors of schedule and decay."""
        factor = self.decay**round
        if self.schedule == "cosine":
            factor *= (1 + math.cos(math.pi * round / rounds)) / 2
        elif self.schedule == "harmonic":
            factor *= 1 / (1 + round / (self.rest or math.inf))
        if factor == 1:
            return method
        if not isinstance(method.solver, Stepper):
            raise InputError(f"{method.solver} has no learning rate: leave schedule and decay out.")
        return replace(method, solver=method.solver.scaled(factor))


@dataclass(frozen=True)
class Execution(_Settings):
    """How a simulated run is computed.

    Args:
        device: "auto" (a GPU if there is one), "cpu", "cuda", …
        engine: "vectorised" (all clients at once) or "sequential" (one by one, as a reference).
        chunk: How many clients to train at once; chosen by memory and cache unless given.
        compile: Compile the elementwise work of a step (on a CPU this needs a C++ compiler), and record steps as CUDA
            graphs on a GPU. None: if the run is long enough to pay for it.
        precision: Of products on a GPU: "float32", "tf32", or "bfloat16" for TF32 with images between convolutions in
            bfloat16, which "auto" chooses; see `fedual.backends.precision`.
        client_state: Where clients' rows are kept: "memory", "disk", or "auto": on disk when there are too many.
        progress: Show the progress of the run: None for a plot in a notebook and nothing elsewhere, True for one line
            a round elsewhere, False for nothing anywhere.
    """

    device: str = "auto"
    engine: Engine = "vectorised"
    chunk: int | None = None
    compile: bool | None = None
    precision: Precision = "auto"
    client_state: Place = "auto"
    progress: bool | None = None


@dataclass(frozen=True)
class Evaluation(_Settings):
    """How a run is evaluated on its test set.

    Args:
        evaluate_every: Evaluate in every n-th round, and in the last.
        samples: Draws of θ under q_g; 0 evaluates at the mean only.
    """

    evaluate_every: int = 1
    samples: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples > MOST_SAMPLES:
            raise InputError(f"samples = {self.samples}: give at most {MOST_SAMPLES}, which already take hours.")


SECTIONS: dict[str, type] = {"training": LocalTraining, "execution": Execution, "evaluation": Evaluation}
"""The settings of a run by their key in config.json."""
FREE = ("device", "client_state", "progress")
"""Settings of `Execution` that a resumed run may change, so that config.json does not keep them."""


def kinds(section: type) -> dict[str, Any]:
    """The type of each setting without None: int, float, bool, str or a Literal."""
    hints = get_type_hints(section)
    return {field.name: _without_none(hints[field.name]) for field in fields(section)}


def split(flat: Mapping[str, Any]) -> dict[str, Any]:
    """One flat table, such as [train] of a scenario file, as settings by section."""
    own = lambda section: {key: flat[key] for key in kinds(section) if key in flat}
    return {name: section(**own(section)) for name, section in SECTIONS.items()}


def flat_kinds() -> dict[str, Any]:
    """The types of all settings by name: no two sections share a name."""
    return {name: kind for section in SECTIONS.values() for name, kind in kinds(section).items()}


def _without_none(kind: Any) -> Any:
    parts = get_args(kind)
    return next(part for part in parts if part is not type(None)) if type(None) in parts else kind
