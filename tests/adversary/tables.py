"""Fuzzers for users' tables: .csv and .parquet, read for networks and for regressions."""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from adversary import mutations
from adversary.harness import Case, Changed
from fedual.data import user_files
from fedual.glm import tables as glm_tables

Make = Callable[[Random], Case]
ROWS = 24
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"target": "label", "test_fraction": 0.25}, {}),
    ({"target": "label", "test_fraction": 0.25, "standardise": True, "drop": ["id"]}, {"column": "site"}),
    ({"target": "days", "test_fraction": 0.25}, {"column": "id", "classes": False}),
]
"""What users ask for: [data], and further arguments of `user_files.load`."""
ALIKE = [
    "007",
    "7",
    "7.0",
    " 7",
    "1234567890123456780",
    "1234567890123456783",
    "1e3",
    "1000",
    "True",
    "inf",
    "0x10",
    "１",
]
"""Names that a parser of numbers would merge."""


def patients(rng: Random) -> dict[str, list[Any]]:
    """Columns of numbers and texts, with a site, an id, classes and numbers to predict."""
    pick = lambda choices: [rng.choice(choices) for _ in range(ROWS)]
    return {
        "age": [round(rng.gauss(50, 10), 2) for _ in range(ROWS)],
        "colour": pick(["red", "green", "blue"]),
        "id": pick([*ALIKE, "a", "b"]) if rng.random() < 0.5 else list(range(ROWS)),
        "site": pick(["north", "east", "west"]),
        "label": pick(["mild", "none", "severe"]),
        "days": [round(rng.gauss(0, 1), 3) for _ in range(ROWS)],
    }


def as_csv(columns: dict[str, list[Any]]) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return file.getvalue().encode()


def as_parquet(table: pyarrow.Table) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def load(path: Path, rng: Random) -> user_files.UserData:
    data, more = rng.choice(SETTINGS)
    data = {"file": path.name, **data}
    if path.suffix == ".npz":
        data = {key: value for key, value in data.items() if key in ("file", "test_fraction", "standardise")}
        more = {"classes": more.get("classes", True)}
    return user_files.load(path.parent, data, **more)


def checked(found: user_files.UserData) -> None:
    """What every result must be, whatever was in the file."""
    if len(found.x_train) != len(found.y_train) or len(found.x_test) != len(found.y_test):
        raise Changed("there are not as many inputs as targets")


# CSV


def csv_bytes(folder: Path) -> Make:
    """Damaged bytes of a .csv; what is read must be what Python's own reader finds in the same bytes."""
    path = folder / "t.csv"

    def make(rng: Random) -> Case:
        content = as_csv(patients(rng))
        content = mutations.data(rng, content, [as_csv(patients(rng))])
        path.write_bytes(content)

        def case() -> None:
            own = rng.random() < 0.5
            if own:
                checked(load(path, rng))
            else:
                frame = glm_tables.read(path, "north")
                _agree(frame, content)

        return case

    return make


def csv_cells(folder: Path) -> Make:
    """Cells, names and rows that are odd, in files of valid syntax; no two ids may become one client."""
    path = folder / "t.csv"

    def make(rng: Random) -> Case:
        columns = patients(rng)
        for _ in range(rng.randrange(1, 4)):
            name = rng.choice(list(columns))
            values = columns[name] = list(columns[name])
            kind = rng.random()
            if kind < 0.6:
                values[rng.randrange(ROWS)] = rng.choice([*mutations.EDGES, *mutations.TEXTS, *ALIKE])
            elif kind < 0.7:
                columns[name] = [rng.choice(ALIKE) for _ in range(ROWS)]
            elif kind < 0.8:
                columns[rng.choice([*mutations.TEXTS, name.upper(), name + " "])] = values
            elif kind < 0.9:
                del columns[name]
            else:
                values[rng.randrange(ROWS)] = "x" * rng.choice([200_000, 140_000])
            if not columns:
                columns = patients(rng)
        path.write_bytes(_lenient(as_csv_text(columns)))

        def case() -> None:
            if rng.random() < 0.4:
                glm_tables.read(path, "north")
                return
            data, more = rng.choice(SETTINGS)
            found = user_files.load(folder, {"file": path.name, **data}, **more)
            checked(found)
            if (column := more.get("column")) and found.sites is not None:
                _not_merged(columns[column], found.sites)

        return case

    return make


def as_csv_text(columns: dict[str, list[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return file.getvalue()


def _lenient(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _not_merged(given: list[Any], sites: list[str]) -> None:
    """Ids whose texts differ stay different clients, but for 1 and 1.0, which one column of numbers may hold."""
    texts = {str(value).strip() for value in given}
    canonical = {text[:-2] if text.endswith(".0") and text[:-2].isdigit() else text for text in texts}
    if len(sites) < len(canonical):
        raise Changed(f"{len(canonical)} ids became {len(sites)} clients: {sorted(canonical)} are {sites}")


def _agree(frame: Any, content: bytes) -> None:
    """A regression's table has as many rows and columns as Python's own CSV reader finds."""
    rows = [row for row in csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True) if row]
    if (len(frame), frame.shape[1]) != (len(rows) - 1, len(rows[0])):
        raise Changed(f"{frame.shape} was read, where there are {len(rows) - 1} rows of {len(rows[0])} cells")
    for place, name in enumerate(frame.columns):
        if frame[name].dtype.kind not in "if":
            continue
        for row, value in zip(rows[1:], frame[name].tolist(), strict=True):
            cell = row[place].strip()
            if not (isinstance(value, float) and math.isnan(value)) and float(cell) != value and int(cell) != value:
                raise Changed(f"{cell!r} was read as {value!r}")


# Parquet


def parquet_bytes(folder: Path) -> Make:
    """Damaged bytes of a .parquet file."""
    path = folder / "t.parquet"

    def make(rng: Random) -> Case:
        content = as_parquet(pyarrow.table(_texts(patients(rng))))
        path.write_bytes(mutations.data(rng, content))

        def case() -> None:
            if rng.random() < 0.5:
                checked(load(path, rng))
            else:
                glm_tables.read(path, "north")

        return case

    return make


def _texts(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: list(map(str, values)) if name == "id" else values for name, values in columns.items()}


TYPES: list[Callable[[Random], pyarrow.Array]] = [
    lambda rng: pyarrow.array([rng.choice([2**63, 2**64 - 1, 1]) for _ in range(ROWS)], pyarrow.uint64()),
    lambda rng: pyarrow.array([rng.choice([2**62 + 1, 2**62, -(2**63)]) for _ in range(ROWS)], pyarrow.int64()),
    lambda rng: pyarrow.array([rng.choice([2**60, -(2**62), 0]) for _ in range(ROWS)], pyarrow.timestamp("us")),
    lambda rng: pyarrow.array([rng.choice([253402300800, -62135596801]) for _ in range(ROWS)], pyarrow.timestamp("s")),
    lambda rng: pyarrow.array([rng.choice([2**30, -(2**30)]) for _ in range(ROWS)], pyarrow.date32()),
    lambda rng: pyarrow.array([rng.choice([2**60, -(2**60)]) for _ in range(ROWS)], pyarrow.duration("ns")),
    lambda rng: pyarrow.array([rng.choice([0.5, math.nan, math.inf]) for _ in range(ROWS)], pyarrow.float16()),
    lambda rng: pyarrow.array([b"\xff\xfe"] * ROWS, pyarrow.binary()),
    lambda rng: pyarrow.Array.from_buffers(
        pyarrow.string(),
        ROWS,
        [None, pyarrow.py_buffer(np.arange(ROWS + 1, dtype=np.int32).tobytes()), pyarrow.py_buffer(b"\xff" * ROWS)],
    ),
    lambda rng: pyarrow.array([[1, 2]] * ROWS),
    lambda rng: pyarrow.array([{"a": 1}] * ROWS),
    lambda rng: pyarrow.array([None] * ROWS),
    lambda rng: pyarrow.array([rng.choice([None, 1, 2**53 + 1]) for _ in range(ROWS)], pyarrow.int64()),
    lambda rng: pyarrow.array([rng.choice([True, False, None]) for _ in range(ROWS)]),
    lambda rng: pyarrow.array([rng.choice(ALIKE) for _ in range(ROWS)]).dictionary_encode(),
    lambda rng: pyarrow.array([rng.choice(ALIKE) for _ in range(ROWS)], pyarrow.large_string()),
    lambda rng: pyarrow.array([10**30 + i for i in range(ROWS)], pyarrow.decimal128(38)),
]
"""Columns of types and values that tables seldom have."""


def parquet_types(folder: Path) -> Make:
    """Valid .parquet files with odd types, values, and names twice."""
    path = folder / "t.parquet"

    def make(rng: Random) -> Case:
        columns = _texts(patients(rng))
        names, arrays = list(columns), [pyarrow.array(values) for values in columns.values()]
        for _ in range(rng.choice([1, 1, 2])):
            place = rng.randrange(len(names) + 1)
            array = rng.choice(TYPES)(rng)
            if place == len(names) or rng.random() < 0.2:
                names.append(rng.choice([*names, *mutations.TEXTS[:8], "more"]))
                arrays.append(array)
            else:
                arrays[place] = array
        try:
            content = as_parquet(pyarrow.Table.from_arrays(arrays, names=names))
        except (pyarrow.ArrowException, UnicodeEncodeError):
            return lambda: None
        path.write_bytes(content)

        def case() -> None:
            if rng.random() < 0.4:
                glm_tables.read(path, "north")
                return
            data, more = rng.choice(SETTINGS)
            found = user_files.load(folder, {"file": path.name, **data}, **more)
            checked(found)
            if len(set(names)) < len(names):
                raise Changed(f"one of two columns of one name was dropped: {names}")
            if (column := more.get("column")) and found.sites is not None:
                _not_merged(arrays[names.index(column)].to_pylist(), found.sites)

        return case

    return make


FUZZERS = {
    "csv-bytes": csv_bytes,
    "csv-cells": csv_cells,
    "parquet-bytes": parquet_bytes,
    "parquet-types": parquet_types,
}
