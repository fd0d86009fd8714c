"""Sites with conjugate losses on a grid in one process, their servers, and what should come out, in NumPy."""

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message, MessageType
from here import Between, Here
from problems import normal, rng

from fedual import settings
from fedual.algorithm import Blend, Method, Natural
from fedual.families import Diagonal
from fedual.flower import BayesianADMM, Policy, client_app, wire
from fedual.flower.ledger import Ledger
from fedual.flower.vault import opened
from fedual.networks import Network
from fedual.rundir import RunDirectory
from fedual.solvers import Conjugate, Exact

RHO, GAMMA = 0.5, 0.2  # unequal, so that every round of every client leaves its mark
EXACT = Method(Diagonal(), Exact(), Natural(GAMMA), Blend(), RHO)


class Federation:
    """Sites "0", "1", … at nodes 100, 101, …; `server` makes a new server of the same experiment.

    Args:
        path: For everybody's files.
        num: Of sites.
        dim: P.
        method: What is run, with losses conjugate to `Diagonal`.
    """

    def __init__(self, path: Path, num: int = 3, dim: int = 4, method: Method = EXACT, seed: int = 0):
        self.path, self.method = path, method
        precision = torch.rand(num, dim, generator=rng(seed)) + 0.1
        self.c = torch.stack([normal((num, dim), seed + 1), -precision / 2], 1)
        self.prior = Diagonal().natural(normal((dim,), seed + 2), 1.5)
        self.out = path / "out"
        self.grid = Here({100 + k: self.node(k) for k in range(num)})

    def node(self, k: int, **changes: Any) -> tuple[Any, dict[str, Any]]:
        """The app and the configuration of site k; `changes` are arguments of `client_app`."""
        losses = lambda node: Conjugate(Diagonal(), self.c[[int(node["data"])]])
        app = client_app(**{"losses": losses, "device": "cpu", **changes})
        return app, {"client-id": str(k), "data": k, "state-dir": str(self.path / f"site{k}")}

    def server(self, rounds: int, min_clients: int = 1, **changes: Any) -> BayesianADMM:
        policy = Policy(min_clients=min_clients, wait=100, timeout=50, grace=10)
        given = {"prior": self.prior, "method": self.method, "experiment": "e", "out": self.out, "policy": policy}
        return BayesianADMM(rounds=rounds, **nested({**given, **changes}))

    def run(self, rounds: int, between: Between | None = None, **changes: Any) -> BayesianADMM:
        """Start a server, or go on after the last one."""
        server = self.server(rounds, **changes)
        self.grid.between = between or (lambda node, message, answer: answer())
        server.start(self.grid)  # type: ignore[arg-type]
        return server

    @property
    def ledger(self) -> Ledger:
        return Ledger.load(self.out / "server.safetensors", self.server(1).ledger.server)

    @property
    def history(self) -> list[dict[str, Any]]:
        return RunDirectory.open(self.out).history()

    @property
    def counted(self) -> list[Any]:
        """The log from which the oracle makes the posterior."""
        return [record["clients"] for record in self.history]

    @property
    def cuts(self) -> list[dict[str, float]]:
        """For each round the factors by which updates were cut."""
        return [record["cut"] for record in self.history]

    def vault(self, client: str) -> Path:
        (found,) = (self.path / f"site{client}").glob("*.safetensors")
        return found

    def duals(self) -> dict[str, np.ndarray]:
        """η_k that each client would go on with."""
        found = {}
        for client, ack in self.ledger.acks.items():
            with opened(self.path / f"site{client}", "e", client) as vault:
                rows = vault.settle(ack, self.ledger.factors.get(client, 1.0))
            assert rows is not None
            found[client] = rows["eta"].numpy()
        return found

    def agrees(self, log: Iterable[Any] | None = None) -> None:
        """The server has the posterior of the oracle, and Σ η is the sum of what the clients have."""
        lam_g, eta = oracle(self.prior, self.c, self.counted if log is None else log, self.cuts)
        server = self.ledger.server
        np.testing.assert_allclose(server.lam_g, lam_g, rtol=1e-9, atol=1e-12)
        duals = self.duals()
        assert duals.keys() == eta.keys()
        for client, own in duals.items():
            np.testing.assert_allclose(own, eta[client], rtol=1e-9, atol=1e-12)
        total = sum(duals.values(), np.zeros(server.eta_sum.shape))
        np.testing.assert_allclose(server.eta_sum, total, rtol=1e-12, atol=1e-13)

    def pooled(self, *without: int) -> torch.Tensor:
        return self.prior + self.c.sum(0) - self.c[list(without)].sum(0)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `BayesianADMM` from flat ones: its settings, those of its policy and those of its network."""
    sections = settings.split(flat)
    of_policy = {field.name: flat[field.name] for field in fields(Policy) if field.name in flat}
    of_network = {name: flat[name] for name in ("scale", "trainable") if name in flat}
    rest = {
        name: value
        for name, value in flat.items()
        if name not in settings.flat_kinds() and name not in of_policy and name not in of_network
    }
    if of_network:
        rest["model"] = Network(rest["model"], **of_network)
    policy = replace(rest.pop("policy", Policy()), **of_policy)
    rest.setdefault("posterior", "point")  # calibration takes more runs than the one tested
    return {**rest, "local": sections["training"], "evaluation": sections["evaluation"], "policy": policy}


def oracle(
    prior: Any, c: Any, log: Iterable[Any], cuts: Iterable[dict[str, float]] = ()
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Lines 1 to 3 for the clients that counted, round after round; "-k" in their place takes client k off.

    `cuts` are the factors of each round.
    """
    prior, c, cuts = np.asarray(prior), np.asarray(c), iter(cuts)
    lam_g, eta = prior.copy(), dict[str, np.ndarray]()
    for clients in log:
        if isinstance(clients, str):
            del eta[clients[1:]]
            continue
        part = next(cuts, {})
        if clients:
            step = lambda k, part=part: part.get(k, 1.0) * (c[int(k)] - eta.setdefault(k, 0 * prior)) / RHO
            solved = {k: lam_g + step(k) for k in clients}
            for k in clients:
                eta[k] = eta[k] + GAMMA * (solved[k] - lam_g)
            alpha = 1 / (1 + RHO * len(clients))
            mean = sum(solved.values()) / len(clients)
            lam_g = (1 - alpha) * mean + alpha * (prior + sum(eta.values()))
    return lam_g, eta


def is_train(message: Message, round: int | None = None) -> bool:
    """Whether a message asks for training (in a round, counted from 1)."""
    train = message.metadata.message_type == MessageType.TRAIN
    return train and round in (None, wire.config_of(message.content)["round"] + 1)
