"""A site's ClientApp: a user gives a model and the site's data, fedual does the rest."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedual import methods
from fedual._version import __version__
from fedual.contracts import Method, num_examples
from fedual.errors import FedualError, InputError
from fedual.evaluate import evaluate
from fedual.families import Gaussian
from fedual.flower import wire
from fedual.flower.site import Order, Site
from fedual.flower.vault import StateLost, opened
from fedual.relative import average_steps, settled
from fedual.rounds import ServerState, scheduled
from fedual.solvers import Clients, Draws, Minibatches, Network
from fedual.solvers.checks import check
from fedual.solvers.network import Trainable

Data = Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]
"""From a SuperNode's configuration, inputs and targets."""


def client_app(
    model: nn.Module | Callable[[], nn.Module] | None = None,
    data: Data | None = None,
    *,
    test: Data | None = None,
    losses: Callable[[Mapping[str, Any]], Any] | None = None,
    method: Method | None = None,
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy",
    scale: float | None = None,
    trainable: Trainable = None,
    about: Mapping[str, str] | None = None,
    device: str | None = None,
) -> ClientApp:
    """The app that every site runs: `model` and `data`, or `losses` for problems that are no networks.

    A SuperNode's `--node-config` names the client (`client-id`, or `partition-id`) and the folder in which its state
    outlives the process (`state-dir`; `~/.fedual/state` unless given).

    Args:
        model: The network, or a function that makes it; its trainable parameters come from the server.
        data: Given the node's configuration, the site's `(x, y)`.
        test: The same for examples on which the site evaluates; its training data unless given.
        losses: Given the node's configuration, the site's loss: a stack of one, such as `fedual.solvers.Conjugate`.
        method: What the server runs, where it is none that `fedual.methods.build` makes by name.
        loss: As in `fedual.fit`.
        scale: As in `fedual.fit`.
        trainable: As in `fedual.fit`.
        about: Facts that all sites and the server must agree on, e.g. `{"labels": "cat,dog", "pixels": "0…1"}`.
        device: Where to train; a GPU where there is one, unless given.
    """
    if (losses is None) == (model is None or data is None):
        raise InputError("client_app needs a model and data, or losses.")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @cache
    def network() -> Network:
        assert model is not None
        return Network(model if isinstance(model, nn.Module) else model(), trainable).to(place)

    @cache
    def examples(of: Data, node: str) -> tuple[Tensor, Tensor]:
        x, y = of(json.loads(node))
        return torch.as_tensor(x).to(place), torch.as_tensor(y).to(place)

    def loss_of(context: Context, config: Mapping[str, Any], number: int) -> Any:
        if losses is not None:
            return losses(dict(context.node_config))
        assert data is not None
        x, y = examples(data, json.dumps(dict(context.node_config), sort_keys=True))
        train = json.loads(config["train"])
        draws = Own(train.pop("seed"), train.pop("noise"), train.pop("order"), number)
        clients = Clients(x, y, [torch.arange(len(x))])
        found = Minibatches(network(), clients, loss, draws, **train, scale=scale, round=config["round"])
        check(found)
        return found

    def method_of(config: Mapping[str, Any]) -> Method:
        if "method" in config:
            found = methods.build(config["method"], **json.loads(config["settings"]))
        elif method is None:
            raise InputError("The server runs a method without a name: give it to client_app, too.")
        else:
            found = method
        clients, total, train = config["clients"], config["examples"], json.loads(config["train"])
        local = {name: train[name] for name in ("batch_size", "local_epochs", "local_steps")}
        steps = average_steps(clients, total, **local)
        return settled(found, clients, total, config["participation"], steps)

    def size(context: Context) -> float:
        """How many examples this site has."""
        if losses is not None:
            return float(num_examples(losses(dict(context.node_config))).sum())
        assert data is not None
        return float(len(examples(data, json.dumps(dict(context.node_config), sort_keys=True))[0]))

    def site(context: Context, config: Mapping[str, Any]) -> Site:
        return Site(name(context), lambda number: loss_of(context, config, number), folder(context))

    def train(message: Message, context: Context) -> Message:
        began, config = time.perf_counter(), wire.config_of(message.content)
        found = site(context, config)
        own = {"client": found.client, "nonce": config["nonce"], "payload": config["payload"]}
        try:
            tensors = {key: value.to(place) for key, value in wire.tensors_of(message.content).items()}
            lam_g, start = tensors["lam_g"], tensors.get("start")
            server = ServerState(tensors.get("prior", lam_g), lam_g, lam_g, config["round"], start, config["moved"])
            now = config["schedule"], config["round"], config["rounds"], config["decay"], config["examples"]
            answer = found.train(scheduled(method_of(config), *now), server, order(config))
        except FedualError as error:
            return Message(wire.pack({}, own | refusal(error)), reply_to=message)
        metrics = {"num-examples": answer.examples, "seconds": time.perf_counter() - began, **answer.guards._asdict()}
        return Message(wire.pack(answer.tensors, own, metrics), reply_to=message)

    def query(message: Message, context: Context) -> Message:
        config = wire.config_of(message.content)
        found = site(context, config)
        own = {"client": found.client, "nonce": config["nonce"]}
        try:
            if config["action"] == "share":
                content = wire.pack({"eta": found.share(order(config))}, own)
            else:
                with opened(found.folder, config["experiment"], found.client) as vault:
                    secret = hashlib.sha256(vault.secret.encode()).hexdigest()
                known = {"examples": size(context)} if config.get("count") else {}
                content = wire.pack({}, {**own, **known, "secret": secret, "facts": json.dumps(facts())})
        except FedualError as error:
            content = wire.pack({}, own | refusal(error))
        return Message(content, reply_to=message)

    def judge(message: Message, context: Context) -> Message:
        config = wire.config_of(message.content)
        own = {"client": name(context), "nonce": config["nonce"]}
        assert data is not None
        try:
            x, y = examples(test or data, json.dumps(dict(context.node_config), sort_keys=True))
            lam_g = wire.tensors_of(message.content)["lam_g"].to(place)
            family = cast(Gaussian, method_of(config).family)
            transform = lambda batch: network().inputs(batch, scale)
            found = evaluate(
                network(), family, lam_g, (x, y), transform=transform, loss=loss, samples=config["samples"]
            )
        except FedualError as error:
            return Message(wire.pack({}, own | refusal(error)), reply_to=message)
        return Message(wire.pack({}, own, {"num-examples": len(x), **found}), reply_to=message)

    @cache
    def facts() -> dict[str, str]:
        return describe(network() if model is not None else None, method, loss, scale, about)

    app = ClientApp()
    app.train()(train)
    app.query()(query)
    app.evaluate()(judge)
    return app


def describe(
    network: Network | None,
    method: Method | None,
    loss: str | Callable[..., Any],
    scale: float | None,
    about: Mapping[str, str] | None,
) -> dict[str, str]:
    """What the server and all sites must agree on, by name."""
    found = {**{key: str(value) for key, value in (about or {}).items()}, "fedual": __version__}
    if method is not None:
        found["method"] = repr(method)
    if network is not None:
        layout = [(name, tuple(shape)) for name, shape in zip(network.names, network.shapes, strict=True)]
        frozen = network.state_dict(network.initial())
        digest = hashlib.sha256(f"{layout} {network.dtype} {network.model}".encode())
        for key in sorted(frozen.keys() - set(network.names)):
            digest.update(key.encode() + frozen[key].cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found["model"] = digest.hexdigest()[:16]
        found["loss"] = loss if isinstance(loss, str) else getattr(loss, "__qualname__", type(loss).__name__)
        found["scale"] = str(None if scale is None else float(scale))
    return found


@dataclass(frozen=True)
class Own(Draws):
    """The draws of the client that has this number in the federation, and is alone here."""

    number: int = 0

    def normal(self, round: int, step: int, sample: int, clients: list[int], like: Tensor) -> Tensor:
        """Noise `(1, P)`."""
        return super().normal(round, step, sample, [self.number], like)

    def permutation(self, round: int, epoch: int, client: int, size: int) -> Tensor:
        """The order of its examples."""
        return super().permutation(round, epoch, self.number, size)

    def uniform(self, round: int, step: int, client: int, size: int, like: Tensor) -> Tensor:
        """For its dropout masks."""
        return super().uniform(round, step, self.number, size, like)


def refusal(error: FedualError) -> dict[str, Any]:
    """What the server is told in the place of an answer."""
    return {"refusal": str(error), "lost": isinstance(error, StateLost)}


def order(config: Mapping[str, Any]) -> Order:
    """What the server asks of this client."""
    return Order(
        config["experiment"],
        config["nonce"],
        config.get("ack"),
        config["number"],
        config.get("payload", "full"),
        config["wait"],
    )


def name(context: Context) -> str:
    """The client's id."""
    found = context.node_config.get("client-id", context.node_config.get("partition-id"))
    if found is None:
        raise InputError("This SuperNode has no name: start it with --node-config 'client-id=\"north\"'.")
    return str(found)


def folder(context: Context) -> Path:
    """Where the client's state is."""
    own = context.node_config.get("state-dir") or os.environ.get("FEDUAL_STATE")
    return Path(str(own)) if own else Path.home() / ".fedual" / "state"
