"""`python -m studies robustness`: the settings, the file of trials, and the table made from it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedual.errors import DataError, InputError
from studies import robustness
from studies.__main__ import app
from studies.robustness import PRESETS, SCENARIOS, VARIED, factors, read, table


def call(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["robustness", *arguments])
    if done.exception:
        raise done.exception
    return done.output


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """No network is trained; the trials asked for."""
    asked = []

    def trial(name, preset, by, device, root):
        asked.append((name, preset, json.dumps(by)))
        return {"scenario": name, "preset": preset, "factors": by, "accuracy": 0.5, "nll": 1.0}

    monkeypatch.setattr(robustness, "trial", trial)
    return asked


def test_factors_are_within_a_decade_and_the_same_every_time():
    some = factors(20)
    assert some == factors(40)[:20]
    assert all(0.1 <= by[key] <= 10 for by in some for key in VARIED)
    assert all(5 <= by["epochs"] <= 20 for by in some)


def test_shares_are_everything_once_and_trials_are_not_repeated(ran: list[tuple], tmp_path: Path):
    file = tmp_path / "new" / "trials.jsonl"
    for part in ("1/3", "2/3", "3/3", "1/1"):
        call("run", "--out", str(file), "--count", "2", "--part", part)
    expected = {(name, preset, json.dumps(by)) for name in SCENARIOS for preset in PRESETS for by in factors(2)}
    assert len(ran) == len(expected) == len(read(file))
    assert set(ran) == expected
    assert {"commit", "torch"} <= read(file)[0]["environment"].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "3/2"], "--part 3/2: write I/N"),
        (["--part", "x"], "--part x: write I/N"),
        (["--preset", "mine"], "--preset mine: choose among paper, default"),
        (["--scenario", "mine"], "--scenario mine: choose among mnist"),
    ],
)
def test_bad_input_is_refused(ran: list[tuple], tmp_path: Path, arguments: list[str], message: str):
    with pytest.raises(InputError, match=message):
        call("run", "--out", str(tmp_path / "x"), *arguments)
    assert not ran


def test_a_torn_line_is_named(ran: list[tuple], tmp_path: Path):
    file = tmp_path / "trials.jsonl"
    file.write_text('{"scenario": "a"}\n{"scen')
    with pytest.raises(DataError, match=r"line 2 of .*trials\.jsonl is no trial"):
        call("run", "--out", str(file))


def line(preset: str, accuracy: float | None, nll: float | None, commit: str) -> dict:
    one = {"scenario": next(iter(SCENARIOS)), "preset": preset, "factors": {}, "accuracy": accuracy, "nll": nll}
    return {**one, "environment": {"commit": commit}}


def test_the_table_counts_trials_near_the_best(tmp_path: Path):
    found = [
        line("paper", 0.80, 0.5, "1234567890+"),
        line("paper", None, None, "1234567890+"),
        line("paper", 0.1, 2.4, "abcdefghij"),  # log 10 = 2.30: worse than a guess
        line("default", 0.90, 0.5, "abcdefghij"),
        line("default", 0.88, 0.5, "abcdefghij"),
        line("default", 0.86, 0.5, "abcdefghij"),
    ]
    file = tmp_path / "trials.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in found))
    output = call("draw", str(file), "--out", str(tmp_path / "out"))
    assert f"| {next(iter(SCENARIOS))} | the paper's settings | 3 | 2 | 0 | 80.0 | 1234567+, abcdefg |\n" in output
    assert f"| {next(iter(SCENARIOS))} | the defaults | 3 | 0 | 2 | 90.0 | abcdefg |\n" in output
    assert (tmp_path / "out" / "robustness.md").read_text() == table(found)
    assert b"<svg" in (tmp_path / "out" / "robustness.svg").read_bytes()


def test_no_trials_no_picture(tmp_path: Path):
    with pytest.raises(InputError, match="no trial to draw"):
        call("draw", str(tmp_path / "nothing"))
