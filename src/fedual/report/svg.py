"""Small plots as inline SVG: text and lines take the page's colours, and so follow its dark mode.

A plot is `chart(label, x, y, marks…)` with two `Axis`, and marks made by `line` and `bar` on the same axes. Sizes are
those of a phone, 340 units wide; wider pages put plots side by side.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedual.report.markup import Safe, tag

WIDTH, HEIGHT = 340, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 322, 10, 182
DOTS = 60
"""Points of a line up to which each is marked, and says its value under the mouse."""


def short(value: float) -> str:
    """A number of an axis: 0.25, −3, 10⁻⁵."""
    value = float(f"{value:.6g}")
    if value and not 1e-4 < abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        mantissa = f"{float(mantissa):g}"
        return power if mantissa == "1" else f"{mantissa}·{power}".replace("-", "−")
    return f"{value:g}".replace("-", "−")


class Axis(NamedTuple):
    """What a side of a plot stands for, from `low` to `high`; ticks are at least `least` apart."""

    label: str
    low: float
    high: float
    log: bool = False
    least: float = 0.0
    show: Callable[[float], str] = short

    def share(self, value: float) -> float:
        """Where a value lies between low, 0, and high, 1."""
        own = math.log if self.log else float
        return (own(value) - own(self.low)) / (own(self.high) - own(self.low))

    def ticks(self) -> list[float]:
        """About five round values."""
        if self.log:
            return _powers(self.low, self.high)
        step = max(_round_step((self.high - self.low) / 4), self.least)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def axis(
    label: str,
    values: Sequence[float],
    *,
    log: bool = False,
    least: float = 0.0,
    zero: bool = False,
    show: Callable[[float], str] = short,
) -> Axis:
    """An axis on which all values lie: from zero where asked to, widened to round ends."""
    low, high = min(values), max(values)
    if log:
        low, high = (low / 2, high * 2) if low == high else (low / 1.1, high * 1.1)
        return Axis(label, low, high, True, least, show)
    low = min(low, 0.0) if zero else low
    if low == high:
        low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1.0)
    step = max(_round_step((high - low) / 4), least)
    return Axis(label, math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, False, least, show)


def _round_step(width: float) -> float:
    """The nearest of 1, 2, 5, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(width))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / width)))


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten, thinned out where there are many, with 2 and 5 times them where there are few."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 2:
        every = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
        return [value for value in every if low <= value <= high]
    return [10.0**power for power in range(first, last + 1, math.ceil((last - first + 1) / 6))]


class Line(NamedTuple):
    """Points to be joined, and marked; `colour` is a CSS colour, `dash` an SVG dash pattern."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dash: str | None = None
    marked: bool = True


def line(x: Axis, y: Axis, drawn: Line) -> Safe:
    """A line through its points, each with its value under the mouse."""
    places = [_place(x, y, *point) for point in drawn.points]
    path = "M" + "L".join(f"{_unit(a)} {_unit(b)}" for a, b in places)
    dots = [
        tag(
            "circle",
            tag("title", f"{drawn.name}, {x.label} {x.show(a)}: {y.show(b)}"),
            cx=_unit(place[0]), cy=_unit(place[1]), r=1.9,
        )
        for place, (a, b) in zip(places, drawn.points, strict=True)
    ]  # fmt: skip
    curve = tag("path", d=path, class_="line", stroke_dasharray=drawn.dash)
    return tag("g", curve, *(dots if drawn.marked and len(dots) <= DOTS else []), style=f"--c:{drawn.colour}")


def bar(x: Axis, y: Axis, left: float, right: float, low: float, high: float, colour: str, tip: str) -> Safe:
    """A rectangle from (left, low) to (right, high), which says `tip` under the mouse."""
    (a, top), (b, bottom) = _place(x, y, left, high), _place(x, y, right, low)
    size = {"x": _unit(a), "y": _unit(top), "width": _unit(b - a), "height": _unit(bottom - top)}
    return tag("rect", tag("title", tip), class_="bar", style=f"--c:{colour}", **size)


def chart(label: str, x: Axis, y: Axis, *marks: Safe) -> Safe:
    """A plot; `label` says to those who cannot see it what it shows."""
    frame = []
    for value in y.ticks():
        height = _unit(_place(x, y, x.low, value)[1])
        frame.append(tag("path", d=f"M{LEFT} {height}H{RIGHT}", class_="grid"))
        frame.append(tag("text", y.show(value), x=LEFT - 6, y=height, dy="0.32em", text_anchor="end"))
    for value in x.ticks():
        across = _unit(_place(x, y, value, y.low)[0])
        frame.append(tag("path", d=f"M{across} {BOTTOM}v4", class_="tick"))
        frame.append(tag("text", x.show(value), x=across, y=BOTTOM + 17, text_anchor="middle"))
    frame.append(tag("path", d=f"M{LEFT} {BOTTOM}H{RIGHT}", class_="tick"))
    frame.append(tag("text", x.label, x=(LEFT + RIGHT) // 2, y=HEIGHT - 5, text_anchor="middle", class_="label"))
    return tag("svg", *frame, *marks, role="img", aria_label=label, viewBox=f"0 0 {WIDTH} {HEIGHT}")


def swatch(colour: str, dash: str | None = None) -> Safe:
    """A piece of a line, for a legend."""
    piece = tag("path", d="M1 6H27", class_="line", stroke_dasharray=dash, style=f"--c:{colour}")
    return tag("svg", piece, viewBox="0 0 28 12", class_="swatch", aria_hidden="true")


def colours(count: int) -> list[str]:
    """As many colours: those of the page, or a circle of hues where they do not suffice."""
    if count <= 10:
        return [f"var(--c{number})" for number in range(count)]
    return [f"hsl({360 * number // count} 60% {(42, 56, 68)[number % 3]}%)" for number in range(count)]


def _place(x: Axis, y: Axis, a: float, b: float) -> tuple[float, float]:
    return LEFT + (RIGHT - LEFT) * x.share(a), BOTTOM - (BOTTOM - TOP) * y.share(b)


def _unit(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")
