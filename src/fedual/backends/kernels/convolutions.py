"""Triton kernels for convolutions of n clients, each with weights of its own.

cuDNN has no fast kernels for the grouped convolution that a stack of clients is. Here images have their channels last,
`(n, B, H, W, C)`, and a convolution is one matrix product for each client whose left operand, the K·L·C inputs of
each output pixel, is gathered from the image where it is. Sums are taken in a fixed order: a run repeats its bits.

A convolution's weights `(n, O, C, K, L)` are used as `taps` `(n, K·L·C, O)`: row (k·L + l)·C + c has the weights of
input channel c at row k and column l of the filter.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from fedual.backends.kernels.grids import Geometry, ceil_div, launch, power_of_two

PIXELS = 128
"""Output pixels that a program computes; half as many where there are few. The fastest of 64, 128 and 256, measured."""
DEPTH, WIDTH = 64, 64
"""Rows and columns of a product that a program computes at most."""
PROGRAMS = 1056
"""Programs among which the gradient of weights is divided: eight for each multiprocessor of an H200."""
SUMMED, COLUMNS = 32, 64
"""Parts and numbers that a program sums at a time."""


@triton.jit(do_not_specialize=["pixels"])
def _correlate(
    x, taps, bias, y, pixels, H, W, OH, OW, sh, sw, ph, pw, dh, dw, gap_h, gap_w, taps_row, bias_row,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside, wanted = at < pixels, o < O
    column, row, image = at % OW, at // OW % OH, at // (OW * OH)
    x += client * (pixels // (OH * OW)) * H * W * C
    taps += client * taps_row
    total = tl.zeros((BLOCK, WIDTH), tl.float32)
    for tile in range((K * L * C + DEPTH - 1) // DEPTH):
        k = tile * DEPTH + tl.arange(0, DEPTH)
        tap, c, known = k // C, k % C, k < K * L * C
        down = (row * sh - ph)[:, None] + (tap // L * dh)[None, :]
        across = (column * sw - pw)[:, None] + (tap % L * dw)[None, :]
        there = inside[:, None] & known[None, :]
        if gap_h * gap_w > 1:  # x's pixels are that far apart, with zeros between them
            there = there & (down % gap_h == 0) & (across % gap_w == 0) & (down >= 0) & (across >= 0)
            down, across = down // gap_h, across // gap_w
        there = there & (down >= 0) & (down < H) & (across >= 0) & (across < W)
        place = ((image[:, None] * H + down) * W + across) * C + c[None, :]
        a = tl.load(x + place, mask=there, other=0.0)
        b = tl.load(taps + k[:, None] * O + o[None, :], mask=known[:, None] & wanted[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + client * bias_row + o, mask=wanted, other=0.0).to(tl.float32)[None, :]
    y += client * pixels * O
    tl.store(y + at[:, None] * O + o[None, :], total.to(y.dtype.element_ty), mask=inside[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=["pixels", "each"])
def _outer(
    x, slope, out, pixels, each, H, W, OH, OW, sh, sw, ph, pw, dh, dw,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, client = tl.program_id(0), tl.program_id(2).to(tl.int64)
    TILES: tl.constexpr = (ROWS + DEPTH - 1) // DEPTH
    k = tl.program_id(1) % TILES * DEPTH + tl.arange(0, DEPTH)
    o = tl.program_id(1) // TILES * WIDTH + tl.arange(0, WIDTH)
    tap, c, known = k // C, k % C, k < K * L * C
    x += client * (pixels // (OH * OW)) * H * W * C
    slope += client * pixels * O
    last = tl.minimum(pixels, part * each + each)
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    for first in range(part * each, last, BLOCK):
        at = first + tl.arange(0, BLOCK)
        column, row, image, inside = at % OW, at // OW % OH, at // (OW * OH), at < last
        down = (row * sh - ph)[:, None] + (tap // L * dh)[None, :]
        across = (column * sw - pw)[:, None] + (tap % L * dw)[None, :]
        there = inside[:, None] & known[None, :] & (down >= 0) & (down < H) & (across >= 0) & (across < W)
        place = ((image[:, None] * H + down) * W + across) * C + c[None, :]
        a = tl.load(x + place, mask=there, other=0.0)
        if ROWS > K * L * C:  # the row after the last has ones: the sum of the slopes is the bias' gradient
            a = tl.where((k == K * L * C)[None, :], 1.0, a).to(x.dtype.element_ty)
        b = tl.load(slope + at[:, None] * O + o[None, :], mask=inside[:, None] & (o < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    out += (client * tl.num_programs(0) + part) * ROWS * O
    tl.store(out + k[:, None] * O + o[None, :], total, mask=(k < ROWS)[:, None] & (o < O)[None, :])


@triton.jit(do_not_specialize=["parts"])
def _collect(
    partial, place, parts, size, partial_row, partial_part, place_row,
    C: tl.constexpr, O: tl.constexpr, TAPS: tl.constexpr, ADD: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    i, part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, AT_ONCE)
    partial += client * partial_row
    sums = tl.zeros((AT_ONCE, BLOCK), tl.float32)
    for first in range(0, parts, AT_ONCE):
        mask = (first + part < parts)[:, None] & (i < size)[None, :]
        sums += tl.load(partial + (first + part)[:, None] * partial_part + i[None, :], mask=mask, other=0.0)
    total = tl.sum(sums, 0)
    place += client * place_row + (i % O * C + i // O % C) * TAPS + i // (C * O)  # from (tap, c, o) to (o, c, tap)
    if ADD:
        total += tl.load(place, mask=i < size, other=0.0)
    tl.store(place, total, mask=i < size)


def correlate(x: Tensor, taps: Tensor, geometry: Geometry, bias: Tensor | None = None) -> Tensor:
    """y = Σ over the filter's taps of x's pixels times weights, plus the bias.

    Args:
        x: `(n, B, H, W, C)`, contiguous.
        taps: `(n, K·L·C, O)`; clients may be any distance apart.
        geometry: Of the convolution.
        bias: `(n, O)`, or None.

    Returns:
        `(n, B, OH, OW, O)` in x's type.
    """
    size = geometry.size(x.shape[2], x.shape[3])
    return _correlation(x, taps, size, geometry.sides, geometry[1:], (1, 1), bias)


def transposed(slope: Tensor, mirrored: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    """The gradient `(n, B, *size, C)` of x from that of the result: a correlation with the mirrored filter.

    `mirrored` is `(n, K·L·O, C)`, with the taps in reversed order.
    """
    sides, stride, padding, dilation = geometry
    border = [d * (k - 1) - p for k, p, d in zip(sides, padding, dilation, strict=True)]
    return _correlation(slope, mirrored, size, sides, ((1, 1), border, dilation), stride, None)


def _correlation(x: Tensor, taps: Tensor, size: Any, sides: Any, moves: Any, gaps: Any, bias: Tensor | None) -> Tensor:
    n, B, H, W, C = x.shape
    O, pixels = taps.shape[-1], B * size[0] * size[1]
    y = x.new_empty(n, B, *size, O)
    block = PIXELS // 2 if n * pixels < PIXELS * PROGRAMS // 8 else PIXELS
    blocks = {"BLOCK": block, "DEPTH": 16 if 8 < C <= 16 else 32, "WIDTH": _width(O), "num_stages": 2}
    numbers = [number for pair in (*moves, gaps) for number in pair]
    rows = taps.stride(0), 0 if bias is None else bias.stride(0)
    arguments = x, taps, x if bias is None else bias, y, pixels, H, W, *size, *numbers, *rows
    shape = {"C": C, "O": O, "K": sides[0], "L": sides[1], "BIAS": bias is not None}
    grid = ceil_div(pixels, block), ceil_div(O, _width(O)), n
    launch(_correlate, grid, *arguments, **shape, **blocks, PRECISION=_precision())
    return y


def outer(x: Tensor, slope: Tensor, geometry: Geometry, bias: bool) -> Tensor:
    """Gradients of taps `(n, parts, K·L·C, O)`, whose sum over the parts is due; one row more with a bias.

    From x `(n, B, H, W, C)` and the gradient `slope` of the result `(n, B, OH, OW, O)`; in float32.
    """
    n, B, H, W, C = x.shape
    OH, OW, O = slope.shape[2:]
    (K, L), *moves = geometry
    pixels, rows = B * OH * OW, K * L * C + bias
    tiles = ceil_div(rows, DEPTH) * ceil_div(O, _width(O))
    each = ceil_div(ceil_div(pixels, max(1, PROGRAMS // (tiles * n))), PIXELS) * PIXELS
    out = x.new_empty(n, ceil_div(pixels, each), rows, O, dtype=torch.float32)
    arguments = x, slope, out, pixels, each, H, W, OH, OW, *(number for pair in moves for number in pair)
    shape = {"C": C, "O": O, "K": K, "L": L, "ROWS": rows, "PRECISION": _precision()}
    blocks = {"BLOCK": PIXELS, "DEPTH": DEPTH, "WIDTH": _width(O), "num_stages": 1}
    launch(_outer, (out.shape[1], tiles, n), *arguments, **shape, **blocks)
    return out


def collect(partial: Tensor, place: Tensor, add: bool, taps: int = 1) -> None:
    """Write Σ_p partial[:, p] `(n, parts, taps·C, O)` to `place` `(n, O, C, taps)`, or add it there.

    Dimensions of one client's part must be contiguous in both tensors.
    """
    n, parts, rows, O = partial.shape
    arguments = partial, place, parts, rows * O, partial.stride(0), partial.stride(1), place.stride(0)
    sizes = {"C": rows // taps, "O": O, "TAPS": taps, "AT_ONCE": SUMMED, "BLOCK": COLUMNS}
    launch(_collect, (ceil_div(rows * O, COLUMNS), n), *arguments, ADD=add, **sizes)


def _width(channels: int) -> int:
    """Columns of a product: a power of two, at least 16."""
    return max(16, min(WIDTH, power_of_two(channels)))


def _precision() -> str:
    """Of products of float32 numbers, as for all other products of the network."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
