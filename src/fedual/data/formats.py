"""The formats of MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100.

- IDX (MNIST and Fashion-MNIST): `00 00 08 d`, the d dimensions as big-endian 32-bit integers, and that many bytes.
- Binary: records of one label byte (CIFAR-100: a coarse and a fine one) and 3072 bytes of pixels, 1024 red, 1024 green,
  1024 blue, each row by row.
- Python: a pickled dict with an array `data` (N, 3072) and a list of labels.
- PNG sheets (CIFAR-10): six pictures with one image in each row, and two JSON lists of labels; Pillow reads them once,
  to store them in the binary format.

A file may be stored gzipped or not.
"""

import gzip
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from fedual.data import safe_pickle
from fedual.errors import DataError, import_optional
from fedual.parsing import DOCUMENT, loads, parsing, read_bytes

GZIP_MAGIC = b"\x1f\x8b"
MAX_BYTES = 1 << 28
"""Largest accepted content: the largest supported file has 155 MB, and a gzip bomb has no end."""
SHAPE = (3, 32, 32)
PIXELS = 3072
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
LABEL_LISTS = ("train_lables.json", "test_lables.json")  # sic
SHEET_ROWS = 10_000
"""Images of a sheet at most; a picture takes its size in memory however small its file is."""
SHEET_MEMBERS = (*(f"{sheet}.png" for sheet in BATCHES), *LABEL_LISTS)

Batch = tuple[np.ndarray, np.ndarray]
"""Images (N, 3, 32, 32) and labels (N,), both uint8."""


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open the uncompressed content of a file; gzip is detected by its magic number, not by the file's name."""
    with parsing(path, "is a damaged gzip file", "fetch it again"), path.open("rb") as raw:
        compressed = raw.peek(2)[:2] == GZIP_MAGIC
        try:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if compressed else raw
        except EOFError:
            raise DataError(f"{path} is a truncated gzip file") from None


def read_plain(path: Path) -> bytes:
    """Return the uncompressed content of a file."""
    with open_plain(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DataError(f"{path} holds more than {MAX_BYTES} bytes, more than any file of the supported data sets")
    return content


def check_labels(path: Path, labels: np.ndarray, num_classes: int) -> None:
    """Raise `DataError` if a file has no examples or a label outside 0…num_classes − 1."""
    if not len(labels):
        raise DataError(f"{path} holds no examples")
    if labels.max() >= num_classes:
        raise DataError(f"{path} holds the label {labels.max()}, which is not in 0…{num_classes - 1}")


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read an IDX file, gzipped or not, as a uint8 array of `ndim` dimensions: 3 for images, 1 for labels."""
    magic = bytes([0, 0, 8, ndim])
    with open_plain(path) as file:
        start = file.read(4)
        if start != magic:
            cause = f"it begins with {start.hex(' ') or 'nothing'}, not {magic.hex(' ')}"
            raise DataError(f"{path} is not an IDX file of bytes in {ndim} dimension{'s' * (ndim > 1)}: {cause}")
        header = file.read(4 * ndim)
        if len(header) < 4 * ndim:
            raise DataError(f"{path} is truncated: it ends inside its header")
        shape = struct.unpack(f">{ndim}I", header)
        size = math.prod(shape)
        if not size:
            raise DataError(f"{path} announces {' × '.join(map(str, shape))} bytes: it holds no examples")
        if size > MAX_BYTES:
            raise DataError(f"{path} announces {' × '.join(map(str, shape))} bytes, more than any supported data set")
        content = file.read(size + 1)
    if len(content) != size:
        actual = "more follow" if len(content) > size else f"{len(content)} follow: it is truncated"
        raise DataError(f"{path} announces {size} bytes of data and {actual}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_idx_pair(paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Read the images (N, 28, 28) and the labels (N,) of a data set like MNIST, both uint8."""
    images, labels = paths
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if x.shape[1:] != (28, 28):
        raise DataError(f"{images} holds images of {x.shape[1]} × {x.shape[2]} pixels, not 28 × 28")
    if len(x) != len(y):
        raise DataError(f"{images} holds {len(x)} images and {labels} holds {len(y)} labels")
    check_labels(labels, y, num_classes=10)
    return x, y


def read_binary(paths: Sequence[Path], label_bytes: int, num_classes: int) -> Batch:
    """Read files of the binary version, in order; of CIFAR-100's two label bytes the second is the fine label."""

    def read(path: Path) -> Batch:
        content = read_plain(path)
        record = label_bytes + PIXELS
        if not content or len(content) % record:
            raise DataError(f"{path} holds {len(content)} bytes, not a whole number of records of {record} bytes")
        records = np.frombuffer(content, np.uint8).reshape(-1, record)
        return records[:, label_bytes:].reshape(-1, *SHAPE), records[:, label_bytes - 1]

    return _join(paths, read, num_classes)


def read_python(paths: Sequence[Path], key: bytes, num_classes: int) -> Batch:
    """Read files of the Python version, in order, without executing them; `key` is the name of their labels."""

    def read(path: Path) -> Batch:
        try:
            batch = safe_pickle.loads(read_plain(path))
        except DataError as error:
            raise DataError(f"{path} is not a CIFAR batch: {error}") from None
        images, labels = (batch.get(b"data"), batch.get(key)) if isinstance(batch, dict) else (None, None)
        if not (isinstance(images, np.ndarray) and isinstance(labels, list)):
            raise DataError(f"{path} is not a CIFAR batch: it has no array 'data' with a list {key.decode()!r}")
        if images.shape != (len(labels), PIXELS):
            raise DataError(f"{path} holds {len(labels)} labels for data of shape {images.shape}, not (N, {PIXELS})")
        if not all(type(label) is int and 0 <= label < 256 for label in labels):
            raise DataError(f"{path} holds labels that are not class numbers")
        return images.reshape(-1, *SHAPE), np.array(labels, np.uint8)

    return _join(paths, read, num_classes)


def sheets_to_binary(folder: Path) -> None:
    """Write the binary files of CIFAR-10 next to the sheets and labels in a folder."""
    labels = [label for name in LABEL_LISTS for label in _sheet_labels(folder / name)]
    for sheet in BATCHES:
        images = _sheet_images(folder / f"{sheet}.png")
        batch_labels, labels = labels[: len(images)], labels[len(images) :]
        if len(batch_labels) != len(images):
            raise DataError(f"{folder} holds fewer labels than images")
        records = np.hstack([np.array(batch_labels, np.uint8)[:, None], images.reshape(-1, PIXELS)])
        (folder / f"{sheet}.bin").write_bytes(records.tobytes())


def _join(paths: Sequence[Path], read: Callable[[Path], Batch], num_classes: int) -> Batch:
    """Concatenate batches, which must have equal sizes: a file cut between two records is found this way."""
    images, labels = zip(*map(read, paths), strict=True)
    for path, y in zip(paths, labels, strict=True):
        check_labels(path, y, num_classes)
        if len(y) != len(labels[0]):
            raise DataError(f"{path} holds {len(y)} examples and {paths[0]} holds {len(labels[0])}")
    return np.concatenate(images), np.concatenate(labels)


def _sheet_labels(path: Path) -> list[int]:
    with parsing(path.name, "is not JSON", "fetch it again"):
        labels = loads(read_bytes(path, DOCUMENT))
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise DataError(f"{path.name} is not a list of class numbers 0…9")
    return labels


def _sheet_images(path: Path) -> np.ndarray:
    """Read a sheet of N × 1024 pixels as images (N, 3, 32, 32)."""
    import_optional("A PNG sheet", "PIL", "'fedual[data]'", DataError)
    from PIL import Image

    with parsing(path.name, "is not a whole PNG picture", "fetch it again"), Image.open(path, formats=["PNG"]) as sheet:
        if sheet.height > SHEET_ROWS:
            raise DataError(f"{path.name} has {sheet.height} rows, more than the {SHEET_ROWS} images of any sheet")
        pixels = np.asarray(sheet)
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (1024, 3):
        raise DataError(f"{path.name} is not an RGB sheet 1024 pixels wide")
    return pixels.reshape(-1, *SHAPE[1:], SHAPE[0]).transpose(0, 3, 1, 2)
