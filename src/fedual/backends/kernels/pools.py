"""Triton kernels for max pooling of images with their channels last, `(n, B, H, W, C)`."""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from fedual.backends.kernels.grids import Geometry, ceil_div, launch

POOLED = 1024
"""Values that a program pools."""


@triton.jit(do_not_specialize=["values"])
def _pool(
    x, y, chosen, values, H, W, OH, OW, sh, sw, ph, pw, dh, dw,
    C: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, column, row, image = at % C, at // C % OW, at // (C * OW) % OH, at // (C * OW * OH)
    best, tap = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for number in tl.static_range(K * L):
        down, across = row * sh - ph + number // L * dh, column * sw - pw + number % L * dw
        there = (at < values) & (down >= 0) & (down < H) & (across >= 0) & (across < W)
        value = tl.load(x + ((image * H + down) * W + across) * C + c, mask=there, other=-float("inf")).to(tl.float32)
        better = (value > best) | (value != value)  # a NaN stays
        best, tap = tl.where(better, value, best), tl.where(better, number, tap)
    tl.store(y + at, best.to(y.dtype.element_ty), mask=at < values)
    tl.store(chosen + at, tap.to(tl.uint8), mask=at < values)


@triton.jit(do_not_specialize=["values"])
def _unpool(
    slope, chosen, dx, values, H, W, OH, OW, sh, sw, ph, pw, dh, dw,
    C: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, column, row, image = at % C, at // C % W, at // (C * W) % H, at // (C * W * H)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(K * L):  # the windows in which this pixel is tap `number`
        down, across = row + ph - number // L * dh, column + pw - number % L * dw
        there = (at < values) & (down >= 0) & (across >= 0) & (down % sh == 0) & (across % sw == 0)
        down, across = down // sh, across // sw
        there = there & (down < OH) & (across < OW)
        place = ((image * OH + down) * OW + across) * C + c
        mine = there & (tl.load(chosen + place, mask=there, other=255) == number)
        total += tl.load(slope + place, mask=mine, other=0.0).to(tl.float32)
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=at < values)


def pool(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The largest value of each window of x `(n, B, H, W, C)`, contiguous, and which of the window it is, as uint8."""
    n, B, H, W, C = x.shape
    (K, L), *moves = geometry
    OH, OW = geometry.size(H, W)
    y = x.new_empty(n, B, OH, OW, C)
    chosen = torch.empty_like(y, dtype=torch.uint8)
    arguments = x, y, chosen, y.numel(), H, W, OH, OW, *(number for pair in moves for number in pair)
    launch(_pool, (ceil_div(y.numel(), POOLED), 1), *arguments, C=C, K=K, L=L, BLOCK=POOLED)
    return y, chosen


def unpool(slope: Tensor, chosen: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    """The gradient `(n, B, *size, C)` of x from that of `pool`."""
    n, B, OH, OW, C = slope.shape
    (K, L), *moves = geometry
    dx = slope.new_empty(n, B, *size, C)
    arguments = slope, chosen, dx, dx.numel(), *size, OH, OW, *(number for pair in moves for number in pair)
    launch(_unpool, (ceil_div(dx.numel(), POOLED), 1), *arguments, C=C, K=K, L=L, BLOCK=POOLED)
    return dx
