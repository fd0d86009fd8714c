"""The gradient of one client, traced and compiled: for networks with convolutions on a GPU.

Convolutions with separate weights for every client form one grouped convolution, for which cuDNN has no fast kernels.
Launching the clients one by one, side by side on the GPU, is faster. All have the same shapes, so one compiled function
serves them all.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from fedual.backends.kernels.fused_updates import logger
from fedual.errors import in_one_line
from fedual.networks.minibatches import Minibatches

Slope = Callable[[Tensor, Tensor, Tensor, Tensor, list[Tensor]], Tensor]
"""Maps θ `(P,)`, x `(B, …)`, y `(B, …)`, weights `(B,)` and dropout's uniforms to ∇ of the batch mean, `(P,)`."""


def compiled(losses: Minibatches, example: Any) -> Slope:
    """The gradient as a compiled function for arguments like the example; uncompiled if compilation fails."""
    network = losses.network

    def value(theta: Tensor, x: Tensor, y: Tensor, weight: Tensor, uniforms: list[Tensor]) -> Tensor:
        with FourChannels():
            outputs = network.forward(network.split(theta), x, uniforms)
        return (weight * losses.criterion(outputs, y)).sum()

    slope = grad(value)
    try:
        with torch.no_grad():
            function = torch.compile(make_fx(slope)(*example), fullgraph=True, dynamic=False)
            function(*example)
    except Exception as error:
        logger.warning("The network runs without compiled code, slower: %s", in_one_line(error))
        return slope
    return torch.no_grad()(function)


class FourChannels(TorchFunctionMode):
    """Pads images with fewer than four channels to four before a convolution, with zeros.

    cuDNN has no repeatable algorithm on tensor cores for the gradient of three channels' weights: 247 µs against 36.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.conv2d and len(args) > 1 and args[0].shape[-3] == args[1].shape[1] < 4:
            x, weight, *rest = args
            missing = (0, 0, 0, 0, 0, 4 - weight.shape[1])
            args = F.pad(x, missing), F.pad(weight, missing), *rest
        return func(*args, **(kwargs or {}))
