from pathlib import Path

import pytest
from fake_training import Fake

from fedual.scenarios import federation


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """A stand-in for `fit`, in an empty folder."""
    stand_in = Fake()
    monkeypatch.setattr(federation, "fit", stand_in.fit)
    monkeypatch.chdir(tmp_path)
    return stand_in
