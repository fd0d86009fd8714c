"""Exclusive locks: of a folder for a whole run (`in_use`), of a file for a moment (`locked`).

Both are locks of the system (flock), which end with their process, however it ends.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

from fedual.errors import DataError, FedualError, InputError
from fedual.rundir.atomic import PRIVATE, make_folder, writing

P = ParamSpec("P")
T = TypeVar("T")
LOCK = "lock"
"""The file in a folder that is in use; it says by whom."""
UNCHANGED = "nothing was changed"
PAUSE = 0.05
"""Seconds between two attempts to take the lock."""
ATTEMPTS = 10
"""How often a holder that has not said who it is yet is looked up, and a folder is made."""
LONGEST_NAME = 300
"""Bytes that are read of a process's number and its machine's name."""


@contextmanager
def in_use(folder: Path | None) -> Iterator[None]:
    """Hold a run's folder alone; None is no folder.

    A folder that does not exist is made, and removed again if it is still empty at the end.

    Raises:
        InputError: Another run holds it, in this process or another; or it cannot be made or written.
        DataError: Its file system has no locks.
    """
    if folder is None:
        yield
        return
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    handle = _take(folder)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        _release(handle)
        with suppress(OSError):  # not empty
            for each in made:
                each.rmdir()


def alone_in_out(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function hold the folder of its keyword argument `out` while it runs."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        out = cast("str | os.PathLike[str] | None", kwargs.get("out"))
        with nullcontext() if out is None else in_use(Path(out)):
            return function(*args, **kwargs)

    return call


@contextmanager
def locked(path: Path, wait: float) -> Iterator[None]:
    """Hold an exclusive lock on a file. The file stays: if it were removed, two processes could hold two locks.

    Args:
        path: The file; made if it does not exist.
        wait: Seconds to wait until another process or thread releases it.
    """
    handle = _open(path)
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
        _release(handle)


def _take(folder: Path) -> int:
    """The handle of a folder's lock, which says that this process has it."""
    path = folder / LOCK
    while True:
        handle = _made(folder)
        if not _try_lock(handle, path):
            holder = _holder(handle)
            os.close(handle)
            raise InputError(f"{folder} is in use by {holder}: let that end, or choose another folder.")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                break
        _release(handle)  # the last holder has just removed the file
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode()[:LONGEST_NAME], 0)
    return handle


def _made(folder: Path) -> int:
    """The handle of a folder's lock, both made if need be; the last holder may be removing them at the same time."""
    for left in reversed(range(ATTEMPTS)):
        try:
            make_folder(folder)
            return _open(folder / LOCK)
        except FedualError:
            if not left:
                raise
    raise AssertionError


def _holder(handle: int) -> str:
    """Who has a lock, in words; whoever has just taken it says so in a moment."""
    for _ in range(ATTEMPTS):
        if name := os.pread(handle, LONGEST_NAME, 0):
            return name.decode(errors="replace")
        time.sleep(PAUSE)
    return "another process"


def _open(path: Path) -> int:
    with writing(path, 0, UNCHANGED):
        return os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE)


def _release(handle: int) -> None:
    fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough if a forked child has the handle too
    os.close(handle)


def _try_lock(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        why = f"{path} cannot be locked ({error.strerror})"
        raise DataError(f"{why}: its file system has no locks (flock), choose a folder on another.") from error
    return True
