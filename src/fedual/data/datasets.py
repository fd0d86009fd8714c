"""The data sets: where their files are, how they are verified, and `load`.

The SHA-256 digests of MNIST, Fashion-MNIST and CIFAR-10 were computed from the packages that `fedual.data.fetch` names
(CIFAR-10's binary files made from PNG sheets equal the published ones, bit for bit). Those of CIFAR-100 and the MD5
digests of the Python versions are the ones that other libraries check against; no copy was available to compute them.
"""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedual.data.formats import BATCHES, MAX_BYTES, open_plain, read_binary, read_idx_pair, read_python
from fedual.data.partition import held_out
from fedual.errors import DataError, InputError, hint


class File(NamedTuple):
    """A published file: its name, and the size and digest (`algorithm:hex`) of its uncompressed content."""

    name: str
    size: int | None
    digest: str


class Version(NamedTuple):
    """A published form of a data set: its files, the sub-folders they may lie in, and the function that reads them."""

    files: tuple[File, ...]
    num_train: int  # so many of the files, the first ones, hold the training set
    folders: tuple[str, ...]
    read: Callable[[Sequence[Path]], tuple[np.ndarray, np.ndarray]]


class Spec(NamedTuple):
    """A data set; networks see its stored pixels divided by `scale`.

    `fedual data get` stores the first of its versions; a data set without versions is bundled.
    """

    name: str
    title: str
    num_classes: int
    scale: int
    versions: tuple[Version, ...] = ()


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
        """Convert stored images into the network's inputs, x / scale: [0, 1], but 0…255 for Fashion-MNIST."""
        return x.to(dtype) / self.scale


def load(name: str, root: str | os.PathLike[str] | None = None, *, checksums: bool = False) -> Dataset:
    """Load a data set from disk; nothing is downloaded.

    Args:
        name: One of `NAMES`.
        root: The folder that holds a folder for each data set; by default `$FEDUAL_DATA`, else the user's cache folder.
        checksums: Compare the files with the published ones. Without it, only their structure is checked: format,
            lengths, counts and labels.
    """
    spec = lookup(name)
    if not spec.versions:
        train, test = _digits()
    else:
        try:
            version, paths = locate(spec, root_folder(root) / name, checksums)
            train, test = version.read(paths[: version.num_train]), version.read(paths[version.num_train :])
        except DataError as error:
            raise DataError(f"{error}; run `fedual data get {name}`") from None
    x_train, x_test = (torch.from_numpy(np.array(x, np.uint8)) for x, _ in (train, test))
    y_train, y_test = (torch.from_numpy(np.array(y, np.int64)) for _, y in (train, test))
    return Dataset(x_train, y_train, x_test, y_test, name, spec.num_classes, spec.scale)


def lookup(name: str) -> Spec:
    """Return the description of a data set; raise `InputError` if its name is unknown."""
    if name not in SPECS:
        raise InputError(f"unknown data set {name!r}: {hint(name, SPECS)}")
    return SPECS[name]


def locate(spec: Spec, folder: Path, checksums: bool = False) -> tuple[Version, list[Path]]:
    """Find the first complete version of a data set in its folder or a usual sub-folder, and the paths of its `files`.

    If none is complete, the `DataError` names the missing files of the version that lacks fewest.
    """
    problem, fewest = f"{spec.name} is not in {folder}", math.inf
    for version, place in ((each, folder / sub) for each in spec.versions for sub in each.folders):
        stored = [
            next((path for path in (place / name, place / f"{name}.gz") if path.is_file()), None)
            for name, *_ in version.files
        ]
        absent = [file.name for file, path in zip(version.files, stored, strict=True) if path is None]
        if not absent:
            paths = [path for path in stored if path is not None]
            for path, file in zip(paths, version.files, strict=True) if checksums else ():
                verify(path, file)
            return version, paths
        if len(absent) < min(fewest, len(stored)):
            fewest = len(absent)
            problem = f"{spec.name} is incomplete: {', '.join(absent)} not in {place}"
    raise DataError(problem)


def root_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all data sets: `root`, else `$FEDUAL_DATA`, else the user's cache folder."""
    if root is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = os.environ.get("FEDUAL_DATA") or Path(cache, "fedual")
    return Path(root).expanduser()


def verify(path: Path, expected: File) -> None:
    """Raise `DataError` if a file's content does not have the published size and digest."""
    algorithm, _, digest = expected.digest.partition(":")
    state = hashlib.new(algorithm, usedforsecurity=False)
    size = 0
    with open_plain(path) as file:
        while size <= MAX_BYTES and (chunk := file.read(1 << 20)):
            size += len(chunk)
            state.update(chunk)
    if expected.size is not None and size != expected.size:
        raise DataError(f"{path} holds {size} bytes where the published file has {expected.size}")
    if state.hexdigest() != digest:
        raise DataError(f"{path} is not the published file: its {algorithm} is {state.hexdigest()}, not {digest}")


def _digits() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Load scikit-learn's digits; a fifth of each class, the same in every run, is the test set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("digits comes with scikit-learn, which is missing: pip install 'fedual[data]'") from None
    x, y = map(np.asarray, load_digits(return_X_y=True))
    x, test = x.reshape(-1, 8, 8), held_out(y, 0.2)
    return (x[~test], y[~test]), (x[test], y[test])


def _idx(*digests: str) -> Version:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    files = map(File, names, (47_040_016, 60_008, 7_840_016, 10_008), digests)
    return Version(tuple(files), 2, ("", "raw"), read_idx_pair)


def _cifar(read: Callable, folder: str, names: Sequence[str], sizes: Sequence[int | None], *digests: str) -> Version:
    return Version(tuple(map(File, names, sizes, digests)), len(names) - 1, ("", "raw", folder), read)


_MNIST = _idx(
    "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_FMNIST = _idx(
    "sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
_CIFAR10_BINARY = _cifar(
    partial(read_binary, label_bytes=1, num_classes=10),
    "cifar-10-batches-bin",
    [f"{batch}.bin" for batch in BATCHES],
    [30_730_000] * 6,
    "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)
_CIFAR10_PYTHON = _cifar(
    partial(read_python, key=b"labels", num_classes=10),
    "cifar-10-batches-py",
    BATCHES,
    [None] * 6,
    "md5:c99cafc152244af753f735de768cd75f",
    "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "md5:54ebc095f3ab1f0389bbae665268c751",
    "md5:634d18415352ddfa80567beed471001a",
    "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "md5:40351d587109b95175f43aff81a1287e",
)
_CIFAR100_BINARY = _cifar(
    partial(read_binary, label_bytes=2, num_classes=100),
    "cifar-100-binary",
    ("train.bin", "test.bin"),
    (153_700_000, 30_740_000),
    "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
    "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
)
_CIFAR100_PYTHON = _cifar(
    partial(read_python, key=b"fine_labels", num_classes=100),
    "cifar-100-python",
    ("train", "test"),
    (None, None),
    "md5:16019d7e3df5f24257cddd939b257f8d",
    "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
)

SPECS = {
    spec.name: spec
    for spec in (
        Spec("digits", "handwritten digits, 8×8, bundled with scikit-learn", 10, 16),
        Spec("mnist", "MNIST, handwritten digits", 10, 255, (_MNIST,)),
        # the paper does not scale Fashion-MNIST's pixels: they stay in 0…255
        Spec("fmnist", "Fashion-MNIST, articles of clothing", 10, 1, (_FMNIST,)),
        Spec("cifar10", "CIFAR-10, colour photographs", 10, 255, (_CIFAR10_BINARY, _CIFAR10_PYTHON)),
        Spec("cifar100", "CIFAR-100, colour photographs", 100, 255, (_CIFAR100_BINARY, _CIFAR100_PYTHON)),
    )
}
NAMES = tuple(SPECS)
"""The data sets that `load` knows."""
