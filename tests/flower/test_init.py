import ast
import importlib.util
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from here import Here
from typer.testing import CliRunner

from fedual import Posterior, data
from fedual.cli import build
from fedual.errors import InputError


def init(*arguments: str) -> str:
    done = CliRunner().invoke(build(), ["init", *arguments])
    if done.exception:
        raise done.exception
    return done.output


def test_the_flower_app_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert "app.py" in init(str(tmp_path / "mine"), "--flower")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedual.flower.roster.POLL", 0.0)
    about = tomllib.loads((tmp_path / "mine" / "pyproject.toml").read_text())
    assert about["tool"]["flwr"]["app"]["components"] == {"serverapp": "app:server", "clientapp": "app:client"}
    assert about["project"]["dependencies"] == []
    spec = importlib.util.spec_from_file_location("app", tmp_path / "mine" / "app.py")
    assert spec
    assert spec.loader
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    nodes = {"partition-id": 0, "num-partitions": 2, "state-dir": str(tmp_path / "state")}
    grid = Here({k: (app.client, {**nodes, "partition-id": k}) for k in range(2)})
    app.main(grid, Context(1, 1, {}, RecordDict(), {**about["tool"]["flwr"]["app"]["config"], "rounds": 1}))
    digits = data.load("digits")
    found = Posterior.load(tmp_path / "runs" / "digits" / "posterior.safetensors", app.model())
    guessed = found.predict(digits.x_test).probabilities.argmax(1)  # type: ignore[union-attr]
    assert float((guessed == digits.y_test).double().mean()) > 0.5


def test_the_flower_app_is_short_and_its_apps_are_plain_assignments(tmp_path: Path):
    init(str(tmp_path / "mine"), "--flower")
    source = (tmp_path / "mine" / "app.py").read_text()
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith('"""')]
    assert len(lines) <= 30
    names = [node.targets[0] for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    assert [name.id for name in names if isinstance(name, ast.Name)] == ["client", "server"]  # Flower reads the source


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="exists"):
        init(str(tmp_path / "mine"), "--flower")
    assert not list((tmp_path / "mine").iterdir())
