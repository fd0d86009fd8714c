"""The two formats of CIFAR-10 and CIFAR-100: the binary version and the python version.

Binary: records of one label byte (CIFAR-100: a coarse and a fine one) and 3072 bytes of pixels, 1024 red, 1024 green,
1024 blue, each row by row. Python: a pickled dict with an array `data` (N, 3072) and a list of labels.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedual.data.files import check_labels, read_plain
from fedual.data.restricted import loads
from fedual.errors import DataError

SHAPE = (3, 32, 32)
PIXELS = 3072


def read_binary(paths: Sequence[Path], label_bytes: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read files of the binary version.

    Args:
        paths: the files, in order.
        label_bytes: 1 for CIFAR-10; 2 for CIFAR-100, of which the second, the fine label, is kept.
        num_classes: labels must be below it.

    Returns:
        `(images, labels)`: uint8 arrays (N, 3, 32, 32) and (N,).
    """
    return _join(paths, [_binary(path, label_bytes) for path in paths], num_classes)


def read_python(paths: Sequence[Path], key: bytes, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read files of the python version without executing them.

    Args:
        paths: the files, in order.
        key: the name of the labels: `b"labels"` in CIFAR-10, `b"fine_labels"` in CIFAR-100.
        num_classes: labels must be below it.

    Returns:
        `(images, labels)`: uint8 arrays (N, 3, 32, 32) and (N,).
    """
    return _join(paths, [_python(path, key) for path in paths], num_classes)


def write_binary(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write images (N, 3, 32, 32) and labels (N,), both uint8, as a file of CIFAR-10's binary version."""
    path.write_bytes(np.hstack([labels[:, None], images.reshape(-1, PIXELS)]).tobytes())


def _binary(path: Path, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    content = read_plain(path)
    record = label_bytes + PIXELS
    if not content or len(content) % record:
        raise DataError(f"{path} holds {len(content)} bytes, not a whole number of records of {record} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, label_bytes:].reshape(-1, *SHAPE), records[:, label_bytes - 1]


def _python(path: Path, key: bytes) -> tuple[np.ndarray, np.ndarray]:
    content = read_plain(path)
    try:
        batch = loads(content)
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


def _join(
    paths: Sequence[Path], batches: list[tuple[np.ndarray, np.ndarray]], num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Put batches one after another; they have equal sizes, so that one cut between two records shows."""
    images, labels = zip(*batches, strict=True)
    for path, y in zip(paths, labels, strict=True):
        check_labels(path, y, num_classes)
        if len(y) != len(labels[0]):
            raise DataError(f"{path} holds {len(y)} examples and {paths[0]} holds {len(labels[0])}")
    return np.concatenate(images), np.concatenate(labels)
