"""The IDX format of MNIST and Fashion-MNIST.

A file is `00 00 08 d`, the d dimensions as big-endian 32-bit integers, and then that many unsigned bytes.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedual.data.files import MAX_BYTES, check_labels, open_plain
from fedual.errors import DataError


def read(path: Path, ndim: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, gzipped or not.

    Args:
        path: the file.
        ndim: the number of dimensions it must have: 3 for images, 1 for labels.

    Returns:
        A uint8 array of the announced shape.

    Raises:
        DataError: another kind of file, or one with fewer or more bytes than its header announces.
    """
    magic = bytes([0, 0, 8, ndim])
    with open_plain(path) as file:
        begin = file.read(4)
        if begin != magic:
            raise DataError(
                f"{path} is not an IDX file of bytes in {ndim} dimension{'s' * (ndim > 1)}: "
                f"it begins with {begin.hex(' ') or 'nothing'}, not {magic.hex(' ')}"
            )
        header = file.read(4 * ndim)
        if len(header) < 4 * ndim:
            raise DataError(f"{path} is truncated: it ends inside its header")
        shape = struct.unpack(f">{ndim}I", header)
        size = math.prod(shape)
        if size > MAX_BYTES:
            raise DataError(f"{path} announces {' × '.join(map(str, shape))} bytes, more than any supported data set")
        content = file.read(size + 1)
    if len(content) != size:
        held = "more follow" if len(content) > size else f"{len(content)} follow: it is truncated"
        raise DataError(f"{path} announces {size} bytes of data and {held}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_pair(paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Read an image file and its label file, as MNIST and its likes have them: 28 × 28 pixels, 10 classes.

    Args:
        paths: the image file and the label file.

    Returns:
        `(images, labels)`: uint8 arrays (N, 28, 28) and (N,).

    Raises:
        DataError: files that `read` refuses, of another shape, of different lengths, or with other labels.
    """
    images, labels = paths
    x, y = read(images, 3), read(labels, 1)
    if x.shape[1:] != (28, 28):
        raise DataError(f"{images} holds images of {x.shape[1]} × {x.shape[2]} pixels, not 28 × 28")
    if len(x) != len(y):
        raise DataError(f"{images} holds {len(x)} images and {labels} holds {len(y)} labels")
    check_labels(labels, y, num_classes=10)
    return x, y
