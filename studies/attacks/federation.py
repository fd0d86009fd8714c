"""A federation with dishonest sites in one process: sites train side by side, and the ledger of Flower's server judges.

Flower's FedMedian and FedTrimmedAvg average θ_k of FedAvg's sites by Flower's own functions.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from fedual import settings
from fedual.algorithm import ClientState, Upload, client_init, client_step, server_init
from fedual.algorithm.influence import SUSPICIOUS
from fedual.defaults import Federation, resolve, resolve_training
from fedual.families import Gaussian
from fedual.flower import ledger as ledgers
from fedual.flower.handshake import Badge
from fedual.flower.ledger import Ledger
from fedual.flower.roster import Policy
from fedual.flower.updates import Reply
from fedual.metrics import evaluate
from fedual.networks import Draws, Minibatches
from fedual.scenarios import load
from fedual.scenarios.federation import materialise
from fedual.solvers.stepper import solve, walk
from studies.attacks import lies

SETTINGS = {
    "off": "no limits",
    "default": "the default",
    "share": '`robust="share"`',
    "trimmed": '`robust="trimmed"`',
    "FedMedian": "Flower's FedMedian",
    "FedTrimmedAvg": "Flower's FedTrimmedAvg",
}
CUT = 0.3
"""The part that FedTrimmedAvg leaves out on each side: three of ten, as ours does."""


def run(name: str, sets: Sequence[str], setting: str, attack: str, liars: Sequence[int], seed: int) -> dict[str, Any]:
    """Train with dishonest sites; return accuracies, and in how many rounds each liar and any other site was named."""
    theirs = setting.startswith("Fed")
    torch.set_default_dtype(torch.float32)
    scenario = load(name, method="fedavg" if theirs else "ivon-admm", preset="default", sets=sets)
    network, clients, test = materialise(scenario, seed)
    if attack == "labels":
        y = clients.y.clone()
        for k in liars:
            y[clients.parts[k]] = 9 - y[clients.parts[k]]
        clients = replace(clients, y=y)
    local, rounds = settings.split(scenario.train)["training"], scenario.train["rounds"]
    sizes = [float(size) for size in clients.sizes]
    claimed = [size * lies.CLAIM if attack == "joins" and k in liars else size for k, size in enumerate(sizes)]
    draws = Draws(seed, local.noise, local.order)
    losses = Minibatches(network, clients, "cross_entropy", draws, local.batch_size, local.local_epochs)
    first = resolve(scenario.spec(), Federation(1, 1.0))
    book, most = Ledger(server_init(first, network.initial()), shares=None), ledgers.MOST
    ledgers.MOST = float("inf") if setting == "off" else most  # as it was before there was a cap
    try:
        for k, size in enumerate(claimed):
            book.admit(str(k), Badge(str(k), str(k)), size)
        names = [str(k) for k in range(len(sizes))]
        federation = Federation(len(sizes), book.total, steps=local.average_steps(len(sizes), book.total))
        method = resolve(scenario.spec(), federation)
        training = resolve_training(local, method, book.total)
        rows = client_init(method, book.server.lam_g).rows()
        state = ClientState.from_rows({key: x.expand(len(sizes), *x.shape[1:]).clone() for key, x in rows.items()})
        robust = setting if setting in ("share", "trimmed") else None
        family, largest = cast(Gaussian, method.family), None if setting == "off" else Policy().largest
        accuracy, named = list[float](), {"liars": 0, "others": 0}
        for round in range(rounds):
            now = training.in_round(method, round, rounds)
            broadcast = book.server.broadcast(now.dual, len(sizes))
            solver = partial(solve, cast(Any, now.solver), run=walk)
            upload, moved = client_step(now, broadcast, state, losses.at(round), solve=solver)
            lam = upload.lam.clone()
            for k in liars:
                lam[k] = lies.sent(attack, network, family, lam[k], broadcast.lam_g, round, round == rounds - 1)
            if theirs:
                lam_g = torch.as_tensor(_flower(setting, upload._replace(lam=lam)))
                book.server = book.server._replace(lam_g=lam_g, round=round + 1, moved=True)
                state, noticed = moved, set[str]()
            else:
                said = [
                    claimed[k] * (lies.CLAIM if attack == "replies" and k in liars else 1) for k in range(len(sizes))
                ]
                if setting == "off":  # a reply's number counted
                    book.examples = dict(zip(names, said, strict=True))
                replies = [Reply(names[k], book.nonce, "full", {"lam": lam[k]}, said[k]) for k in range(len(sizes))]
                closed = book.close(now, replies, book.nonce, largest, robust)
                state = _moved(state, moved, [closed.cut.get(k, 1.0) if k in closed.counted else 0.0 for k in names])
                noticed = {k for k, c in closed.cut.items() if c < SUSPICIOUS} | {*closed.refused, *book.capped}
            named["liars"] += any(str(k) in noticed for k in liars)
            named["others"] += bool(noticed - {str(k) for k in liars})
            figures = evaluate(network, family, book.server.lam_g, test, transform=network.inputs, samples=0)
            accuracy.append(round_to(figures["accuracy"]))
    finally:
        ledgers.MOST = most
    return {"accuracy": accuracy, "named": named, "rounds": rounds, "sizes": [sizes[k] for k in liars]}


def round_to(value: float) -> float:
    """A figure with the digits that are stored."""
    return float(f"{value:.5g}")


def _moved(before: ClientState, after: ClientState, factors: Sequence[float]) -> ClientState:
    """The sites' states after a round: a dual moves by the part of its step that counted."""
    if before.eta is None or after.eta is None:
        return after
    c = torch.tensor(factors).to(after.eta)[:, None, None]
    return after._replace(eta=torch.where(c == 0, before.eta, before.eta + c * (after.eta - before.eta)))


def _flower(setting: str, upload: Upload) -> Any:
    """λ_g by Flower's own aggregation, which ignores the numbers of examples."""
    from flwr.server.strategy.aggregate import aggregate_median, aggregate_trimmed_avg

    results = [([lam.numpy()], int(size)) for lam, size in zip(upload.lam, upload.num_examples, strict=True)]
    (found,) = aggregate_median(results) if setting == "FedMedian" else aggregate_trimmed_avg(results, CUT)
    return found
