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


def packed(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix `(P, P)`, row by row: `(P(P+1)/2,)`."""
    rows, columns = torch.triu_indices(*matrix.shape)
    return matrix[rows, columns]


def unpacked(triangle: Tensor) -> Tensor:
    """The inverse of `packed`."""
    size = int(((8 * len(triangle) + 1) ** 0.5 - 1) / 2)
    rows, columns = torch.triu_indices(size, size)
    matrix = triangle.new_zeros(size, size)
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix


def _count(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_count, value))
    return int(isinstance(value, int | float) and not isinstance(value, bool))


def packed_lam(lam: Tensor) -> Tensor:
    """λ = (Sm, −½S) of a full Gaussian, `(P + 1, P)`, as Sm and the upper triangle of S: `(P(P+3)/2,)`."""
    matrix = lam[1:]
    return torch.cat([lam[0], packed(-(matrix + matrix.mT))])


def unpacked_lam(numbers: Tensor) -> Tensor:
    """The inverse of `packed_lam`."""
    size = int(((8 * len(numbers) + 9) ** 0.5 - 3) / 2)
    return torch.cat([numbers[None, :size], -unpacked(numbers[size:]) / 2])
