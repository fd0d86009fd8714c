"""`python -m studies tuning`: the grid, its lines, and what it must never use."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedual.errors import DivergedError, InputError
from studies import tuning
from studies.__main__ import app


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

    monkeypatch.setattr(tuning, "execute", execute)
    return seen


def run(*arguments: str) -> None:
    done = CliRunner().invoke(app, ["tuning", *arguments])
    if done.exception:
        raise done.exception


def test_the_grid_has_all_combinations():
    assert tuning.grid("fedprox rho=1,2 lr=3,4") == (
        "fedprox",
        [["rho=1", "lr=3"], ["rho=1", "lr=4"], ["rho=2", "lr=3"], ["rho=2", "lr=4"]],
    )
    assert tuning.grid("fedavg") == ("fedavg", [[]])


def test_every_trial_is_a_line(asked: list[dict], tmp_path: Path):
    specs = ["fedavg lr=0.5,1", "feddyn lr=0.25"]
    run("digits-heterog-10", *specs, "--seed", "1", "--seed", "2", "--rounds", "7", "--out", str(tmp_path))
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
        (["--seed", "1", "--seed", "63"], "--seed 63 is one of those that are reported"),
        (["--validation", "0"], "the test set would choose"),
        (["--validation", "1"], "above 0 and below 1"),
    ],
)
def test_the_test_set_and_reported_seeds_are_left_alone(asked: list[dict], given: list[str], message: str):
    with pytest.raises(InputError, match=message):
        run("digits-heterog-10", "fedavg lr=0.5", *given)
    assert not asked
