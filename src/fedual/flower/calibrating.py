"""The calibration of a run's posterior after its last round, from tables of sums that the sites make of their own data.

Where the sites held a tenth of their examples out (`Ledger.fold`), this is one exchange. With few examples in all there
are short runs first, each an experiment of its own (EXPERIMENT.fold-N-of-ROUNDS-after-ROUND) with duals of its own at
the sites.
"""

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid as Nodes
from torch import Tensor

from fedual.calibration import FOLDS, HANDED_OVER, Calibration, Fold, Grid, Trained, hold_out, tables
from fedual.errors import FedualError, InputError, require_count, require_positive
from fedual.families import Gaussian, check
from fedual.flower import wire
from fedual.flower.facts import require_fit
from fedual.flower.limits import Limits
from fedual.flower.refusal import Refusal
from fedual.flower.replies import by_client
from fedual.networks import Clients, Draws, Network
from fedual.parts import decode, encode

Server = Any
"""A `fedual.flower.strategy.BayesianADMM`, whose module imports this one."""


def calibrate(nodes: Nodes, server: Server) -> None:
    """Calibrate a posterior after its last round, and keep the result in the ledger: None if no site answers."""
    ledger, samples = server.ledger, server.evaluation.samples
    grid = Grid.of(server.trained.family, server.resolved.tau, samples)
    count = 0 if ledger.fold is not None else FOLDS
    found, missing, clients, examples = list[Tensor](), set[str](), set[str](), 0
    for fold in [ledger.fold] if ledger.fold is not None else [Fold(number, FOLDS) for number in range(FOLDS)]:
        own = server
        if count:
            log(INFO, "calibration: short run %s of %s", fold.number + 1, FOLDS)
            try:
                own = short_run(server, fold, max(1, (ledger.server.round + 1) // 2))
                own.start(nodes)
            except FedualError as error:
                log(WARNING, "short run %s does not count in the calibration: %s", fold.number + 1, error)
                continue
        told = collect(nodes, own, grid, fold, samples, server.draws.evaluation(ledger.server.round))
        having = {client for client in own.ledger.members if fold.size(int(own.ledger.examples.get(client, 0)))}
        missing |= having - told.keys()
        clients |= told.keys()
        # in the order of their numbers, so that the sum does not depend on who came first
        found += [told[client] for client in sorted(told, key=own.ledger.numbers.__getitem__)]
        examples += sum(fold.size(int(own.ledger.examples[client])) for client in told)
    about: dict[str, Any] = {"weight": float(examples), "examples": examples, "clients": len(clients)}
    ledger.calibration = Calibration.choose(grid, found, **about, folds=count, missing=sorted(missing))
    ledger.calibrated = ledger.server.round


def remove_short_runs(server: Server) -> None:
    """Remove their folders, once the calibration is on disk: a new ledger could not go on with the sites' state."""
    shutil.rmtree(server.folder / "folds", ignore_errors=True)


def short_run(server: Server, fold: Fold, rounds: int) -> Server:
    """The server of a run of its own that leaves other examples out; it goes on where it was interrupted."""
    # a run that is continued is calibrated again: those short runs are others, with ledgers of their own
    name = f"fold-{fold.number}-of-{rounds}-after-{server.ledger.server.round}"
    known = {client: badge.key for client, badge in server.ledger.badges.items()}
    policy = replace(server.policy, readmit=(), forget=(), evaluate_clients=False, known=known or server.policy.known)
    own = type(server)(
        server.network, server.spec, rounds, experiment=f"{server.experiment}.{name}",
        out=server.folder / "folds" / name, seed=server.draws.seed, posterior="point", local=server.local,
        loss=server.loss, policy=policy, about=server.about,
    )  # fmt: skip
    own.fold = fold
    return own


def figures(server: Server) -> dict[str, float]:
    """The test figures of the posterior that a server hands over, if that is not q_g as it was trained."""
    posterior, seed = server.posterior, server.draws.evaluation(server.ledger.server.round)
    same = posterior.lam is server.ledger.server.lam_g and posterior.calibration is None
    if same or server.test is None or server.loss != "cross_entropy":
        return {}
    found = posterior.figures(server.test, server.evaluation.samples, seed)
    return {f"{name}{HANDED_OVER[server.mode]}": value for name, value in found.items()}


def collect(nodes: Nodes, server: Server, grid: Grid, fold: Fold, samples: int, seed: int) -> dict[str, Tensor]:
    """The tables of the sites that answer, each of what it left out of a server's run."""
    ledger, roster, trained, nonce = server.ledger, server.roster, server.trained, secrets.token_hex(8)
    content = wire.arrays({"lam_g": trained.lam, "prior": trained.prior})
    question = {
        **server.envelope,
        "action": "calibrate",
        "nonce": nonce,
        "family": json.dumps(encode(trained.family)),
        "tau": trained.tau,
        "grid": json.dumps(grid),
        "fold": json.dumps(fold),
        "draws": json.dumps([server.draws.seed, samples, seed]),
    }
    asked = {
        client: Message(wire.pack(content, {**question, "number": ledger.numbers[client]}), node, MessageType.QUERY)
        for client, node in roster.nodes.items()
        if fold.size(int(ledger.examples.get(client, 0)))
    }
    found: dict[str, Tensor] = {}
    why = dict.fromkeys(asked, "no reply in time")
    for client, message in by_client(roster.exchange(nodes, [*asked.values()], roster.policy.timeout), asked):
        try:
            found[client] = _table(message, nonce, grid)
        except InputError as error:
            why[client] = wire.brief(error)
    for client in sorted(asked.keys() - found.keys()):
        log(WARNING, "client %s does not count in the calibration: %s", client, why[client])
    return found


def _table(message: Message, nonce: str, grid: Grid) -> Tensor:
    """The table in a reply, which may come from anybody and contain anything."""
    if (why := wire.failure(message)) is not None:
        raise InputError(why)
    if wire.config_of(message.content).get("nonce") != nonce:
        raise InputError("its reply is to another question")
    shape = len(grid.widths), len(grid.temperatures)
    found = wire.tensors_of(message.content, 8 * shape[0] * shape[1] + 4096).get("table")
    if found is None or found.shape != shape or found.dtype != torch.float64:
        raise InputError("it sent no table of the grid")
    if found.isnan().any() or (found > 1e-6).any() or not found[grid.widths.index(0.0)].isfinite().all():
        raise InputError("its table has numbers that no log-likelihoods have")
    return found


def fold_of(config: Mapping[str, Any], limits: Limits) -> Fold | None:
    """What a message asks a site to leave out of training; None if nothing."""
    if config.get("fold") is None:
        return None
    number, of = json.loads(config["fold"])
    if require_count("number", number, 0) >= require_count("of", of, 2):
        raise ValueError(f"part {number} of {of}")
    limits.fold(of)
    return Fold(number, of)


def answer(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    network: Network,
    draws: Callable[[int, int], Draws],
    limits: Limits,
) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """A site's reply, from its examples; what cannot be read of the message raises now.

    Args:
        config: The settings of the message.
        tensors: Its tensors, on the network's device.
        network: The site's network.
        draws: The site's random draws, from the run's seed and the site's number.
        limits: Of the site.
    """
    family, fold = decode(json.loads(config["family"])), fold_of(config, limits)
    if not isinstance(family, Gaussian) or fold is None:
        raise TypeError("the family is not Gaussian, or nothing was left out")
    require_positive("tau", config["tau"])
    seed, samples, at = json.loads(config["draws"])
    grid = Grid(*map(tuple, json.loads(config["grid"])))
    limits.draws(len(grid.temperatures), 1)
    trained = Trained(network, family, tensors["lam_g"], tensors["prior"], config["tau"])
    for lam in (trained.lam, trained.prior):
        require_fit(network, lam)
        check(family, lam, "The server's λ")
    own = draws(seed, require_count("number", config["number"], 0))

    def reply(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        size = fold.size(len(x))
        limits.draws(samples, size)
        limits.draws(len(grid.widths), samples * size)
        clients, held = hold_out(Clients(x, y, [torch.arange(len(x))]), fold, own)
        if not (found := tables(trained, grid, clients, held, samples, at)):
            raise Refusal(f"A site with {len(x)} examples holds none out.")
        return {"table": found[0]}

    return reply
