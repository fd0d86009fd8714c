"""Weights & Biases: a run in a project, kept here until `wandb sync` or sent at once."""

from typing import Literal

from fedual.runs.packages import load
from fedual.runs.run import Run
from fedual.trackers.base import Backend, Tracker, parameters, recall, remember


def wandb(project: str = "fedual", mode: Literal["offline", "online"] = "offline") -> Tracker:
    """Log a run's config and figures to Weights & Biases.

    Args:
        project: Where the run appears.
        mode: "offline" sends nothing: files stay in the run's folder (here, without one) until `wandb sync`.

    Raises:
        InputError: wandb is missing.
    """
    package = load("fedual.trackers.wandb", "wandb", "wandb")

    def open(run: Run) -> Backend:
        name = recall(run, "wandb")
        mine = package.init(
            project=project,
            mode=mode,
            dir=run.path.absolute() if run.path else None,
            name=run.path.name if run.path else None,
            config=parameters(run.config),
            id=name,
            resume="allow" if name and mode == "online" else None,
        )
        remember(run, "wandb", mine.id)
        # offline, wandb does not know how far it was: then the checkpoint says it
        last = max(run.server.round, mine.starting_step - 1) if name else 0
        log = lambda figures, round: mine.log(figures, step=round)
        return Backend(last, log, lambda failed: mine.finish(exit_code=int(failed)))

    return Tracker(open)
