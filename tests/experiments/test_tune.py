"""`python -m bench.tune`: the grid, its lines, and what it must never touch."""

import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fedual.errors import DivergedError

# bench is no part of what is installed
loader = SourceFileLoader("tune", str(Path(__file__).parent.parent.parent / "bench" / "tune.py"))
tune = ModuleType("tune")
loader.exec_module(tune)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What would be run; an lr of 1 diverges."""
    seen = []

    def execute(scenario, seed, **more):
        seen.append({"scenario": scenario, "seed": seed, **more})
        done = SimpleNamespace(history=[{"round": 1}, {"round": 2, "accuracy": 0.87654, "nll": float("inf")}])
        if scenario.settings["lr"] == 1:
            error = DivergedError("Too far.")
            error.run = SimpleNamespace(history=[])
            raise error
        return done

    monkeypatch.setattr(tune, "execute", execute)
    return seen


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tune", *arguments])
    tune.main()


def test_trials_are_all_combinations():
    assert tune.trials("fedprox rho=1,2 lr=3,4") == (
        "fedprox",
        [["rho=1", "lr=3"], ["rho=1", "lr=4"], ["rho=2", "lr=3"], ["rho=2", "lr=4"]],
    )
    assert tune.trials("fedavg") == ("fedavg", [[]])


def test_every_trial_is_a_line(asked: list[dict], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    specs = ["fedavg lr=0.5,1", "feddyn lr=0.25"]
    run(monkeypatch, "digits-heterog-10", *specs, "--seed", "1", "2", "--rounds", "7", "--out", str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "digits-heterog-10.jsonl").read_text().splitlines()]
    said = [(line["method"], line["sets"], line["seed"], line["diverged"]) for line in lines]
    assert said == [
        *(("fedavg", ["lr=0.5"], 1, None), ("fedavg", ["lr=0.5"], 2, None)),
        *(("fedavg", ["lr=1"], 1, "Too far."), ("fedavg", ["lr=1"], 2, "Too far.")),
        *(("feddyn", ["lr=0.25"], 1, None), ("feddyn", ["lr=0.25"], 2, None)),
    ]
    assert lines[0]["accuracy and nll at rounds"] == {"2": [0.8765, None]}
    assert lines[2]["accuracy and nll at rounds"] == {}
    assert [call["seed"] for call in asked] == [1, 2] * 3
    assert {call["validation"] for call in asked} == {0.1}
    assert [call["scenario"].settings["lr"] for call in asked] == [0.5, 0.5, 1, 1, 0.25, 0.25]
    assert {(call["scenario"].train["rounds"], call["scenario"].train["samples"]) for call in asked} == {(7, 0)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--seed", "1", "63"], "--seed 63 is one of those that are reported"),
        (["--validation", "0"], "the test set would choose"),
        (["--validation", "1"], "above 0 and below 1"),
    ],
)
def test_the_test_set_and_reported_seeds_are_left_alone(
    asked: list[dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, given: list[str], message: str
):
    with pytest.raises(SystemExit):
        run(monkeypatch, "digits-heterog-10", "fedavg lr=0.5", *given)
    assert message in capsys.readouterr().err
    assert not asked
