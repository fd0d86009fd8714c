"""Files that are there whole or not at all, also after the machine loses power."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedual.errors import DataError


def write(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(path: Path, content: bytes) -> None:
    """Put new content in the place of a file: whoever opens it finds the old or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def writing(path: Path, nbytes: int, remains: str) -> Iterator[None]:
    """Say in one sentence what could not be written, how much room it takes and what is still there.

    Raises:
        DataError: in the place of any OSError: a full disk or quota, no permission, a broken device.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror or error}): it takes {nbytes} bytes; "
            f"make room or allow writing, then resume: {remains}."
        ) from error
