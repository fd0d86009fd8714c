"""The elements that the template draws: sections made of plots, pictures and tables.

A plot has two axes, lines and bars. Colours are CSS variables, so that plots follow the page's dark mode.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

WIDTH, HEIGHT = 340, 220  # of a plot, which fits a phone; wider pages put plots side by side
LEFT, RIGHT, TOP, BOTTOM = 46, 322, 10, 182  # the area between the axes
MARKED = 60  # lines with at most so many points mark each point, which shows its value under the mouse


def short(value: float) -> str:
    """A number as a tick label: 0.25, −3."""
    return f"{value:.6g}".replace("-", "−")


def percent(share: float) -> str:
    """A share as a whole percentage: 25%."""
    return f"{100 * share:.0f}%"


class Axis(NamedTuple):
    """One axis of a plot, from `low` to `high`; neighbouring ticks differ by at least `least`."""

    label: str
    low: float
    high: float
    log: bool = False
    least: float = 0.0
    show: Callable[[float], str] = short

    def share(self, value: float) -> float:
        """Position of a value between low, 0, and high, 1."""
        scale = math.log if self.log else float
        return (scale(value) - scale(self.low)) / ((scale(self.high) - scale(self.low)) or 1.0)

    def ticks(self) -> list[float]:
        """About five round values; on a logarithmic axis powers of ten, with 2 and 5 times them if those are few."""
        if not self.log:
            step = max(_round_step((self.high - self.low) / 4), self.least)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [number * step for number in range(first, last + 1)]
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first >= 2:
            return [10.0**power for power in range(first, last + 1, math.ceil((last - first + 1) / 6))]
        every = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
        return [value for value in every if self.low <= value <= self.high]


def axis(label: str, values: Sequence[float], *, zero: bool = False, **settings: Any) -> Axis:
    """An axis that holds all values, and zero if asked to; `settings` are `log`, `least` and `show` of the axis."""
    low, high = min(values), max(values)
    if settings.get("log"):
        margin = 2 if low == high else 1.1
        return Axis(label, low / margin, high * margin, **settings)
    low = min(low, 0.0) if zero else low
    if low == high:
        low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1.0)
    step = max(_round_step((high - low) / 4), settings.get("least", 0.0))
    return Axis(label, math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, **settings)


def _round_step(width: float) -> float:
    """The nearest of 1, 2, 5, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(width))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / width)))


class Line(NamedTuple):
    """Points that a line joins; `colour` is a CSS colour, `dash` an SVG dash pattern."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dash: str | None = None
    marked: bool = True


class Bar(NamedTuple):
    """A rectangle from (left, low) to (right, high) that shows `tip` under the mouse."""

    left: float
    right: float
    low: float
    high: float
    colour: str
    tip: str


class Plot(NamedTuple):
    """A plot; `description` tells its content to readers who cannot see it."""

    title: str
    description: str
    x: Axis
    y: Axis
    lines: Sequence[Line] = ()
    bars: Sequence[Bar] = ()

    def across(self, value: float) -> float:
        """Horizontal coordinate of a value."""
        return round(LEFT + (RIGHT - LEFT) * self.x.share(value), 1)

    def down(self, value: float) -> float:
        """Vertical coordinate of a value."""
        return round(BOTTOM - (BOTTOM - TOP) * self.y.share(value), 1)

    def path(self, line: Line) -> str:
        """A line as SVG path data."""
        return "M" + "L".join(f"{self.across(a):g} {self.down(b):g}" for a, b in line.points)


class Table(NamedTuple):
    """A table; each row's first cell is its heading."""

    caption: str
    head: Sequence[Any]
    rows: Sequence[Sequence[Any]]


Key = tuple[str, str, str | None]  # an entry of a legend: label, colour, dash


class Section(NamedTuple):
    """Words, plots, pictures, and the numbers that they show as tables."""

    words: str = ""
    legend: Sequence[Key] = ()
    plots: Mapping[str, Sequence[Plot]] = {}  # of several groups, the page shows one at a time
    aside: str = ""
    cards: Sequence[tuple[str, Sequence[Any]]] = ()  # the addresses of images, and their rows of the table
    tables: Sequence[Table] = ()


def colours(count: int) -> list[str]:
    """Distinct colours: those of the page, or evenly spaced hues if there are more than ten."""
    if count <= 10:
        return [f"var(--c{number})" for number in range(count)]
    return [f"hsl({360 * number // count} 60% {(42, 56, 68)[number % 3]}%)" for number in range(count)]
