"""A stepper's elementwise work as one pass over memory: compiled by `torch.compile`, or as plain code.

In plain PyTorch, each operation of IVON's update passes over tensors as large as all clients' networks.
Compiled, it reads ĝ, m, σ, g, A and B once, and writes m, σ, g and the next θ: ten passes, which memory bounds.
"""

import itertools
import logging
from collections.abc import Callable
from functools import cache
from threading import RLock
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fedual.errors import in_one_line
from fedual.solvers.stepper import Stepper, advance

logger: logging.Logger = logging.getLogger("fedual")


def compiled(stepper: Stepper, device: str) -> Callable[..., None]:
    """`advance` compiled for a stepper; if that fails, a warning is logged once and plain code runs instead."""
    with _lock:
        return _compiled(stepper, device)


@cache
def _compiled(stepper: Stepper, device: str) -> Callable[..., None]:
    # `torch.compile` gives up on code that it has compiled too often, so each stepper gets a copy of its own, which is
    # compiled for any number of clients, for one client, and for noise that is not shared
    code = advance.__code__.replace(co_name=f"advance_{next(_numbers)}")
    copy = FunctionType(code, advance.__globals__, code.co_name, advance.__defaults__)
    # called from C++, which lets other Python threads continue
    function = torch.compile(copy, fullgraph=True, options={"cpp_wrapper": True} if device == "cpu" else None)

    def attempt(*args: Any) -> None:
        nonlocal function
        used = function
        try:
            used(*args)
        except Exception as error:
            if used is advance:
                raise
            with _lock:
                if function is not advance:
                    logger.warning("Training goes on without compiled code, slower: %s", in_one_line(error))
                    function = advance
            advance(*args)

    return attempt


_lock = RLock()
_numbers = itertools.count()


def window(value: Tensor, n: int) -> Tensor:
    """The first n rows, for compiled code: a view of another tensor would be compiled anew for each n."""
    import torch._dynamo  # importing this takes a second

    rows = value[:n]
    alone = torch.empty(0, dtype=value.dtype, device=value.device)
    alone.set_(rows.untyped_storage(), rows.storage_offset(), rows.shape, rows.stride())
    torch._dynamo.maybe_mark_dynamic(alone, 0)
    return alone
