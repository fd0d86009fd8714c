import warnings
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow without runs, to copy: making its tables takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        warnings.filterwarnings("ignore", "The ``noload`` loader", DeprecationWarning)  # its use of SQLAlchemy
        MlflowClient(tracking_uri=f"sqlite:///{path}")
    return path


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch):
    """Nothing is sent anywhere."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
