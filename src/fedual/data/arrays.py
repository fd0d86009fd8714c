"""NumPy's files, .npy and .npz, read after their headers: nothing is allocated that a file does not hold.

An .npz is a zip archive of .npy files. Its directory announces how long each of them is, and each .npy begins with a
header that announces shape and type. The two must agree, and their sum must be within the limits of `fedual.parsing`.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile, ZipInfo

import numpy as np

from fedual.errors import DataError
from fedual.parsing import parsing, require_memory

KINDS = "biufU"
"""Arrays of booleans, whole numbers, numbers and texts; no others, and no objects, which would be pickled."""
REMEDY = "save it again with numpy.savez"
ENCRYPTED = 1
"""The bit of a zip member's flags that says that it needs a password."""


def read_npy(path: Path) -> np.ndarray:
    """The array of an .npy file; texts as an array of Python's."""
    with (
        parsing(path, "is damaged or no .npy of a plain array", "save it again with numpy.save"),
        path.open("rb") as file,
    ):
        size = path.stat().st_size
        require_memory(path, size)
        return _read(str(path), lambda: file, size)


def read_npz(
    path: Path, choose: Callable[[Sequence[str]], Sequence[str]] = lambda names: names
) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name, those that `choose` picks of all names."""
    with parsing(path, "is damaged or no .npz of plain arrays", REMEDY), ZipFile(path) as archive:
        members: dict[str, ZipInfo] = {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name == info.filename:
                raise DataError(f"{path} holds {name!r}, which is no array: {REMEDY}.")
            if name in members:
                raise DataError(f"{path} holds two arrays {name!r}: {REMEDY}.")
            if info.flag_bits & ENCRYPTED:
                raise DataError(f"{path} is protected by a password: save it without one.")
            members[name] = info
        chosen = choose(list(members))
        require_memory(path, sum(members[name].file_size for name in chosen), path.stat().st_size)
        place = lambda name: f"{path}, array {name!r},"
        return {
            name: _read(place(name), lambda name=name: archive.open(members[name]), members[name].file_size)
            for name in chosen
        }


def _read(where: str, open: Callable[[], IO[bytes]], size: int) -> np.ndarray:
    """An array of a file of so many bytes, which must be what its header announces."""
    with open() as file:
        shape, dtype = _header(file)
        if dtype.hasobject or dtype.kind not in KINDS or not shape:
            raise DataError(f"{where} is {dtype} {shape}: give arrays of numbers or texts.")
        announced, present = math.prod(shape) * dtype.itemsize, size - file.tell()
        if announced != present:
            raise DataError(f"{where} announces {announced} bytes and has {present}: {REMEDY}.")
        file.seek(0)
        values = np.lib.format.read_array(file, allow_pickle=False)
    if dtype.kind == "U":
        return values.astype(object)
    native = np.dtype(np.float64) if dtype.itemsize > 8 else dtype.newbyteorder("=")
    return np.ascontiguousarray(values, native)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type; the other versions of the format are for records, which have no place here."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of the format")
    shape, _, dtype = readers[version](file)
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {shape}")
    return shape, dtype
