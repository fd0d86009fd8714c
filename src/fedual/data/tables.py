"""Read a user's table from .csv, .parquet or .npz, without executing anything that is in it.

A cell that is empty or holds NA, N/A, NaN or null is missing, and refused. Rows are counted from 1, below the header.
Texts are arrays of Python's own: NumPy's would give every cell the length of the longest.
"""

import csv
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedual.data.arrays import read_npz
from fedual.errors import DataError, hint, import_optional
from fedual.parsing import parsing, require_memory

MISSING = ("", "na", "n/a", "nan", "null")
CSV_IN_MEMORY = 16
"""Bytes of memory that a byte of a CSV file takes while it is read: a cell of three letters is a Python text of 52."""
EXACT = 2**53
"""Beyond it, floating point numbers stand for several whole numbers each."""
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0*)?")
"""Texts that are a whole number written in the usual way; 007 is none."""


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file by name, each (N, …): numbers, or texts (objects), which may stand for numbers."""

    path: Path
    columns: dict[str, np.ndarray]

    def column(self, name: str) -> np.ndarray:
        """Return a column, or raise `DataError` if there is none of this name."""
        if name not in self.columns:
            raise DataError(f"{self.path} has no column {name!r}: {hint(name, self.columns)}")
        return self.columns[name]

    def where(self, name: str) -> str:
        """Name a column, for an error message."""
        return f"{self.path}, column {name!r}"

    def first(self, name: str, marked: np.ndarray) -> str:
        """Name the first marked row of a column, for an error message."""
        row = int(marked.reshape(len(marked), -1).any(1).argmax())
        return f"{self.where(name)}, row {row + 1}"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def read(path: Path) -> Table:
    """Read a .csv file with a header and commas, a .parquet file, or an .npz file whose arrays are the columns."""
    readers = {".csv": _csv, ".parquet": _parquet, ".npz": read_npz}
    if path.suffix not in readers:
        raise DataError(f"{path} is no table that fedual reads: give one that ends in {', '.join(readers)}.")
    with parsing(path, f"is damaged or no {path.suffix} file", "save it again"):
        table = Table(path, readers[path.suffix](path))
    if not table.columns or not all(len(values) for values in table.columns.values()):
        raise DataError(f"{path} has no rows: leave the file out, or give it some.")
    for name, values in table.columns.items():
        if are_texts(values):
            _refuse(table, name, marked(values, lambda text: text.lower() in MISSING), "is missing")
            # NumPy drops it at the end of a text, so that two names would become one
            _refuse(table, name, marked(values, lambda text: "\0" in text), "contains a NUL character")
        elif values.dtype.kind == "f":
            _refuse(table, name, ~np.isfinite(values), "is missing or infinite")
    return table


def are_texts(values: np.ndarray) -> bool:
    """True for a column of texts, False for one of numbers."""
    return values.dtype.kind == "O"


def marked(values: np.ndarray, test: Callable[[str], bool]) -> np.ndarray:
    """Which texts pass a test, in the shape of the values."""
    return np.fromiter(map(test, values.flat), bool, values.size).reshape(values.shape)


def texts(values: Iterable[str]) -> np.ndarray:
    """Texts as an array `(N,)`, each of its own length."""
    values = list(values)
    found = np.empty(len(values), object)
    found[:] = values
    return found


def parsed(table: Table, name: str) -> np.ndarray:
    """Return a column as numbers, or as texts if none of its values is a number; refuse a mixture."""
    values = table.column(name)
    if not are_texts(values):
        return values
    numbers = np.fromiter(map(number, values.flat), np.float64, values.size).reshape(values.shape)
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


def names(values: np.ndarray, where: str) -> np.ndarray:
    """Convert numbers or texts to names, of which no two that differ become one.

    The numbers 1 and 1.0 and the texts "1" and "1.0" are one name, because files differ in how they write a number.
    "007" and "7" are two, and so are whole numbers of any length. Floating point numbers beyond 2⁵³ are refused:
    they may have been different numbers before they were stored.

    Args:
        values: A column.
        where: Its place, for an error message.
    """

    def name(value: Any) -> str:
        if not isinstance(value, float | np.floating) or not value.is_integer():
            text, whole = str(value), _WHOLE.fullmatch(str(value))
            return text if whole is None else "0" if whole[1] == "-0" else whole[1]
        if abs(value) > EXACT:
            problem = "holds whole numbers beyond 2⁵³ as floating point numbers, which stand for several of them each"
            raise DataError(f"{where} {problem}: save the column as whole numbers or texts.")
        return str(int(value))

    return texts(map(name, values.tolist()))


def ordered(names: Iterable[str]) -> list[str]:
    """Sort different names, as numbers if all are numbers; in one order, also for those that are the same number."""
    names = set(names)
    return sorted(names) if any(math.isnan(number(name)) for name in names) else sorted(names, key=_by_number)


def _by_number(name: str) -> tuple[float, int, str]:
    return number(name), len(name), name


def _refuse(table: Table, name: str, bad: np.ndarray, what: str) -> None:
    if bad.any():
        raise DataError(f"{table.first(name, bad)}: a value {what}: fill it in, or leave the row or column out.")


def _csv(path: Path) -> dict[str, np.ndarray]:
    require_memory(path, CSV_IN_MEMORY * path.stat().st_size)
    with parsing(path, "is no CSV in UTF-8", "save it again"), path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = [[cell.strip() for cell in row] for row in csv.reader(file, strict=True) if row] or [[]]
    seen = set[str]()
    for name in header:
        if not name or name in seen:
            raise DataError(f"{path} has the column name {name!r} {'twice' if name else '(empty)'}: name each column.")
        seen.add(name)
    for i, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise DataError(f"{path}, row {i} has {len(row)} cells under {len(header)} names: correct the row.")
    return {name: texts(row[i] for row in rows) for i, name in enumerate(header)}


def read_parquet(path: Path) -> Any:
    """Read a .parquet file as an Arrow table; its texts are dictionaries, so that each is in memory once."""
    parquet = import_optional(str(path), "pyarrow.parquet", "'fedual[parquet]'", DataError)
    from pyarrow import types

    with parsing(path, "is damaged or no Parquet file", "save it again"), path.open("rb") as file:
        opened = parquet.ParquetFile(file)
        about, schema = opened.metadata, opened.schema_arrow
        for name in schema.names:
            if schema.names.count(name) > 1:
                raise DataError(f"{path} has two columns {name!r}: rename one.")
            if types.is_nested(schema.field(name).type):
                raise DataError(f"{path}, column {name!r} holds lists or records: give one value in each row.")
        announced = [about.row_group(group).total_byte_size for group in range(about.num_row_groups)]
        require_memory(path, max(sum(announced), 8 * about.num_rows * len(schema.names)), path.stat().st_size)
        long = [field.name for field in schema if types.is_string(field.type) or types.is_binary(field.type)]
        return parquet.ParquetFile(file, read_dictionary=long).read(use_threads=False)


def _parquet(path: Path) -> dict[str, np.ndarray]:
    table = read_parquet(path)
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        with parsing(f"{path}, column {name!r}", "cannot be read", "save it again, as numbers or texts"):
            columns[name] = _values(column)
    return columns


def _values(column: Any) -> np.ndarray:
    """A column of an Arrow table as numbers, or as texts, where a missing value is an empty text."""
    from pyarrow import types

    if (types.is_integer(column.type) or types.is_floating(column.type)) and not column.null_count:
        return column.to_numpy()
    text = lambda value: "" if value is None else str(value)
    if not types.is_dictionary(column.type):
        return texts(map(text, column.to_pylist()))
    parts = [texts([])]
    for chunk in column.chunks:
        known = texts([*map(text, chunk.dictionary.to_pylist()), ""])
        parts.append(known[chunk.indices.fill_null(len(known) - 1).to_numpy(zero_copy_only=False)])
    return np.concatenate(parts)
