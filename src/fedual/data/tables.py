"""Read a table of the user's: .csv, .parquet or .npz, without executing anything that is in it.

A cell that is empty or says NA, N/A, NaN or null is missing, and refused. Rows are counted from 1, below the header.
"""

import csv
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from fedual.errors import DataError, hint

MISSING = ("", "na", "n/a", "nan", "null")
ENDINGS = (".csv", ".parquet", ".npz")


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file by name, each (N, …): numbers, or texts that may stand for numbers."""

    path: Path
    columns: dict[str, np.ndarray]

    def column(self, name: str) -> np.ndarray:
        """A column, if it is there."""
        if name not in self.columns:
            raise DataError(f"{self.path} has no column {name!r}: {hint(name, self.columns)}")
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def read(path: Path) -> Table:
    """Read a table.

    Args:
        path: a .csv file with a header and commas, a .parquet file, or an .npz file whose arrays are the columns.

    Raises:
        DataError: a file that is missing, damaged, without rows or with missing values, or of another kind.
    """
    if path.suffix not in ENDINGS:
        raise DataError(f"{path} is no table that fedual reads: give one that ends in {', '.join(ENDINGS)}.")
    try:
        table = Table(path, {".csv": _csv, ".parquet": _parquet, ".npz": _npz}[path.suffix](path))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): check its path.") from None
    if not table.columns or not all(len(values) for values in table.columns.values()):
        raise DataError(f"{path} has no rows: leave the file out, or give it some.")
    for name, values in table.columns.items():
        if values.dtype.kind == "U":
            _refuse(table, name, np.isin(np.char.lower(values), MISSING), "is missing")
        elif values.dtype.kind == "f":
            _refuse(table, name, ~np.isfinite(values), "is missing or infinite")
    return table


def numbers(table: Table, name: str) -> np.ndarray | None:
    """A column as numbers; None for one of texts of which none is a number.

    Raises:
        DataError: a column of both.
    """
    values = table.column(name)
    if values.dtype.kind != "U":
        return values
    found = np.array([_number(text) for text in values.tolist()])
    odd = np.isnan(found)
    if odd.all():
        return None
    if odd.any():
        row = int(odd.argmax())
        raise DataError(
            f"{table.path}, column {name!r}, row {row + 1}: {str(values[row])!r} is not a number, but others of this "
            "column are: correct it, or drop the column."
        )
    _refuse(table, name, ~np.isfinite(found), "is infinite")
    return found


def names(values: np.ndarray) -> np.ndarray:
    """Numbers or texts as names: whole numbers without a decimal point, so that 1, 1.0 and "1" are one name."""
    return np.array([_name(value) for value in values.tolist()])


def ordered(found: Iterable[str]) -> list[str]:
    """Different names in order: that of numbers where all are numbers."""
    found = set(found)
    return sorted(found, key=None if any(math.isnan(_number(name)) for name in found) else float)


def _name(value: str | float | bool) -> str:
    number = _number(value) if isinstance(value, str) else value
    return str(int(number)) if not isinstance(value, bool) and float(number).is_integer() else str(value)


def _number(text: str) -> float:
    """NaN for what is no number; Python would read 1_000 as one."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def _refuse(table: Table, name: str, bad: np.ndarray, what: str) -> None:
    if bad.any():
        row = int(bad.reshape(len(bad), -1).any(1).argmax())
        raise DataError(
            f"{table.path}, column {name!r}, row {row + 1}: a value {what}: fill it in, or leave the row or column out."
        )


def _csv(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [[cell.strip() for cell in row] for row in csv.reader(file, strict=True) if row] or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is no CSV in UTF-8 ({error}): save it again.") from None
    for place, name in enumerate(header):
        if not name or name in header[:place]:
            raise DataError(f"{path} has the column name {name!r} {'twice' if name else '(empty)'}: name each column.")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise DataError(f"{path}, row {number} has {len(row)} cells under {len(header)} names: correct the row.")
    return {name: np.array([row[place] for row in rows], str) for place, name in enumerate(header)}


def _parquet(path: Path) -> dict[str, np.ndarray]:
    try:
        from pyarrow import ArrowException, types
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise DataError(f"{path} needs pyarrow, which is missing: pip install 'fedual[parquet]'.") from None
    columns = {}
    try:
        with path.open("rb") as file:
            table = ParquetFile(file).read(use_threads=False)
    except ArrowException as error:
        raise DataError(
            f"{path} is damaged or no Parquet file ({str(error).splitlines()[0]}): save it again."
        ) from None
    for name, column in zip(table.column_names, table.columns, strict=True):
        plain = types.is_integer(column.type) or types.is_floating(column.type)
        if plain and not column.null_count:
            columns[name] = column.to_numpy()
        else:  # None becomes a text that is refused
            columns[name] = np.array(["" if value is None else str(value) for value in column.to_pylist()], str)
    return columns


def _npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            arrays = dict(archive) if isinstance(archive, np.lib.npyio.NpzFile) else {}
    except (ValueError, EOFError, KeyError, BadZipFile, zlib.error) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is damaged or no .npz of plain arrays ({reason}): save it with numpy.savez.") from None
    for name, values in arrays.items():
        if values.ndim == 0 or values.dtype.kind not in "biufU":
            raise DataError(f"{path}: {name} is {values.dtype} {values.shape}: give arrays of numbers or texts.")
    return arrays
