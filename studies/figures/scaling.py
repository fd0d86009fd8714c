"""The cost of a round against clients, parameters and local steps, as `studies.scaling` measures it."""

from collections.abc import Sequence
from typing import Any

from studies.figures.common import BLUE, GREY, ORANGE, RED, Drawing, canvas
from studies.scaling import Curves, Point, report, verdicts

MEGABYTE = 1e6


def draw(curves: Curves, device: str) -> Drawing:
    """Draw a column for each curve: seconds a round above, memory below, both axes logarithmic."""
    with canvas(3.1 * len(curves), 5.4) as figure:
        axes = figure.subplots(2, len(curves), squeeze=False, sharex="col", sharey="row")
        for (above, below), (curve, points) in zip(axes.T, curves.items(), strict=True):
            x = [getattr(point, curve) for point in points]
            _time(above, x, points)
            _memory(below, x, points, curve)
            name = curve.replace("_", " ")
            above.set_title(f"Against {name}")
            below.set_xlabel(name + " of each client" * (curve == "local_steps"))
            for axis in (above, below):
                axis.set(xscale="log", yscale="log")
                axis.legend()
        for (axis, *_), label in zip(axes, ("seconds a round", "peak memory, MB"), strict=True):
            axis.set_ylabel(label)
            axis.yaxis.set_major_formatter("{x:g}")
    findings = [f"{v.sentence} (at most {v.limit:g}): {'ok' if v.ok else 'TOO MUCH'}" for v in verdicts(curves)]
    return Drawing(figure, report(curves, device), findings)


def _time(axis: Any, x: list[int], points: Sequence[Point]) -> None:
    """Draw the seconds beside a line proportional to the work."""
    last = points[-1]
    axis.plot(x, [point.seconds for point in points], color=BLUE, marker="o", ms=4, label="measured")
    linear = [last.seconds * point.work / last.work for point in points]
    axis.plot(x, linear, color=GREY, ls="--", lw=1.2, label="linear in the work")


def _memory(axis: Any, x: list[int], points: Sequence[Point], curve: str) -> None:
    """Draw the federation's memory, the memory in use before it, and a proportional line."""
    megabytes = lambda values: [value / MEGABYTE for value in values]
    own = megabytes(point.memory for point in points)
    axis.plot(x, own, color=BLUE, marker="o", ms=4, label="the federation's")
    if points[-1].device_bytes:
        device = megabytes(point.device_bytes for point in points)
        axis.plot(x, device, color=ORANGE, marker="s", ms=4, label="on the GPU")
    if curve == "clients":
        state = megabytes(point.state_bytes for point in points)
        axis.plot(x, state, color=RED, ls="--", lw=1.2, label="clients' state, on disk")
    if curve == "parameters":
        linear = [own[-1] * value / x[-1] for value in x]
        axis.plot(x, linear, color=GREY, ls="--", lw=1.2, label="linear")
    before = megabytes(point.baseline_bytes for point in points)
    axis.plot(x, before, color=GREY, ls=":", lw=1.2, label="before it: imports, data")
