"""Fuzzers for the messages of regressions: to the server, and to a site, which tells nothing of its table."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import glm_federation
from flwr.app import Context, Message, RecordDict
from glm_federation import Sites

from adversary import messages
from adversary.clock import Clock, hurried
from adversary.harness import Case, Changed, no_sentence
from fedual.flower import wire
from fedual.glm.flower import exchange, sites

Make = Callable[[Random], Case]
LIAR = 101


def _prepared() -> None:
    clock: Clock = hurried()
    for module in (exchange, sites):
        module.time = clock  # type: ignore[assignment]  # pyright: ignore[reportPrivateImportUsage]
    glm_federation.FRAMES = {name: frame.head(60) for name, frame in glm_federation.FRAMES.items()}


def replies(folder: Path) -> Make:
    """One site's answer to one kind of message is altered: a fit, or one sentence."""
    _prepared()
    kinds = sorted({glm_federation.kind(message) for message in _asked(folder / "first")})

    def make(rng: Random) -> Case:
        own = folder / "now"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        kind = rng.choice(kinds)

        def between(node: int, message: Message, answer: Callable[[], Message]) -> Message:
            honest = answer()
            if node != LIAR or glm_federation.kind(message) != kind:
                return honest
            return messages.reply(rng, honest, message)

        def case() -> None:
            fit = Sites(own, between).fit()
            str(fit.summary())

        return case

    return make


def _asked(folder: Path) -> list[Message]:
    """The messages of a fit."""
    folder.mkdir(parents=True)
    federation = Sites(folder)
    federation.fit()
    return [copy.deepcopy(message) for message in federation.sent]


def questions(folder: Path) -> Make:
    """Altered questions to a site: its answers and refusals are sentences without a path or a number of a row."""
    _prepared()
    asked = [message for message in _asked(folder / "sites") if message.metadata.dst_node_id == LIAR]
    federation = Sites(folder / "sites")
    app, config = federation.apps[LIAR]
    state = Path(config["state-dir"])
    shutil.rmtree(state, ignore_errors=True)
    for message in asked[:3]:
        app(copy.deepcopy(message), Context(1, LIAR, config, RecordDict(), {}))
    shutil.copytree(state, folder / "kept")

    def make(rng: Random) -> Case:
        shutil.rmtree(state, ignore_errors=True)
        shutil.copytree(folder / "kept", state)
        question = copy.deepcopy(rng.choice(asked))
        question.content = messages.altered(rng, question.content)

        def case() -> bool:
            reply = app(question, Context(1, LIAR, config, RecordDict(), {}))
            refusal = wire.config_of(reply.content).get("refusal")
            if refusal is None:
                return False
            if problem := no_sentence(str(refusal)):
                raise Changed(f"a refusal: {problem}")
            if "SuperNode's log shows an error" in str(refusal):
                raise Changed(f"an exception that is none of fedual's: {refusal}")
            if str(folder) in str(refusal):
                raise Changed(f"a refusal names a path: {refusal}")
            return True

        return case

    return make


FUZZERS: dict[str, Any] = {"glm-replies": replies, "glm-questions": questions}
