"""Convolutions and group normalisation of n clients on a GPU, by the kernels of `bench.gpu_kernels`.

A probe, not a part of the library: `python -m bench.convolutions` says whether it pays.

Under `vmap` a layer of one client, x `(B, C, H, W)`, becomes that of all clients, `(n, B, C, H, W)`, whose memory has
the channels last: elementwise operations in between keep that order.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.func import vmap

from fedual.networks.linear_layers import Slot, Stacked

TYPES = torch.float32, torch.bfloat16
"""What the kernels compute in."""


class Kernels(Stacked):
    """`Stacked` with convolutions and group norms by the kernels; `many` is True under a `vmap` over clients."""

    def __init__(self, parts: Mapping[str, Tensor], slots: Mapping[str, Slot], many: bool):
        super().__init__(parts, slots)
        self.many: bool = many

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = {F.conv2d: convolution, F.group_norm: group_norm}.get(func)
        done = None if layer is None else layer(self.slots, self.many, *args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs) if done is None else done


class AnyType(Slot):
    """A slot that takes gradients of another type than its own."""

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a_k b_k, the gradient of a weight."""
        self.add(torch.bmm(a, b)) if a.dtype != self.place.dtype else super().add_product(a, b)

    def add_sum(self, gradients: Tensor) -> None:
        """Add Σ_i of gradients `(n, N, *shape)`, the gradient of a bias."""
        self.add(gradients.sum(1, dtype=self.place.dtype))


def convolution(
    slots: Mapping[int, Slot],
    many: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """`F.conv2d` for n clients, or None if the kernels cannot compute it."""
    own = [slots.get(id(part)) for part in (weight, bias) if part is not None]
    step, zeros = _of_both_axes(stride), _of_both_axes(padding)
    if not (_fits(input) and weight.shape[-1] == weight.shape[-2] and _of_both_axes(dilation) == groups == 1):
        return None
    if None in own or step is None or zeros is None or zeros >= weight.shape[-1]:
        return None
    return _run(_Convolution, many, (step, zeros), input, weight, bias, own)


def group_norm(
    slots: Mapping[int, Slot],
    many: bool,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    """`F.group_norm` for n clients, or None if the kernels cannot compute it."""
    own = [slots.get(id(part)) for part in (weight, bias)]
    return (
        None if None in own or not _fits(input) else _run(_GroupNorm, many, (num_groups, eps), input, weight, bias, own)
    )


def _fits(x: Tensor) -> bool:
    return x.dim() == 4 and x.dtype in TYPES


def _of_both_axes(value: Any) -> int | None:
    """The number that both axes have, or None if they differ or it is a word."""
    values = set(value) if isinstance(value, tuple | list) else {value}
    one = values.pop()
    return one if isinstance(one, int) and not values else None


def _run(layer: Any, many: bool, settings: Any, x: Tensor, weight: Any, bias: Any, slots: Any) -> Tensor:
    """Apply a layer of n clients to one of them under `vmap` (`many`), or to a single client."""
    if many:
        return _Stacked.apply(layer, settings, x, weight, bias, *slots)  # type: ignore[return-value]
    alone = None if bias is None else bias[None]
    return layer.apply(settings, x[None], weight[None], alone, *slots)[0]


class _Stacked(Function):
    """A layer of one client that exists under `vmap` only, as the layer of all clients."""

    @staticmethod
    def forward(layer: Any, settings: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *slots: Slot) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError

    @staticmethod
    def vmap(info: Any, in_dims: Any, layer: Any, settings: Any, *args: Any) -> Any:
        x, weight, bias, *slots = args
        if None in (*in_dims[2:4], *(() if bias is None else in_dims[4:5])):  # the model itself uses vmap
            return vmap(lambda *parts: layer.plain(settings, *parts), in_dims[2:5])(x, weight, bias), 0
        return layer.apply(settings, x.movedim(in_dims[2], 0), weight, bias, *slots), 0


class _Convolution(Function):
    """The layer of n clients: x `(n, B, C, H, W)`, W `(n, O, C, K, K)`, b `(n, O)`."""

    @staticmethod
    def plain(settings: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, *settings)

    @staticmethod
    def forward(ctx: Any, settings: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *slots: Slot) -> Tensor:
        from bench import gpu_kernels

        stride, padding = ctx.settings = settings
        x, taps = _channels_last(x), weight.to(x.dtype).permute(0, 3, 4, 2, 1).contiguous()
        size = [(length + 2 * padding - taps.shape[1]) // stride + 1 for length in x.shape[2:4]]
        y = gpu_kernels.correlate(x, taps, (size[0], size[1]), stride, padding)
        ctx.save_for_backward(x, taps)
        ctx.slots = slots
        return _channels_first(y if bias is None else y.add_(bias[:, None, None, None].to(y.dtype)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        from bench import gpu_kernels

        (x, taps), (stride, padding), grad = ctx.saved_tensors, ctx.settings, _channels_last(grad)
        ctx.slots[0].add(gpu_kernels.outer(x, grad, taps.shape[1], stride, padding).permute(0, 4, 3, 1, 2))
        if len(ctx.slots) > 1:
            ctx.slots[1].add(grad.sum((1, 2, 3), dtype=torch.float32))
        dx = None
        if ctx.needs_input_grad[1]:
            mirrored = taps.flip(1, 2).transpose(3, 4).contiguous()
            size = (x.shape[2], x.shape[3])
            dx = _channels_first(gpu_kernels.correlate(grad, mirrored, size, 1, taps.shape[1] - 1 - padding, stride))
        return None, dx, None, None, *(None for _ in ctx.slots)


class _GroupNorm(Function):
    """The layer of n clients: x `(n, B, C, H, W)`, weight and bias `(n, C)`."""

    @staticmethod
    def plain(settings: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.group_norm(x, settings[0], weight, bias, settings[1])

    @staticmethod
    def forward(ctx: Any, settings: Any, x: Tensor, weight: Tensor, bias: Tensor, *slots: Slot) -> Tensor:
        from bench import gpu_kernels

        x, weight = _channels_last(x), weight.contiguous()
        y, means, scales = gpu_kernels.normalise(x, weight, bias.contiguous(), *settings)
        ctx.save_for_backward(x, weight, means, scales)
        ctx.slots = slots
        return _channels_first(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        from bench import gpu_kernels

        x, weight, means, scales = ctx.saved_tensors
        dx, dweight, dbias = gpu_kernels.denormalise(x, _channels_last(grad), weight, means, scales)
        for slot, gradients in zip(ctx.slots, (dweight, dbias), strict=True):
            slot.add_sum(gradients)
        return None, _channels_first(dx), None, None, *(None for _ in ctx.slots)


def _channels_last(x: Tensor) -> Tensor:
    """`(n, B, C, H, W)` as `(n, B, H, W, C)`, contiguous: a copy only where the memory has another order."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3)
