"""What the Triton kernels for images compute, by torch's own layers, client by client."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad

from fedual.backends.kernels.grids import Geometry


def first(x: Tensor) -> Tensor:
    """Images of one client `(B, H, W, C)` with their channels first."""
    return x.permute(0, 3, 1, 2)


def last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def each(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """A function of one client's tensors for all clients, in double precision; the result has the first one's type."""
    assert tensors[0] is not None
    own = zip(*([None] * len(tensors[0]) if t is None else t.double() for t in tensors), strict=True)
    return torch.stack([function(*one) for one in own]).to(tensors[0].dtype)


def filters(taps: Tensor, sides: tuple[int, int]) -> Tensor:
    """The weights `(O, C, K, L)` of taps `(K·L·C, O)`."""
    return taps.unflatten(0, (*sides, -1)).permute(3, 2, 0, 1)


def moves(geometry: Geometry) -> list[Any]:
    """Stride, padding and dilation, which `torch.nn.grad` declares as numbers and takes as pairs, too."""
    return list(geometry[1:])


def correlate(x: Tensor, taps: Tensor, geometry: Geometry, bias: Tensor | None = None) -> Tensor:
    def one(x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        return last(F.conv2d(first(x), filters(taps, geometry.sides), bias, *moves(geometry)))

    return each(one, x, taps, bias)


def transposed(slope: Tensor, mirrored: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    def one(slope: Tensor, mirrored: Tensor) -> Tensor:
        weight = filters(mirrored, geometry.sides).flip(2, 3).transpose(0, 1)
        shape = len(slope), weight.shape[1], *size
        return last(grad.conv2d_input(shape, weight, first(slope), *moves(geometry)))

    return each(one, slope, mirrored)


def outer(x: Tensor, slope: Tensor, geometry: Geometry, bias: bool) -> Tensor:
    def one(x: Tensor, slope: Tensor) -> Tensor:
        shape = slope.shape[-1], x.shape[-1], *geometry.sides
        weight = grad.conv2d_weight(first(x), shape, first(slope), *moves(geometry))
        rows = weight.permute(2, 3, 1, 0).flatten(0, 2)
        return (torch.cat([rows, slope.sum((0, 1, 2))[None]]) if bias else rows)[None]

    return each(one, x, slope)


def collect(partial: Tensor, place: Tensor, add: bool, taps: int = 1) -> None:
    total = partial.double().sum(1).unflatten(1, (taps, -1)).permute(0, 3, 2, 1).reshape(place.shape)
    place.copy_(total + place if add else total)


def pool(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    (K, L), (down, across), (top, side), (tall, wide) = geometry
    padded = F.pad(x, (0, 0, side, side, top, top), value=-torch.inf)
    windows = padded.unfold(2, (K - 1) * tall + 1, down).unfold(3, (L - 1) * wide + 1, across)
    y, tap = windows[..., ::tall, ::wide].flatten(-2).max(-1)
    return y.contiguous(), tap.to(torch.uint8).contiguous()


def unpool(slope: Tensor, chosen: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    (_, L), (down, across), (top, side), (tall, wide) = geometry
    n, B, OH, OW, C = slope.shape
    row = torch.arange(OH)[:, None, None].to(slope.device) * down - top + chosen.long() // L * tall
    column = torch.arange(OW)[:, None].to(slope.device) * across - side + chosen.long() % L * wide
    dx, place = slope.new_zeros(n, B, size[0] * size[1], C), row * size[1] + column
    return dx.scatter_add_(2, place.flatten(2, 3), slope.flatten(2, 3)).unflatten(2, size)


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, rest: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    y = each(_normalised(groups, eps, relu), x, rest, weight, bias)
    values = x.double().unflatten(-1, (groups, -1))
    variance, mean = torch.var_mean(values, (2, 3, 5), correction=0)
    return y, mean, (variance + eps).rsqrt()


def denormalise(
    x: Tensor, y: Tensor, slope: Tensor, weight: Tensor, means: Tensor, scales: Tensor, rest: bool, relu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`y`, the result, says where the ReLU was 0."""
    slope = torch.where(y > 0, slope, 0) if relu else slope
    g = slope.double()
    spread = lambda per_group: per_group.double().repeat_interleave(x.shape[-1] // means.shape[-1], 2)[:, :, None, None]
    level = (x.double() - spread(means)) * spread(scales)
    partial = torch.stack([(g * level).sum((2, 3)), g.sum((2, 3))], 2)
    inner = g * weight.double()[:, None, None, None]
    of_group = lambda value: value.unflatten(-1, (means.shape[-1], -1)).mean((2, 3, 5))
    dx = (inner - spread(of_group(inner)) - level * spread(of_group(inner * level))) * spread(scales)
    return dx.to(x.dtype), partial, slope if rest else None


def _normalised(groups: int, eps: float, relu: bool) -> Callable[..., Tensor]:
    def one(x: Tensor, rest: Any, weight: Tensor, bias: Tensor) -> Tensor:
        y = last(F.group_norm(first(x), groups, weight, bias, eps))
        y = y if rest is None else y + rest
        return y.relu() if relu else y

    return one
