"""A stepper's elementwise work as one pass over memory: compiled by `torch.compile`, or as it is written.

Left to PyTorch's operations, IVON's update walks some forty times over tensors as large as all clients' networks.
Compiled, it reads ĝ, m, h, g, A and B once, and writes m, h, g and the next θ: ten passes, which memory bounds.
"""

import logging
from typing import Any

import torch
from torch import Tensor

Inner = dict[str, Tensor]
"""A stepper's variables within a round, each with a leading client axis."""
logger = logging.getLogger("fedual")


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


class Compiled:
    """`advance`, compiled at the first call; where that fails, it says so once and goes on without."""

    def __init__(self):
        self.function: Any = None

    def __call__(self, *args: Any) -> None:
        """`advance`."""
        if self.function is not None:
            return self.function(*args)
        try:
            self.function = torch.compile(advance, dynamic=True, fullgraph=True)
            return self.function(*args)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.warning("fedual could not compile its update (%s): it trains without, more slowly.", reason)
            self.function = advance
            return self.function(*args)


compiled = Compiled()
