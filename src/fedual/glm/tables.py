"""Sites' tables, from wherever they are: CSV or Parquet files, data frames, columns, arrays, or functions."""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from torch import Tensor

from fedual.data.tables import MISSING, read_parquet
from fedual.errors import DataError, FedualError, InputError, in_one_line
from fedual.parsing import parsing, require_memory

Source = (
    str
    | Path
    | pd.DataFrame
    | Mapping[str, ArrayLike | Tensor]
    | tuple[ArrayLike | Tensor | pd.DataFrame, ArrayLike | Tensor]
    | Callable[[], Any]
)
"""A table: the path of a .csv or .parquet file, a data frame, columns by name, (X, y), or a function returning one."""

REMEDY = "give a data frame, the path of a CSV or Parquet file, columns by name, (X, y), or a function that returns one"
INDEX = re.compile(r"__index_level_\d+__")
"""Columns in which pandas stores the labels of rows that are not in order: no variables."""
_MISSING = {form for text in MISSING for form in (text, text.upper(), text.capitalize(), text.replace("n", "N"))}


CSV_IN_MEMORY = 4
"""Bytes of memory that a byte of a CSV file takes while pandas reads it: a cell of one letter is a number of eight."""
_IDENTIFIER = re.compile(r"\s*[+-]?(0[0-9]+|[0-9]{16,})\s*")
"""Whole numbers that pandas may make equal: 007 and 7, and those beyond 2⁵³ where a cell is missing."""
_ODD = re.compile(rb"(?<![0-9.])0[0-9]|[0-9]{16}")
"""Files without it have no such number, and most have not."""


def sources(sites: Mapping[str, Source] | Sequence[Source]) -> dict[str, Source]:
    """Name the sites' tables: as in a mapping, after their files, or "site 1", "site 2", …."""
    if isinstance(sites, Mapping):
        named = list(sites.items())
    elif isinstance(sites, Iterable) and not isinstance(sites, str | pd.DataFrame | np.ndarray | Tensor):
        named = [
            (Path(one).stem if isinstance(one, str | Path) else f"site {i}", one) for i, one in enumerate(sites, 1)
        ]
    else:
        raise InputError(
            f"sites is a {type(sites).__name__}: give a list of tables, or a mapping from names to tables."
        )
    if not named:
        raise InputError("sites is empty: give at least one table.")
    found: dict[str, Source] = {}
    for name, source in named:
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"{name!r} is no name of a site: use texts.")
        if name in found:
            raise InputError(f"Two sites have the name {name!r}: name them by a mapping from names to tables.")
        if not (callable(source) or isinstance(source, str | Path | pd.DataFrame | Mapping | tuple)):
            raise InputError(f"Site {name!r} is a {type(source).__name__}: {REMEDY}.")
        found[name] = source
    return found


def read(source: Source, site: str) -> pd.DataFrame:
    """Read a site's table; arrays and data frames are not copied.

    The columns of (X, y) are x1, …, xP and y, unless X is a data frame or y has a name. In files, cells that are empty
    or hold NA, N/A, NaN or null are missing.

    Raises:
        DataError: The table cannot be read, or has no rows or two columns of one name; names the site.
    """
    if isinstance(source, pd.DataFrame):
        frame = source
    elif isinstance(source, str | Path):
        frame = _file(Path(source), site)
    elif isinstance(source, Mapping):
        frame = _columns(source, site)
    elif isinstance(source, tuple):
        frame = _arrays(source, site)
    elif callable(source):
        try:
            return read(source(), site)
        except FedualError:
            raise
        except Exception as error:
            raise DataError(f"Site {site!r}: its function failed ({in_one_line(error)}): correct it.") from error
    else:
        raise DataError(f"Site {site!r} is a {type(source).__name__}: {REMEDY}.")
    if isinstance(frame.columns, pd.MultiIndex):
        raise DataError(f"Site {site!r} has columns of several levels: give them one name each.")
    if not all(isinstance(name, str) for name in frame.columns):
        frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DataError(f"Site {site!r} has two columns {twice!r}: rename one.")
    if not len(frame):
        raise DataError(f"Site {site!r} has no row: leave the site out.")
    return frame


def _columns(columns: Mapping[str, Any], site: str) -> pd.DataFrame:
    arrays = {name: _array(values, site, f"column {name!r}") for name, values in columns.items()}
    for name, values in arrays.items():
        if values.ndim != 1:
            raise DataError(f"Site {site!r}, column {name!r} has {values.ndim} axes: give each column a name.")
        if len(values) != (first := len(next(iter(arrays.values())))):
            raise DataError(
                f"Site {site!r}, column {name!r} has {len(values)} rows, others have {first}: make them equal."
            )
    return pd.DataFrame(arrays, copy=False)


def _arrays(pair: tuple[Any, ...], site: str) -> pd.DataFrame:
    if len(pair) != 2:
        raise DataError(f"Site {site!r} is a tuple of {len(pair)}: give (X, y).")
    x = pair[0] if isinstance(pair[0], pd.DataFrame) else _array(pair[0], site, "X")
    y, name = _array(pair[1], site, "y"), str(getattr(pair[1], "name", None) or "y")
    if x.ndim == 1:
        x = x[:, None]
    if x.ndim != 2 or y.ndim != 1 or len(x) != len(y):
        raise DataError(f"Site {site!r}: X is {x.shape} and y is {y.shape}: give X (N, P) and y (N,).")
    numbered = [f"x{i + 1}" for i in range(x.shape[1])]
    frame = x.copy(deep=False) if isinstance(x, pd.DataFrame) else pd.DataFrame(x, columns=numbered, copy=False)
    if name in frame.columns:
        raise DataError(f"Site {site!r}: X has a column {name!r}, which is the name of y: rename one.")
    frame[name] = y
    return frame


def _array(values: Any, site: str, what: str) -> Any:
    """An array, without a copy if it is one already."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, pd.Series):
        return values.array
    if isinstance(values, np.ndarray) and not isinstance(values, np.ma.MaskedArray):
        return values
    try:
        return pd.Series(values).array if np.ndim(values) == 1 else np.asarray(values, float)
    except (TypeError, ValueError) as error:
        raise DataError(f"Site {site!r}: {what} is no array ({in_one_line(error)}): give numbers or texts.") from None


def _file(path: Path, site: str) -> pd.DataFrame:
    readers = {".csv": _csv, ".parquet": _parquet}
    if path.suffix.lower() not in readers:
        raise DataError(f"Site {site!r}: {path} is no table: give a file that ends in {' or '.join(readers)}.")
    with parsing(f"Site {site!r}: {path}", "is damaged or no table", "save it again"):
        return readers[path.suffix.lower()](path, site)


def _csv(path: Path, site: str) -> pd.DataFrame:
    """Read a .csv file; the csv module finds what pandas would overlook, such as short rows."""
    require_memory(f"Site {site!r}: {path}", CSV_IN_MEMORY * path.stat().st_size)
    with parsing(f"Site {site!r}: {path}", "is no CSV in UTF-8", "save it again"):
        header, spelled = _checked(path, site)
        frame = pd.read_csv(
            path,
            names=header,
            header=0,
            index_col=False,
            keep_default_na=False,
            na_values=list(_MISSING),
            skipinitialspace=True,
            encoding="utf-8-sig",
            low_memory=False,
            dtype=dict.fromkeys(spelled, "str"),
        )
    for name in header:
        if pd.api.types.infer_dtype(frame[name], skipna=True) == "string":
            frame[name] = frame[name].str.strip()
    for name in spelled:
        frame[name] = _exact(pd.Series(frame[name]))
    return frame


def _checked(path: Path, site: str) -> tuple[list[str], list[str]]:
    """The names of a CSV file's columns, and those that pandas would read as other numbers than are written there."""
    if not path.stat().st_size:
        raise DataError(f"Site {site!r}: {path} is empty: save it again.")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        look = _ODD.search(content) is not None
    spelled = set[int]()
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = filter(None, csv.reader(file, strict=True))
        header = [name.strip() for name in next(rows, [])]
        if not header:
            raise DataError(f"Site {site!r}: {path} is empty: save it again.")
        for name, count in Counter(header).items():
            if not name or count > 1:
                kind = "two columns" if name else "a column without a name,"
                raise DataError(f"Site {site!r}: {path} has {kind} {name!r}: name each column.")
        if len(header) == 1 and (sign := next((sign for sign in ";\t" if sign in header[0]), None)):
            raise DataError(f"Site {site!r}: {path} has {sign!r} between its cells: save it with commas.")
        for i, row in enumerate(rows, 1):
            if len(row) != len(header):
                cells = f"{len(row)} cells under {len(header)} names"
                raise DataError(f"Site {site!r}: {path}, row {i} has {cells}: correct the row.")
            if look:
                spelled |= {place for place, cell in enumerate(row) if _IDENTIFIER.fullmatch(cell)}
    return header, [header[place] for place in sorted(spelled)]


def _exact(values: pd.Series) -> pd.Series:
    """A column of texts as whole numbers of 64 bits, if that is what all of them are, without zeros in front."""
    present = values.dropna()
    if present.str.fullmatch(r"-?(0|[1-9][0-9]{0,17}|[1-8][0-9]{18})").all():
        return values.astype("Int64")
    return values


def _parquet(path: Path, site: str) -> pd.DataFrame:
    with parsing(f"Site {site!r}: {path}", "cannot be read", "save it again, as numbers or texts"):
        try:
            table = read_parquet(path)
        except DataError as error:
            raise DataError(f"Site {site!r}: {error}") from None
        table = table.drop_columns([name for name in table.column_names if INDEX.fullmatch(name)])
        return table.to_pandas(ignore_metadata=True, split_blocks=True, self_destruct=True)
