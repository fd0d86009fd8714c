import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedual.report.markup import Safe, join, table, tag
from fedual.report.svg import BOTTOM, LEFT, RIGHT, TOP, Axis, Line, axis, bar, chart, colours, line, short

finite = st.floats(-1e9, 1e9).map(lambda value: float(f"{value:.6g}"))


@given(st.lists(finite, min_size=1, max_size=5), st.booleans())
def test_an_axis_has_round_ends_that_hold_all_values_and_few_ticks_in_between(values: list[float], zero: bool):
    found = axis("x", values, zero=zero)
    width = found.high - found.low
    assert found.low - 1e-9 * width <= min(values)
    assert max(values) <= found.high + 1e-9 * width
    assert not zero or found.low <= 0
    ticks = found.ticks()
    assert 2 <= len(ticks) <= 9
    assert all(-1e-9 <= found.share(tick) <= 1 + 1e-9 for tick in ticks)


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=5))
def test_a_logarithmic_axis_holds_all_values_too(values: list[float]):
    found = axis("x", values, log=True)
    assert found.low < min(values) <= max(values) < found.high
    assert all(0 <= found.share(tick) <= 1 for tick in found.ticks())
    assert len(found.ticks()) <= 8


def test_ticks_are_round_and_rounds_are_whole():
    assert Axis("", 0.0, 1.0).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert Axis("", 0.01, 1000.0, log=True).ticks() == pytest.approx([0.01, 0.1, 1, 10, 100, 1000])
    assert Axis("", 0.1, 1.0, log=True).ticks() == pytest.approx([0.1, 0.2, 0.5, 1])
    assert axis("round", [1, 2, 3], least=1.0).ticks() == [1, 2, 3]
    alone = axis("round", [3], least=1.0)
    assert (alone.low, alone.high) == (1, 5)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.25"), (-3, "−3"), (0.1 + 0.2, "0.3"), (1e-5, "10⁻⁵"), (2e7, "2·10⁷"), (0, "0"), (-2e7, "−2·10⁷")],
)
def test_numbers_are_short(value: float, text: str):
    assert short(value) == text


def test_a_line_goes_through_its_points():
    x, y = Axis("x", 0, 10), Axis("y", 1, 100, log=True)
    path = re.search(r'd="M([^"]*)"', line(x, y, Line("a", [(0, 1), (5, 10), (10, 100)], "red")))
    assert path
    middle = f"{(LEFT + RIGHT) / 2:g} {(TOP + BOTTOM) / 2:g}"
    assert path[1].split("L") == [f"{LEFT} {BOTTOM}", middle, f"{RIGHT} {TOP}"]


def test_a_bar_covers_its_part():
    x, y = Axis("x", 0, 1), Axis("y", 0, 1)
    found = dict(re.findall(r'(\w+)="([\d.]+)"', bar(x, y, 0.5, 1, 0, 0.25, "red", "tip")))
    assert float(found["x"]) == (LEFT + RIGHT) / 2
    assert float(found["x"]) + float(found["width"]) == RIGHT
    assert float(found["y"]) + float(found["height"]) == BOTTOM
    assert float(found["height"]) == (BOTTOM - TOP) / 4


def test_a_plot_says_what_it_shows_and_uses_the_page_s_colours():
    found = chart("Loss <over> rounds", Axis("x", 0, 1), Axis("y", 0, 1))
    assert 'role="img" aria-label="Loss &lt;over&gt; rounds"' in found
    assert "#" not in found
    assert len(set(colours(100))) == 100
    assert colours(2) == ["var(--c0)", "var(--c1)"]


def test_markup_escapes_all_but_markup():
    assert tag("p", "<b>", tag("b", "&"), class_="x", title='"', hidden=None) == (
        '<p class="x" title="&quot;">&lt;b&gt;<b>&amp;</b></p>'
    )
    assert tag("img", alt="<") == '<img alt="&lt;">'
    assert join("<", None, Safe("<br>"), 1) == "&lt;<br>1"
    assert table(["<"], [["<", "<"]], "<").count("&lt;") == 5


def test_an_axis_of_one_value_has_room():
    for value in (0.0, 3.0, -3.0):
        found = axis("", [value])
        assert found.low < found.high
        assert math.isfinite(found.share(value))
