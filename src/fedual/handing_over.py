"""What a run chooses on held-out examples before it hands its posterior over: width, temperature, and personal steps.

The examples are those that were held out of the run itself, or those of short runs that each leave out another part
(`fedual.calibration`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from fedual import calibration, personal
from fedual.backends.precision import arithmetic
from fedual.calibration import FOLDS, Calibration, Fold, Grid, HeldOut, hold_out
from fedual.errors import DivergedError
from fedual.networks import Clients
from fedual.personal import Choices

if TYPE_CHECKING:
    from fedual.run import Run


def choose(run: "Run", whole: Clients, held: HeldOut | None, short_run: Callable[[Clients, int], "Run"]) -> Choices:
    """Choose on the examples `held` out of a run, or on those of short runs.

    Args:
        run: After its last round.
        whole: The clients with all of their examples.
        held: What was held out of the run; None: short runs leave it out.
        short_run: Trains clients for a number of rounds, as the run was trained.
    """
    losses, samples, rounds = run.losses, run.evaluation.samples, (run.server.round + 1) // 2
    grid, seed = Grid.of(run.trained.family, run.method.tau, samples), losses.draws.evaluation(run.server.round)
    count = FOLDS if held is None else 0
    widths, steps, rows, weight, clients = list[Tensor](), list[Tensor](), 0, 0.0, set[int]()
    for number in range(count or 1):
        training, left = (whole, held) if held is not None else hold_out(whole, Fold(number, FOLDS), losses.draws)
        if not any(map(len, left.rows)):
            continue
        try:
            source = run if held is not None else short_run(training, max(1, rounds))
        except DivergedError:
            continue
        with arithmetic(losses.network.device, run.execution.precision):
            widths += calibration.tables(source.trained, grid, losses.data, left, samples, seed)
            steps += personal.tables(source.trained, source.store, losses.data, left)
        rows += sum(map(len, left.rows))
        weight += float(sum(map(len, left.rows) if left.weights is None else (w.double().sum() for w in left.weights)))
        clients |= {k for k, own in enumerate(left.rows) if len(own)}
    about = {"weight": weight, "examples": rows, "clients": len(clients), "folds": count}
    return Choices(Calibration.choose(grid, widths, **about), personal.choose(steps, **about))
