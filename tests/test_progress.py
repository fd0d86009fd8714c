"""What is shown while a run goes on, with a stand-in for IPython where there would be a notebook."""

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import matplotlib.image
import pytest
import torch
from flat import fit
from problems import normal
from torch import nn

from fedual import progress
from fedual.errors import DivergedError
from fedual.methods import fedavg
from fedual.run import Run
from fedual.solvers import SGD


def train(rounds: int = 2, method: Any = "ivon-admm", test: bool = True, **options: Any) -> Run:
    sites = [(normal((n, 3), n), torch.arange(n) % 2) for n in (4, 6)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
    given = {"local_epochs": 1, "samples": 2, "device": "cpu", "test": sites[0] if test else None}
    return fit(model, sites, method, rounds, **given, **options)


class Place:
    """One output of a notebook, and all that it showed."""

    def __init__(self, first: Any):
        self.shown = [first]

    def update(self, obj: Any) -> None:
        self.shown.append(obj)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """The outputs of a notebook's cell; `IPython.display` as it is documented."""
    made: list[Place] = []

    def display(obj: Any, *, display_id: bool) -> Place:
        assert display_id
        made.append(Place(obj))
        return made[-1]

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    ipython.version_info = (9, 0)  # type: ignore[attr-defined] # matplotlib asks
    module.display = display  # type: ignore[attr-defined]
    module.Image = lambda data: SimpleNamespace(png=data)  # type: ignore[attr-defined]
    module.Pretty = lambda data: SimpleNamespace(text=data)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return made


def test_a_notebook_gets_one_plot_that_is_updated_and_ends_complete(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
):
    seen = []
    draw = progress.plot
    monkeypatch.setattr(progress, "plot", lambda run: seen.append(len(run.history)) or draw(run))
    train(rounds=3)
    (place,) = places
    assert place.shown[0].text == "round 0 of 3, 2 clients"
    height, width, _ = matplotlib.image.imread(io.BytesIO(place.shown[-1].png)).shape
    assert width > 2 * height  # two panels: accuracy and NLL
    assert (seen[0], seen[-1]) == (0, 3)


def test_the_plot_has_the_history(monkeypatch: pytest.MonkeyPatch):
    from matplotlib.axes import Axes

    lines, draw = {}, Axes.plot

    def plot(axes: Axes, x: Any, y: Any, *rest: Any, label: str) -> Any:
        lines.setdefault(label, []).append((x, y))
        return draw(axes, x, y, *rest, label=label)

    run = train(rounds=5, evaluate_every=2)
    monkeypatch.setattr(Axes, "plot", plot)
    progress.plot(run)
    evaluated = [record for record in run.history if "nll" in record]
    points = lambda key: (tuple(r["round"] for r in evaluated), tuple(r[key] for r in evaluated))
    assert points("nll")[0] == (2, 4, 5)
    assert lines == {
        "at the mean": [points("accuracy"), points("nll")],
        "under q_g": [points("accuracy_mc"), points("nll_mc")],
    }


def test_slow_plots_are_left_out_but_for_the_last(places: list[Place], monkeypatch: pytest.MonkeyPatch):
    """By a clock that says that a drawing takes 1 s, and training no time at all."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def plot(run: Run) -> None:
        clock.now += 1

    monkeypatch.setattr(progress, "plot", plot)
    train(rounds=4)
    first, last = places[0].shown
    assert first.text == "round 0 of 4, 2 clients"
    assert last.text.startswith("round 4 of 4, 2 clients, accuracy ")


def test_without_matplotlib_or_a_test_set_it_is_a_line(places: list[Place], monkeypatch: pytest.MonkeyPatch):
    train(test=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = train()
    bare, evaluated = (place.shown[-1].text for place in places)
    assert "nll" not in bare
    assert f"round 2 of 2, 2 clients, accuracy {run.history[-1]['accuracy']:.4g}, nll " in evaluated


def test_a_run_that_diverges_is_shown_to_its_end(places: list[Place]):
    with pytest.raises(DivergedError):
        train(method=fedavg(solver=SGD(lr=1e30)))
    assert places[0].shown[-1].text == "round 0 of 2, 2 clients"


@pytest.mark.parametrize("rich", [True, False])
def test_progress_elsewhere_is_a_line_a_round(capsys: pytest.CaptureFixture[str], monkeypatch, rich: bool):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    run = train(rounds=3, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert all(f"nll {record['nll']:.4g}" in line for line, record in zip(lines, run.history, strict=True))


def test_refused_clients_are_named():
    record = {"round": 1, "counted": 1, "refused": 2, "seconds": 0.5}
    run: Any = SimpleNamespace(history=[record], rounds=4)
    assert progress.line(run) == "round 1 of 4, 1 clients, 2 refused, 0.5 s"


@pytest.mark.parametrize("progress", [None, False])
def test_elsewhere_it_is_silent_unless_asked(capsys: pytest.CaptureFixture[str], progress: bool | None):
    train(progress=progress)
    assert capsys.readouterr() == ("", "")


def test_a_notebook_is_silent_where_asked_and_a_terminal_is_no_notebook(
    places: list[Place], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    train(progress=False)
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())  # of a terminal
    train()
    assert not places
    assert capsys.readouterr() == ("", "")
