"""CIFAR-10 as PNG sheets: six pictures with one image a row, and two lists of labels.

They are read once, with Pillow, and stored in the binary format of `fedual.data.cifar`.
"""

import json
from pathlib import Path

import numpy as np

from fedual.data.cifar import write_binary
from fedual.errors import DataError

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
MEMBERS = (*(f"{batch}.png" for batch in BATCHES), "train_lables.json", "test_lables.json")  # sic


def to_binary(folder: Path) -> None:
    """Write the binary files of CIFAR-10 next to the sheets and labels in a folder.

    Raises:
        DataError: a sheet or list that does not have the right form, or no Pillow to read it.
    """
    labels = _labels(folder / "train_lables.json") + _labels(folder / "test_lables.json")
    for batch in BATCHES:
        images = _images(folder / f"{batch}.png")
        own, labels = labels[: len(images)], labels[len(images) :]
        if len(own) != len(images):
            raise DataError(f"{folder} holds fewer labels than images")
        write_binary(folder / f"{batch}.bin", images, np.array(own, np.uint8))


def _labels(path: Path) -> list[int]:
    try:
        labels = json.loads(path.read_bytes())
    except ValueError:
        raise DataError(f"{path.name} is not JSON") from None
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise DataError(f"{path.name} is not a list of class numbers 0…9")
    return labels


def _images(path: Path) -> np.ndarray:
    """Read a sheet of N × 1024 pixels as images (N, 3, 32, 32)."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("the PNG sheets need Pillow, which is missing: pip install 'fedual[data]'") from None
    try:
        with Image.open(path, formats=["PNG"]) as sheet:
            pixels = np.asarray(sheet)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise DataError(f"{path.name} is not a whole PNG picture ({error})") from None
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (1024, 3):
        raise DataError(f"{path.name} is not an RGB sheet 1024 pixels wide")
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
