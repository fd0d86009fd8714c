"""The page in a real browser; skipped where Debian's `chromium` is not installed."""

import json
from pathlib import Path

import pytest
from browser import CHROMIUM, Tab, browser
from folders import METHOD, record, written
from PIL import Image

from fedual.report import write

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The reports of one run, and of two."""
    folder = tmp_path_factory.mktemp("runs")
    figures = lambda n: {"nll_mc": 0.9 / n, "accuracy_mc": 1 - 0.5 / n, "ece_mc": 0.1 / n}
    runs = [
        written(folder / name, [record(n, 1 / n, **figures(n)) for n in range(1, 13)], method={**METHOD, "name": name})
        for name in ("ivon-admm", "a-method-with-a-name-that-is-much-longer-than-any-phone-is-wide-<b>")
    ]
    kept = {"shape": [8, 8], "dtype": "uint8", "sizes": [9, 4, 6], "labels": [[4, 5], [4, 0], [1, 5]]}
    (runs[0] / "clients.json").write_text(json.dumps(kept))
    return [write(runs[:1]), write(runs, folder / "both.html")]


def brightness(path: Path) -> float:
    """The mean brightness of a picture, from 0 to 1."""
    histogram = Image.open(path).convert("L").histogram()
    return sum(level * count for level, count in enumerate(histogram)) / 255 / sum(histogram)


@pytest.mark.parametrize("width", [390, 1200])
def test_it_loads_without_complaint_and_fits_the_screen(tab: Tab, pages: list[Path], width: int):
    for page in pages:
        tab.open(page, width)
        assert not tab.seen("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        asked = [one["request"]["url"] for one in tab.seen("Network.requestWillBeSent")]
        assert [address for address in asked if not address.startswith("data:")] == [page.resolve().as_uri()]
        tab.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert tab.value("document.documentElement.scrollWidth") == width


def test_plots_are_drawn_and_readable_on_a_phone(tab: Tab, pages: list[Path]):
    tab.open(pages[0], 390)
    seen = "[...document.querySelectorAll('svg[role=img]')].filter(one => one.getBoundingClientRect().height > 150)"
    assert tab.value(f"{seen}.length") == 3 + 1 + 2  # figures over rounds, residuals, clients
    assert tab.value(f"Math.min(...{seen}.map(one => one.getBoundingClientRect().width))") > 330
    smallest = (
        "Math.min(...[...document.querySelectorAll('svg text')].filter(one => one.getBoundingClientRect().height)"
    )
    assert tab.value(f"{smallest}.map(one => one.getBoundingClientRect().height))") >= 11
    assert (
        tab.value(f"Math.min(...{seen}.map(one => one.querySelectorAll('.line, .bar').length))") == 2
    )  # at the mean, and under q_g


def test_the_switch_works_from_the_keyboard(tab: Tab, pages: list[Path]):
    tab.open(pages[0], 1200)
    shown = lambda key: tab.value(f"getComputedStyle(document.querySelector('.by-{key}')).display") != "none"
    assert (shown("rounds"), shown("bytes")) == (True, False)
    tab.value("document.querySelector('#over-rounds').focus()")
    for kind in ("keyDown", "keyUp"):
        tab.ask("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    assert (shown("rounds"), shown("bytes")) == (False, True)


def test_it_follows_dark_mode(tab: Tab, pages: list[Path], tmp_path: Path):
    tab.open(pages[0], 1200)
    tab.picture(tmp_path / "light.png")
    text = "getComputedStyle(document.querySelector('svg text')).fill"
    light = tab.value(text)
    tab.open(pages[0], 1200, dark=True)
    tab.picture(tmp_path / "dark.png")
    assert tab.value(text) != light
    assert brightness(tmp_path / "light.png") > 0.8
    assert brightness(tmp_path / "dark.png") < 0.25
