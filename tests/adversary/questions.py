"""Fuzzers for messages to a site: what a server, or somebody in its place, may ask.

A site answers, or refuses in one sentence that names no path of the site's. What it refuses leaves its state as it was.
"""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from federation import Federation
from flwr.app import Context, Message, RecordDict

from adversary import messages
from adversary.clock import hurried
from adversary.harness import Case, Changed, no_sentence
from adversary.replies import LIAR, Networks, kind_of
from fedual.flower import wire

Make = Callable[[Random], Case]


class Recorded:
    """Genuine questions to one site, with the site's files as they were when each was asked.

    Args:
        run: Runs a federation, with what happens between it and its sites.
        path: The folder of everybody's files.
        state: The site's folder.
        apps: For each node its app and its configuration.
    """

    def __init__(self, run: Callable[[Any], Any], path: Path, state: Path, apps: Any):
        self.state, self.apps, self.path = state, apps, path
        self.asked: list[tuple[Message, Path]] = []

        def between(node: int, message: Message, answer: Callable[[], Message]) -> Message:
            if node == LIAR:
                kept = path / "asked" / str(len(self.asked))
                shutil.copytree(state, kept) if state.exists() else kept.mkdir(parents=True)
                self.asked.append((copy.deepcopy(message), kept))
            return answer()

        run(between)
        self.kinds = sorted({kind_of(message) for message, _ in self.asked})

    def question(self, rng: Random) -> Message:
        """One of them, with the site's files as they were."""
        kind = rng.choice(self.kinds)
        message, kept = rng.choice([one for one in self.asked if kind_of(one[0]) == kind])
        shutil.rmtree(self.state, ignore_errors=True)
        shutil.copytree(kept, self.state)
        return copy.deepcopy(message)

    def files(self) -> dict[str, bytes]:
        """What the site keeps, but for its locks and the count of what it was asked."""
        kept = lambda path: path.is_file() and path.suffix != ".lock" and not path.name.startswith("asked")
        paths = [path for path in self.state.rglob("*") if kept(path)]
        return {str(path.relative_to(self.state)): path.read_bytes() for path in paths}

    def answered(self, message: Message) -> Message:
        """The site's answer."""
        app, config = self.apps[LIAR]
        return app(message, Context(1, LIAR, config, RecordDict(), {}))


def asking(recorded: Recorded) -> Make:
    """Cases that alter a genuine question."""

    def make(rng: Random) -> Case:
        question = recorded.question(rng)
        question.content = messages.altered(rng, question.content)

        def case() -> bool:
            before = recorded.files()
            reply = recorded.answered(question)
            if reply.has_error():
                raise Changed(f"an error in the place of an answer: {reply.error.reason}")
            refusal = wire.config_of(reply.content).get("refusal")
            if refusal is None:
                return False
            if problem := no_sentence(str(refusal)):
                raise Changed(f"a refusal: {problem}")
            if str(recorded.path) in str(refusal) or "/dev/shm" in str(refusal):
                raise Changed(f"a refusal names a path: {refusal}")
            if recorded.files() != before:
                changed = {name for name, content in recorded.files().items() if before.get(name) != content}
                raise Changed(f"a refused message changed {changed or 'nothing but removed files'}: {refusal}")
            return True

        return case

    return make


def conjugate(folder: Path) -> Make:
    """Questions to a site with a conjugate loss: hello, train, and its dual."""
    hurried()
    torch.set_default_dtype(torch.float64)
    sites = Federation(folder / "now")

    def run(between: Any) -> None:
        sites.run(3, between)
        sites.run(4, between, forget=["2"])

    return asking(Recorded(run, folder, folder / "now" / "site1", sites.grid.apps))


def networks(folder: Path) -> Make:
    """Questions to sites with small networks: targets, residuals, evaluation and calibration, too."""
    hurried()
    makes = []
    for loss in ("mse", "cross_entropy"):
        own = Networks(folder / loss, loss)
        run = lambda between, own=own: own.run(2, between, evaluate_clients=True)
        makes.append(asking(Recorded(run, folder / loss, folder / loss / "site1", own.grid.apps)))
    return lambda rng: rng.choice(makes)(rng)


FUZZERS = {"questions": conjugate, "questions-networks": networks}
