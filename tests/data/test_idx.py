import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from make_files import idx_bytes, images, labels

from fedual.data.formats import read_idx, read_idx_pair
from fedual.errors import DataError

IMAGES = images(5, seed=0)
PLAIN = idx_bytes(IMAGES)


@pytest.mark.parametrize("stored", [PLAIN, gzip.compress(PLAIN, mtime=0)])
def test_reads_what_was_written(tmp_path: Path, stored: bytes):
    path = tmp_path / "images"
    path.write_bytes(stored)
    np.testing.assert_array_equal(read_idx(path, 3), IMAGES)


@pytest.mark.parametrize(
    ("stored", "complaint"),
    [
        (b"", "begins with nothing"),
        (b"<html>not found</html>", "begins with 3c 68 74 6d"),
        (idx_bytes(labels(5)), "begins with 00 00 08 01"),
        (b"\0\0\x0d\x03" + PLAIN[4:], "begins with 00 00 0d 03"),  # floats
        (PLAIN[:10], "ends inside its header"),
        (PLAIN[:-1], "truncated"),
        (PLAIN[:16], "0 follow"),
        (PLAIN + b"\0", "more follow"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 28, 28) + bytes(100), "more than any supported"),
        (gzip.compress(PLAIN[:-1], mtime=0), "truncated"),
        (gzip.compress(PLAIN, mtime=0)[:-12], "truncated gzip"),
    ],
)
def test_refuses_other_files(tmp_path: Path, stored: bytes, complaint: str):
    path = tmp_path / "images"
    path.write_bytes(stored)
    with pytest.raises(DataError, match=complaint) as raised:
        read_idx(path, 3)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("x", "y", "complaint"),
    [
        (IMAGES, labels(4), "5 images and .* 4 labels"),
        (images(5, seed=0, shape=(28, 27)), labels(5), "28 × 27 pixels"),
        (IMAGES, np.array([0, 1, 2, 3, 10], np.uint8), "label 10"),
        (IMAGES[:0], labels(0), "no examples"),
    ],
)
def test_pair_must_fit_together(tmp_path: Path, x: np.ndarray, y: np.ndarray, complaint: str):
    paths = [tmp_path / "images", tmp_path / "labels"]
    for path, array in zip(paths, (x, y), strict=True):
        path.write_bytes(idx_bytes(array))
    with pytest.raises(DataError, match=complaint):
        read_idx_pair(paths)
