"""What the federation and a site tell each other: plain facts and float64 tensors, on Flower and in the simulator."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Message:
    """A request to a site, or its reply.

    Args:
        kind: What is asked, or answered: the name of a method of `fedual.glm.site.Site`.
        facts: JSON values.
        tensors: float64 tensors; symmetric matrices are packed by `packed`, so that no number is sent twice.
    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def digest(self) -> str:
        """A SHA-256 of the content: the same for the same message only."""
        found = hashlib.sha256(json.dumps([self.kind, dict(self.facts)], sort_keys=True).encode())
        for name in sorted(self.tensors):
            tensor = self.tensors[name].contiguous()
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()

    @property
    def numbers(self) -> int:
        """How many numbers a reader of the message learns, those within its facts included."""
        return _count(self.facts) + sum(tensor.numel() for tensor in self.tensors.values())


Ask = Callable[[Message], Mapping[str, Message]]
"""Sends one request to all sites and returns their replies by the sites' names."""


def packed(matrix: Tensor, diagonal: int = 0) -> Tensor:
    """The upper triangle of a symmetric matrix `(P, P)`, row by row: `(P(P+1)/2,)`.

    Of the block of its last `diagonal` rows and columns, the diagonal alone.
    """
    rows, columns = _places(len(matrix), diagonal)
    return matrix[rows, columns]


def unpacked(triangle: Tensor, diagonal: int = 0) -> Tensor:
    """The inverse of `packed`."""
    size = _size(len(triangle), diagonal, 1)
    rows, columns = _places(size, diagonal)
    matrix = triangle.new_zeros(size, size)
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix


def _places(size: int, diagonal: int) -> Tensor:
    rows, columns = places = torch.triu_indices(size, size)
    return places[:, (rows < size - diagonal) | (rows == columns)]


def _size(numbers: int, diagonal: int, linear: int) -> int:
    """P, where p(p + linear)/2 numbers and p + linear for each of the `diagonal` rows are sent, with P = p + diagonal.

    `linear` is 1 for a matrix, and 3 for one with a vector.
    """
    each = 2 * diagonal + linear
    rest = 2 * (numbers - diagonal * ((linear + 1) // 2))
    return int(((each**2 + 4 * rest) ** 0.5 - each) / 2 + 0.5) + diagonal


def _count(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_count, value))
    return int(isinstance(value, int | float) and not isinstance(value, bool))


def packed_lam(lam: Tensor, diagonal: int = 0) -> Tensor:
    """λ = (Sm, −½S) of a full Gaussian, `(P + 1, P)`, as Sm and S's upper triangle, `(P(P+3)/2,)`: see `packed`."""
    matrix = lam[1:]
    return torch.cat([lam[0], packed(-(matrix + matrix.mT), diagonal)])


def unpacked_lam(numbers: Tensor, diagonal: int = 0) -> Tensor:
    """The inverse of `packed_lam`."""
    size = _size(len(numbers), diagonal, 3)
    return torch.cat([numbers[None, :size], -unpacked(numbers[size:], diagonal) / 2])
