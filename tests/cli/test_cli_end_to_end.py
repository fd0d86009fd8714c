"""The commands as a user runs them, with real training on the bundled digits."""

import json

import pytest
from command import Done, fedual, process

from fedual.posterior import Posterior


def answer(done: Done) -> dict:
    assert done.code == 0, done.err
    assert not done.err  # no terminal, no progress
    return json.loads(done.out.splitlines()[-1])


def test_run_and_resume(tmp_path):
    """What one process began, another one ends bit for bit as if it had begun it."""
    quick = ["run", "--set", "local_epochs=1", "--json"]
    first = answer(process(tmp_path, *quick, "--rounds", "2"))
    assert (first["scenario"], first["method"], first["rounds"]) == ("digits-heterog-10", "ivon-admm", 2)
    resumed = answer(fedual(tmp_path, *quick, "--rounds", "3", "--resume"))
    whole = answer(fedual(tmp_path, *quick, "--rounds", "3"))
    assert resumed["path"] == first["path"] != whole["path"]
    for record in (resumed["last"], whole["last"]):
        for name in ("seconds", "evaluation_seconds", "calibration_seconds"):
            record.pop(name)
    assert resumed["last"] == whole["last"]

    posterior = Posterior.load(tmp_path / whole["path"] / "posterior.safetensors")
    assert posterior.network.dim == 64 * 100 + 100 + 100 * 50 + 50 + 50 * 10 + 10
    assert "calibrated in 5 short runs on 1432 held-out examples of 8 sites" in repr(posterior)


def test_compare(tmp_path):
    short = ["--rounds", "1", "--seeds", "0,1", "--json"]
    report = answer(fedual(tmp_path, "compare", "digits-homog-10", "--methods", "fedavg,fedlap-cov", *short))
    for row in report["methods"]:
        assert len({run["record"]["nll"] for run in row["runs"]}) == 2  # seeds differ
        assert row["summary"]["diverged"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "digits"], "did you mean"),
        (["run", "--set", "rhoo=1"], "did you mean 'rho'"),
        (["run", "--method", "feddin"], "did you mean 'feddyn'"),
        (["run", "--device", "cuda:7"], "cuda:7"),
        (["run", "--set", "lr=-1"], "lr = -1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    done = fedual(tmp_path, *arguments)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_run_that_diverges_says_what_to_change(tmp_path):
    """Two of the settings of the paper's method that are known to run away: no limit on the step, a large lr."""
    wild = ["--set", "clip=0.0", "--set", "lr=5.0", "--set", "tau=0.001", "--rounds", "5"]
    done = fedual(tmp_path, "run", *wild)
    assert done.code == 2
    assert "diverged" in done.err
    assert "set clip = 1" in done.err
    assert len(done.err.strip().splitlines()) == 1
