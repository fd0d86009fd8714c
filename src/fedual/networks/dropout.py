"""Dropout with its random numbers as an argument, so that a client's masks do not depend on the other clients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_AXES = {F.dropout: None, F.dropout1d: 2, F.dropout2d: 2, F.dropout3d: 2}
"""Number of leading axes with independent masks; None means all axes."""


class Dropout(TorchFunctionMode):
    """Takes dropout's uniform numbers from a list; without a list, records their shapes and drops nothing."""

    def __init__(self, uniforms: list[Tensor] | None):
        self.uniforms: list[Tensor] | None = uniforms
        self.shapes: list[torch.Size] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _AXES:
            return func(*args, **(kwargs or {}))
        x, p, training = _arguments(*args, **(kwargs or {}))
        if not training or p == 0:
            return x
        axes = _AXES[func]
        shape = x.shape if axes is None else (*x.shape[:axes], *(1,) * (x.dim() - axes))
        self.shapes.append(torch.Size(shape))
        return x if self.uniforms is None else x * (self.uniforms.pop(0) >= p) / (1 - p)


def _arguments(input: Tensor, p=0.5, training=True, inplace=False) -> tuple[Tensor, float, bool]:
    return input, p, training
