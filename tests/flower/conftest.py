import os

import pytest

from fedual.flower import roster


class Clock:
    """Time that passes only when somebody waits."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Nobody waits in real time; and what is given to the system survives a kill without fsync."""
    found = Clock()
    monkeypatch.setattr(roster, "time", found)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    return found
