"""Load a data set by name, as it is stored, split into training and test examples."""

import os
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedual.data.catalog import SPECS, Spec, folder_of, locate, lookup
from fedual.errors import DataError

NAMES = tuple(SPECS)
"""The data sets that `load` knows."""


class Dataset(NamedTuple):
    """A data set: images as stored (uint8), labels as class numbers (int64).

    Images have shape (N, 8, 8) in digits, (N, 28, 28) in MNIST and Fashion-MNIST, (N, 3, 32, 32) in CIFAR.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    name: str
    num_classes: int
    scale: int

    def inputs(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Turn stored pixels into what networks see, x / scale.

        Digits, MNIST and CIFAR come out in [0, 1]; Fashion-MNIST, whose scale is 1, stays in 0…255.

        Args:
            x: stored images, any batch of `x_train` or `x_test`.
            dtype: the floating-point type of the result.

        Returns:
            A floating-point tensor of the same shape.
        """
        return x.to(dtype) / self.scale


def load(name: str, root: str | os.PathLike[str] | None = None) -> Dataset:
    """Load a data set from disk; nothing is downloaded.

    The structure of every file is checked (format, lengths, counts, labels); `fedual data check` also compares
    checksums with the published ones.

    Args:
        name: one of `NAMES`.
        root: the folder that holds a folder for each data set; by default `$FEDUAL_DATA`, else the user's cache folder.

    Returns:
        The data set.

    Raises:
        InputError: an unknown name.
        DataError: files that are missing, damaged, truncated or not what their names say.
    """
    spec = lookup(name)
    if not spec.versions:
        return _digits(spec)
    try:
        located = locate(spec, folder_of(spec, root))
        x_train, y_train = located.version.read(located.train)
        x_test, y_test = located.version.read(located.test)
    except DataError as error:
        raise DataError(f"{error}; run `fedual data get {name}`") from None
    return _dataset(spec, x_train, y_train, x_test, y_test)


def _dataset(spec: Spec, x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Dataset:
    return Dataset(
        torch.from_numpy(np.array(x_train, np.uint8)),
        torch.from_numpy(y_train.astype(np.int64)),
        torch.from_numpy(np.array(x_test, np.uint8)),
        torch.from_numpy(y_test.astype(np.int64)),
        spec.name,
        spec.num_classes,
        spec.scale,
    )


def _digits(spec: Spec) -> Dataset:
    """Load scikit-learn's digits; a fifth of each class, the same in every run, is the test set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("digits comes with scikit-learn, which is missing: pip install 'fedual[data]'") from None
    x, y = map(np.asarray, load_digits(return_X_y=True))
    x = x.astype(np.uint8).reshape(-1, 8, 8)
    rng = np.random.Generator(np.random.PCG64(0))
    test = np.zeros(len(y), bool)
    for label in range(spec.num_classes):
        members = np.flatnonzero(y == label)
        test[rng.choice(members, round(len(members) / 5), replace=False)] = True
    return _dataset(spec, x[~test], y[~test], x[test], y[test])
