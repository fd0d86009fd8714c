"""How a run goes on, where somebody looks at it: a plot that grows in a notebook, a line a round elsewhere."""

import io
import sys
import time
from typing import Any

from fedual.runs.run import SHOWN, Callback, Record, Run

PATIENCE = 10
"""A plot is drawn again when so many times as long has passed as the last drawing took."""


def watchers(progress: bool | None) -> list[Callback]:
    """What shows the progress of a run, as `fedual.fit` describes it."""
    if progress is not False and in_notebook():
        return [Live()]
    return [say] if progress else []


def in_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook, and not in a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


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
    """The last round in words; figures are those of this round, where it was evaluated."""
    if not run.history:
        return f"round 0 of {run.rounds}, {len(run.losses.data)} clients"
    last = run.history[-1]
    words = [f"round {last['round']} of {run.rounds}", f"{last['counted']} clients"]
    words += [f"{last['refused']} refused"] if last["refused"] else []
    words += [f"{name} {last[name]:.4g}" for name in SHOWN if last.get(name) is not None]
    return ", ".join([*words, f"{last['seconds']:.2g} s"])


class Live:
    """A callback for notebooks: accuracy and NLL (or what the loss has) over rounds, in one place that is updated.

    Without matplotlib, or without a test set, that place has a line of text.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self.place: Any = None  # IPython's handle of what is displayed
        self.cost: float = 0.0
        self.drawn: float = 0.0

    def __call__(self, run: Run, record: Record | None) -> None:
        """Draw, unless that would take long beside the training."""
        self.run = run
        if time.perf_counter() - self.drawn >= PATIENCE * self.cost:
            self.draw()

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *error: object) -> None:
        if self.run:
            self.draw()

    def draw(self) -> None:
        """Show the run as it is now."""
        from IPython.display import Image, Pretty, display  # pyright: ignore[reportMissingImports]

        assert self.run is not None
        began = time.perf_counter()
        png = plot(self.run)
        shown = Pretty(line(self.run)) if png is None else Image(png)
        if self.place is None:
            self.place = display(shown, display_id=True)
        else:
            self.place.update(shown)
        self.drawn = time.perf_counter()
        self.cost = self.drawn - began


def plot(run: Run) -> bytes | None:
    """The figures on the test set over rounds, as PNG; None where there are none, or no matplotlib."""
    names = [name for name in SHOWN if any(name in record for record in run.history)]
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    if not names:
        return None
    figure = Figure(figsize=(4 * len(names), 2.8), layout="constrained")
    figure.suptitle(line(run), fontsize=10)
    tempered = "" if run.method.tau == 1 else f", tempered: τ = {run.method.tau:g}"
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for key, label in ((name, "at the mean"), (f"{name}_mc", f"under q_g{tempered}")):
            points = [(each["round"], each[key]) for each in run.history if each.get(key) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), ".-", label=label)
        axes.set(xlabel="round", ylabel=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.axes[-1].legend(frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=90)
    return file.getvalue()
