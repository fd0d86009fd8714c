"""A stand-in for `fedual.fitting.fit` that trains nothing and remembers what it was asked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedual.calibration import tempered
from fedual.defaults import Federation, resolve
from fedual.errors import DivergedError
from fedual.methods import MethodSpec
from fedual.solvers import IVON


class Fake:
    """`nll` says what a call ends with, given the method and the arguments; None diverges."""

    def __init__(self, nll=lambda method, asked: 0.5):
        self.nll, self.asked = nll, []

    def fit(self, model: Any, clients: Any, spec: MethodSpec, rounds: int, **asked: Any) -> SimpleNamespace:
        method = resolve(spec, Federation(len(clients), 1000.0))
        self.asked.append({"clients": clients, "method": method, "rounds": rounds, **asked})
        loss = self.nll(method, asked)
        out = asked.get("out")
        about = tempered(method.tau) if isinstance(method.solver, IVON) else ""
        posterior = SimpleNamespace(about=about)
        run = SimpleNamespace(history=[], method=method, posterior=posterior, path=None if out is None else Path(out))
        calls = asked.get("callbacks", ())
        for call in calls:
            call(run, None)
        if loss is None:
            raise DivergedError("No client's update is inside the domain.")
        if run.path:
            run.path.mkdir(parents=True, exist_ok=True)
        for number in range(1, rounds + 1):
            record = record_of(number, loss + rounds - number)
            if isinstance(method.solver, IVON):
                record |= {f"{key}_mc": record[key] / 2 for key in ("accuracy", "nll", "brier", "ece")}
            run.history.append(record)
            for call in calls:
                call(run, record)
        return run


def record_of(number: int, nll: float) -> dict[str, Any]:
    figures = {"accuracy": 0.75, "nll": nll, "brier": 0.25, "ece": 0.125}
    events = {"counted": 9, "refused": 1, "shortened": 1.0, "active": 10}
    return {"round": number, **figures, **events, "seconds": 2.0, "primal": 0.0, "dual": 0.0}
