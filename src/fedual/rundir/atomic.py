"""Write files and folders whole or not at all, even if the machine loses power."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from fedual.errors import DataError, InputError

INTACT = "what was there before is intact"


logger: logging.Logger = logging.getLogger("fedual")
OTHERS = 0o077
"""Permissions of a folder for all but its owner."""
PRIVATE, SHARED = 0o600, 0o666
"""Permissions of a new file: for its owner alone, or as the process's umask allows."""


def write(path: Path, content: bytes, mode: int = SHARED) -> None:
    """Write a new file with these permissions, in place of one that is there, and wait until it is on disk."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # one that a kill has left has permissions of its own
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's content, or the list of names in a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which is renamed to `path` when the block succeeds.

    The block makes a file or a folder there and syncs it (`write`, `sync`). If it fails, the temporary path is removed.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace(path: Path, content: bytes, mode: int = SHARED) -> None:
    """Replace the content of a file: readers see the old or the new content, never a mixture."""
    with replacing(path) as temporary:
        write(temporary, content, mode)


@contextmanager
def writing(path: Path, nbytes: int, remains: str = INTACT) -> Iterator[None]:
    """Turn an OSError (full disk or quota, missing permission, broken device) into a DataError of one sentence.

    It names the path, its size in bytes, and what remains intact if writing fails.
    """
    try:
        yield
    except OSError as error:
        cause = f"{path} cannot be written ({error.strerror or error}): it takes {nbytes} bytes"
        raise DataError(f"{cause}; make room or allow writing, then resume or try again: {remains}.") from error


def store(path: Path, content: bytes, remains: str = INTACT, mode: int = SHARED) -> None:
    """`replace` a file, with the error of `writing`."""
    with writing(path, len(content), remains):
        replace(path, content, mode)


def make_folder(folder: Path) -> None:
    """Make the folder of a run, unless it is there; refuse a place that cannot hold one."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: choose a folder for the run.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error.strerror}): choose another folder for the run.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder} is not writable: choose another folder for the run, or allow writing.")


def make_private(folder: Path) -> None:
    """Make a folder that nobody but its owner can read, unless it is there; warn if others can list what it holds."""
    with writing(folder, 0, "nothing was changed"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & OTHERS:
            _warn(folder)


@cache
def _warn(folder: Path) -> None:
    """Warn once in a process."""
    logger.warning("%s can be entered by others than its owner: allow only the owner (chmod 700).", folder)
