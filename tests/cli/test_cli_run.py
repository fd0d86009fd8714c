import io
import json
import math
import re
from pathlib import Path
from typing import ClassVar

import pytest
from fake_training import Fake, record_of
from rich.console import Console
from typer.testing import CliRunner

from fedual.cli import build
from fedual.cli.progress import progress
from fedual.cli.run import report, times
from fedual.errors import InputError
from fedual.scenarios import load
from fedual.settings import Execution, LocalTraining


def run(*arguments: str) -> str:
    done = CliRunner().invoke(build(), ["run", *arguments])
    if done.exception:
        raise done.exception
    return done.output


def test_without_arguments_it_runs_the_default_scenario(fake: Fake):
    output = run()
    (asked,) = fake.asked
    assert (asked["rounds"], len(asked["clients"]), asked["seed"]) == (20, 10, 0)
    assert (asked["execution"], asked["resume"]) == (Execution(), False)
    assert asked["local"] == LocalTraining(batch_size=32, local_epochs=10)
    assert asked["clients"].description["scenario"]["name"] == "digits-heterog-10"
    assert "20 rounds" in output
    assert "runs/digits-heterog-10-ivon-admm-0" in output


def test_options_reach_fit(fake: Fake, tmp_path: Path):
    options = "--method fedprox --rounds 3 --seed 7 --set lr=0.5 --set batch_size=16 --device cpu --engine sequential"
    run("digits-homog-10", *options.split(), "--out", str(tmp_path / "here"), "--resume")
    (asked,) = fake.asked
    assert (asked["rounds"], asked["seed"], asked["local"].batch_size) == (3, 7, 16)
    assert (asked["execution"], asked["resume"]) == (Execution(device="cpu", engine="sequential"), True)
    assert asked["out"] == tmp_path / "here"
    assert asked["method"].solver.lr == 0.5


def test_table_has_the_last_round_at_the_mean_and_under_q_and_says_that_it_is_tempered(fake: Fake):
    output = run("--rounds", "2", "--set", "tau=0.25")
    rows = [re.split(" {2,}", line.strip()) for line in output.splitlines() if "%" in line]
    assert rows == [["at the mean", "75.0%", "0.500", "0.125"], ["under q_g", "37.5%", "0.250", "0.062"]]
    assert "τ = 0.25; it counts every example 4 times" in output
    assert "2 updates of clients were refused" in output


def test_a_regression_has_its_own_figures_and_is_not_compared_with_guessing(capsys: pytest.CaptureFixture[str]):
    record = {"round": 3, "refused": 0, "shortened": 1.0, "rmse": 0.25, "nll": 0.95, "rmse_mc": 0.5, "nll_mc": 0.75}
    report(load("digits-heterog-10", sets=["model.outputs=1"]), [record], "")
    lines = [re.split(" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [["RMSE", "NLL"], ["at the mean", "0.250", "0.950"], ["under q_g", "0.500", "0.750"]]
    assert not any("guessing" in line[0] for line in lines)


@pytest.mark.parametrize(("r2", "told"), [(0.3, False), (-0.25, True)])
def test_a_regression_says_when_it_is_worse_than_the_mean(capsys: pytest.CaptureFixture[str], r2: float, told: bool):
    record = {"round": 3, "refused": 0, "shortened": 1.0, "rmse": 0.25, "r2": r2, "nll": 0.95}
    report(load("digits-heterog-10", sets=["model.outputs=1"]), [record], "")
    assert ("R² is -0.25: the run predicts worse than the mean" in capsys.readouterr().out) == told


def test_a_point_method_has_no_figures_under_q(fake: Fake):
    output = run("--method", "fedavg", "--rounds", "1")
    assert "at the mean" in output
    assert "under q_g" not in output
    assert "tempered" not in output


def test_the_next_free_folder_unless_resumed(fake: Fake):
    for more in ([], [], [], ["--resume"]):
        run("--rounds", "1", *more)
    base = Path("runs/digits-heterog-10-ivon-admm-0")
    assert [asked["out"] for asked in fake.asked] == [base, *(Path(f"{base}-{n}") for n in (2, 3)), base]


def test_json_is_the_last_line(fake: Fake):
    fake.nll = lambda method, asked: math.nan
    last = json.loads(run("--rounds", "2", "--json").splitlines()[-1], parse_constant=pytest.fail)
    assert {key: last[key] for key in ("scenario", "method", "seed", "rounds")} == {
        "scenario": "digits-heterog-10",
        "method": "ivon-admm",
        "seed": 0,
        "rounds": 2,
    }
    assert last["last"]["round"] == 2
    assert last["last"]["nll"] is None  # JSON has no NaN
    assert Path(last["path"]).is_dir()
    assert last["seconds"] > 0
    assert set(last["times"]) == {"training", "evaluation", "compilation", "start and files"}


def test_the_last_line_says_how_long_training_and_evaluation_took(fake: Fake):
    """Of the stand-in's rounds, two seconds each by its own account, and none of evaluation."""
    output = run("--rounds", "3")
    assert re.search(r"^3 rounds, \d+\.\d s \(training 6\.0, evaluation 0\.0\), in runs/", output, re.MULTILINE)


class TestTimes:
    """What a run's seconds were for."""

    ROUNDS: ClassVar = [{"seconds": 9.0}, {"seconds": 2.0, "evaluation_seconds": 0.5}, {"seconds": 3.0}]

    def test_the_parts_are_all_of_it(self):
        spent = times(self.ROUNDS, 20.0)
        assert spent == {"training": 7.0, "evaluation": 0.5, "compilation": 7.0, "start and files": 5.5}
        assert sum(spent.values()) == 20.0

    def test_a_first_round_that_was_no_slower_compiled_nothing(self):
        assert times(self.ROUNDS[1:], 6.0) == {
            "training": 5.0,
            "evaluation": 0.5,
            "compilation": 0.0,
            "start and files": 0.5,
        }

    def test_too_few_rounds_to_tell(self):
        assert times(self.ROUNDS[:1], 10.0)["compilation"] == 0.0
        assert set(times([], 1.5).values()) == {0.0, 1.5}

    def test_a_resumed_run_took_no_negative_time(self):
        """Its history has rounds of the earlier process, too."""
        assert times(self.ROUNDS, 4.0)["start and files"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits"], "unknown scenario"),
        (["--method", "fedavgg"], "did you mean 'fedavg"),
        (["--set", "lrr=1"], "did you mean 'lr"),
        (["--preset", "paper"], "unknown preset"),
        (["--set", "lr=-1"], "lr = -1: it must be a positive"),
    ],
)
def test_bad_input_is_refused_before_any_work(fake: Fake, arguments: list[str], message: str):
    with pytest.raises(InputError, match=message):
        run(*arguments)
    assert not fake.asked
    assert not Path("runs").exists()


def show(terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with progress(console) as watch:
        callback = watch("a run", 5)
        callback(None, None)
        callback(None, record_of(2, 0.375))  # resumed after round 1
        callback(None, {**record_of(3, 0.25), "accuracy": None, "nll": None})  # a round that was not evaluated
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_progress_shows_the_round_and_the_last_figures_known():
    shown = show(terminal=True)
    for words in ("a run", "3/5", "9 clients", "1 refused", "accuracy 75.0%", "NLL 0.375"):
        assert words in shown
    assert "\x1b[31m1 refused" in shown  # in red


def test_progress_is_quiet_where_there_is_no_terminal():
    assert show(terminal=False) == ""
