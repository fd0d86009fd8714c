"""TensorBoard: one folder of event files."""

import os
import time
from pathlib import Path

from fedual.runs.packages import load
from fedual.runs.run import Run
from fedual.trackers.base import Backend, Figures, Tracker, parameters


def tensorboard(folder: str | os.PathLike[str]) -> Tracker:
    """Write a run's figures for TensorBoard, and its config as the text "config".

    Args:
        folder: For the event files of this run alone; see them with `tensorboard --logdir FOLDER`.

    Raises:
        InputError: TensorBoard is missing.
    """
    package = load("fedual.trackers.tensorboard", "torch.utils.tensorboard", "tensorboard")

    def open(run: Run) -> Backend:
        known = _wait(Path(folder))
        # rounds after the checkpoint that a resumed run starts from come again: TensorBoard drops their first version
        writer = package.SummaryWriter(str(folder), purge_step=run.server.round + 1 if known else None)
        if not known:
            writer.add_text("config", _table(run))

        def log(figures: Figures, round: int) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, round)
            writer.flush()

        return Backend(run.server.round if known else 0, log, lambda failed: writer.close())

    return Tracker(open)


def _wait(folder: Path) -> bool:
    """Whether event files are there; not in the second of the latest of them.

    TensorBoard reads files in the order of their names, which hold whole seconds: of two files of one second the newer
    may come first, and its purge step would purge nothing.
    """
    if any(folder.glob(f"events.out.tfevents.{int(time.time())}.*")):
        time.sleep(1 - time.time() % 1)
    return any(folder.glob("events.out.tfevents.*"))


def _table(run: Run) -> str:
    """The config in Markdown."""
    rows = [f"| {key} | {value} |" for key, value in parameters(run.config).items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])
