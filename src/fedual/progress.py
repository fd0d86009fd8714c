"""Show the progress of a run: a live plot in a notebook, one line a round elsewhere."""

import io
import sys
import time
from typing import Any

from fedual.calibration import AT
from fedual.run import SHOWN, Callback, Record, Run

PATIENCE = 10  # a plot is redrawn after this many times the duration of the last drawing, which limits the cost


def watchers(progress: bool | None) -> list[Callback]:
    """Return the callbacks that show progress, as `fedual.fit` describes it."""
    # a notebook has a kernel, a terminal has none
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if progress is not False and getattr(shell, "kernel", None) is not None:
        return [Live()]
    return [say] if progress else []


def say(run: Run, record: Record | None) -> None:
    """Print a round."""
    if record is None:
        return
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(line(run))
    else:
        Console(soft_wrap=True).print(line(run))


def line(run: Run) -> str:
    """Describe the last round; accuracy and NLL are included if it was evaluated."""
    if not run.history:
        return f"round 0 of {run.rounds}, {len(run.losses.data)} clients"
    last = run.history[-1]
    words = [f"round {last['round']} of {run.rounds}", f"{last['counted']} clients"]
    words += [f"{last['refused']} refused"] if last["refused"] else []
    words += [f"{name} {last[name]:.4g}" for name in SHOWN if last.get(name) is not None]
    return ", ".join([*words, f"{last['seconds']:.2g} s"])


class Live:
    """A callback for notebooks: a plot of accuracy and NLL (or the loss's own figures) that is updated in place.

    Without matplotlib or a test set it is a line of text.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self.display: Any = None  # IPython's handle of the output
        self.cost: float = 0.0  # seconds that the last drawing took
        self.drawn: float = 0.0  # when it ended

    def __call__(self, run: Run, record: Record | None) -> None:
        """Draw, unless drawing takes long compared with the training."""
        self.run = run
        if time.perf_counter() - self.drawn >= PATIENCE * self.cost:
            self.draw()

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *error: object) -> None:
        if self.run:
            self.draw()

    def draw(self) -> None:
        """Show the current state of the run."""
        from IPython.display import Image, Pretty, display  # pyright: ignore[reportMissingImports]

        assert self.run is not None
        start, png = time.perf_counter(), plot(self.run)
        content = Pretty(line(self.run)) if png is None else Image(png)
        if self.display is None:
            self.display = display(content, display_id=True)
        else:
            self.display.update(content)
        self.drawn = time.perf_counter()
        self.cost = self.drawn - start


def plot(run: Run) -> bytes | None:
    """Plot the test figures over rounds, as PNG; None without figures or matplotlib."""
    names = [name for name in SHOWN if any(name in record for record in run.history)]
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    if not names:
        return None
    figure = Figure(figsize=(4 * len(names), 2.8), layout="constrained")
    figure.suptitle(line(run), fontsize=10)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for end, label in AT.items():
            points = [(each["round"], each[name + end]) for each in run.history if each.get(name + end) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), ".-", label=label)
        axes.set(xlabel="round", ylabel=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.axes[-1].legend(frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=90)
    return file.getvalue()
