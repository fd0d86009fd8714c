"""Time that passes only when somebody waits, and a disk that needs no fsync, for a process that only runs cases."""

import functools
import logging
import os

from fedual import settings
from fedual.flower import roster


class Clock:
    """What `fedual.flower.roster` takes for the time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def hurried() -> Clock:
    """Replace time, fsync and Flower's log in this process for good; call it in a process of the adversary's only."""
    clock = Clock()
    roster.time = clock  # type: ignore[assignment]  # pyright: ignore[reportPrivateImportUsage]
    os.fsync = lambda file: None  # type: ignore[assignment]
    logging.disable(logging.CRITICAL)
    # a fifth of the time of small runs: types of settings, and git's answer which commit this is
    settings.kinds = functools.cache(settings.kinds)
    os.environ["FEDUAL_COMMIT"] = "adversary"
    return clock
