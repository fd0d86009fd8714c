"""Time that passes only when somebody waits, and a disk that needs no fsync, for a process that only runs cases."""

import functools
import logging
import os
import typing

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
    typing.get_type_hints = functools.cache(typing.get_type_hints)  # a tenth of the time of small rounds
    return clock
