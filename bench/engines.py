"""fedual's engines, a round at a time, with the scenario's settings."""

from collections.abc import Generator

from bench.work import SCENARIO, SEED, Work
from fedual import fit
from fedual.experiments import load
from fedual.runs.run import Run
from fedual.runs.run import rounds as rounds_of


def rounds(work: Work, method: str, engine: str = "vectorised") -> Generator[float]:
    """Seconds of each round, server step included and evaluation not."""
    scenario = load(SCENARIO, method=method, sets=[f"local_epochs={work.epochs}", f"batch_size={work.batch_size}"])
    given = {"scale": work.scale, "seed": SEED, "device": "cpu", "engine": engine, "callbacks": [_hold]}
    run = fit(work.model, work.clients, scenario.build(), **scenario.train, **given)
    run.stop = False
    for record in rounds_of(run, None):
        if record["counted"] < len(work.clients):
            raise RuntimeError(f"{method}: {record['refused']} clients were refused: this is not the same work.")
        yield record["seconds"]


def _hold(run: Run, record: object) -> None:
    """Return from `fit` before the first round, so that rounds of others fit between this one's."""
    run.stop = True
