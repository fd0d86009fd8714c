"""Fuzzers for messages to the server: handshakes, rounds, duals, sums, calibration and evaluation.

A server works with two honest sites and one whose answer to one kind of message is altered. It never raises anything
but a `FedualError`, never leaves an honest site out, says of the other in one sentence why it does, and has afterwards
the posterior of those that counted.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from federation import GAMMA, RHO, Federation, oracle
from flwr.app import Message, MessageType
from here import Here
from torch import nn

from adversary import messages
from adversary.clock import hurried
from adversary.harness import Case, Changed, no_sentence
from fedual.flower import BayesianADMM, Policy, client_app, wire
from fedual.settings import LocalTraining

Make = Callable[[Random], Case]
LIAR = 101
ROUNDS = 3
"""Rounds that all sites have been through honestly before one of them lies."""


def kind_of(message: Message) -> str:
    """What a message asks: "train", "evaluate", "hello", "share", "calibrate", …."""
    asked = message.metadata.message_type
    if asked != MessageType.QUERY:
        return str(asked).split(".")[0]
    return str(wire.config_of(message.content).get("action", "hello"))


class Lying:
    """What happens between a server and its sites: the liar's answer to one kind of message is altered.

    Args:
        rng: The source of changes.
        kind: The kind of message that is answered with a lie.
    """

    def __init__(self, rng: Random, kind: str):
        self.rng, self.kind, self.lies = rng, kind, 0

    def __call__(self, node: int, message: Message, answer: Callable[[], Message]) -> Message | None:
        honest = answer()
        if node != LIAR or kind_of(message) != self.kind:
            return honest
        self.lies += 1
        return messages.reply(self.rng, honest, message)


def judge(record: dict[str, Any]) -> None:
    """A round's record: honest sites counted, and a reason of one sentence for the other."""
    if not {"0", "2"} <= set(record["clients"]):
        raise Changed(f"honest sites were left out: {record['left_out']}")
    for why in record["left_out"].values():
        if problem := no_sentence(why):
            raise Changed(f"left out: {problem}")


def conjugate(folder: Path) -> Make:
    """Conjugate problems: handshake, round, and duals for a re-admission, with NumPy's posterior as the oracle."""
    hurried()
    torch.set_default_dtype(torch.float64)
    sites = Federation(folder / "now")
    sites.run(ROUNDS)
    shutil.copytree(sites.path, folder / "then")
    before = oracle(sites.prior, sites.c, [["0", "1", "2"]] * ROUNDS, sites.cuts)

    def make(rng: Random) -> Case:
        kind = rng.choice(["hello", "train", "train", "train", "share"])
        shutil.rmtree(sites.path)
        shutil.copytree(folder / "then", sites.path)
        lying = Lying(rng, kind)
        sent: list[np.ndarray] = []

        def between(node: int, message: Message, answer: Callable[[], Message]) -> Message | None:
            reply = lying(node, message, answer)
            if node == LIAR and kind_of(message) == "train" and reply is not None and reply.has_content():
                try:
                    sent[:] = [np.array(wire.tensors_of(reply.content)["lam"])]
                except Exception:
                    sent.clear()
            return reply

        def case() -> bool | None:
            changes: dict[str, Any] = {"forget": ["2"], "keep_shares": False} if kind == "share" else {}
            server = sites.run(ROUNDS + 1, between, min_clients=2 if kind != "share" else 1, **changes)
            if kind == "share":
                return _inside(sites)  # nobody can know what its dual is
            record = server.history[-1]
            judge(record)
            _exact(sites, before, record, sent)
            return None

        return case

    return make


def _inside(sites: Federation) -> None:
    found = sites.ledger.server
    if not found.lam_g.isfinite().all() or not (found.lam_g[1] < 0).all():
        raise Changed("λ_g left the domain")


def _exact(sites: Federation, before: Any, record: dict[str, Any], sent: list[np.ndarray]) -> None:
    """Line 3 in NumPy with what the sites sent, each cut as the record says, and what the server has."""
    _inside(sites)
    found, clients, (lam_g, eta) = sites.ledger.server, record["clients"], before
    if "1" in clients and not sent:
        raise Changed("an answer without a readable λ counted")
    solved = {k: lam_g + (np.asarray(sites.c[int(k)]) - eta[k]) / RHO for k in clients}
    if "1" in clients:
        solved["1"] = sent[0]
    solved = {k: lam_g + record["cut"].get(k, 1.0) * (lam - lam_g) for k, lam in solved.items()}
    expected, _ = stepped(np.asarray(sites.prior), lam_g, eta, solved)
    if not np.allclose(found.lam_g, expected, rtol=1e-8, atol=1e-10):
        raise Changed("the posterior is not that of the clients that counted")


def stepped(prior: np.ndarray, lam_g: np.ndarray, eta: dict[str, np.ndarray], solved: dict[str, np.ndarray]) -> Any:
    """Eq. 16 and 17 for what clients sent."""
    eta = {**eta, **{k: eta[k] + GAMMA * (lam - lam_g) for k, lam in solved.items()}}
    alpha = 1 / (1 + RHO * len(solved))
    mean = sum(solved.values()) / len(solved)
    return (1 - alpha) * mean + alpha * (prior + sum(eta.values())), eta


class Networks:
    """Three sites with a small network and few examples, and their server."""

    def __init__(self, path: Path, loss: str):
        self.path, self.loss = path, loss
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.grid = Here({100 + k: (client_app(self.model, self.data, loss=loss, device="cpu"), self.node(k))
                          for k in range(3)})  # fmt: skip

    def node(self, k: int) -> dict[str, Any]:
        return {"client-id": str(k), "data": k, "state-dir": str(self.path / f"site{k}")}

    def data(self, node: Any) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(int(node["data"]))
        x = torch.randn(8, 3, generator=generator)
        y = x[:, :2] if self.loss == "mse" else (x[:, 0] > 0).long()
        return x, y

    def run(self, rounds: int, between: Any = None, **policy: Any) -> BayesianADMM:
        own = Policy(min_clients=2, wait=100, timeout=50, grace=10, **policy)
        mode = "calibrated" if self.loss == "cross_entropy" else "point"
        server = BayesianADMM(
            self.model, "ivon-admm", rounds, experiment="e", out=self.path / "out", loss=self.loss, policy=own,
            posterior=mode, local=LocalTraining(batch_size=8, local_epochs=1),
        )  # fmt: skip
        self.grid.between = between or (lambda node, message, answer: answer())
        server.start(self.grid)  # type: ignore[arg-type]
        return server


def networks(folder: Path) -> Make:
    """Small networks: sums of targets, residuals, evaluation and calibration, besides handshake and round."""
    hurried()
    examples = []
    for loss in ("mse", "cross_entropy"):
        (folder / loss).mkdir()
        own = Networks(folder / loss / "now", loss)
        own.run(1)
        shutil.copytree(own.path, folder / loss / "then")
        examples.append(own)

    def make(rng: Random) -> Case:
        own = rng.choice([examples[0], examples[0], examples[0], examples[1]])
        last = "residuals" if own.loss == "mse" else "calibrate"
        kind = rng.choice(["hello", "train", "evaluate", last])
        shutil.rmtree(own.path)
        shutil.copytree(own.path.parent / "then", own.path)
        lying = Lying(rng, kind)

        def case() -> None:
            server = own.run(2, lying, evaluate_clients=kind == "evaluate")
            judge(server.history[-1])
            if not server.ledger.server.lam_g.isfinite().all():
                raise Changed("λ_g is not finite")
            if server.ledger.noise is not None and not (server.ledger.noise > 0).all():
                raise Changed("the noise is not positive")

        return case

    return make


FUZZERS = {"replies": conjugate, "replies-networks": networks}
