"""A stepper's elementwise work as one pass over memory: compiled by `torch.compile`, or as it is written.

Left to PyTorch, each operation of IVON's update walks over tensors as large as all clients' networks.
Compiled, it reads ĝ, m, h, g, A and B once, and writes m, h, g and the next θ: ten passes, which memory bounds.
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

Inner = dict[str, Tensor]
"""A stepper's variables within a round, each with a leading client axis."""
logger: logging.Logger = logging.getLogger("fedual")


def advance(
    stepper: Any,
    inner: Inner,
    gradient: Tensor,
    correlation: Tensor | None = None,
    noise: Tensor | None = None,
    ahead: Tensor | None = None,
    theta: Tensor | None = None,
) -> None:
    """One step, in place.

    Args:
        stepper: Whose `update` and `place`.
        inner: Its variables.
        gradient: ĝ `(n, P)`.
        correlation: ĝε, unless it is to be made from one sample's noise.
        noise: ε of that sample.
        ahead: ε of the next step.
        theta: Becomes the place of the next step's gradient.
    """
    if noise is not None:
        correlation = gradient * noise
    moved = stepper.update(inner, gradient, correlation)
    for name, value in moved.items():
        if value is not inner[name]:
            inner[name].copy_(value)
    if theta is not None:
        theta.copy_(stepper.place(moved, ahead))


def compiled(stepper: Any, device: str) -> Callable[..., None]:
    """`advance`, compiled for steppers of these settings; where that fails it says so once, and runs as it is."""
    with _lock:
        return _compiled(stepper, device)


@cache
def _compiled(stepper: Any, device: str) -> Callable[..., None]:
    # `torch.compile` gives up on code that it had to compile too often: each stepper has a copy of its own, compiled
    # for any number of clients, for one, and for noise that is not shared
    code = advance.__code__.replace(co_name=f"advance_{next(_numbers)}")
    copy = FunctionType(code, advance.__globals__, code.co_name, advance.__defaults__)
    # called from C++, which lets other Python threads go on
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
                    logger.warning("Training goes on without compiled code, slower: %s", reason(error))
                    function = advance
            advance(*args)

    return attempt


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


_lock = RLock()
_numbers = itertools.count()


def window(value: Tensor, n: int) -> Tensor:
    """The first n rows, for compiled code: a view of another tensor would be compiled anew for each n."""
    import torch._dynamo  # takes a second: only for those who compile

    rows = value[:n]
    alone = torch.empty(0, dtype=value.dtype, device=value.device)
    alone.set_(rows.untyped_storage(), rows.storage_offset(), rows.shape, rows.stride())
    torch._dynamo.maybe_mark_dynamic(alone, 0)
    return alone


def aligned(like: Tensor) -> Tensor:
    """Memory `(n, P)` whose rows begin at multiples of 128 bytes: tensor cores want matrices within θ aligned."""
    columns = like.shape[-1]
    return like.new_empty(len(like), columns + -columns % 32)[:, :columns]
