"""`fedual init`: a project that runs at once."""

import csv
import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from command import fedual
from typer.testing import CliRunner

from fedual.cli import build
from fedual.errors import DataError, InputError
from fedual.scenarios import load
from fedual.scenarios.federation import execute, materialise

HOSPITALS = [f"hospital-{number}.csv" for number in (1, 2, 3, 4)]


def init(*arguments: str) -> str:
    done = CliRunner().invoke(build(), ["init", *arguments])
    if done.exception:
        raise done.exception
    return done.output


def table(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects") / "demo"
    init(str(folder))
    return folder


def test_what_is_written(project: Path):
    assert sorted(path.name for path in project.iterdir()) == ["README.md", "data", "model.py", "scenario.toml"]
    assert sorted(path.name for path in (project / "data").iterdir()) == [*HOSPITALS, "test.csv"]


def test_the_tables_are_the_patients_each_once(project: Path):
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    found, sizes, ill = [], [], []
    for name in (*HOSPITALS, "test.csv"):
        header, *rows = table(project / "data" / name)
        assert len(header) == 31
        found += [[*map(float, row[:-1]), row[-1]] for row in rows]
        sizes.append(len(rows))
        ill.append(np.mean([row[-1] == "malignant" for row in rows]))
    words = np.array(["malignant", "benign"])  # scikit-learn's 0 and 1
    expected = [[*row, words[label]] for row, label in zip(x.tolist(), y.tolist(), strict=True)]
    assert sorted(found) == sorted(expected)
    assert abs(ill[-1] - (y == 0).mean()) < 0.01  # the test set is like all patients
    assert max(sizes[:-1]) > 3 * min(sizes[:-1])
    assert max(ill[:-1]) > 3 * min(ill[:-1])


def test_it_learns(project: Path):
    done = execute(load(project / "scenario.toml"), 0, device="cpu")
    assert done.history[-1]["accuracy"] > 0.93
    assert done.history[-1]["accuracy_mc"] > 0.93
    assert done.config["classes"] == ["benign", "malignant"]


def test_the_same_seed_and_rounds_for_a_preset_and_a_sweep(project: Path):
    assert load(project / "scenario.toml", preset="quick").train["rounds"] == 3
    for method in ("ivon-admm", "fedavg"):
        assert len(load(project / "scenario.toml", method=method).trials()) == 4


def test_every_line_that_is_commented_out_can_be_said(project: Path, tmp_path: Path):
    """A key that is only explained must be right, too; those in place of others are left out."""
    text = (project / "scenario.toml").read_text()
    for line in ('# drop = ["patient"]', "# fraction = 0.5", '# loss = "mse"', "# participation = 0.5"):
        assert text.count(line) == 1
        text = text.replace(line, line.removeprefix("# "))
    path = project / "other.toml"
    path.write_text(text.replace('"patient"', '"mean_area"').replace("inputs = 30", "inputs = 29"))
    try:
        assert load(path).train["participation"] == 0.5
        with pytest.raises(DataError, match="a regression needs numbers"):
            materialise(load(path), 0)
        path.write_text(path.read_text().replace('loss = "mse"', ""))
        assert materialise(load(path), 0).clients.x.shape == (398, 29)
    finally:
        path.unlink()


def test_the_commands_of_the_readme(project: Path, tmp_path: Path):
    """Each names a command and options that there are, and files that are there after the ones before it."""
    lines = [line.strip() for line in (project / "README.md").read_text().splitlines() if line.startswith("    fedual")]
    commands = [line.partition("#")[0].split() for line in lines]
    assert [command[1] for command in commands] == ["run", "report", "predict", "compare", "init"]
    for _, *arguments in commands:
        short = ["--rounds", "1"] if arguments[0] in ("run", "compare") else []
        done = fedual(project, *arguments, *short)
        assert done.code == 0, done.err
    config = json.loads((project / "runs" / "scenario-ivon-admm-0" / "config.json").read_text())
    assert config["model"]["model"] == "model:build"
    assert tomllib.loads((project.parent / "my-deployment" / "pyproject.toml").read_text())


def test_here_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    output = init()
    assert (tmp_path / "scenario.toml").exists()
    assert "  fedual run scenario.toml" in output
    assert "cd " not in output


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    for given in (tmp_path / "mine", tmp_path / "mine" / "notes"):
        with pytest.raises(InputError, match="is not an empty folder"):
            init(str(given))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        init(str(tmp_path / "file" / "demo"))


def test_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="scikit-learn, which is missing"):
        init(str(tmp_path / "mine"))
    assert not (tmp_path / "mine").exists()
