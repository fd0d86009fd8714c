"""Triton kernels for convolutions and group normalisation of n clients, each with weights of its own.

cuDNN has no fast kernels for the grouped convolution that a stack of clients is. Here images are stored with their
channels last, `(n, B, H, W, C)`, and a convolution is a sum over its taps of small matrix products that read the image
where it is. Sums are taken in a fixed order, so that a run repeats its bits. A probe: see `bench.convolutions`.
"""

from typing import Any, cast

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

ROWS = 128
"""Output pixels that a program computes at a time."""
PARTS = 16
"""Programs that share the pixels of a weight's gradient; their sums are added up in order."""
CHUNK = 4096
"""Values that a program normalises at a time."""


@triton.jit
def _correlate(
    x, weight, y, pixels, H, W, OH, OW, stride, spread, padding,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, CP: tl.constexpr, OP: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pixels
    column, row, image = at % OW, at // OW % OH, at // (OW * OH)
    c, o = tl.arange(0, CP), tl.arange(0, OP)
    x += client * (pixels // (OH * OW)) * H * W * C
    weight += client * K * K * C * O
    y += client * pixels * O
    total = tl.zeros((BLOCK, OP), tl.float32)
    for tap in range(K * K):
        down, across = row * stride + tap // K - padding, column * stride + tap % K - padding
        there = inside & (down >= 0) & (down < H * spread) & (across >= 0) & (across < W * spread)
        there = there & (down % spread == 0) & (across % spread == 0)
        place = ((image * H + down // spread) * W + across // spread) * C
        a = tl.load(x + place[:, None] + c[None, :], mask=there[:, None] & (c < C)[None, :], other=0.0)
        known = (c < C)[:, None] & (o < O)[None, :]
        b = tl.load(weight + (tap * C + c[:, None]) * O + o[None, :], mask=known, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    mask = inside[:, None] & (o < O)[None, :]
    tl.store(y + at[:, None] * O + o[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _outer(
    x, slope, out, pixels, each, H, W, OH, OW, stride, padding,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, CP: tl.constexpr, OP: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, tap, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    c, o = tl.arange(0, CP), tl.arange(0, OP)
    x += client * (pixels // (OH * OW)) * H * W * C
    slope += client * pixels * O
    last = tl.minimum(pixels, part * each + each)
    total = tl.zeros((CP, OP), tl.float32)
    for first in range(part * each, last, BLOCK):
        at = first + tl.arange(0, BLOCK)
        column, row, image = at % OW, at // OW % OH, at // (OW * OH)
        down, across = row * stride + tap // K - padding, column * stride + tap % K - padding
        there = (at < last) & (down >= 0) & (down < H) & (across >= 0) & (across < W)
        place = ((image * H + down) * W + across) * C
        a = tl.load(x + place[None, :] + c[:, None], mask=there[None, :] & (c < C)[:, None], other=0.0)
        mask = (at < last)[:, None] & (o < O)[None, :]
        b = tl.load(slope + at[:, None] * O + o[None, :], mask=mask, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    out += ((part * tl.num_programs(2) + client) * K * K + tap) * C * O
    tl.store(out + c[:, None] * O + o[None, :], total, mask=(c < C)[:, None] & (o < O)[None, :])


@triton.jit
def _normalise(
    x, weight, bias, y, means, scales, B, P, eps,
    C: tl.constexpr, G: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    SIZE: tl.constexpr = C // G
    c = tl.arange(0, CP)
    channel, known = group * SIZE + c, c < SIZE
    x += image * P * C
    y += image * P * C
    sums = tl.zeros((BLOCK, CP), tl.float32)
    for first in range(0, P, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = (at < P)[:, None] & known[None, :]
        sums += tl.load(x + at[:, None] * C + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(sums) / (P * SIZE)
    sums = tl.zeros((BLOCK, CP), tl.float32)
    for first in range(0, P, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = (at < P)[:, None] & known[None, :]
        gap = tl.load(x + at[:, None] * C + channel[None, :], mask=mask, other=0.0).to(tl.float32) - mean
        sums += tl.where(mask, gap * gap, 0.0)
    scale = 1 / tl.sqrt(tl.sum(sums) / (P * SIZE) + eps)
    w = tl.load(weight + image // B * C + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + image // B * C + channel, mask=known, other=0.0).to(tl.float32)
    for first in range(0, P, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = (at < P)[:, None] & known[None, :]
        place = at[:, None] * C + channel[None, :]
        value = (tl.load(x + place, mask=mask, other=0.0).to(tl.float32) - mean) * scale
        tl.store(y + place, (value * w[None, :] + b[None, :]).to(y.dtype.element_ty), mask=mask)
    tl.store(means + image * G + group, mean)
    tl.store(scales + image * G + group, scale)


@triton.jit
def _denormalise(
    x, slope, weight, means, scales, dx, dweight, dbias, B, P,
    C: tl.constexpr, G: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    SIZE: tl.constexpr = C // G
    c = tl.arange(0, CP)
    channel, known = group * SIZE + c, c < SIZE
    x += image * P * C
    slope += image * P * C
    dx += image * P * C
    mean, scale = tl.load(means + image * G + group), tl.load(scales + image * G + group)
    w = tl.load(weight + image // B * C + channel, mask=known, other=0.0).to(tl.float32)
    along, alone = tl.zeros((CP,), tl.float32), tl.zeros((CP,), tl.float32)
    for first in range(0, P, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = (at < P)[:, None] & known[None, :]
        place = at[:, None] * C + channel[None, :]
        g = tl.load(slope + place, mask=mask, other=0.0).to(tl.float32)
        value = (tl.load(x + place, mask=mask, other=0.0).to(tl.float32) - mean) * scale
        along += tl.sum(g * value, 0)
        alone += tl.sum(g, 0)
    tl.store(dweight + image * C + channel, along, mask=known)
    tl.store(dbias + image * C + channel, alone, mask=known)
    inner, level = tl.sum(along * w) / (P * SIZE), tl.sum(alone * w) / (P * SIZE)
    for first in range(0, P, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = (at < P)[:, None] & known[None, :]
        place = at[:, None] * C + channel[None, :]
        g = tl.load(slope + place, mask=mask, other=0.0).to(tl.float32) * w[None, :]
        value = (tl.load(x + place, mask=mask, other=0.0).to(tl.float32) - mean) * scale
        tl.store(dx + place, ((g - level - value * inner) * scale).to(dx.dtype.element_ty), mask=mask)


def correlate(x: Tensor, weight: Tensor, size: tuple[int, int], stride: int, padding: int, spread: int = 1) -> Tensor:
    """Correlate images with the clients' weights: the convolution of a network.

    Args:
        x: `(n, B, H, W, C)`, contiguous.
        weight: `(n, K, K, C, O)`, contiguous.
        size: Height and width of the result.
        stride: Of the result's pixels.
        padding: Zeros around x on each side.
        spread: Distance of x's pixels; those between are zeros.

    Returns:
        `(n, B, *size, O)`.
    """
    n, B, H, W, C = x.shape
    K, O = weight.shape[1], weight.shape[-1]
    y = x.new_empty(n, B, *size, O)
    pixels = B * size[0] * size[1]
    settings = {"CP": _padded(C), "OP": _padded(O), "BLOCK": ROWS, "PRECISION": _precision()}
    shape = {"C": C, "O": O, "K": K}
    _launch(
        _correlate,
        (_up(pixels, ROWS), n),
        x,
        weight,
        y,
        pixels,
        H,
        W,
        *size,
        stride,
        spread,
        padding,
        **shape,
        **settings,
    )
    return y


def outer(x: Tensor, slope: Tensor, K: int, stride: int, padding: int) -> Tensor:
    """Gradient `(n, K, K, C, O)` of the weights of `correlate`, from ∂y `(n, B, OH, OW, O)`, in float32."""
    n, B, H, W, C = x.shape
    OH, OW, O = slope.shape[2:]
    pixels, shape = B * OH * OW, {"C": C, "O": O, "K": K}
    out = x.new_empty(PARTS, n, K, K, C, O, dtype=torch.float32)
    settings = {"CP": _padded(C), "OP": _padded(O), "BLOCK": ROWS // 2, "PRECISION": _precision()}
    arguments = (x, slope, out, pixels, _up(pixels, PARTS), H, W, OH, OW, stride, padding)
    _launch(_outer, (PARTS, K * K, n), *arguments, **shape, **settings)
    return out.sum(0)


def normalise(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise the channels of each image in groups; return y, and means and scales `(n, B, groups)`."""
    n, B, H, W, C = x.shape
    y = torch.empty_like(x)
    means, scales = (x.new_empty(n, B, groups, dtype=torch.float32) for _ in range(2))
    sizes = _sizes(C // groups, H * W)
    _launch(_normalise, (groups, n * B), x, weight, bias, y, means, scales, B, H * W, eps, C=C, G=groups, **sizes)
    return y, means, scales


def denormalise(
    x: Tensor, slope: Tensor, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `normalise`: ∂x, and for each image those of weight and bias, `(n, B, C)` in float32."""
    n, B, H, W, C = x.shape
    groups, dx = means.shape[-1], torch.empty_like(x)
    dweight, dbias = (x.new_empty(n, B, C, dtype=torch.float32) for _ in range(2))
    arguments = (x, slope, weight, means, scales, dx, dweight, dbias, B, H * W)
    _launch(_denormalise, (groups, n * B), *arguments, C=C, G=groups, **_sizes(C // groups, H * W))
    return dx, dweight, dbias


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    cast(Any, kernel)[grid](*arguments, **settings)


def _sizes(channels: int, pixels: int) -> dict[str, int]:
    width = triton.next_power_of_2(channels)
    return {"CP": width, "BLOCK": max(1, min(triton.next_power_of_2(pixels), CHUNK // width))}


def _padded(channels: int) -> int:
    """Channels of a product's operands: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(channels))


def _precision() -> str:
    """Of products of float32 numbers, as for all other products of the network."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _up(total: int, each: int) -> int:
    return -(-total // each)
