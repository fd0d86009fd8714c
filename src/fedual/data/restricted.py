"""A reader for the pickled arrays of CIFAR's python version that executes nothing.

A pickle is a program for a small stack machine, and the general reader lets it call any function of any module.
This one walks the same opcodes and builds arrays of unsigned bytes, lists, tuples, dicts, integers, None and bytes,
itself. The names that NumPy writes into a pickle are recognised as words, never looked up; any other is refused.
All text becomes bytes: what Python 2 wrote as it is, Unicode as UTF-8.
"""

import math
import pickletools
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any, TypeVar, cast

import numpy as np

from fedual.errors import DataError

_T = TypeVar("_T")
_UINT8 = np.dtype(np.uint8)


class _Word(Enum):
    RECONSTRUCT = auto()
    NDARRAY = auto()
    DTYPE = auto()
    ENCODE = auto()
    BYTES = auto()


_WORDS = {
    "numpy.core.multiarray _reconstruct": _Word.RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _Word.RECONSTRUCT,
    "numpy ndarray": _Word.NDARRAY,
    "numpy dtype": _Word.DTYPE,
    "_codecs encode": _Word.ENCODE,  # how Python 3 writes bytes in protocol 2,
    "__builtin__ bytes": _Word.BYTES,  # and no bytes
}


def loads(content: bytes) -> Any:
    """Build the value that a pickle describes, from plain data only.

    Args:
        content: the whole pickle, protocol 0 to 4.

    Returns:
        An array of uint8, a list, tuple or dict of such values, an integer, None or bytes.

    Raises:
        DataError: the pickle is damaged, or asks for anything else.
    """
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks below each MARK
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        nonlocal stack
        items, stack = stack, outer.pop()
        return items

    operations = cast(Iterable[tuple[pickletools.OpcodeInfo, Any, int]], pickletools.genops(content))
    try:
        for opcode, arg, position in operations:
            match opcode.name:
                case "BININT" | "BININT1" | "BININT2" | "INT" | "LONG" | "LONG1" | "LONG4":
                    stack.append(arg)
                case "BINPUT" | "LONG_BINPUT" | "PUT":
                    memo[arg] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINGET" | "LONG_BINGET" | "GET":
                    stack.append(memo[arg])
                case "STRING" | "BINSTRING" | "SHORT_BINSTRING":
                    stack.append(arg.encode("latin-1"))
                case "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                    stack.append(arg.encode("utf-8"))
                case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8":
                    stack.append(arg)
                case "NONE":
                    stack.append(None)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(opcode.name == "NEWTRUE")
                case "MARK":
                    outer.append(stack)
                    stack = []
                case "EMPTY_TUPLE":
                    stack.append(())
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    size = int(opcode.name[-1])
                    if len(stack) < size:
                        raise IndexError
                    stack[-size:] = [tuple(stack[-size:])]
                case "TUPLE":
                    items = since_mark()
                    stack.append(tuple(items))
                case "EMPTY_LIST":
                    stack.append([])
                case "LIST":
                    items = since_mark()
                    stack.append(items)
                case "APPEND":
                    item = stack.pop()
                    _a(list, stack[-1]).append(item)
                case "APPENDS":
                    items = since_mark()
                    _a(list, stack[-1]).extend(items)
                case "EMPTY_DICT":
                    stack.append({})
                case "DICT":
                    items = since_mark()
                    stack.append(_update({}, items))
                case "SETITEM":
                    value, key = stack.pop(), stack.pop()
                    _update(_a(dict, stack[-1]), [key, value])
                case "SETITEMS":
                    items = since_mark()
                    _update(_a(dict, stack[-1]), items)
                case "GLOBAL":
                    stack.append(_word(arg))
                case "STACK_GLOBAL":
                    name, module = _a(bytes, stack.pop()), _a(bytes, stack.pop())
                    stack.append(_word(f"{module.decode()} {name.decode()}"))
                case "REDUCE":
                    args, function = stack.pop(), stack.pop()
                    stack.append(_call(function, args))
                case "BUILD":
                    state = stack.pop()
                    _fill(stack[-1], state)
                case "PROTO" | "FRAME":
                    pass
                case "STOP":
                    if position + 1 != len(content):
                        raise DataError("bytes follow its end")
                case other:
                    raise DataError(f"it uses the pickle operation {other}, which plain data do not need")
        (result,) = stack
    except (ValueError, IndexError, KeyError, TypeError) as error:
        detail = str(error)[:100] if isinstance(error, ValueError) else "its operations do not fit together"
        raise DataError(f"it is not a whole pickle ({detail})") from None
    return result


def _a(kind: type[_T], value: Any) -> _T:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _update(target: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    keys, values = items[::2], items[1::2]
    if not all(isinstance(key, bytes | int) for key in keys):
        raise TypeError
    target.update(zip(keys, values, strict=True))
    return target


def _word(name: str) -> _Word:
    if name not in _WORDS:
        raise DataError(f"it names {name.replace(' ', '.', 1)[:100]!r}, which is code and not data")
    return _WORDS[name]


def _call(function: Any, args: Any) -> Any:
    """Do what NumPy's own pickles call: name a dtype, begin an array, turn text into bytes."""
    match function, args:
        case _Word.RECONSTRUCT, (_Word.NDARRAY, (0,), b"b"):
            return np.empty(0, _UINT8)  # filled by the BUILD that follows
        case _Word.DTYPE, (b"u1" | b"|u1", *_):
            return _UINT8
        case _Word.DTYPE, (bytes() as code, *_):
            raise DataError(f"it holds an array of type {code.decode('latin-1')[:100]!r}, not of unsigned bytes")
        case _Word.ENCODE, (bytes() as text, b"latin1"):
            return text.decode("utf-8").encode("latin-1")
        case _Word.BYTES, ():
            return b""
    raise DataError("it makes a call that no pickled array needs")


def _fill(target: Any, state: Any) -> None:
    """Give an array begun by `_call` its shape and content, once they are known to fit together."""
    if target is _UINT8:
        return  # byte order and alignment: one byte has neither
    match state:
        case (1, tuple() as shape, dtype, bool(), bytes() as data) if dtype is _UINT8:
            small = len(shape) <= 4 and all(type(n) is int and 0 <= n < 2**31 for n in shape)
            if not small or math.prod(shape) != len(data):
                raise DataError(f"it announces an array of another shape than its {len(data)} bytes have")
            _a(np.ndarray, target).__setstate__(cast(Any, state))
        case _:
            raise DataError("it describes something else than an array of unsigned bytes")
