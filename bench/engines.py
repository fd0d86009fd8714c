"""fedual's engines, a round at a time, with the scenario's settings."""

from collections.abc import Generator

from bench.work import SCENARIO, SEED, Work
from fedual import fit
from fedual.networks import Network
from fedual.run import Run, run_rounds
from fedual.scenarios import load
from fedual.settings import Execution, split


def rounds(work: Work, method: str, engine: str = "vectorised") -> Generator[float]:
    """Seconds of each round, server step included and evaluation not."""
    scenario = load(SCENARIO, method=method, sets=[f"local_epochs={work.epochs}", f"batch_size={work.batch_size}"])
    run = fit(
        Network(work.model, scale=work.scale),
        work.clients,
        scenario.spec(),
        scenario.train["rounds"],
        seed=SEED,
        posterior="point",
        local=split(scenario.train)["training"],
        execution=Execution(device="cpu", engine=engine),  # type: ignore[arg-type]
        callbacks=[_hold],
    )
    run.stop = False
    for record in run_rounds(run, None):
        if record["counted"] < len(work.clients):
            raise RuntimeError(f"{method}: {record['refused']} clients were refused: this is not the same work.")
        yield record["seconds"]


def _hold(run: Run, record: object) -> None:
    """Return from `fit` before the first round, so that rounds of others fit between this one's."""
    run.stop = True
