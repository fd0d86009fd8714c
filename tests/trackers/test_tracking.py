"""Trackers by name: packages that are missing, and `fedual run --track`."""

import shutil
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from fedual import trackers
from fedual.cli import build
from fedual.errors import InputError


def run(*arguments: str) -> str:
    done = CliRunner().invoke(build(), ["run", "--rounds", "2", "--set", "local_epochs=1", *arguments])
    if done.exception:
        raise done.exception
    return done.output


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_named_with_its_pip_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"{name} needs .*{name}, which is missing: pip install {name}$"):
        trackers.inside(tmp_path, name)


def test_an_unknown_tracker_or_flower_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        run("--track", "tensorbord")
    with pytest.raises(InputError, match="--track mlflow: runs on Flower are not tracked"):
        run("--track", "mlflow", "--engine", "flower")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")  # MLflow's use of SQLAlchemy
def test_run_tracks_into_its_folder(tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch):
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    Path("here/mlruns").mkdir(parents=True)
    shutil.copy(empty, "here/mlruns/mlflow.db")
    run("--track", "tensorboard", "--track", "mlflow", "--track", "mlflow", "--out", "here")
    assert {path.name for path in tmp_path.iterdir()} == {"here"}
    events = EventAccumulator("here/tensorboard").Reload()
    assert [event.step for event in events.Scalars("accuracy")] == [1, 2]
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/here/mlruns/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("fedual").experiment_id])  # type: ignore[union-attr]
    assert [metric.step for metric in client.get_metric_history(found.info.run_id, "accuracy")] == [1, 2]
    assert found.data.params["scenario.method"] == "ivon-admm"
