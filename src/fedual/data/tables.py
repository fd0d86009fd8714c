"""Read a user's table from .csv, .parquet or .npz, without executing anything that is in it.

A cell that is empty or holds NA, N/A, NaN or null is missing, and refused. Rows are counted from 1, below the header.
"""

import csv
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fedual.errors import DataError, hint, import_optional

MISSING = ("", "na", "n/a", "nan", "null")


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file by name, each (N, …): numbers, or texts, which may stand for numbers."""

    path: Path
    columns: dict[str, np.ndarray]

    def column(self, name: str) -> np.ndarray:
        """Return a column, or raise `DataError` if there is none of this name."""
        if name not in self.columns:
            raise DataError(f"{self.path} has no column {name!r}: {hint(name, self.columns)}")
        return self.columns[name]

    def first(self, name: str, marked: np.ndarray) -> str:
        """Name the first marked row of a column, for an error message."""
        row = int(marked.reshape(len(marked), -1).any(1).argmax())
        return f"{self.path}, column {name!r}, row {row + 1}"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def read(path: Path) -> Table:
    """Read a .csv file with a header and commas, a .parquet file, or an .npz file whose arrays are the columns."""
    readers = {".csv": _csv, ".parquet": _parquet, ".npz": _npz}
    if path.suffix not in readers:
        raise DataError(f"{path} is no table that fedual reads: give one that ends in {', '.join(readers)}.")
    try:
        table = Table(path, readers[path.suffix](path))
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


def parsed(table: Table, name: str) -> np.ndarray:
    """Return a column as numbers, or as texts if none of its values is a number; refuse a mixture."""
    values = table.column(name)
    if values.dtype.kind != "U":
        return values
    numbers = np.array([number(text) for text in values.tolist()])
    odd = np.isnan(numbers)
    if odd.all():
        return values
    if odd.any():
        problem = f"{str(values[odd][0])!r} is not a number, but others of this column are"
        raise DataError(f"{table.first(name, odd)}: {problem}: correct it, or drop the column.")
    _refuse(table, name, ~np.isfinite(numbers), "is infinite")
    return numbers


def number(text: str) -> float:
    """Parse a number; other texts are NaN, and so is 1_000, which Python would accept."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def names(values: np.ndarray) -> np.ndarray:
    """Convert numbers or texts to names: whole numbers lose the decimal point, so that 1, 1.0 and "1" are one name."""

    def name(value: str | float | bool) -> str:
        numeric = number(value) if isinstance(value, str) else value
        return str(int(numeric)) if not isinstance(value, bool) and float(numeric).is_integer() else str(value)

    return np.array([name(value) for value in values.tolist()])


def ordered(names: Iterable[str]) -> list[str]:
    """Sort different names, as numbers if all are numbers."""
    names = set(names)
    return sorted(names, key=None if any(math.isnan(number(name)) for name in names) else float)


def _refuse(table: Table, name: str, bad: np.ndarray, what: str) -> None:
    if bad.any():
        raise DataError(f"{table.first(name, bad)}: a value {what}: fill it in, or leave the row or column out.")


def _csv(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [[cell.strip() for cell in row] for row in csv.reader(file, strict=True) if row] or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is no CSV in UTF-8 ({error}): save it again.") from None
    for i, name in enumerate(header):
        if not name or name in header[:i]:
            raise DataError(f"{path} has the column name {name!r} {'twice' if name else '(empty)'}: name each column.")
    for i, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise DataError(f"{path}, row {i} has {len(row)} cells under {len(header)} names: correct the row.")
    return {name: np.array([row[i] for row in rows], str) for i, name in enumerate(header)}


def read_parquet(path: Path) -> Any:
    """Read a .parquet file as an Arrow table."""
    parquet = import_optional(str(path), "pyarrow.parquet", "'fedual[parquet]'", DataError)
    from pyarrow import ArrowException

    try:
        with path.open("rb") as file:
            return parquet.ParquetFile(file).read(use_threads=False)
    except ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is damaged or no Parquet file ({reason}): save it again.") from None


def _parquet(path: Path) -> dict[str, np.ndarray]:
    table, columns = read_parquet(path), {}
    from pyarrow import types

    for name, column in zip(table.column_names, table.columns, strict=True):
        if (types.is_integer(column.type) or types.is_floating(column.type)) and not column.null_count:
            columns[name] = column.to_numpy()
        else:  # None becomes an empty text, which `read` refuses
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
