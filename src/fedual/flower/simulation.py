"""Flower's simulation engine as a backend: every client is a task of Ray, on this machine or on a cluster.

It is much slower than fedual's own engines. It serves to check the deployment against them, and users with a Ray
cluster.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedual.algorithm import Method
from fedual.errors import FedualError, InputError
from fedual.flower.client import client_app
from fedual.flower.roster import Policy
from fedual.flower.strategy import BayesianADMM
from fedual.methods import MethodSpec
from fedual.networks import Clients, Network
from fedual.posterior import Posterior

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class Portable(ClientApp):
    """An app that is sent to Ray's workers as a function, which makes the app once in each worker."""

    apps: ClassVar[dict[str, ClientApp]] = {}

    def __init__(self, key: str, make: Callable[[], ClientApp]):
        super().__init__()
        self.key, self.make = key, make

    def __call__(self, message: Message, context: Context) -> Message:
        """The app's reply."""
        if self.key not in self.apps:
            self.apps.clear()
            self.apps[self.key] = self.make()
        return self.apps[self.key](message, context)


def _examples(clients: Clients) -> dict[str, Tensor]:
    """The tensors of the file from which workers read their clients' examples, so that no message carries them."""
    if clients.weights is not None:
        raise InputError("Flower's engine does not take weights of examples: use another engine.")
    rows = {f"part.{number}": part.long().contiguous() for number, part in enumerate(clients.parts)}
    return {"x": clients.x.cpu().contiguous(), "y": clients.y.cpu().contiguous(), **rows}


def _site(examples: Path, number: int) -> tuple[Tensor, Tensor]:
    with safe_open(examples, "pt") as file:
        rows = file.get_tensor(f"part.{number}")
        return file.get_tensor("x")[rows], file.get_tensor("y")[rows]


@dataclass(frozen=True)
class Simulated:
    """A run on Flower with the attributes of `fedual.run.Run` that the command line needs."""

    strategy: BayesianADMM
    path: Path

    @property
    def method(self) -> Method:
        """The method with the numbers of this federation."""
        return self.strategy.resolved

    @property
    def posterior(self) -> Posterior:
        """The posterior that is handed over."""
        return self.strategy.posterior

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """One record for every round."""
        return self.strategy.history


def simulate(
    model: nn.Module | Network,
    clients: Clients,
    method: str | MethodSpec | Method,
    rounds: int,
    *,
    out: str | os.PathLike[str],
    seed: int = 0,
    cpus: float = 1.0,
    gpus: float = 0.0,
    loss: str = "cross_entropy",
    **settings: Any,
) -> Simulated:
    """Train on Flower's simulation engine; the result is that of `fedual.fit` with the same arguments.

    Args:
        model: As in `fedual.fit`.
        clients: The clients' examples, without weights.
        method: As in `fedual.fit`.
        rounds: Rounds of communication.
        out: The run's folder, which also holds the clients' state.
        seed: As in `fedual.fit`.
        cpus: CPU cores for each client's task.
        gpus: GPUs for each client's task; may be a fraction.
        loss: As in `fedual.fit`.
        settings: Further arguments of `BayesianADMM`.
    """
    if find_spec("ray") is None:
        raise InputError("Flower's simulation needs Ray: pip install 'flwr[simulation]'.")
    from flwr.simulation import run_simulation

    folder, failed = Path(out).absolute(), list[Exception]()
    policy = Policy(min_clients=len(clients), largest=None)  # these sites are trusted, as in `fedual.fit`
    strategy = BayesianADMM(
        model, method, rounds, experiment="simulation", out=folder, seed=seed, loss=loss, policy=policy,
        **settings,
    )  # fmt: skip
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            strategy.start(grid)
        except Exception as error:
            failed.append(error)  # Flower itself would only report that the app crashed

    device = "cuda" if gpus and torch.cuda.is_available() else "cpu"
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="fedual", ignore_cleanup_errors=True) as home:
        examples = Path(home) / "examples.safetensors"
        save_file(_examples(clients), examples)
        site = lambda node: _site(examples, int(node["partition-id"]))
        make = lambda: client_app(model, site, loss=loss, device=device, limits=None)
        app = Portable(str(examples), make)
        os.environ |= {**QUIET, "FLWR_HOME": home, "FEDUAL_STATE": str(folder / "clients")}
        try:
            backend = {"client_resources": {"num_cpus": cpus, "num_gpus": gpus}}
            run_simulation(server, app, len(clients), backend_config=backend)  # pyright: ignore[reportArgumentType]
        finally:
            os.environ.clear()
            os.environ.update(before)
    if failed:
        raise failed[0]
    if len(strategy.history) < rounds:
        raise FedualError(f"Flower's simulation ended after {len(strategy.history)} of {rounds} rounds: see its log.")
    return Simulated(strategy, folder)
