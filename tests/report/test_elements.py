import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedual.report import elements, templates
from fedual.report.elements import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Axis,
    Bar,
    Line,
    Plot,
    Table,
    axis,
    colours,
    percent,
    short,
)

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
    [(0.25, "0.25"), (-3, "−3"), (0.1 + 0.2, "0.3"), (1e-5, "1e−05"), (2e7, "2e+07"), (0, "0"), (-2e7, "−2e+07")],
)
def test_numbers_are_short(value: float, text: str):
    assert short(value) == text


def test_a_line_goes_through_its_points():
    plot = Plot("", "", Axis("x", 0, 10), Axis("y", 1, 100, log=True))
    middle = f"{(LEFT + RIGHT) / 2:g} {(TOP + BOTTOM) / 2:g}"
    path = plot.path(Line("a", [(0, 1), (5, 10), (10, 100)], "red"))
    assert path == f"M{LEFT} {BOTTOM}L{middle}L{RIGHT} {TOP}"


def test_colours_are_those_of_the_page_and_distinct():
    assert len(set(colours(100))) == 100
    assert colours(2) == ["var(--c0)", "var(--c1)"]
    assert percent(0.254) == "25%"


def test_a_chart_draws_bars_and_lines_with_values_under_the_mouse_and_escapes_every_text():
    x, y = Axis("<x>", 0, 1), Axis("y", 0, 1)
    line = Line("<line>", [(0, 0), (1, 1)], "var(--c0)", "4 3")
    plot = Plot("<title>", "Loss <over> rounds", x, y, [line], [Bar(0.5, 1, 0, 0.25, "red", "<tip>")])
    drawn = str(templates().get_template("macros.html").module.chart(plot, elements))
    sizes = dict(re.findall(r' (\w+)="([\d.]+)"', re.findall("<rect[^>]*>", drawn)[0]))
    assert float(sizes["x"]) == (LEFT + RIGHT) / 2
    assert float(sizes["x"]) + float(sizes["width"]) == RIGHT
    assert float(sizes["y"]) + float(sizes["height"]) == BOTTOM
    assert float(sizes["height"]) == (BOTTOM - TOP) / 4
    assert 'role="img" aria-label="Loss &lt;over&gt; rounds"' in drawn
    titles = re.findall("<title>(.*?)</title>", drawn)
    assert titles == ["&lt;tip&gt;", "&lt;line&gt;, &lt;x&gt; 0: 0", "&lt;line&gt;, &lt;x&gt; 1: 1"]
    assert drawn.count('stroke-dasharray="4 3"') == 1
    assert not re.search("<(line|x|over|tip)>|#[0-9a-f]{3}", drawn)


def test_a_table_has_a_caption_and_headings_and_shows_values_in_short():
    html = str(templates().get_template("macros.html").module.table(Table("<c>", ["<"], [["<", None, 0.123456, True]])))
    assert '<div class="scroll" tabindex="0" role="region" aria-label="&lt;c&gt;"><table><caption>&lt;c&gt;' in html
    assert '<th scope="col">&lt;</th>' in html
    assert '<th scope="row">&lt;</th><td>–</td><td>0.1235</td><td>yes</td>' in html


def test_an_axis_of_one_value_has_room():
    for value in (0.0, 3.0, -3.0):
        found = axis("", [value])
        assert found.low < found.high
        assert math.isfinite(found.share(value))
