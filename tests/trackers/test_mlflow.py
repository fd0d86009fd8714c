"""What MLflow's client reads back from a local database."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tracked import DIVERGING, CrashError, crash_after, numbers, same_config, stop_after, train

from fedual.errors import DataError, DivergedError, InputError
from fedual.trackers import mlflow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),  # MLflow's use of SQLAlchemy
]


@pytest.fixture
def uri(tmp_path: Path, empty: Path) -> str:
    return f"sqlite:///{shutil.copy(empty, tmp_path / 'mlflow.db')}"


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def stored(uri: str, experiment: str = "fedual") -> list[Any]:
    """The runs of an experiment, the oldest first."""
    group = client(uri).get_experiment_by_name(experiment).experiment_id
    return client(uri).search_runs([group], order_by=["attributes.start_time ASC"])


def metrics(uri: str, name: str) -> dict[str, list[tuple[int, float]]]:
    keys = client(uri).get_run(name).data.metrics
    history = {key: client(uri).get_metric_history(name, key) for key in keys}
    return {key: sorted((metric.step, metric.value) for metric in found) for key, found in history.items()}


@pytest.mark.slow
def test_every_figure_of_every_round_and_the_config(uri: str):
    run = train(mlflow("mine", uri), description={"note": {"long": "x" * 7000, "empty": None}})
    (found,) = stored(uri, "mine")
    assert found.info.status == "FINISHED"
    assert metrics(uri, found.info.run_id) == numbers(run)
    params = found.data.params
    assert (params["note.long"], params["training.batch_size"]) == ("x" * 6000, "32")
    assert same_config(params | {"note.long": "x" * 7000}, run)


def test_a_resumed_run_appends_and_no_round_is_there_twice(tmp_path: Path, uri: str):
    with pytest.raises(CrashError):
        train(mlflow(uri=uri), crash_after(2), out=tmp_path / "run", rounds=3)
    (found,) = stored(uri)
    assert found.info.status == "FAILED"
    assert [step for step, _ in metrics(uri, found.info.run_id)["nll"]] == [1, 2]
    run = train(mlflow(uri=uri), out=tmp_path / "run", rounds=4)  # more rounds: parameters cannot change in MLflow
    (found,) = stored(uri)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    again, expected = metrics(uri, found.info.run_id), numbers(run)
    for timing in ("seconds", "evaluation_seconds"):  # of round 2 the first ones stay
        assert [step for step, _ in again.pop(timing)] == [step for step, _ in expected.pop(timing)]
    assert again == expected


def test_another_database_gets_the_whole_history(tmp_path: Path, uri: str, empty: Path):
    train(mlflow(uri=uri), out=tmp_path / "run", rounds=1)
    other = f"sqlite:///{shutil.copy(empty, tmp_path / 'other.db')}"
    run = train(mlflow(uri=other), out=tmp_path / "run", rounds=2)
    (found,) = stored(other)
    assert metrics(other, found.info.run_id) == numbers(run)


def test_runs_without_a_folder_are_runs_of_their_own(uri: str):
    for seed in (0, 1):
        train(mlflow(uri=uri), seed=seed, rounds=1)
    assert sorted(found.data.params["seed"] for found in stored(uri)) == ["0", "1"]


def test_a_run_that_diverges_failed_and_one_that_is_stopped_did_not(uri: str):
    with pytest.raises(DivergedError):
        train(mlflow(uri=uri), method=DIVERGING)
    train(mlflow(uri=uri), stop_after(1), rounds=3)
    assert [found.info.status for found in stored(uri)] == ["FAILED", "FINISHED"]


def test_a_uri_that_mlflow_refuses_is_refused_before_training(tmp_path: Path):
    seen = []
    with pytest.raises(InputError, match="MLflow cannot use uri = 'nowhere:x'"):
        train(mlflow(uri="nowhere:x"), lambda run, record: seen.append(record), out=tmp_path / "run")
    assert not seen


@pytest.mark.slow
def test_a_damaged_memory_of_trackers_is_named(tmp_path: Path, uri: str):
    train(mlflow(uri=uri), out=tmp_path / "run", rounds=1)
    memory = tmp_path / "run" / "trackers.json"
    assert json.loads(memory.read_text()) == {"mlflow": stored(uri)[0].info.run_id}
    memory.write_text("{")
    with pytest.raises(DataError, match=r"trackers\.json cannot be read"):
        train(mlflow(uri=uri), out=tmp_path / "run", rounds=2)
