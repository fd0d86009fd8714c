"""Triton kernels for group norms of n clients: images have their channels last, `(n, B, H, W, C)`."""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from fedual.backends.kernels.grids import launch, power_of_two

NORMALISED = 2048
"""Values that a program normalises at a time."""


@triton.jit
def _values(x, first, P, C: tl.constexpr, channel, known, BLOCK: tl.constexpr):
    """Some pixels of one group in float32, and where they exist."""
    at = first + tl.arange(0, BLOCK)
    mask = (at < P)[:, None] & known[None, :]
    return tl.load(x + at[:, None] * C + channel[None, :], mask=mask, other=0.0).to(tl.float32), mask


@triton.jit
def _normalise(
    x, rest, weight, bias, y, means, scales, B, P, eps, weight_row,
    C: tl.constexpr, SIZE: tl.constexpr, REST: tl.constexpr, RELU: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, WIDTH)
    channel, known = group * SIZE + c, c < SIZE
    x += image * P * C
    y += image * P * C
    rest += image * P * C
    sums = tl.zeros((BLOCK, WIDTH), tl.float32)
    for first in range(0, P, BLOCK):
        value, _ = _values(x, first, P, C, channel, known, BLOCK)
        sums += value
    mean = tl.sum(sums) / (P * SIZE)
    sums = tl.zeros((BLOCK, WIDTH), tl.float32)
    for first in range(0, P, BLOCK):
        value, mask = _values(x, first, P, C, channel, known, BLOCK)
        sums += tl.where(mask, (value - mean) * (value - mean), 0.0)
    scale = 1 / tl.sqrt(tl.sum(sums) / (P * SIZE) + eps)
    w = tl.load(weight + image // B * weight_row + channel, mask=known, other=0.0)
    b = tl.load(bias + image // B * weight_row + channel, mask=known, other=0.0)
    for first in range(0, P, BLOCK):
        value, mask = _values(x, first, P, C, channel, known, BLOCK)
        value = (value - mean) * scale * w[None, :] + b[None, :]
        if REST:
            more, _ = _values(rest, first, P, C, channel, known, BLOCK)
            value += more
        if RELU:
            value = tl.where(value < 0, 0.0, value)  # a NaN stays
        place = (first + tl.arange(0, BLOCK))[:, None] * C + channel[None, :]
        tl.store(y + place, value.to(y.dtype.element_ty), mask=mask)
    tl.store(means + image * (C // SIZE) + group, mean)
    tl.store(scales + image * (C // SIZE) + group, scale)


@triton.jit
def _slopes(slope, y, first, P, C: tl.constexpr, channel, known, RELU: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of what was normalised, before a ReLU, and where it exists."""
    g, mask = _values(slope, first, P, C, channel, known, BLOCK)
    if RELU:
        result, _ = _values(y, first, P, C, channel, known, BLOCK)
        g = tl.where(result > 0, g, 0.0)
    return g, mask


@triton.jit
def _denormalise(
    x, y, slope, weight, means, scales, dx, drest, partial, B, P, weight_row,
    C: tl.constexpr, SIZE: tl.constexpr, REST: tl.constexpr, RELU: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, WIDTH)
    channel, known = group * SIZE + c, c < SIZE
    x += image * P * C
    y += image * P * C
    slope += image * P * C
    dx += image * P * C
    drest += image * P * C
    mean, scale = tl.load(means + image * (C // SIZE) + group), tl.load(scales + image * (C // SIZE) + group)
    w = tl.load(weight + image // B * weight_row + channel, mask=known, other=0.0)
    along, alone = tl.zeros((BLOCK, WIDTH), tl.float32), tl.zeros((BLOCK, WIDTH), tl.float32)
    for first in range(0, P, BLOCK):
        g, _ = _slopes(slope, y, first, P, C, channel, known, RELU, BLOCK)
        value, _ = _values(x, first, P, C, channel, known, BLOCK)
        along += g * (value - mean) * scale
        alone += g
    along, alone = tl.sum(along, 0), tl.sum(alone, 0)
    tl.store(partial + image * 2 * C + channel, along, mask=known)
    tl.store(partial + image * 2 * C + C + channel, alone, mask=known)
    inner, level = tl.sum(along * w) / (P * SIZE), tl.sum(alone * w) / (P * SIZE)
    for first in range(0, P, BLOCK):
        g, mask = _slopes(slope, y, first, P, C, channel, known, RELU, BLOCK)
        value, _ = _values(x, first, P, C, channel, known, BLOCK)
        place = (first + tl.arange(0, BLOCK))[:, None] * C + channel[None, :]
        if REST:
            tl.store(drest + place, g.to(drest.dtype.element_ty), mask=mask)
        value = (g * w[None, :] - level - (value - mean) * scale * inner) * scale
        tl.store(dx + place, value.to(dx.dtype.element_ty), mask=mask)


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, rest: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise the channels of each image in groups, add `rest`, and cut off what is negative, both if asked.

    x is `(n, B, H, W, C)`, contiguous, and so is the rest; weight and bias are `(n, C)`, their clients equally far
    apart. Returns the result, and means and scales `(n, B, groups)`.
    """
    n, B, H, W, C = x.shape
    y = torch.empty_like(x)
    means, scales = (x.new_empty(n, B, groups, dtype=torch.float32) for _ in range(2))
    arguments = x, x if rest is None else rest, weight, bias, y, means, scales, B, H * W, eps, weight.stride(0)
    kind = {"REST": rest is not None, "RELU": relu}
    launch(_normalise, (groups, n * B), *arguments, C=C, **kind, **_group(C // groups, H * W))
    return y, means, scales


def denormalise(
    x: Tensor, y: Tensor, slope: Tensor, weight: Tensor, means: Tensor, scales: Tensor, rest: bool, relu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `normalise`: ∂x, and each image's part of those of weight and bias, `(n, B, 2, C)` in float32.

    The last one is ∂rest, if there is a rest.
    """
    n, B, H, W, C = x.shape
    groups, dx, partial = means.shape[-1], torch.empty_like(x), x.new_empty(n, B, 2, C, dtype=torch.float32)
    drest = torch.empty_like(x) if rest and relu else None
    tensors = x, y, slope, weight, means, scales, dx, dx if drest is None else drest, partial
    kind = {"REST": drest is not None, "RELU": relu}
    arguments = *tensors, B, H * W, weight.stride(0)
    launch(_denormalise, (groups, n * B), *arguments, C=C, **kind, **_group(C // groups, H * W))
    return dx, partial, slope if rest and not relu else drest


def _group(channels: int, pixels: int) -> dict[str, int]:
    width = power_of_two(channels)
    return {"SIZE": channels, "WIDTH": width, "BLOCK": max(1, min(power_of_two(pixels), NORMALISED // width))}
