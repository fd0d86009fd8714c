"""Triton kernels for convolutions and group normalisation of n clients, each with weights of its own.

cuDNN has no fast kernels for the grouped convolution that a stack of clients is. Here images have their channels last,
`(n, B, H, W, C)`, and a convolution is one matrix product for each client whose left operand, the K·L·C inputs of
each output pixel, is gathered from the image where it is. Sums are taken in a fixed order: a run repeats its bits.

A convolution's weights `(n, O, C, K, L)` are used as `taps` `(n, K·L·C, O)`: row (k·L + l)·C + c has the weights of
input channel c at row k and column l of the filter.
"""

from typing import Any, NamedTuple, cast

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

PIXELS = 128
"""Output pixels that a program computes; half as many where there are few. The fastest of 64, 128 and 256, measured."""
DEPTH, WIDTH = 64, 64
"""Rows and columns of a product that a program computes at most."""
PROGRAMS = 1056
"""Programs among which the gradient of weights is divided: eight for each multiprocessor of an H200."""
SUMMED, COLUMNS = 32, 64
"""Parts and numbers that a program sums at a time."""
POOLED = 1024
"""Values that a program pools."""
NORMALISED = 2048
"""Values that a program normalises at a time."""


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


@triton.jit(do_not_specialize=["values"])
def _pool(
    x, y, chosen, values, H, W, OH, OW, sh, sw, ph, pw,
    C: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, column, row, image = at % C, at // C % OW, at // (C * OW) % OH, at // (C * OW * OH)
    best, tap = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for number in tl.static_range(K * L):
        down, across = row * sh - ph + number // L, column * sw - pw + number % L
        there = (at < values) & (down >= 0) & (down < H) & (across >= 0) & (across < W)
        value = tl.load(x + ((image * H + down) * W + across) * C + c, mask=there, other=-float("inf")).to(tl.float32)
        better = (value > best) | (value != value)  # a NaN stays
        best, tap = tl.where(better, value, best), tl.where(better, number, tap)
    tl.store(y + at, best.to(y.dtype.element_ty), mask=at < values)
    tl.store(chosen + at, tap.to(tl.uint8), mask=at < values)


@triton.jit(do_not_specialize=["values"])
def _unpool(
    slope, chosen, dx, values, H, W, OH, OW, sh, sw, ph, pw,
    C: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, column, row, image = at % C, at // C % W, at // (C * W) % H, at // (C * W * H)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(K * L):  # the windows in which this pixel is tap `number`
        down, across = row + ph - number // L, column + pw - number % L
        there = (at < values) & (down >= 0) & (across >= 0) & (down % sh == 0) & (across % sw == 0)
        down, across = down // sh, across // sw
        there = there & (down < OH) & (across < OW)
        place = ((image * OH + down) * OW + across) * C + c
        mine = there & (tl.load(chosen + place, mask=there, other=255) == number)
        total += tl.load(slope + place, mask=mine, other=0.0).to(tl.float32)
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=at < values)


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


class Geometry(NamedTuple):
    """Where a convolution takes its inputs from: numbers for rows and columns of the image."""

    sides: tuple[int, int]  # of the filter
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result."""
        each = zip((height, width), *self, strict=True)
        rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each)
        return rows, columns


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
    grid = _up(pixels, block), _up(O, _width(O)), n
    _launch(_correlate, grid, *arguments, **shape, **blocks, PRECISION=_precision())
    return y


def outer(x: Tensor, slope: Tensor, geometry: Geometry, bias: bool) -> Tensor:
    """Gradients of taps `(n, parts, K·L·C, O)`, whose sum over the parts is due; one row more with a bias.

    From x `(n, B, H, W, C)` and the gradient `slope` of the result `(n, B, OH, OW, O)`; in float32.
    """
    n, B, H, W, C = x.shape
    OH, OW, O = slope.shape[2:]
    (K, L), *moves = geometry
    pixels, rows = B * OH * OW, K * L * C + bias
    tiles = _up(rows, DEPTH) * _up(O, _width(O))
    each = _up(_up(pixels, max(1, PROGRAMS // (tiles * n))), PIXELS) * PIXELS
    out = x.new_empty(n, _up(pixels, each), rows, O, dtype=torch.float32)
    arguments = x, slope, out, pixels, each, H, W, OH, OW, *(number for pair in moves for number in pair)
    shape = {"C": C, "O": O, "K": K, "L": L, "ROWS": rows, "PRECISION": _precision()}
    blocks = {"BLOCK": PIXELS, "DEPTH": DEPTH, "WIDTH": _width(O), "num_stages": 1}
    _launch(_outer, (out.shape[1], tiles, n), *arguments, **shape, **blocks)
    return out


def collect(partial: Tensor, place: Tensor, add: bool, taps: int = 1) -> None:
    """Write Σ_p partial[:, p] `(n, parts, taps·C, O)` to `place` `(n, O, C, taps)`, or add it there.

    Dimensions of one client's part must be contiguous in both tensors.
    """
    n, parts, rows, O = partial.shape
    arguments = partial, place, parts, rows * O, partial.stride(0), partial.stride(1), place.stride(0)
    sizes = {"C": rows // taps, "O": O, "TAPS": taps, "AT_ONCE": SUMMED, "BLOCK": COLUMNS}
    _launch(_collect, (_up(rows * O, COLUMNS), n), *arguments, ADD=add, **sizes)


def pool(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The largest value of each window of x `(n, B, H, W, C)`, contiguous, and which of the window it is, as uint8."""
    n, B, H, W, C = x.shape
    (K, L), *moves, _ = geometry
    OH, OW = geometry.size(H, W)
    y = x.new_empty(n, B, OH, OW, C)
    chosen = torch.empty_like(y, dtype=torch.uint8)
    arguments = x, y, chosen, y.numel(), H, W, OH, OW, *(number for pair in moves for number in pair)
    _launch(_pool, (_up(y.numel(), POOLED), 1), *arguments, C=C, K=K, L=L, BLOCK=POOLED)
    return y, chosen


def unpool(slope: Tensor, chosen: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    """The gradient `(n, B, *size, C)` of x from that of `pool`."""
    n, B, OH, OW, C = slope.shape
    (K, L), *moves, _ = geometry
    dx = slope.new_empty(n, B, *size, C)
    arguments = slope, chosen, dx, dx.numel(), *size, OH, OW, *(number for pair in moves for number in pair)
    _launch(_unpool, (_up(dx.numel(), POOLED), 1), *arguments, C=C, K=K, L=L, BLOCK=POOLED)
    return dx


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
    _launch(_normalise, (groups, n * B), *arguments, C=C, **kind, **_group(C // groups, H * W))
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
    _launch(_denormalise, (groups, n * B), *arguments, C=C, **kind, **_group(C // groups, H * W))
    return dx, partial, slope if rest and not relu else drest


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    cast(Any, kernel)[grid](*arguments, **settings)


def _group(channels: int, pixels: int) -> dict[str, int]:
    width = _power(channels)
    return {"SIZE": channels, "WIDTH": width, "BLOCK": max(1, min(_power(pixels), NORMALISED // width))}


def _width(channels: int) -> int:
    """Columns of a product: a power of two, at least 16."""
    return max(16, min(WIDTH, _power(channels)))


def _power(number: int) -> int:
    return triton.next_power_of_2(number)


def _precision() -> str:
    """Of products of float32 numbers, as for all other products of the network."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _up(total: int, each: int) -> int:
    return -(-total // each)
