"""A cell: a table, a method with settings, and a seed."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

import fedual
from fedual import methods
from fedual.algorithm import Method
from fedual.calibration import Mode
from fedual.defaults import Federation, resolve
from fedual.errors import FedualError
from fedual.settings import Evaluation, Execution, LocalTraining
from studies.small.tables import OTHERS, REPORTED, Table

SAMPLES = 32
LOCAL, ROUNDS = LocalTraining(), 50
WARM = {"rho": 1.0, "tau": 1.0, "damping": 1.0}
BASELINES = "fedavg", "fedprox", "feddyn"
METHODS: dict[str, tuple[str, dict[str, Any], Mode]] = {
    "ivon-admm": ("ivon-admm", {}, "point"),
    "ivon-admm calibrated": ("ivon-admm", {}, "calibrated"),
    "ivon-admm tau=rho=damping=1": ("ivon-admm", WARM, "point"),
    **{name: (name, {}, "point") for name in BASELINES},
    **{f"{name} lr=1e-3": (name, {"lr": 1e-3}, "point") for name in BASELINES},
}


@dataclass(frozen=True)
class Cell:
    """A method with settings on a table, with a seed."""

    table: str
    method: str
    settings: dict[str, Any]
    seed: int
    posterior: Mode = "point"

    def load(self) -> Table:
        """The table."""
        return (REPORTED | OTHERS)[self.table].table(self.table, self.seed)

    def resolved(self, table: Table) -> Method:
        """The method with the numbers that its rules have now."""
        return resolved(self.method, self.settings, [len(y) for _, y in table.sites])

    def run(self, table: Table, rounds: int = ROUNDS) -> dict[str, Any]:
        """Train and measure: the record."""
        start, error = time.perf_counter(), None
        figures: dict[str, Any] = {}
        spec = methods.spec(self.method, **self.settings)
        try:
            run = fedual.fit(
                table.model, table.sites, spec, rounds, loss=table.loss, seed=self.seed, posterior=self.posterior,
                local=LOCAL, execution=Execution(device="cpu", compile=False), evaluation=Evaluation(rounds, 0),
            )  # fmt: skip
            figures = measure(run.posterior, table) | {"trained": run.method.name}
        except FedualError as problem:
            error = str(problem)
        return {
            "table": self.table, "method": self.method, "settings": self.settings, "seed": self.seed, "rounds": rounds,
            "posterior": self.posterior,
            "resolved": self.resolved(table).to_dict(), "sizes": [len(y) for _, y in table.sites],
            "parameters": sum(p.numel() for p in table.model.parameters()), **figures, "error": error,
            "seconds": round(time.perf_counter() - start, 2),
        }  # fmt: skip


def resolved(method: str, settings: dict[str, Any], sizes: list[int]) -> Method:
    """A method with the numbers that its rules have now for sites of these sizes."""
    steps = LOCAL.average_steps(len(sizes), sum(sizes))
    return resolve(methods.spec(method, **settings), Federation(len(sizes), sum(sizes), steps=steps))


def measure(posterior: fedual.Posterior, table: Table) -> dict[str, float]:
    """Accuracy or RMSE, and NLL, on the test rows: at the mean, and as handed over with the suffix `_mc`."""
    x, y = table.test
    figures, at_mean = {}, replace(posterior, calibration=None)
    for suffix, q, samples in (("", at_mean, 0), ("_mc", posterior, SAMPLES)):
        predicted: Any = q.predict(x, samples=samples)
        if table.loss == "cross_entropy":
            p = predicted.probabilities.double().clamp(min=1e-300)
            found = {"accuracy": float((p.argmax(-1) == y).double().mean())}
            found["nll"] = -float(p.log().gather(-1, y[:, None]).mean())
        else:
            mean, sd = predicted.mean[:, 0].double(), predicted.observation_sd[:, 0].double()
            found = {"rmse": float((mean - y).square().mean().sqrt())}
            found["nll"] = -float(torch.distributions.Normal(mean, sd).log_prob(y.double()).mean())
        figures |= {f"{name}{suffix}": float(f"{value:.6g}") for name, value in found.items()}
    return figures
