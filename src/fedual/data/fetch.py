"""Fetch a data set, and check one that is there.

Files are fetched into a temporary folder next to their destination, verified there, and only then renamed into place:
an interrupted or refused download leaves what was there before.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedual.data.catalog import Spec, folder_of, locate, lookup
from fedual.data.datasets import load
from fedual.data.files import File, verify
from fedual.data.sources import FAILURES, Progress, Source, sources_of
from fedual.errors import DataError


class Fetched(NamedTuple):
    """Where a data set is, and which source it came from."""

    folder: Path
    source: str


def check(name: str, root: str | os.PathLike[str] | None = None) -> None:
    """Compare the files of a data set with the published sizes and checksums, and load it.

    Raises:
        InputError: an unknown name.
        DataError: it is missing, incomplete, or not what was published.
    """
    spec = lookup(name)
    if spec.versions:
        try:
            _verified(spec, folder_of(spec, root))
        except DataError as error:
            raise DataError(f"{error}; run `fedual data get {name}`") from None
    load(name, root)


def get(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
    sources: Sequence[Source] | None = None,
) -> Fetched:
    """Make a data set available: by files already there, else by the first source that delivers the published files.

    Args:
        name: one of `fedual.data.NAMES`.
        root: the folder that holds a folder for each data set (see `fedual.data.load`).
        force: fetch even if the right files are there.
        progress: called as bytes arrive.
        sources: where to fetch from; by default the data set's own.

    Returns:
        Where the files are, and where they came from.

    Raises:
        InputError: an unknown name.
        DataError: no source delivered; the message says why each one failed and what to do by hand.
    """
    spec = lookup(name)
    folder = folder_of(spec, root)
    if not spec.versions:
        load(name)
        return Fetched(folder, "bundled")
    failed = []
    if not force:
        try:
            _verified(spec, folder)
        except DataError as error:
            failed.append(f"files already there ({error})")
        else:
            return Fetched(folder, "files already there")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = tempfile.TemporaryDirectory(prefix=".get-", dir=folder.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise DataError(
            f"{folder.parent} cannot be written to ({error.strerror}): choose another root, or set $FEDUAL_DATA"
        ) from None
    with staging:
        for number, source in enumerate(sources_of(name) if sources is None else sources):
            fresh = Path(staging.name, str(number))
            try:
                fresh.mkdir()
                source.fetch(fresh, progress)
                _install(_verified(spec, fresh), folder)
            except FAILURES as error:
                failed.append(f"{source.label} ({_reason(error, fresh)})")
            else:
                return Fetched(folder, source.label)
    version = spec.versions[0]
    files = ", ".join(file.name for file in version.train + version.test)
    raise DataError(
        f"{name} could not be fetched; tried {'; '.join(failed)}: put the files {files} (plain or gzipped) "
        f"into {folder} and run `fedual data check {name}`"
    )


def _verified(spec: Spec, folder: Path) -> list[tuple[Path, File]]:
    """Return the files of the data set in a folder, each of them known to be the published one."""
    files = locate(spec, folder).files()
    for path, file in files:
        verify(path, file)
    return files


def _install(files: list[tuple[Path, File]], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path, file in files:
        path.replace(folder / path.name)
        other = f"{file.name}.gz" if path.name == file.name else file.name
        (folder / other).unlink(missing_ok=True)  # an old copy, gzipped or plain, must not be read instead


def _reason(error: Exception, fresh: Path) -> str:
    """Say in one line why a source failed, without the temporary folder it was given."""
    cause = getattr(error, "reason", error)
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(text.replace(f"{fresh}{os.sep}", "").replace(str(fresh), "what came").split())
