"""Three sites of a federated regression on a Flower grid in one process."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import Message
from flwr.clientapp import ClientApp
from here import Between, Here

from fedual import glm
from fedual.flower import wire
from fedual.glm.flower import FederatedRegression, Patience, client_app
from fedual.glm.settings import Settings

FORMULA = "sick ~ age + C(sex)"
NAMES = ("north", "south", "west")
PATIENCE = Patience(wait=100, grace=10, resend=20, timeout=200)


def frame(seed: int, rows: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    age, sex = random.normal(50, 10, rows), random.choice(["female", "male"], rows)
    chance = 1 / (1 + np.exp(2.5 - age / 20 - 0.5 * (sex == "male")))
    sick, visits = (random.random(rows) < chance).astype(int), random.negative_binomial(2, 1 / (1 + age / 40))
    death, lost = random.exponential(40 - 0.4 * age + 8 * (sex == "male")), random.uniform(5, 25, rows)
    times = {"time": np.ceil(np.minimum(death, lost)) + 1, "died": (death < lost).astype(int)}
    entry = np.minimum(random.integers(0, 4, rows), times["time"] - 1)
    return pd.DataFrame({"age": age, "sex": sex, "sick": sick, "visits": visits, **times, "entry": entry})


FRAMES = {name: frame(seed, 300 + 150 * seed) for seed, name in enumerate(NAMES)}


def kind(message: Message) -> str:
    return str(wire.config_of(message.content)["kind"])


class Sites(Here):
    """The three sites at nodes 100, 101 and 102, each with its own state and its own CSV file.

    Attributes:
        returns: (node, app) of a site that is back when the server has looked for nodes five times without it.
    """

    def __init__(self, path: Path, between: Between | None = None, app: ClientApp | None = None):
        self.path, self.returns, self.looks = path, dict[int, Any](), 0
        app = app or client_app()
        nodes = {}
        for number, (name, table) in enumerate(FRAMES.items()):
            file = path / f"{name}.csv"
            table.to_csv(file, index=False)
            config = {"client-id": name, "data-path": str(file), "state-dir": str(path / f"state-{name}")}
            nodes[100 + number] = app, config
        super().__init__(nodes, between)

    def get_node_ids(self) -> Iterable[int]:
        self.looks += bool(self.returns)
        if self.looks > 5:
            self.apps.update(self.returns)
            self.returns, self.looks = {}, 0
        return super().get_node_ids()

    def fit(self, **changes: Any) -> glm.Fit:
        given = {"patience": PATIENCE, "min_sites": 3} | changes
        settings = given.pop("settings", Settings(FORMULA, "binomial"))
        return FederatedRegression(settings, **given).start(self)  # type: ignore[arg-type]

    def asked(self, node: int) -> list[str]:
        """What a node was asked, in order."""
        return [kind(message) for message in self.sent if message.metadata.dst_node_id == node]


def first(node: int, what: str, then: Callable[[Message, Callable[[], Message]], Any], nth: int = 1) -> Between:
    """Something happens to the first (or nth) message of a kind at a node."""
    seen = []

    def between(at: int, message: Message, answer: Callable[[], Message]) -> Message | None:
        if at == node and kind(message) == what:
            seen.append(message)
            if len(seen) == nth:
                return then(message, answer)
        return answer()

    return between
