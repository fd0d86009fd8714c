"""What is known of each data set: its files with their checksums, its classes, its scale; and where it is on disk.

The SHA-256 digests of MNIST, Fashion-MNIST and CIFAR-10 were computed from the packages that `fedual.data.sources`
names (CIFAR-10's binary files made from PNG sheets equal the published ones, bit for bit). Those of CIFAR-100 and the
MD5 digests of the python versions are the ones that other libraries check against; no copy was at hand to compute them.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedual.data.cifar import read_binary, read_python
from fedual.data.files import File, root_folder
from fedual.data.idx import read_pair
from fedual.errors import DataError, InputError, hint


class Version(NamedTuple):
    """One published form of a data set: its files, the sub-folders they may lie in, and their reader."""

    train: tuple[File, ...]
    test: tuple[File, ...]
    folders: tuple[str, ...]
    read: Callable[[Sequence[Path]], tuple[np.ndarray, np.ndarray]]


class Spec(NamedTuple):
    """A data set; stored pixels divided by `scale` are what networks see.

    The first of its versions is the one that `fedual data get` stores; a data set without versions is bundled.
    """

    name: str
    title: str
    num_classes: int
    scale: int
    versions: tuple[Version, ...] = ()


class Located(NamedTuple):
    """A complete version found on disk, with its paths in the order of its files."""

    version: Version
    train: list[Path]
    test: list[Path]

    def files(self) -> list[tuple[Path, File]]:
        """Return every path with the published file it should be."""
        expected = self.version.train + self.version.test
        return list(zip(self.train + self.test, expected, strict=True))


def lookup(name: str) -> Spec:
    """Return a data set's description.

    Raises:
        InputError: the name is unknown.
    """
    if name not in SPECS:
        raise InputError(f"unknown data set {name!r}: {hint(name, SPECS)}")
    return SPECS[name]


def folder_of(spec: Spec, root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of a data set under `root` (see `fedual.data.files.root_folder`)."""
    return root_folder(root) / spec.name


def locate(spec: Spec, folder: Path) -> Located:
    """Find the first complete version of a data set in its folder or one of the usual sub-folders.

    Raises:
        DataError: none is complete; the message names what is missing from the nearest one.
    """
    nearest = f"{spec.name} is not in {folder}"
    fewest = None
    for version in spec.versions:
        for sub in version.folders:
            names = [file.name for file in version.train + version.test]
            paths = [_stored(folder / sub, name) for name in names]
            found = [path for path in paths if path is not None]
            if len(found) == len(names):
                return Located(version, found[: len(version.train)], found[len(version.train) :])
            absent = [name for name, path in zip(names, paths, strict=True) if path is None]
            if found and (fewest is None or len(absent) < fewest):
                fewest = len(absent)
                nearest = f"{spec.name} is incomplete: {', '.join(absent)} not in {folder / sub}"
    raise DataError(nearest)


def _stored(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _idx(*digests: str) -> Version:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    files = tuple(map(File, names, sizes, digests))
    return Version(files[:2], files[2:], ("", "raw"), read_pair)


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

_CIFAR10_BINARY = Version(
    train=(
        File("data_batch_1.bin", 30_730_000, "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        File("data_batch_2.bin", 30_730_000, "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        File("data_batch_3.bin", 30_730_000, "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        File("data_batch_4.bin", 30_730_000, "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        File("data_batch_5.bin", 30_730_000, "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    ),
    test=(
        File("test_batch.bin", 30_730_000, "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    folders=("", "raw", "cifar-10-batches-bin"),
    read=partial(read_binary, label_bytes=1, num_classes=10),
)
_CIFAR10_PYTHON = Version(
    train=(
        File("data_batch_1", None, "md5:c99cafc152244af753f735de768cd75f"),
        File("data_batch_2", None, "md5:d4bba439e000b95fd0a9bffe97cbabec"),
        File("data_batch_3", None, "md5:54ebc095f3ab1f0389bbae665268c751"),
        File("data_batch_4", None, "md5:634d18415352ddfa80567beed471001a"),
        File("data_batch_5", None, "md5:482c414d41f54cd18b22e5b47cb7c3cb"),
    ),
    test=(File("test_batch", None, "md5:40351d587109b95175f43aff81a1287e"),),
    folders=("", "raw", "cifar-10-batches-py"),
    read=partial(read_python, key=b"labels", num_classes=10),
)

_CIFAR100_BINARY = Version(
    train=(File("train.bin", 153_700_000, "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),),
    test=(File("test.bin", 30_740_000, "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),),
    folders=("", "raw", "cifar-100-binary"),
    read=partial(read_binary, label_bytes=2, num_classes=100),
)
_CIFAR100_PYTHON = Version(
    train=(File("train", None, "md5:16019d7e3df5f24257cddd939b257f8d"),),
    test=(File("test", None, "md5:f0ef6b0ae62326f3e7ffdfab6717acfc"),),
    folders=("", "raw", "cifar-100-python"),
    read=partial(read_python, key=b"fine_labels", num_classes=100),
)

SPECS = {
    spec.name: spec
    for spec in (
        Spec("digits", "handwritten digits, 8×8, bundled with scikit-learn", 10, 16),
        Spec("mnist", "MNIST, handwritten digits", 10, 255, (_MNIST,)),
        # the paper's runs use Fashion-MNIST's pixels as they are, 0…255
        Spec("fmnist", "Fashion-MNIST, articles of clothing", 10, 1, (_FMNIST,)),
        Spec("cifar10", "CIFAR-10, colour photographs", 10, 255, (_CIFAR10_BINARY, _CIFAR10_PYTHON)),
        Spec("cifar100", "CIFAR-100, colour photographs", 100, 255, (_CIFAR100_BINARY, _CIFAR100_PYTHON)),
    )
}
