"""Inputs from files, as the run stored its own: .npy, .npz, .csv, .parquet, .png, or a folder of .png.

    shape   that of the run's inputs, or a flat row of as many numbers
    type    that of the run's inputs: pixels are 0…255 where these were uint8, and never scaled
    table   the columns of the run's own table, encoded as in training

Nothing is resized, rounded, clipped or unpickled.
"""

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from fedual.data import own
from fedual.errors import DataError, InputError
from fedual.predicting.trained import Trained

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".npy", ".npz", ".csv", ".parquet", ".png")
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Pillow's word for so many channels of eight bits."""


class Inputs(NamedTuple):
    """Inputs `(N, ...)` as they are stored, and what to call each: its file, or its number from 1."""

    names: list[str]
    x: Tensor


def read(path: Path, trained: Trained) -> Inputs:
    """Read inputs for a run's posterior.

    Raises:
        InputError: Inputs of another shape, type or form than those of the run.
        DataError: A file that is missing, damaged or of another kind.
    """
    if path.is_dir():
        pictures = sorted(own for own in path.iterdir() if own.suffix.lower() == ".png")
        if not pictures:
            raise DataError(f"{path} holds no .png: give a folder that does, or a file.")
        return _pictures(pictures, trained)
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        raise InputError(f"{path} is no input that fedual reads: give {', '.join(ENDINGS)}, or a folder of .png.")
    if not path.exists():
        raise DataError(f"{path} is not there: check the path.")
    if kind == ".png":
        return _pictures([path], trained)
    if trained.columns and kind != ".npy":
        values = own.encode(path, trained.columns).numpy()
    else:
        _refuse_unencoded(path, trained)
        values = _numbers(path, kind)
    if not len(values):
        raise DataError(f"{path} holds no inputs: give at least one.")
    x = _typed(path, _shaped(path, values, trained), trained)
    return Inputs([str(number) for number in range(1, len(x) + 1)], x)


def _refuse_unencoded(path: Path, trained: Trained) -> None:
    """Refuse numbers that training would have encoded by what only a table has."""
    told = trained.columns
    if told and (told["columns"] != ["x"] or told["standardised"]):
        form = "an .npz with the array x" if told["columns"] == ["x"] else "a .csv or .parquet with the same columns"
        raise InputError(f"{path}: the run encoded its inputs from a table: give {form}.")


def _numbers(path: Path, kind: str) -> np.ndarray:
    """The array in a file, of whatever shape; of finite numbers."""
    try:
        values = {".npy": _array, ".npz": _archive, ".csv": _rows}.get(kind, _table)(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): check the file.") from None
    except (ValueError, EOFError, BadZipFile) as error:
        raise DataError(
            f"{path} is damaged or holds no numbers ({str(error).splitlines()[0]}): save it again."
        ) from None
    if values.dtype.kind not in "biuf" or not values.ndim:
        raise DataError(f"{path} holds {values.dtype} {values.shape}: give an array of real numbers.")
    if values.dtype.kind == "f" and (bad := ~np.isfinite(values)).any():
        row = int(bad.reshape(len(bad), -1).any(1).argmax())
        raise DataError(f"{path}, row {row + 1} holds NaN or infinity: fill it in, or leave the row out.")
    return values.astype(np.uint8) if values.dtype.kind == "b" else values


def _array(path: Path) -> np.ndarray:
    return np.load(path, allow_pickle=False)


def _archive(path: Path) -> np.ndarray:
    with np.load(path, allow_pickle=False) as archive:
        name = "x" if "x" in archive.files else archive.files[0] if len(archive.files) == 1 else None
        if name is None:
            raise DataError(f"{path} holds {', '.join(archive.files) or 'nothing'}: name the array of inputs x.")
        return archive[name]


def _rows(path: Path) -> np.ndarray:
    """The rows of a CSV; a first row in which anything is no number is a header."""
    found: list[list[float]] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        for line, cells in enumerate(csv.reader(file, strict=True), 1):
            if not cells:
                continue
            try:
                row = [float(cell) for cell in cells]
            except ValueError as error:
                if line == 1:
                    continue
                raise ValueError(f"line {line}: {error}") from None
            if found and len(row) != len(found[0]):
                raise ValueError(f"line {line} has {len(row)} cells, those before {len(found[0])}")
            found.append(row)
    return np.array(found).reshape(len(found), -1 if found else 0)


def _table(path: Path) -> np.ndarray:
    raise DataError(f"{path}: the run was not trained on a table: give .npy, .npz or .csv.")


def _shaped(path: Path, values: np.ndarray, trained: Trained) -> np.ndarray:
    """The array as `(N, ...)`: a single input, and flat rows, take the shape that the run's inputs have."""
    shape = trained.shape
    if shape is None or values.shape[1:] == shape:
        return values
    size = math.prod(shape)
    if values.shape == shape or values.shape == (size,) or (values.ndim == 2 and values.shape[1] == size):
        return values.reshape(-1, *shape)
    wanted = f"(N, {', '.join(map(str, shape))}) or {size} numbers a row" if shape else "(N,)"
    raise InputError(f"{path} has the shape {values.shape}: the run's inputs are {shape}, so give {wanted}.")


def _typed(path: Path, values: np.ndarray, trained: Trained) -> Tensor:
    """The array in the type that the run's inputs have; whole numbers where that is one of whole numbers."""
    dtype = trained.dtype
    if dtype is None:
        return torch.from_numpy(values.astype(np.float64 if values.dtype.kind == "f" else np.int64))
    if dtype.is_floating_point:
        return torch.from_numpy(values.astype(np.float64)).to(dtype)
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    wrong = (values != np.round(values)) | (values < least) | (values > most)
    if wrong.any():
        what = f"the run's inputs are {str(dtype).removeprefix('torch.')}, whole numbers from {least} to {most}"
        raise InputError(f"{path} holds {values[wrong][0]:g}: {what}; give them as they were stored, not scaled.")
    return torch.from_numpy(values.astype(np.int64)).to(dtype)


def _pictures(paths: list[Path], trained: Trained) -> Inputs:
    """The pixels of PNG files, `(N, H, W)` or `(N, C, H, W)` as the run stored its own."""
    _refuse_unencoded(paths[0], trained)
    shape = trained.shape
    if shape is None:
        raise InputError(f"{paths[0]}: the run does not say what its inputs are: give them as .npy, in their shape.")
    if trained.dtype is not torch.uint8:
        kind = str(trained.dtype).removeprefix("torch.")
        raise InputError(f"{paths[0]} holds pixels from 0 to 255, but the run's inputs are {kind}: give them as .npy.")
    channels = 1 if len(shape) == 2 else shape[0] if len(shape) == 3 else 0
    if channels not in MODES:
        raise InputError(f"{paths[0]} is a picture, but the run's inputs have the shape {shape}: give them as .npy.")
    pixels = [_picture(path, MODES[channels], shape[-2:]) for path in paths]
    x = np.stack([own.reshape(*shape[-2:], channels).transpose(2, 0, 1).reshape(shape) for own in pixels])
    return Inputs([path.name for path in paths], torch.from_numpy(x))


def _picture(path: Path, mode: str, size: tuple[int, ...]) -> np.ndarray:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise InputError("Pictures are read with Pillow, which is missing: pip install 'fedual[data]'.") from None
    try:
        with Image.open(path, formats=["PNG"]) as image:
            _check_picture(path, image, size)  # before it is unpacked
            return np.asarray(image.convert(mode))
    except InputError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is damaged or no PNG ({error}): save it again.") from None


def _check_picture(path: Path, image: "Image", size: tuple[int, ...]) -> None:
    if (image.height, image.width) != tuple(size):
        found, wanted = f"{image.width} × {image.height} pixels", f"{size[1]} × {size[0]}"
        raise InputError(f"{path} has {found}, the run's inputs {wanted}: resize it as the training data were.")
    if image.mode.startswith(("I", "F")):
        raise InputError(f"{path} has more than eight bits a pixel: convert it as the training data were.")
