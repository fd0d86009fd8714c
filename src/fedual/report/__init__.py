"""A run, or several, as one page of HTML that needs nothing else: `write` makes it from the runs' folders.

The page loads nothing and runs nothing: plots are inline SVG, pictures are part of it, and it has no script.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from fedual.errors import DataError, InputError
from fedual.report.page import page
from fedual.report.seen import read
from fedual.runs.files import replace


def write(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of one run, or of several together.

    Args:
        folders: Of the runs.
        out: The file; unless given, report.html in the run's folder, or here for several runs.

    Returns:
        The file's path.

    Raises:
        InputError: A folder without a run, or one given twice.
        DataError: A run's file that cannot be read, or a report that cannot be written.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise InputError("There is no run to report on: give at least one folder.")
    real = [path.resolve() for path in paths]
    if twice := [path for path in paths if real.count(path.resolve()) > 1]:
        raise InputError(f"{twice[0]} is given twice: name every run once.")
    content = page([read(path) for path in paths]).encode()
    to = Path(out) if out is not None else (paths[0] if len(paths) == 1 else Path()) / "report.html"
    try:
        replace(to, content)
    except OSError as error:
        raise DataError(f"{to} cannot be written ({error.strerror}): choose another file with --out.") from None
    return to
