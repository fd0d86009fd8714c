"""Flower's simulation engine as a backend: every client a task of Ray, here or on a cluster.

It is slower than fedual's own engines by far; it is there to check the deployment against them, and for those whose
machines Ray already holds together.
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

from fedual.contracts import Method
from fedual.errors import FedualError, InputError
from fedual.flower.client import client_app
from fedual.flower.roster import Policy
from fedual.flower.strategy import BayesianADMM
from fedual.solvers import Clients

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class Portable(ClientApp):
    """An app that travels to Ray's workers as the function that makes it, and is made once in each."""

    made: ClassVar[dict[str, ClientApp]] = {}

    def __init__(self, key: str, make: Callable[[], ClientApp]):
        super().__init__()
        self.key, self.make = key, make

    def __call__(self, message: Message, context: Context) -> Message:
        """What the app answers."""
        if self.key not in self.made:
            self.made.clear()
            self.made[self.key] = self.make()
        return self.made[self.key](message, context)


def _examples(clients: Clients) -> dict[str, Tensor]:
    """All clients' examples in a file, which every message would carry otherwise."""
    if clients.weights is not None:
        raise InputError("Flower's engine does not take weights of examples: use another one.")
    rows = {f"part.{number}": part.long().contiguous() for number, part in enumerate(clients.parts)}
    return {"x": clients.x.cpu().contiguous(), "y": clients.y.cpu().contiguous(), **rows}


def _site(examples: Path, number: int) -> tuple[Tensor, Tensor]:
    with safe_open(examples, "pt") as file:
        rows = file.get_tensor(f"part.{number}")
        return file.get_tensor("x")[rows], file.get_tensor("y")[rows]


@dataclass(frozen=True)
class Simulated:
    """What `fedual.training.Run` has, of a run on Flower."""

    strategy: BayesianADMM
    path: Path

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """One record a round."""
        return self.strategy.history


def simulate(
    model: nn.Module,
    clients: Clients,
    method: Method,
    rounds: int,
    *,
    out: str | os.PathLike[str],
    seed: int = 0,
    cpus: float = 1.0,
    gpus: float = 0.0,
    scale: float | None = None,
    loss: str = "cross_entropy",
    **settings: Any,
) -> Simulated:
    """Train on Flower's simulation engine; the answer is that of `fedual.fit` with the same arguments.

    Args:
        model: As in `fedual.fit`, and so the others.
        clients: See there.
        method: See there.
        rounds: See there.
        out: The run's folder, which also holds the clients' state.
        seed: See there.
        cpus: Of each client's task.
        gpus: Of each client's task.
        scale: See `fedual.fit`.
        loss: See there.
        settings: Further arguments of `BayesianADMM`.
    """
    if find_spec("ray") is None:
        raise InputError("Flower's simulation needs Ray: pip install 'flwr[simulation]'.")
    from flwr.simulation import run_simulation

    folder, failed = Path(out).absolute(), list[Exception]()
    policy = Policy(min_clients=len(clients))
    strategy = BayesianADMM(
        model, method, rounds, experiment="simulation", out=folder, seed=seed, scale=scale, loss=loss, policy=policy,
        **settings,
    )  # fmt: skip
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            strategy.start(grid)
        except Exception as error:
            failed.append(error)  # Flower would only say that the app crashed

    device = "cuda" if gpus and torch.cuda.is_available() else "cpu"
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="fedual", ignore_cleanup_errors=True) as home:
        examples = Path(home) / "examples.safetensors"
        save_file(_examples(clients), examples)
        site = lambda node: _site(examples, int(node["partition-id"]))
        make = lambda: client_app(model, site, method=method, scale=scale, loss=loss, device=device)
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
