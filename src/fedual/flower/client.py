"""The app of a site: the user provides the model and the site's data, fedual answers the server's messages."""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedual.algorithm import Broadcast, Method
from fedual.algorithm.round import first_lam
from fedual.calibration import hold_out
from fedual.errors import InputError, require_count, require_positive
from fedual.families import Family, Gaussian, check
from fedual.flower import calibrating, wire
from fedual.flower.facts import require_fit, shared_facts, standardises
from fedual.flower.identity import NETWORKS, identity
from fedual.flower.limits import LONGEST_NAME, Limits, count, timed
from fedual.flower.node import client_id, state_folder
from fedual.flower.payload import KINDS
from fedual.flower.refusal import reading, words
from fedual.flower.site import Request, Site
from fedual.flower.vault import StateLost
from fedual.metrics import evaluate, residual_squares
from fedual.networks import Clients, Draws, Minibatches, Network
from fedual.networks.checks import check as check_data
from fedual.networks.targets import Targets, client_sums
from fedual.parts import decode
from fedual.settings import LocalTraining

Data = Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]
"""A function from a SuperNode's configuration to inputs and targets."""
Content = tuple[Mapping[str, Tensor], Mapping[str, Any], Mapping[str, float]]
"""The tensors, the settings and the figures of a reply."""


def client_app(
    model: nn.Module | Network | Callable[[], nn.Module | Network] | None = None,
    data: Data | None = None,
    *,
    test: Data | None = None,
    losses: Callable[[Mapping[str, Any]], Any] | None = None,
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy",
    about: Mapping[str, str] | None = None,
    device: str | None = None,
    limits: Limits | None = Limits(),
) -> ClientApp:
    """The app that every site runs: with `model` and `data`, or with `losses` for problems that are not networks.

    The server sends the method and its numbers as data. If a method has parts that you wrote, register them at every
    site with `fedual.parts.register`.

    A SuperNode's `--node-config` names the client (`client-id`, or `partition-id`) and the folder that keeps its state
    when the process ends (`state-dir`, by default `~/.fedual/state`).

    Args:
        model: The network, or a function that makes it; the server sends its trainable parameters.
        data: A function from the node's configuration to the site's `(x, y)`.
        test: The same for the examples on which the site evaluates; by default its training data.
        losses: A function from the node's configuration to the site's loss, a stack of one such as
            `fedual.solvers.Conjugate`.
        loss: As in `fedual.fit`.
        about: Facts that all sites and the server must agree on, e.g. `{"labels": "cat,dog", "pixels": "0…1"}`.
        device: The device to train on; by default a GPU if there is one.
        limits: What the server may ask of this site; None is no limit.
    """
    if (losses is None) == (model is None or data is None):
        raise InputError("client_app needs a model and data, or losses.")
    allowed = limits or Limits.none()
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @cache
    def network() -> Network:
        assert model is not None
        return Network.of(model if isinstance(model, nn.Module | Network) else model()).to(place)

    @cache
    def in_unit(targets: str | None) -> Network:
        """The network in the unit of the federation's targets, which the server sends once it has all sums."""
        if targets is None:
            return network()
        found = Network.of(network()).to(place)
        found.targets = Targets.from_dict(json.loads(targets))
        return found

    @cache
    def load(source: Data, node: str) -> tuple[Tensor, Tensor]:
        x, y = source(json.loads(node))
        return torch.as_tensor(x).to(place), torch.as_tensor(y).to(place)

    def examples(context: Context, source: Data | None = None) -> tuple[Tensor, Tensor]:
        source = source or data
        assert source is not None
        found = load(source, json.dumps(dict(context.node_config), sort_keys=True))
        allowed.data(len(found[0]))
        return found

    @cache
    def facts() -> dict[str, str]:
        return shared_facts(network() if model is not None else None, loss, about)

    def train(config: Mapping[str, Any], message: Message, context: Context) -> Content:
        began = time.perf_counter()
        with reading():
            tensors = {key: value.to(place) for key, value in wire.tensors_of(message.content).items()}
            allowed.method(json.loads(config["method"]))
            method, round = parse_method(config["method"]), require_count("round", config["round"], 0)
            training = json.loads(config["train"])
            seed, request = training.pop("seed"), request_of(config)
            local, fold = LocalTraining.from_dict(training), calibrating.fold_of(config, allowed)
            allowed.training(local)
            lam_g, start = tensors["lam_g"], tensors.get("start")
            mine = None if model is None else in_unit(config.get("targets"))
            if model is not None:
                require_fit(network(), lam_g)
            check(method.family, lam_g, "The server's λ_g")
            first = first_lam(method, tensors.get("prior", lam_g), start) if method.server.remembers else lam_g
            broadcast = Broadcast(lam_g, None if config["moved"] else start, tensors.get("eta_mean"))

        def loss_of(number: int) -> Any:
            if losses is not None:
                return timed(losses(dict(context.node_config)), allowed.seconds)
            x, y = examples(context)
            allowed.work(local, len(x))
            assert mine is not None
            own, draws = Clients(x, y, [torch.arange(len(x))]), SiteDraws(seed, local.noise, local.order, number)
            batches = Minibatches(
                mine,
                own if fold is None else hold_out(own, fold, draws)[0],
                loss,
                draws,
                local.batch_size,
                local.local_epochs,
                local.local_steps,
                round=round,
            )
            check_data(batches)
            return timed(batches, allowed.seconds)

        client, folder = client_id(context.node_config), state_folder(context.node_config)
        count(folder, client, request.experiment, allowed, is_round=True)
        answer = Site(client, loss_of, folder, allowed).train(method, broadcast, first, request)
        figures = {"num-examples": answer.examples, "seconds": time.perf_counter() - began, **answer.guards._asdict()}
        return answer.tensors, {}, figures

    def query(config: Mapping[str, Any], message: Message, context: Context) -> Content:
        client, folder = client_id(context.node_config), state_folder(context.node_config)
        if config.get("action") == "share":
            with reading():
                request = request_of(config)
            count(folder, client, request.experiment, allowed, is_round=False)
            return {"eta": Site(client, lambda number: None, folder, allowed).share(request)}, {}, {}
        if config.get("action") == "residuals":
            with reading():
                lam_g = wire.tensors_of(message.content)["lam_g"].to(place)
                require_fit(network(), lam_g)
                mean = decode(json.loads(config["family"])).mean(lam_g)
                mine, experiment = in_unit(config["targets"]), experiment_of(config)
            count(folder, client, experiment, allowed, is_round=False)
            return {"squares": residual_squares(mine, mean, *examples(context))}, {}, {}
        if config.get("action") == "calibrate":
            with reading():
                tensors = {key: value.to(place) for key, value in wire.tensors_of(message.content).items()}
                draws = lambda seed, number: SiteDraws(seed, number=number)
                reply = calibrating.answer(config, tensors, network(), draws, allowed)
                experiment = experiment_of(config)
            count(folder, client, experiment, allowed, is_round=False)
            return reply(*examples(context)), {}, {}
        with reading():
            challenge, experiment = str(config["nonce"]), experiment_of(config)
        site = identity(folder, client)
        signature = site.sign(NETWORKS, challenge, experiment, client, message.metadata.dst_node_id)
        own_losses = None if losses is None else losses(dict(context.node_config))
        size = len(examples(context)[0]) if own_losses is None else float(own_losses.num_examples.sum())
        told = {"examples": float(size), "facts": json.dumps(facts())}
        told |= {"key": site.public, "signature": signature}
        if model is not None and standardises(network(), loss):
            told["targets"] = json.dumps(client_sums(examples(context)[1]).to_dict())
        return {}, told, {}

    def judge(config: Mapping[str, Any], message: Message, context: Context) -> Content:
        with reading():
            lam_g = wire.tensors_of(message.content)["lam_g"].to(place)
            family, samples = decode(json.loads(config["family"])), require_count("samples", config["samples"], 0)
            if not isinstance(family, Gaussian):
                raise TypeError("the family is not Gaussian")
            require_fit(network(), lam_g)
            check(family, lam_g, "The server's λ_g")
            mine, experiment = in_unit(config.get("targets")), experiment_of(config)
        count(state_folder(context.node_config), client_id(context.node_config), experiment, allowed, is_round=False)
        x, y = examples(context, test)
        allowed.draws(samples, len(x))
        figures = evaluate(mine, family, lam_g, (x, y), transform=mine.inputs, loss=loss, samples=samples)
        return {}, {}, {"num-examples": len(x), **figures}

    prepare = network if model is not None else lambda: None
    app = ClientApp()
    app.train()(answering(train, prepare))
    app.query()(answering(query, prepare))
    app.evaluate()(answering(judge, prepare))
    return app


def answering(
    respond: Callable[[Mapping[str, Any], Message, Context], Content], prepare: Callable[[], Any]
) -> Callable[[Message, Context], Message]:
    """A handler of Flower's messages that answers any error with a refusal that discloses nothing of the site.

    `prepare` does what does not depend on the message; its errors are the site's own.
    """

    def handle(message: Message, context: Context) -> Message:
        config = wire.config_of(message.content)
        envelope: dict[str, Any] = {"nonce": config.get("nonce"), "payload": config.get("payload")}
        try:
            envelope["client"] = client_id(context.node_config)
            prepare()
            tensors, own, figures = respond(config, message, context)
            content = wire.pack(tensors, {**envelope, **own}, figures)
        except Exception as error:  # its text may quote the site's data or files
            why = {"refusal": words(envelope.get("client", "?"), error), "lost": isinstance(error, StateLost)}
            content = wire.pack({}, envelope | why)
        return Message(content, reply_to=message)

    return handle


def parse_method(text: str) -> Method:
    """The method of a round from its JSON."""
    method = Method.from_dict(json.loads(text))
    if not (isinstance(method.family, Family) and callable(method.solver) and callable(method.dual)):
        raise TypeError("a part of the method has another type")
    return method


def experiment_of(config: Mapping[str, Any]) -> str:
    """The experiment that a message names."""
    name = config["experiment"]
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise ValueError(f"its experiment is no text of 1 to {LONGEST_NAME} letters")
    return name


def request_of(config: Mapping[str, Any]) -> Request:
    """What the server asks of this client."""
    nonce, ack = str(config["nonce"]), config.get("ack")
    if not re.fullmatch(r"\w+(\.\d+\.\d+)?", nonce):
        raise ValueError("its nonce is damaged")
    number, wait = require_count("number", config["number"], 0), float(config["wait"])
    if (payload := str(config.get("payload", "full"))) not in KINDS:
        raise ValueError(f"its payload is {payload!r}")
    factor = float(config.get("factor", 1.0))
    require_positive("factor", factor, most=1.0)
    return Request(experiment_of(config), nonce, None if ack is None else str(ack), number, payload, wait, factor)


@dataclass(frozen=True)
class SiteDraws(Draws):
    """The random draws of one client of a federation at its own site, where it is the only client.

    Args:
        number: The client's number in the federation, on which its draws depend.
    """

    number: int = 0

    def normal(self, round: int, step: int, sample: int, clients: list[int], like: Tensor) -> Tensor:
        """Noise `(1, P)`."""
        return super().normal(round, step, sample, [self.number], like)

    def permutation(self, round: int, epoch: int, client: int, size: int) -> Tensor:
        """The order of its examples."""
        return super().permutation(round, epoch, self.number, size)

    def held_out(self, client: int, size: int) -> Tensor:
        """The order in which it would hold its examples out."""
        return super().held_out(self.number, size)

    def uniform(self, round: int, step: int, client: int, size: int, like: Tensor) -> Tensor:
        """Uniform numbers for its dropout masks."""
        return super().uniform(round, step, self.number, size, like)
