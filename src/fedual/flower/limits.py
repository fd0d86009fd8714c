"""What a server may ask of a site: the site's own limits, enforced before work starts.

What was asked is counted in one small file for each client, in its state folder: a server that invents experiments or
comes back under another name meets the same counts.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedual.errors import DataError, require_count, require_positive
from fedual.flower.refusal import Refusal
from fedual.flower.vault import file_name, vault_file
from fedual.rundir.atomic import PRIVATE, make_private, store, writing
from fedual.rundir.locking import UNCHANGED, locked
from fedual.settings import LocalTraining

WAIT = 60.0
"""Seconds to wait for another message that is being counted."""
LONGEST_NAME = 200
"""The largest number of letters in an experiment's name."""
SAMPLES, STEPS = ("samples", "points"), ("max_steps",)
"""Whole numbers in a method that multiply the work of a step, and those that are numbers of steps."""
EVALUATIONS = ("gradient", "natural_gradient", "moments", "curvature")
"""The methods of losses that solvers call once a step."""


@dataclass(frozen=True)
class Limits:
    """What a server may ask of a site; None is no limit.

    Args:
        local_epochs: Passes over the data in a round: ten times more than any run of this project needed.
        local_steps: Steps in a round, whether they were asked for by steps or by epochs, and a solver's iterations.
        visited: Examples in the batches of a round, each as often as it comes: their order takes 16 bytes each.
        seconds: For a round; training stops between two steps. A site that works for six hours on one round blocks its
            machine, and the server has long gone on without it.
        samples: Monte-Carlo samples, or points of a quadrature, in a step or in an evaluation.
        batch_size: The *smallest* batch: what a solver keeps of its last step (IVON's h with β₂ = 0) rests on one batch
            alone. Five as `min_cell` of regressions; the last batch of an epoch may be smaller.
        examples: The *smallest* number of examples on which any answer may rest: an update after few steps, an
            evaluation, or sums of targets. The gradient of one example is often the example.
        folds: The *largest* number of parts of which one is held out: runs that leave out single examples could be
            subtracted. fedual itself leaves out a tenth or a fifth.
        messages: Answers in one experiment, handshakes aside: each tells something, and 10,000 rounds with
            evaluations need twice as many.
        rounds: Rounds of one experiment that the site answers.
        experiments: Experiments with the same site, each of which keeps a file. A calibrated run with few examples
            has five more of its own. When there are so many, the operator removes old ones (`fedual flower remove`).
        disk: Bytes of the state folder, in which an experiment takes four vectors of λ's size with IVON-ADMM.
    """

    local_epochs: int | None = 1000
    local_steps: int | None = 1_000_000
    visited: int | None = 10**8
    seconds: float | None = 6 * 3600.0
    samples: int | None = 1000
    batch_size: int | None = 5
    examples: int | None = 5
    folds: int | None = 10
    messages: int | None = 30_000
    rounds: int | None = 10_000
    experiments: int | None = 100
    disk: int | None = 2**36

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name == "seconds":
                require_positive(field.name, value)
            elif value is not None:
                require_count(field.name, value)

    @classmethod
    def none(cls) -> "Limits":
        """No limits, for simulations."""
        return cls(**dict.fromkeys(field.name for field in fields(cls)))

    def training(self, local: LocalTraining) -> None:
        """Refuse local training whose numbers are beyond the limits, whatever the site's data."""
        if local.local_steps is None:
            self._most("local_epochs", local.local_epochs)
        else:
            self._most("local_steps", local.local_steps)
            self._least("examples", local.local_steps * local.batch_size)
        self._least("batch_size", local.batch_size)

    def work(self, local: LocalTraining, examples: int) -> None:
        """Refuse training that takes too many steps with this number of examples."""
        steps = local.local_steps or local.local_epochs * -(-examples // local.batch_size)
        self._most("local_steps", steps)
        self._most("visited", steps * local.batch_size)

    def method(self, content: Any) -> None:
        """Refuse a method in JSON values whose numbers of samples, points or steps are beyond the limits."""
        for name, value in _numbers(content):
            if name in SAMPLES:
                self._most("samples", value)
            elif name in STEPS:
                self._most("local_steps", value)

    def draws(self, samples: int, examples: int) -> None:
        """Refuse an evaluation with too many draws of θ, each for so many examples."""
        self._most("samples", samples)
        self._most("visited", samples * examples)

    def fold(self, of: int) -> None:
        """Refuse to leave out less than the smallest part."""
        self._most("folds", of)

    def data(self, examples: float) -> None:
        """Refuse answers that would rest on too few examples."""
        if self.examples is not None and examples < self.examples:
            raise Refusal(
                "Its answer would rest on too few examples (its limit examples): leave this site out.",
                f"{examples:g} examples, at least {self.examples}",
            )

    def room(self, folder: Path, needed: int) -> None:
        """Refuse to keep so many more bytes in a folder that has too many then."""
        if self.disk is None:
            return
        there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if there + needed > self.disk:
            raise Refusal(
                "Its state would take more room than it gives (its limit disk): its operator removes old experiments.",
                f"{there} bytes in {folder}, {needed} more are needed, at most {self.disk}",
            )

    def _most(self, name: str, asked: float) -> None:
        limit = getattr(self, name)
        if limit is not None and asked > limit:
            raise _beyond(name, f"{asked} asked, at most {limit}")

    def _least(self, name: str, asked: float) -> None:
        limit = getattr(self, name)
        if limit is not None and asked < limit:
            raise _beyond(name, f"{asked} asked, at least {limit}")


def timed(losses: Any, seconds: float | None) -> Any:
    """The same losses, which refuse another step when so many seconds have passed since this call."""
    if seconds is None:
        return losses
    deadline, found = time.monotonic() + seconds, copy(losses)

    def limited(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate_in_time(*args: Any, **kwargs: Any) -> Any:
            if time.monotonic() > deadline:
                raise _beyond("seconds", f"more than {seconds:g} s")
            return evaluate(*args, **kwargs)

        return evaluate_in_time

    for name in EVALUATIONS:
        if hasattr(losses, name):
            object.__setattr__(found, name, limited(getattr(found, name)))
    return found


def count(folder: Path, client: str, experiment: str, limits: Limits, is_round: bool) -> None:
    """Count a message of a server, durably, or refuse it.

    Args:
        folder: The site's state folder.
        client: The client's id.
        experiment: The experiment that the message names.
        limits: Of this site.
        is_round: True if it asks for training.

    Raises:
        Refusal: The message is one too many.
        DataError: The file with the counts is damaged, or cannot be read or written.
    """
    if limits.experiments is limits.messages is limits.rounds is None:
        return
    make_private(folder)
    path = counts_file(folder, client)
    with locked(path.with_suffix(".lock"), WAIT):
        counts = read_counts(path)
        messages, rounds = counts.get(experiment, (0, 0))
        if experiment not in counts and limits.experiments is not None and len(counts) >= limits.experiments:
            raise Refusal(
                "It keeps no further experiment (its limit experiments): its operator removes old ones.",
                f"{path} has {len(counts)}: see `fedual flower remove`",
            )
        asked = {"messages": messages + 1, "rounds": rounds + is_round}
        for name, number in asked.items():
            limits._most(name, number)
        write_counts(path, counts | {experiment: (asked["messages"], asked["rounds"])})


def forget(folder: Path, client: str, experiment: str) -> None:
    """Remove what a site keeps of an experiment: its vault, copies of it, and its counts."""
    vault, path = vault_file(folder, experiment, client), counts_file(folder, client)
    with (
        locked(path.with_suffix(".lock"), WAIT),
        locked(vault.with_suffix(".lock"), WAIT),
        writing(vault, 0, UNCHANGED),
    ):
        for file in folder.glob(f"{vault.stem}*.safetensors*"):
            file.unlink()
        write_counts(path, {name: each for name, each in read_counts(path).items() if name != experiment})


def counts_file(folder: Path, client: str) -> Path:
    """The file with a client's counts."""
    return folder / f"{file_name(f'asked-{client}', client)}.json"


def read_counts(path: Path) -> dict[str, tuple[int, int]]:
    """For each experiment the numbers of messages and of rounds so far."""
    try:
        content = json.loads(path.read_bytes())
        counts = {str(name): (int(messages), int(rounds)) for name, (messages, rounds) in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}): remove it; what was asked so far counts for nothing then."
        ) from None
    return counts


def write_counts(path: Path, counts: Mapping[str, tuple[int, int]]) -> None:
    """Replace the file; it is on disk when this returns."""
    store(path, json.dumps(counts).encode(), mode=PRIVATE)


def _beyond(name: str, private: str) -> Refusal:
    return Refusal(f"The server asks for more than this site allows (its limit {name}): ask for less.", private)


def _numbers(content: Any) -> Iterator[tuple[str, int | float]]:
    """All numbers in JSON values, with the names that they have."""
    pairs = content.items() if isinstance(content, Mapping) else ()
    for name, value in pairs:
        if isinstance(value, int | float):
            yield str(name), value
    for value in content.values() if isinstance(content, Mapping) else content if isinstance(content, list) else ():
        yield from _numbers(value)
