"""Data files: where they live, how their content is read, and how it is verified.

Sizes and digests are those of the *plain* content, so that a file may be stored gzipped or not and a gzip
made by another program still verifies.
"""

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from fedual.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
MAX_BYTES = 1 << 28
"""Plain content beyond this is refused: the largest supported file has 155 MB, a gzip bomb has no end."""


class File(NamedTuple):
    """A published file: its name, and the size and digest (`algorithm:hex`) of its plain content."""

    name: str
    size: int | None
    digest: str


def root_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder that holds all data sets: `root`, else `$FEDUAL_DATA`, else the user's cache folder."""
    if root is not None:
        return Path(root).expanduser()
    if chosen := os.environ.get("FEDUAL_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedual"


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a file's plain content; gzip is known by its magic number, not by the file's name.

    Raises:
        DataError: whatever goes wrong while the file is open: unreadable, or a damaged or truncated gzip.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == GZIP_MAGIC
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
    except EOFError:
        raise DataError(f"{path} is a truncated gzip file") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file ({error})") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None


def read_plain(path: Path) -> bytes:
    """Return a file's plain content."""
    with open_plain(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DataError(f"{path} holds more than {MAX_BYTES} bytes, more than any file of the supported data sets")
    return content


def check_labels(path: Path, labels: np.ndarray, num_classes: int) -> None:
    """Refuse a file without examples or with a label that is no class."""
    if not len(labels):
        raise DataError(f"{path} holds no examples")
    if labels.max() >= num_classes:
        raise DataError(f"{path} holds the label {labels.max()}, which is not in 0…{num_classes - 1}")


def verify(path: Path, expected: File) -> None:
    """Check a file's plain content against its published size and digest.

    Raises:
        DataError: the content is not that of the published file.
    """
    algorithm, _, digest = expected.digest.partition(":")
    state = hashlib.new(algorithm, usedforsecurity=False)
    size = 0
    with open_plain(path) as file:
        while size <= MAX_BYTES and (chunk := file.read(1 << 20)):
            size += len(chunk)
            state.update(chunk)
    if expected.size is not None and size != expected.size:
        raise DataError(f"{path} holds {size} bytes where the published file has {expected.size}")
    if state.hexdigest() != digest:
        raise DataError(f"{path} is not the published file: its {algorithm} is {state.hexdigest()}, not {digest}")
