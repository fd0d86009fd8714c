import json
import math
import re
import statistics
from pathlib import Path

import pytest
from fake_training import Fake
from typer.testing import CliRunner

from fedual.cli import build
from fedual.comparison import table
from fedual.errors import InputError
from fedual.scenarios import load
from fedual.scenarios.sweep import TUNING_SEED, _loss


def compare(*arguments: str, methods: str = "ivon-admm,fedavg") -> str:
    done = CliRunner().invoke(build(), ["compare", "digits-heterog-10", "--methods", methods, *arguments])
    if done.exception:
        raise done.exception
    return done.output


def test_every_method_and_seed_at_equal_rounds(fake: Fake):
    fake.nll = lambda method, asked: 0.25 + asked["seed"] / 8
    last = json.loads(compare("--seeds", "1,2,4", "--rounds", "3", "--json").splitlines()[-1])
    assert [(asked["seed"], asked["rounds"]) for asked in fake.asked] == [(seed, 3) for seed in (1, 2, 4)] * 2
    losses = [0.25 + seed / 8 for seed in (1, 2, 4)]
    for row in last["methods"]:
        assert row["summary"]["nll"]["mean"] == pytest.approx(statistics.fmean(losses))
        assert row["summary"]["nll"]["sd"] == pytest.approx(statistics.stdev(losses))
        assert row["summary"]["seconds_per_round"] == {"mean": 2.0, "sd": 0.0}
        assert row["trials"] == []
    assert "nll_mc" in last["methods"][0]["summary"]
    assert "nll_mc" not in last["methods"][1]["summary"]


def test_table_and_files(fake: Fake, tmp_path: Path):
    output = compare("--seeds", "0,1", "--rounds", "1", "--out", "here")
    rows = [re.split(" {2,}", line.strip()) for line in output.splitlines() if re.search(r"\d ± \d", line)]
    assert [row[:2] for row in rows] == [["ivon-admm", "mean"], ["ivon-admm", "q_g"], ["fedavg", "mean"]]
    assert rows[0][2:] == ["75.0 ± 0.0", "0.500 ± 0.000", "0.125 ± 0.000", "2.00", "0 of 2"]
    assert rows[1][2:5] == ["37.5 ± 0.0", "0.250 ± 0.000", "0.062 ± 0.000"]
    assert "ivon-admm: q_g is tempered" in output
    written = json.loads((tmp_path / "here" / "compare.json").read_text())
    assert {"scenario", "rounds", "seeds", "environment", "methods"} <= written.keys()
    assert written["environment"]["torch"]
    assert [run["seed"] for run in written["methods"][0]["runs"]] == [0, 1]
    assert {p.name for p in (tmp_path / "here").iterdir() if p.is_dir()} == {
        f"{method}-{seed}" for method in ("ivon-admm", "fedavg") for seed in (0, 1)
    }


def test_sweep_chooses_by_validation_nll_and_reports_on_all_data(fake: Fake):
    """The fake's loss has its minimum at lr = 3e-3 among the trials; two of them diverge, one way or the other."""
    wanted = 3e-3

    def nll(method, asked):
        lr = method.solver.lr
        return None if lr == 3e-2 else math.nan if lr == 1e-2 else abs(math.log(lr / wanted))

    fake.nll = nll
    output = compare("--sweep", "--seeds", "0,1", "--rounds", "1", "--json", methods="fedavg")
    (row,) = json.loads(output.splitlines()[-1])["methods"]
    trials = load("digits-heterog-10", method="fedavg").trials()
    assert [trial["settings"] for trial in row["trials"]] == [settings for settings, _ in trials]
    assert row["trials"][row["chosen"]]["settings"] == {"lr": wanted}
    assert [bool(trial["diverged"]) for trial in row["trials"]] == [
        settings["lr"] in (1e-2, 3e-2) for settings, _ in trials
    ]
    tuning, reported = fake.asked[: len(trials)], fake.asked[len(trials) :]
    total = sum(map(len, reported[0]["clients"].parts))
    for asked in tuning:
        assert asked["seed"] == TUNING_SEED
        assert asked.get("out") is None
        assert sum(map(len, asked["clients"].parts)) + len(asked["test"][1]) == total
    assert [(asked["seed"], asked["method"].solver.lr) for asked in reported] == [(0, wanted), (1, wanted)]
    assert len(reported[0]["test"][1]) == 1797 - total  # the true test set
    assert "chosen" in output
    assert "diverged" in output


def test_all_trials_diverged(fake: Fake):
    fake.nll = lambda method, asked: None if hasattr(method.solver, "h0") else 0.5
    output = compare("--sweep", "--seeds", "0", "--rounds", "1", "--json")
    ivon, fedavg = json.loads(output.splitlines()[-1])["methods"]
    assert (ivon["runs"], ivon["chosen"]) == ([], None)
    assert len(fedavg["runs"]) == 1
    assert "every trial" in output


def test_a_diverged_run_is_a_result(fake: Fake):
    fake.nll = lambda method, asked: None if asked["seed"] == 1 else 0.5
    output = compare("--seeds", "0,1,2", "--rounds", "1", "--json", methods="fedavg")
    (row,) = json.loads(output.splitlines()[-1])["methods"]
    assert row["summary"]["diverged"] == 1
    assert row["summary"]["nll"] == {"mean": 0.5, "sd": 0.0}
    assert "No client's update" in row["runs"][1]["diverged"]
    assert "1 of 3" in output


def test_what_is_done_is_written_before_the_next_run(fake: Fake):
    """Interrupted in its third run, a comparison keeps the first two."""

    def nll(method, asked):
        if len(fake.asked) == 3:
            raise KeyboardInterrupt
        return 0.5

    fake.nll = nll
    with pytest.raises(SystemExit):
        compare("--seeds", "0,1,2", "--rounds", "1", methods="fedavg")
    (row,) = json.loads(Path("runs/digits-heterog-10-compare/compare.json").read_text())["methods"]
    assert len(row["runs"]) == 2


@pytest.mark.parametrize(
    ("arguments", "methods", "message"),
    [
        ([], "fedavg,fedavgg", "did you mean 'fedavg"),
        ([], "fedavg,fedavg", "named twice in fedavg, fedavg"),
        ([], ",", "no method to compare"),
        (["--seeds", "0,x"], "fedavg", "--seeds 0,x: give whole numbers"),
        (["--seeds", "0,0"], "fedavg", "named twice in 0, 0"),
        (["--sweep", "--seeds", str(TUNING_SEED)], "fedavg", "report other seeds"),
        (["--sweep"], "fedavg,admm", "fedavg 8, admm 0: give every method"),
    ],
)
def test_bad_comparisons_are_refused_before_any_run(fake: Fake, arguments: list[str], methods: str, message: str):
    with pytest.raises(InputError, match=message):
        compare(*arguments, methods=methods)
    assert not fake.asked


def test_another_comparison_is_not_overwritten(fake: Fake):
    compare("--seeds", "0", "--rounds", "1", "--out", "here", methods="fedavg")
    with pytest.raises(InputError, match="the result of another comparison"):
        compare("--seeds", "0", "--rounds", "1", "--out", "here", methods="fedavg")


def test_a_regression_is_shown_and_judged_by_the_figures_that_it_has():
    shown = table({"fedavg": {"runs": 1, "diverged": 0, "rmse": {"mean": 0.25, "sd": None}}})
    assert shown == [["method", "at", "RMSE", "s/round", "diverged"], ["fedavg", "mean", "0.250", "–", "0 of 1"]]
    assert _loss({"record": {"loss": 0.5}}) == 0.5  # of a loss without an NLL
    assert _loss({"record": {"nll": 2.0, "rmse": 0.5}}) == 2.0
