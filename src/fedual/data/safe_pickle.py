"""A reader for the pickled arrays of CIFAR's Python version that executes nothing.

A pickle is a program for a small stack machine, and Python's own reader lets it call any function of any module.
This reader walks the same opcodes, but builds uint8 arrays, lists, tuples, dicts, integers, None and bytes itself.
It recognises the names that NumPy writes into a pickle without looking them up, and refuses all others. All text
becomes bytes: Python 2's strings unchanged, Unicode as UTF-8.
"""

import math
import pickletools
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np

from fedual.errors import DataError

_UINT8 = np.dtype(np.uint8)
_MAX_DIMS = 4  # no array of CIFAR has more


_NAMES = (
    "numpy.core.multiarray _reconstruct",
    "numpy ndarray",
    "numpy dtype",
    "_codecs encode",  # with it, Python 3 writes bytes in protocol 2
    "__builtin__ bytes",  # and with this, empty ones
)
"""The names that a pickled array contains. On the stack, only names are `str`: all text is bytes."""


def _name(name: str) -> str:
    name = name.replace("numpy._core.", "numpy.core.", 1)
    if name not in _NAMES:
        raise DataError(f"it names {name.replace(' ', '.', 1)[:100]!r}, which is code and not data")
    return name


_PUSHES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4"), lambda arg: arg),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), lambda arg: arg),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), lambda arg: arg.encode("latin-1")),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), lambda arg: arg.encode("utf-8")),
    "NONE": lambda arg: None,
    "NEWTRUE": lambda arg: True,
    "NEWFALSE": lambda arg: False,
    "EMPTY_TUPLE": lambda arg: (),
    "EMPTY_LIST": lambda arg: [],
    "EMPTY_DICT": lambda arg: {},
    "GLOBAL": _name,
}
"""Opcodes that push a value made from their argument alone."""

_POPS = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "STACK_GLOBAL": 2, "REDUCE": 2, "BUILD": 1}
"""Opcodes that pop a fixed number of values."""

_POPS_TO_MARK = ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS")
"""Opcodes that pop all values since the last MARK."""


def loads(content: bytes) -> Any:
    """Build the value of a pickle of protocol 0 to 4; raise `DataError` if it is damaged or asks for anything else."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks below each MARK
    memo: dict[int, Any] = {}
    operations = cast(Iterable[tuple[pickletools.OpcodeInfo, Any, int]], pickletools.genops(content))
    try:
        for opcode, arg, position in operations:
            if opcode.name in _PUSHES:
                stack.append(_PUSHES[opcode.name](arg))
                continue
            if opcode.name in _POPS_TO_MARK:
                items, stack = stack, below.pop()
            else:
                items = [stack.pop() for _ in range(_POPS.get(opcode.name, 0))][::-1]
            match opcode.name:
                case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                    stack.append(tuple(items))
                case "LIST":
                    stack.append(items)
                case "DICT":
                    stack.append(_update({}, items))
                case "APPEND" | "APPENDS":
                    _expect(list, stack[-1]).extend(items)
                case "SETITEM" | "SETITEMS":
                    _update(_expect(dict, stack[-1]), items)
                case "STACK_GLOBAL":
                    stack.append(_name(" ".join(_expect(bytes, item).decode() for item in items)))
                case "REDUCE":
                    stack.append(_call(*items))
                case "BUILD":
                    _fill(stack[-1], *items)
                case "BINPUT" | "LONG_BINPUT" | "PUT":
                    memo[arg] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINGET" | "LONG_BINGET" | "GET":
                    stack.append(memo[arg])
                case "MARK":
                    below.append(stack)
                    stack = []
                case "STOP" if position + 1 != len(content):
                    raise DataError("bytes follow its end")
                case "PROTO" | "FRAME" | "STOP":
                    pass
                case other:
                    raise DataError(f"it uses the pickle operation {other}, which plain data do not need")
        (result,) = stack
    except DataError:
        raise
    except Exception as error:
        detail = str(error)[:100] if isinstance(error, ValueError) else "its operations do not fit together"
        raise DataError(f"it is not a whole pickle ({detail})") from None
    return result


def _expect(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _update(target: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    """Add items, which are keys and values in turn, to a dict."""
    if not all(isinstance(key, bytes | int) for key in items[::2]):
        raise TypeError
    target.update(zip(items[::2], items[1::2], strict=True))
    return target


def _call(function: Any, args: Any) -> Any:
    """Do what NumPy's own pickles call: name a dtype, start an array, turn text into bytes."""
    match function, args:
        case "numpy.core.multiarray _reconstruct", ("numpy ndarray", (0,), b"b"):
            return np.empty(0, _UINT8)  # filled by the BUILD that follows
        case "numpy dtype", (b"u1" | b"|u1", *_):
            return _UINT8
        case "numpy dtype", (bytes() as code, *_):
            raise DataError(f"it holds an array of type {code.decode('latin-1')[:100]!r}, not of unsigned bytes")
        case "_codecs encode", (bytes() as text, b"latin1"):
            return text.decode("utf-8").encode("latin-1")
        case "__builtin__ bytes", ():
            return b""
    raise DataError("it makes a call that no pickled array needs")


def _fill(target: Any, state: Any) -> None:
    """Give an array started by `_call` its shape and content, after checking that they fit together."""
    if target is _UINT8:
        return  # its state is byte order and alignment: one byte has neither
    match state:
        case (1, tuple() as shape, dtype, bool(), bytes() as data) if dtype is _UINT8:
            small = len(shape) <= _MAX_DIMS and all(type(n) is int and 0 <= n < 2**31 for n in shape)
            if not small or math.prod(shape) != len(data):
                raise DataError(f"it announces an array of another shape than its {len(data)} bytes have")
            _expect(np.ndarray, target).__setstate__(state)
        case _:
            raise DataError("it describes something else than an array of unsigned bytes")
