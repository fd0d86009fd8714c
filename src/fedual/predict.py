"""Predictions of a finished run for inputs from files.

    finished = open_run("runs/mine")
    inputs = read_inputs(Path("pictures"), finished)
    warnings = warnings_for(inputs, finished).sentences()
    prediction = finished.posterior.predict(inputs.x, finished.samples, finished.seed)
    unsure = prediction.entropy > choose_threshold(prediction.entropy, finished.test, coverage=0.9).threshold

Files are .npy, .npz, .csv, .parquet, .png, or a folder of .png, with inputs as the run stored them:

    shape   the shape of the run's inputs, or flat rows of as many numbers
    type    the type of the run's inputs: pixels are 0…255 if the run's were uint8, and never scaled
    table   the columns of the run's own table, which are encoded as in training

Nothing is resized, rounded, clipped or unpickled.
"""

import csv
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedual.data import user_files
from fedual.data.arrays import read_npy, read_npz
from fedual.data.tables import CSV_IN_MEMORY
from fedual.errors import DataError, InputError, require_positive
from fedual.forms import require
from fedual.networks import Draws
from fedual.networks.moments import Moments
from fedual.parsing import parsing, require_memory
from fedual.posterior import Posterior
from fedual.rundir import RunDirectory, artifacts
from fedual.stored import RESTORE, SEED
from fedual.strange import Warnings, far_columns

ENDINGS = (".npy", ".npz", ".csv", ".parquet", ".png")
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for a number of channels of eight bits."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bool, *_INTEGERS, *_FLOATS)}
"""Types that stored inputs may have."""


class FinishedRun(NamedTuple):
    """A posterior, and what its run stored about inputs; a field is None if the run did not store it."""

    posterior: Posterior
    shape: tuple[int, ...] | None = None  # of one input
    dtype: torch.dtype | None = None
    columns: dict[str, Any] | None = None  # how tables were encoded, see `fedual.data.user_files.encode`
    classes: list[str] | None = None  # names of the classes
    test: artifacts.Evidence | None = None
    samples: int = 32  # draws of θ for the predictions of the test set
    seed: int = 0  # seed of these draws; with other draws all entropies are a little higher, or lower
    moments: Moments | None = None  # of the training inputs
    trained: str | None = None  # `Network.fingerprint` of the trained model, if the caller gave the model


class Inputs(NamedTuple):
    """Inputs `(N, ...)` as they are stored, and the name of each: its file, or its number from 1."""

    names: list[str]
    x: Tensor
    unseen: Sequence[user_files.Unseen] = ()  # categories that training never saw


class Threshold(NamedTuple):
    """Inputs with an entropy above `threshold` are unsure."""

    coverage: float
    threshold: float
    examples: int  # size of the test set that it comes from; 0 if it comes from the inputs themselves
    accuracy: float | None  # on the test set
    accuracy_sure: float | None  # on the examples of the test set that are sure


def open_run(
    path: str | os.PathLike[str],
    model: nn.Module | Callable[..., nn.Module] | None = None,
    device: torch.device | str | None = None,
) -> FinishedRun:
    """Read a finished run's folder, or a posterior file; `model` and `device` are those of `Posterior.load`.

    Raises:
        InputError: There is no run, it has not ended, or the model is missing or a different one.
        DataError: A file is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path} is not there: give the folder of a run, or a posterior file.")
        return FinishedRun(Posterior.load(path, model, device))
    if not (file := path / "posterior.safetensors").exists():
        raise InputError(f"{path} has no posterior.safetensors: give the folder of a run that has ended.")
    config, draws = {}, (32, 0)
    if (path / "config.json").exists():
        folder = RunDirectory.open(path)
        config, history = folder.config, folder.history()
        require(path / "config.json", config, SEED, RESTORE)
        samples = config.get("evaluation", {}).get("samples")
        round = artifacts.round_of_posterior(path) or (history[-1]["round"] if history else None)
        if samples is not None and "seed" in config and round is not None:
            draws = samples, Draws(config["seed"]).evaluation(round)
    shape = dtype = moments = None
    if clients := artifacts.read_clients(path):
        try:
            shape, dtype = tuple(map(int, clients["shape"])), DTYPES[clients["dtype"]]
            moments = Moments.from_dict(clients["moments"], shape) if "moments" in clients else None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = "moments" if shape is not None and dtype is not None else "shape and type"
            raise DataError(f"{path / 'clients.json'} says no {what} of inputs ({error}): delete it.") from None
    posterior, test = Posterior.load(file, model, device), artifacts.read_test(path)
    trained = None if model is None else config.get("network")
    columns, classes = config.get("inputs"), config.get("classes")
    if columns is not None:
        _require_encoding(path / "config.json", columns)
    return FinishedRun(posterior, shape, dtype, columns, classes, test, *draws, moments=moments, trained=trained)


def _require_encoding(path: Path, columns: dict[str, Any]) -> None:
    """Refuse an encoding of tables whose parts do not belong together; its form is right."""
    with parsing(path, "has inputs that cannot be encoded", RESTORE):
        names, offset, scale = user_files.units(columns)
        unknown = (columns["categories"].keys() | columns["standardised"].keys()) - set(columns["columns"])
        if unknown or not names or not (scale > 0).all():
            raise ValueError(f"{min(unknown)!r} is no column" if unknown else "there are no columns, or a scale of 0")
        if len(offset) != len(names):
            raise ValueError(f"{len(names)} columns have {len(offset)} moments")


def warnings_for(inputs: Inputs | Tensor, run: FinishedRun) -> Warnings:
    """What is strange about inputs: far from training, unknown categories, or a model other than the one trained.

    Nothing is said about what the run did not store.

    Raises:
        InputError: The inputs have another shape than those of the run, or are not finite.
    """
    if isinstance(inputs, Tensor):
        inputs = Inputs([str(number) for number in range(1, len(inputs) + 1)], inputs)
    if run.shape is not None and inputs.x.shape[1:] != run.shape:
        raise InputError(f"Inputs have the shape {tuple(inputs.x.shape)}: give (N, {', '.join(map(str, run.shape))}).")
    if (bad := ~inputs.x.isfinite().reshape(len(inputs.x), -1).all(1)).any():
        raise InputError(f"Input {inputs.names[int(bad.int().argmax())]} contains NaN or infinity: clean it first.")
    names, offset, scale, far = None, torch.zeros(1), torch.ones(1), []
    if run.columns:
        columns, *units = user_files.units(run.columns)
        names = None if run.columns["columns"] == ["x"] else columns
        offset, scale = map(torch.from_numpy, units)
    if run.moments is not None:
        far = far_columns(inputs.x, run.moments, names, offset, scale)
    return Warnings(inputs.names, far, list(inputs.unseen), _other_model(run), _too_large(inputs.x, run))


def _other_model(run: FinishedRun) -> str | None:
    if run.trained in (None, found := run.posterior.network.fingerprint):
        return None
    other = f"The model has another class or other layers than the one that was trained ({found}, not {run.trained})"
    return f"{other}: give the code of the training, unless it is the same and another version of torch prints it."


def _too_large(x: Tensor, run: FinishedRun) -> str | None:
    scale = run.posterior.network.scale or 0
    if x.is_floating_point() or scale <= 1 or (largest := x.max().item()) <= scale:
        return None
    return f"Inputs go up to {largest}, but the run divides them by {scale:g}: check how they were stored."


def choose_threshold(entropy: Tensor, test: artifacts.Evidence | None, coverage: float) -> Threshold:
    """The threshold below which a share `coverage` in (0, 1] of the test set is sure.

    If the run kept no test set, the entropies of the inputs `(N,)` take its place.
    """
    require_positive("coverage", coverage, most=1.0)
    if test is None:
        return Threshold(coverage, _quantile(entropy, coverage), 0, None, None)
    threshold = _quantile(test.entropy, coverage)
    right = (test.probabilities.argmax(-1) == test.labels).double()
    sure = test.entropy <= threshold
    return Threshold(coverage, threshold, len(right), float(right.mean()), float(right[sure].mean()))


def _quantile(values: Tensor, share: float) -> float:
    """The least value with at least this share of the values at or below it."""
    # 0.7 · 10 is a little more than 7 in floating point, and must count as 7
    return float(values.sort().values[math.ceil(share * len(values) - 1e-9) - 1])


def read_inputs(path: Path, run: FinishedRun) -> Inputs:
    """Read inputs for a run's posterior.

    Raises:
        InputError: The inputs have another shape, type or form than those of the run.
        DataError: A file is missing, damaged or of another kind.
    """
    if path.is_dir():
        pictures = sorted(file for file in path.iterdir() if file.suffix.lower() == ".png")
        if not pictures:
            raise DataError(f"{path} holds no .png: give a folder that does, or a file.")
        return _read_pictures(pictures, run)
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise InputError(f"{path} is no input that fedual reads: give {', '.join(ENDINGS)}, or a folder of .png.")
    if not path.exists():
        raise DataError(f"{path} is not there: check the path.")
    if ending == ".png":
        return _read_pictures([path], run)
    unseen = []
    if run.columns and ending != ".npy":
        with parsing(path, "does not go with the columns of the run", "give the columns of the training data"):
            encoded, unseen = user_files.encode(path, run.columns)
        values = encoded.numpy()
    else:
        _refuse_unencoded(path, run)
        values = _read_array(path, ending)
    if not len(values):
        raise DataError(f"{path} holds no inputs: give at least one.")
    x = _convert(path, _reshape(path, values, run.shape), run.dtype)
    return Inputs([str(number) for number in range(1, len(x) + 1)], x, unseen)


def _refuse_unencoded(path: Path, run: FinishedRun) -> None:
    """Refuse plain numbers if training encoded the columns of a table, which plain numbers lack."""
    if (columns := run.columns) and (columns["columns"] != ["x"] or columns["standardised"]):
        form = "an .npz with the array x" if columns["columns"] == ["x"] else "a .csv or .parquet with the same columns"
        raise InputError(f"{path}: the run encoded its inputs from a table: give {form}.")


def _read_array(path: Path, ending: str) -> np.ndarray:
    """The array in a file, of any shape, if its numbers are finite."""
    if ending == ".parquet":
        raise DataError(f"{path}: the run was not trained on a table: give .npy, .npz or .csv.")
    with parsing(path, "is damaged or holds no numbers", "save it again"):
        values = {".npy": read_npy, ".npz": _read_npz, ".csv": _read_csv}[ending](path)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{path} holds texts: give an array of real numbers.")
    if values.dtype.kind == "f" and (bad := ~np.isfinite(values)).any():
        row = int(bad.reshape(len(bad), -1).any(1).argmax())
        raise DataError(f"{path}, row {row + 1} holds NaN or infinity: fill it in, or leave the row out.")
    return values.astype(np.uint8) if values.dtype.kind == "b" else values


def _read_npz(path: Path) -> np.ndarray:
    def inputs(names: Sequence[str]) -> Sequence[str]:
        if "x" not in names and len(names) != 1:
            raise DataError(f"{path} holds {', '.join(names) or 'nothing'}: name the array of inputs x.")
        return ["x"] if "x" in names else names

    (values,) = read_npz(path, inputs).values()
    return values


def _read_csv(path: Path) -> np.ndarray:
    """The rows of a CSV file; a first line with anything that is not a number is a header."""
    rows: list[list[float]] = []
    require_memory(path, CSV_IN_MEMORY * path.stat().st_size)
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
            if rows and len(row) != len(rows[0]):
                raise ValueError(f"line {line} has {len(row)} cells, those before {len(rows[0])}")
            rows.append(row)
    return np.array(rows).reshape(len(rows), -1 if rows else 0)


def _reshape(path: Path, values: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray:
    """The array as `(N, *shape)`: a single input and flat rows are reshaped."""
    if shape is None or values.shape[1:] == shape:
        return values
    size = math.prod(shape)
    if values.shape == shape or values.shape == (size,) or (values.ndim == 2 and values.shape[1] == size):
        return values.reshape(-1, *shape)
    wanted = f"(N, {', '.join(map(str, shape))}) or {size} numbers a row" if shape else "(N,)"
    raise InputError(f"{path} has the shape {values.shape}: the run's inputs are {shape}, so give {wanted}.")


def _convert(path: Path, values: np.ndarray, dtype: torch.dtype | None) -> Tensor:
    """The array in the type of the run's inputs; fractions are refused if these are whole numbers."""
    if dtype is None:
        if values.dtype == np.uint64 and values.max(initial=0) > np.iinfo(np.int64).max:
            raise InputError(
                f"{path} holds {values.max()}, beyond 64 bits with a sign: save smaller numbers, or floats."
            )
        return torch.from_numpy(values.astype(np.float64 if values.dtype.kind == "f" else np.int64))
    if dtype.is_floating_point:
        return torch.from_numpy(values.astype(np.float64)).to(dtype)
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    wrong = (values != np.round(values)) | (values < least) | (values > most)
    if wrong.any():
        what = f"the run's inputs are {str(dtype).removeprefix('torch.')}, whole numbers from {least} to {most}"
        raise InputError(f"{path} holds {values[wrong][0]:g}: {what}; give them as they were stored, not scaled.")
    return torch.from_numpy(values.astype(np.int64)).to(dtype)


def _read_pictures(paths: list[Path], run: FinishedRun) -> Inputs:
    """The pixels of PNG files, `(N, H, W)` or `(N, C, H, W)` as the run stored its inputs."""
    _refuse_unencoded(paths[0], run)
    shape = run.shape
    if shape is None:
        raise InputError(f"{paths[0]}: the run does not say what its inputs are: give them as .npy, in their shape.")
    if run.dtype is not torch.uint8:
        kind = str(run.dtype).removeprefix("torch.")
        raise InputError(f"{paths[0]} holds pixels from 0 to 255, but the run's inputs are {kind}: give them as .npy.")
    channels = 1 if len(shape) == 2 else shape[0] if len(shape) == 3 else 0
    if channels not in MODES:
        raise InputError(f"{paths[0]} is a picture, but the run's inputs have the shape {shape}: give them as .npy.")
    pixels = [_read_picture(path, MODES[channels], shape[-2:]) for path in paths]
    x = np.stack([image.reshape(*shape[-2:], channels).transpose(2, 0, 1).reshape(shape) for image in pixels])
    return Inputs([path.name for path in paths], torch.from_numpy(x))


def _read_picture(path: Path, mode: str, size: tuple[int, ...]) -> np.ndarray:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise InputError("Pictures are read with Pillow, which is missing: pip install 'fedual[data]'.") from None
    with parsing(path, "is damaged or no PNG", "save it again"), Image.open(path, formats=["PNG"]) as image:
        # checked before the picture is decompressed
        if (image.height, image.width) != tuple(size):
            has, wanted = f"{image.width} × {image.height} pixels", f"{size[1]} × {size[0]}"
            raise InputError(f"{path} has {has}, the run's inputs {wanted}: resize it as the training data were.")
        if image.mode.startswith(("I", "F")):
            raise InputError(f"{path} has more than eight bits a pixel: convert it as the training data were.")
        return np.asarray(image.convert(mode))
