"""An exclusive lock on a file, held by one process and thread at a time."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedual.errors import DataError
from fedual.rundir.atomic import writing

UNCHANGED = "nothing was changed"
PAUSE = 0.05
"""Seconds between two attempts to take the lock."""


@contextmanager
def locked(path: Path, wait: float) -> Iterator[None]:
    """Hold an exclusive lock on a file. The file stays: if it were removed, two processes could hold two locks.

    Args:
        path: The file; made if it does not exist.
        wait: Seconds to wait until another process or thread releases it.
    """
    with writing(path, 0, UNCHANGED):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + wait
        while not _try_lock(handle, path):
            if time.monotonic() >= deadline:
                raise DataError(
                    f"{path} is held by another process or message, and still was after {wait:g} seconds: let it end, "
                    f"or stop it where two sites use one client id."
                )
            time.sleep(PAUSE)
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough if a forked child has the handle too
        os.close(handle)


def _try_lock(handle: int, path: Path) -> bool:
    with writing(path, 0, UNCHANGED):  # some file systems have no locks
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
