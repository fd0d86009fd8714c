"""Changes to valid examples: of bytes, of JSON trees and of texts."""

import copy
import json
import math
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

EDGES: list[Any] = [
    0, 1, -1, 2, 3, 127, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**9,
    10**30, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e-300, 1e16, 1e30, 1e160, 1e308, -1e308, math.inf, -math.inf, math.nan,
]  # fmt: skip
"""Numbers at which programs go wrong."""
TEXTS = [
    "", " ", "0", "-1", "1e999", "nan", "NaN", "null", "true", "inf", "../..", "/etc/passwd", "a" * 300, "\x00",
    "\x1b[2J", "=1+1",
    "é", "\u202e", "\ud800", "x\ny", "'\"", "{}", "[]", "%s", "{0}", "torch.float64", "float16", "mlp",
    "Full",
]  # fmt: skip
"""Texts at which programs go wrong."""
DEEP = 3000
"""Levels of nesting: more than Python's stack has."""


def edge(rng: Random) -> Any:
    """A value that is seldom expected."""
    return rng.choice(
        [
            lambda: rng.choice(EDGES),
            lambda: rng.choice(EDGES),
            lambda: rng.choice(TEXTS),
            lambda: rng.choice([None, True, False]),
            lambda: [],
            lambda: {},
            lambda: [rng.choice(EDGES) for _ in range(rng.randrange(1, 4))],
            lambda: {"type": rng.choice(TEXTS)},
            lambda: {rng.choice(TEXTS): rng.choice(EDGES)},
            lambda: [[rng.choice(EDGES)]],
        ]
    )()


def near(rng: Random, value: Any) -> Any:
    """A value like this one, of the same type if that is possible."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        real = float(value) if abs(value) < 2**1000 else math.inf
        return rng.choice([value + 1, value - 1, -value, value * 2, value * 10**9, real, str(value)])
    if isinstance(value, float):
        return rng.choice([value * (1 + 1e-9), -value, value * 1e9, value * 1e-9, value + 1, str(value), int(1e9)])
    if isinstance(value, str):
        return rng.choice([value + "x", value[:-1], value.upper(), value * 100, letters(rng, value), [value]])
    if isinstance(value, list):
        other = list(value)
        if other and rng.random() < 0.7:
            where = rng.randrange(len(other))
            other[where : where + 1] = rng.choice([[], [other[where]] * 2, [rng.choice(other)]])
        else:
            other.append(copy.deepcopy(rng.choice(value)) if value else rng.choice(EDGES))
        return other
    return edge(rng)


def letters(rng: Random, text: str) -> str:
    """A text with one letter changed."""
    if not text:
        return rng.choice(TEXTS)
    where = rng.randrange(len(text))
    return (
        text[:where]
        + rng.choice(["", "0", "9", "-", ".", "e", '"', "'", ",", "\n", "\x1b", "ß", "["])
        + text[where + 1 :]
    )


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a tree."""
    found = [above]
    if isinstance(value, dict):
        found += [path for key, item in value.items() for path in places(item, (*above, key))]
    elif isinstance(value, list):
        found += [path for key, item in enumerate(value[:50]) for path in places(item, (*above, key))]
    return found


def tree(rng: Random, value: Any, times: int | None = None) -> Any:
    """A JSON tree with one to three values changed, removed, renamed, doubled or nested."""
    for _ in range(times or rng.choice([1, 1, 1, 2, 3])):
        value = _one(rng, copy.deepcopy(value))
    return value


def _one(rng: Random, value: Any) -> Any:
    # a place high in the tree is as likely as all those below it together
    path = list(rng.choice(places(value)))
    if rng.random() < 0.3 and path:
        path = path[: rng.randrange(1, len(path) + 1)]
    if not path:
        return edge(rng) if rng.random() < 0.3 or not isinstance(value, dict | list) else _shaken(rng, value)
    *above, last = path
    parent = value
    for key in above:
        parent = parent[key]
    kind = rng.random()
    if kind < 0.4:
        parent[last] = edge(rng)
    elif kind < 0.75:
        parent[last] = near(rng, parent[last])
    elif kind < 0.85:
        del parent[last]
    elif kind < 0.9 and isinstance(parent, dict):
        parent[rng.choice(TEXTS)] = parent.pop(last)
    elif kind < 0.95:
        parent[last] = rng.choice([[parent[last]], {"value": parent[last]}, nested(rng)])
    else:
        parent[last] = _somewhere(rng, value)
    return value


def _shaken(rng: Random, value: Any) -> Any:
    if isinstance(value, dict) and value:
        value[rng.choice([*TEXTS, *value])] = edge(rng)
        return value
    return near(rng, value)


def _somewhere(rng: Random, value: Any) -> Any:
    """Another part of the same tree."""
    for key in rng.choice(places(value)):
        value = value[key]
    return copy.deepcopy(value)


def nested(rng: Random, depth: int = 60) -> Any:
    """A list in a list in a list."""
    value: Any = rng.choice(EDGES)
    for _ in range(depth):
        value = [value]
    return value


def as_json(rng: Random, value: Any) -> str:
    """JSON with what Python reads and the standard lacks; sometimes nested deeper than any stack, or damaged."""
    text = json.dumps(value)
    if (chance := rng.random()) < 0.02:
        return text.replace(":", ":" + "[" * DEEP, 1)
    if chance < 0.04:
        return "[" * DEEP * 30
    if chance < 0.06:
        return text.replace(":", ": " + "9" * 5000 + ', "x":', 1)
    return letters(rng, text) if chance < 0.12 else text


def data(rng: Random, content: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Bytes with one to four changes; `others` are contents to splice in."""
    changes: list[Callable[[Random, bytearray, Sequence[bytes]], None]]
    changes = [_bit, _bit, _byte, _byte, _number, _number, _cut, _double, _insert, _splice, _truncate]
    mutable = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if mutable:
            rng.choice(changes)(rng, mutable, others or [content])
    return bytes(mutable)


def flipped(rng: Random, content: bytes) -> bytes:
    """Bytes with one bit changed."""
    mutable = bytearray(content)
    _bit(rng, mutable, ())
    return bytes(mutable)


def _bit(rng: Random, content: bytearray, others: Sequence[bytes]) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _byte(rng: Random, content: bytearray, others: Sequence[bytes]) -> None:
    content[rng.randrange(len(content))] = rng.choice([0, 255, 127, 128, 10, 34, 44, 91, rng.randrange(256)])


def _number(rng: Random, content: bytearray, others: Sequence[bytes]) -> None:
    """A number of 2, 4 or 8 bytes at an edge: where a size is announced, it is now another."""
    form = rng.choice("HIQ")
    size = struct.calcsize(form)
    where = rng.randrange(max(1, len(content) - size))
    value = rng.choice(
        [0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1, rng.getrandbits(8 * size)]
    )
    content[where : where + size] = struct.pack(rng.choice("<>") + form, value)


def _part(rng: Random, content: bytes | bytearray) -> tuple[int, int]:
    start = rng.randrange(len(content))
    return start, min(len(content), start + rng.choice([1, 2, 4, 16, 64, 256]))


def _cut(rng: Random, content: bytearray, others: Sequence[bytes]) -> None:
    start, end = _part(rng, content)
    del content[start:end]


def _double(rng: Random, content: bytearray, others: Sequence[bytes]) -> None:
    start, end = _part(rng, content)
    content[start:start] = content[start:end] * rng.choice([1, 1, 2, 50])


def _insert(rng: Random, content: bytearray, others: Sequence[bytes]) -> None:
    where = rng.randrange(len(content) + 1)
    content[where:where] = rng.choice([b"\0", b'"', b",", b"\n", b"[" * 4, rng.randbytes(rng.randrange(1, 9))])


def _splice(rng: Random, content: bytearray, others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    if other:
        start, end = _part(rng, other)
        where = rng.randrange(len(content))
        content[where : where + end - start] = other[start:end]


def _truncate(rng: Random, content: bytearray, others: Sequence[bytes]) -> None:
    del content[rng.randrange(len(content)) :]
