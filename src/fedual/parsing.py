"""The door for files that others wrote: whatever a parser raises becomes one sentence, and sizes are checked first.

    with parsing(path, "is no TOML", "correct the file"):
        document = tomllib.loads(read_bytes(path).decode())

    require_memory(path, announced)      # before anything of this size is allocated

A parser may raise anything for a hostile file: its own errors, those of the libraries below it, RecursionError,
MemoryError. None of it is a bug of fedual's, and the user needs one thing only: which file, why, and what to do.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from fedual import memory
from fedual.errors import DataError, FedualError, InputError, require_count
from fedual.texts import printable

SETTING = "FEDUAL_MAX_BYTES"
"""The environment variable that takes the place of all limits that depend on memory or on the file."""
SHARE = 4
"""One part in so many of the free memory may go to a file's content, which is converted and split afterwards."""
INFLATION = 100
"""How many times its size a compressed file may hold: data reach about 20, and 1,000 is a bomb."""
ALWAYS = 1 << 28
"""Bytes that a compressed file may hold whatever its size: a sparse table that is well compressed."""
DOCUMENT = 1 << 26
"""Bytes of a JSON file: a run with a million clients has 40 MB of them, and Python takes 20 times as much."""
SETTINGS = 1 << 20
"""Bytes of a TOML file, which people write."""
DEPTH = 64
"""Most levels of lists and tables in each other: those of fedual have about ten, and Python fails beyond hundreds."""
DIGITS = 20
"""Most digits of a whole number in JSON, those of 64 bits: more do not fit into any number that is computed with."""
LONGEST = 160
"""Most letters of another library's message that a sentence quotes."""


@contextmanager
def parsing(where: object, cause: str, remedy: str, kind: type[FedualError] = DataError) -> Iterator[None]:
    """Turn whatever a parser raises into one sentence: `where` `cause` (what the parser says): `remedy`.

    Args:
        where: The file's path, with the place in it if known.
        cause: What is wrong, such as "is damaged or no Parquet file".
        remedy: What to do.
        kind: The error that is raised; those of fedual pass.
    """
    try:
        yield
    except FedualError:
        raise
    except OSError as error:
        if error.errno is None:  # of a decompressor
            raise kind(f"{where} {cause} ({reason(error)}): {remedy}.") from error
        raise kind(f"{where} cannot be read ({reason(error)}): check its path.") from None
    except Exception as error:
        raise kind(f"{where} {cause} ({reason(error)}): {remedy}.") from error


def reason(error: BaseException) -> str:
    """What an error of another library says, in a few words."""
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    if isinstance(error, KeyError):
        return f"it has no {printable(error.args[0] if error.args else 'such key')}"[:LONGEST]
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = printable(lines[0] if lines else type(error).__name__)
    return text[:LONGEST].rstrip(" .:")


def require_memory(where: object, nbytes: int, stored: int | None = None) -> None:
    """Refuse a file that announces more bytes than a share of the memory, or than its `stored` bytes can mean.

    `$FEDUAL_MAX_BYTES` takes the place of both limits.
    """
    limit, why = memory.available() // SHARE, "a quarter of the free memory"
    if stored is not None and (compressed := max(ALWAYS, INFLATION * stored)) < limit:
        limit, why = compressed, f"{INFLATION} times the file's size"
    if given := os.environ.get(SETTING):
        if not given.isascii() or not given.isdigit():
            raise InputError(f"{SETTING} = {given!r}: give a number of bytes, e.g. 8000000000.")
        limit, why = require_count(SETTING, int(given[:DIGITS])), SETTING
    if nbytes > limit:
        raise DataError(
            f"{where} announces {_amount(nbytes)}, more than {_amount(limit)} ({why}): check it, or set "
            f"{SETTING} to as many bytes as it may take."
        )


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a file of at most so many bytes, by default a share of the memory."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is None:
            require_memory(path, size)
        elif size > most:
            raise DataError(f"{path} has {_amount(size)}, more than the {_amount(most)} of any such file: check it.")
        return file.read(size)


def loads(content: bytes | str) -> Any:
    """A JSON value; `ValueError` if it cannot be computed with or written: long numbers, deep nesting, half letters."""
    value = json.loads(content, parse_int=_whole)
    require_depth(value)
    if b"\\u" in (
        content if isinstance(content, bytes) else content.encode()
    ):  # half of a pair, which no file can hold
        json.dumps(value, ensure_ascii=False).encode()
    return value


def require_depth(value: Any) -> None:
    """Raise `ValueError` if lists and tables are nested too deeply to walk through."""
    level, depth = [value], 0
    while level := list(chain.from_iterable(_items(each) for each in level)):
        if (depth := depth + 1) > DEPTH:
            raise ValueError(f"it is nested more than {DEPTH} levels deep")


def _items(value: Any) -> Any:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inner if isinstance(each, dict | list)]


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _amount(nbytes: int) -> str:
    """A number of bytes in words."""
    for power, unit in ((5, "PB"), (4, "TB"), (3, "GB"), (2, "MB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.3g} {unit}"
    return f"{nbytes} bytes"
