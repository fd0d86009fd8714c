"""Small data sets in the standard file formats, and descriptions under which they count as the published ones."""

import gzip
import hashlib
import math
import pickle
import struct
from pathlib import Path

import numpy as np

from fedual.data.datasets import SPECS, File, Spec

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def images(count: int, seed: int, shape: tuple[int, ...] = (28, 28)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(count: int, num_classes: int = 10) -> np.ndarray:
    return (np.arange(count) % num_classes).astype(np.uint8)


def idx_contents() -> dict[str, bytes]:
    """The four files of a small MNIST: 20 training and 10 test examples."""
    arrays = (images(20, 0), labels(20), images(10, 1), labels(10))
    return {name: idx_bytes(array) for name, array in zip(IDX, arrays, strict=True)}


def write(folder: Path, contents: dict[str, bytes], zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / name).write_bytes(content)


def cifar_binary(x: np.ndarray, *label_columns: np.ndarray) -> bytes:
    return b"".join(bytes(int(column[i]) for column in label_columns) + x[i].tobytes() for i in range(len(x)))


def cifar_pickle(x: np.ndarray, protocol: int = 2, **label_lists: list[int]) -> bytes:
    batch = {
        b"batch_label": b"a batch",
        b"data": x.reshape(len(x), math.prod(x.shape[1:])),
        b"filenames": [b"a.png"] * len(x),
    }
    return pickle.dumps({**batch, **{k.encode(): v for k, v in label_lists.items()}}, protocol=protocol)


def published(name: str, contents: dict[str, bytes]) -> Spec:
    """Describe a data set whose published files (of its first version) are `contents`."""

    def known(file: File) -> File:
        content = contents[file.name]
        return File(file.name, len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")

    spec = SPECS[name]
    first = spec.versions[0]
    small = first._replace(files=tuple(map(known, first.files)))
    return spec._replace(versions=(small, *spec.versions[1:]))
