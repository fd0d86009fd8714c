"""The work that everybody does in the comparison of engines: rounds of local training on `mnist-2class-100`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from fedual import models
from fedual.errors import DataError
from fedual.networks import Clients, Draws
from fedual.scenarios import load
from fedual.scenarios.federation import materialise

SCENARIO, SEED = "mnist-2class-100", 62


@dataclass(frozen=True, eq=False)
class Work:
    """Clients, a network and a plan of batches.

    Args:
        model: Initialised; whoever trains copies it.
        clients: Pixels as they are stored.
        scale: Pixels divided by it are what the network sees.
        batch_size: Of local training.
        epochs: Passes over its data that a client makes in a round.
        data: Where the examples come from.
    """

    model: nn.Module
    clients: Clients
    scale: float
    batch_size: int
    epochs: int
    data: str

    def first(self, clients: int) -> "Work":
        """The same for the first clients alone."""
        return replace(self, clients=replace(self.clients, parts=self.clients.parts[:clients]))

    @property
    def steps(self) -> int:
        """Client steps in a round."""
        return sum(self.epochs * -(-len(part) // self.batch_size) for part in self.clients.parts)

    def examples(self, client: int) -> tuple[Tensor, Tensor]:
        """A client's inputs `(N, 784)` in float32, and its labels `(N,)`."""
        rows = self.clients.parts[client]
        return self.clients.x[rows].flatten(1).float() / self.scale, self.clients.y[rows]

    def batches(self, round: int, client: int) -> Iterator[Tensor]:
        """Positions within a client's examples, batch after batch: those that fedual's engines draw."""
        size = len(self.clients.parts[client])
        for epoch in range(self.epochs):
            yield from Draws(SEED).permutation(round, epoch, client, size).split(self.batch_size)


@cache  # Flower's workers ask for it with every message
def make(epochs: int) -> Work:
    """All clients of the scenario; without its data set, random examples of the same shapes."""
    scenario = load(SCENARIO, sets=["train.batch_size=64"])
    try:
        found = materialise(scenario, SEED)
        model, clients, scale = found.model.model.requires_grad_(True), found.clients, found.model.scale or 1.0
        data = scenario.data["name"]
    except DataError:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model, scale, data = models.build(**scenario.model), 255, "random data: MNIST is not here"
            x, y = torch.randint(256, (60_000, 28, 28), dtype=torch.uint8), torch.randint(10, (60_000,))
        clients = Clients(x, y, torch.arange(60_000).split(600))
    return Work(model, clients, scale, scenario.train["batch_size"], epochs, data)
