"""The clients' examples: one pair of arrays in their stored type, and the indices of each client's rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedual.errors import InputError
from fedual.networks.targets import Targets, client_sums, pooled


@dataclass(frozen=True, eq=False, repr=False)
class Clients:
    """K clients' examples."""

    x: Tensor  # inputs of all clients, (N, ...), of any type
    y: Tensor  # targets, (N, ...)
    parts: Sequence[Tensor]  # the indices of each client's examples, (N_k,); clients may share examples
    weights: Sequence[Tensor] | None = None  # positive, of each client's examples, (N_k,); None means 1
    description: Mapping[str, Any] | None = None  # JSON for config.json, such as the names of `sites` and `classes`

    def __post_init__(self) -> None:
        if not len(self.parts):
            raise InputError("There are no clients: give at least one.")
        if len(self.x) != len(self.y):
            raise InputError(f"{len(self.x)} inputs, but {len(self.y)} targets: give one target to each input.")
        for k, part in enumerate(self.parts):
            if not len(part):
                raise InputError(f"Client {k} has no examples: leave it out, or give it some.")
            if part.is_floating_point() or not 0 <= int(part.min()) <= int(part.max()) < len(self.x):
                raise InputError(f"Client {k} names examples outside 0 … {len(self.x) - 1}.")
        for what, values in (("inputs", self.x), ("targets", self.y)):
            if values.is_floating_point() and not values.isfinite().all():
                self._refuse(what, ~values.isfinite())
        if self.weights is not None:
            self._check_weights(self.weights)

    @classmethod
    def from_pairs(cls, pairs: Sequence[Any]) -> "Clients":
        """Make clients from `(x, y)` or `(x, y, weights)` tensors, or from datasets whose items are pairs."""
        if not isinstance(pairs, Sequence):
            raise InputError(f"clients is a {type(pairs).__name__}: give a list of (x, y) pairs, one for each client.")
        weighted = [isinstance(pair, tuple | list) and len(pair) == 3 and _are_arrays(pair) for pair in pairs]
        if any(weighted) and not all(weighted):
            raise InputError(f"Client {weighted.index(False)} has no weights, but others have: weigh all or none.")
        weights = [torch.as_tensor(pair[2]) for pair in pairs] if any(weighted) else None
        if weights is not None:
            pairs = [pair[:2] for pair in pairs]
        tensors = [materialise(f"Client {k}", pair) for k, pair in enumerate(pairs)]
        if not tensors:
            raise InputError("There are no clients: give a list of (x, y) pairs, one for each client.")
        for k, (x, y) in enumerate(tensors):
            if len(x) != len(y):
                has = f"Client {k} has {len(x)} inputs, but {len(y)} targets"
                raise InputError(f"{has}: give one target to each input.")
            if not len(x):
                raise InputError(f"Client {k} has no examples: leave it out, or give it some.")
            for what, a, b in (("inputs", x, tensors[0][0]), ("targets", y, tensors[0][1])):
                if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
                    raise InputError(
                        f"Client {k}'s {what} are {a.dtype} {tuple(a.shape)}, client 0's {b.dtype} {tuple(b.shape)}: "
                        "all clients need the same type, and the same shape of an example."
                    )
        rows = torch.arange(sum(len(x) for x, _ in tensors)).split([len(x) for x, _ in tensors])
        return cls(torch.cat([x for x, _ in tensors]), torch.cat([y for _, y in tensors]), rows, weights)

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        words = lambda values: f"{tuple(values.shape[1:])} {str(values.dtype).removeprefix('torch.')}"
        least, most = min(self.sizes), max(self.sizes)
        weighted = "" if self.weights is None else ", weighted"
        return f"Clients({len(self)} with {least}–{most} examples, x {words(self.x)}, y {words(self.y)}{weighted})"

    @cached_property
    def sizes(self) -> list[int]:
        """N_k."""
        return [len(part) for part in self.parts]

    @cached_property
    def total_weights(self) -> Tensor:
        """Σ_i w_i of each client's examples, `(K,)`; N_k without weights."""
        if self.weights is None:
            return torch.tensor(self.sizes, dtype=torch.float64)
        return torch.stack([weight.double().sum() for weight in self.weights])

    @cached_property
    def flat(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """All clients' row indices and weights, on the device of the examples, and each client's first index `(K,)`."""
        first = torch.tensor([0, *self.sizes[:-1]]).cumsum(0)
        weights = None if self.weights is None else torch.cat(list(self.weights)).to(self.x.device)
        return torch.cat([part.long() for part in self.parts]).to(self.x.device), weights, first

    def to(self, device: torch.device | str) -> "Clients":
        """The same clients with the examples on a device; the indices stay where batches are planned."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def targets(self) -> Targets:
        """Mean and sd of the federation's targets, from the sums of each client."""
        weights = self.weights or [None] * len(self)
        return pooled([client_sums(self.y[part], own) for part, own in zip(self.parts, weights, strict=True)])

    def _check_weights(self, weights: Sequence[Tensor]) -> None:
        if len(weights) != len(self.parts):
            raise InputError(f"Weights for {len(weights)} clients, but there are {len(self.parts)}: give each its own.")
        for k, (weight, part) in enumerate(zip(weights, self.parts, strict=True)):
            if weight.shape != (len(part),) or not (weight.isfinite().all() and (weight > 0).all()):
                has = f"Client {k}'s weights {tuple(weight.shape)} must be {len(part)} positive, finite numbers"
                raise InputError(f"{has}: leave out examples that should not count.")

    def _refuse(self, what: str, bad: Tensor) -> None:
        rows = set(bad.reshape(len(bad), -1).any(1).nonzero()[:, 0].tolist())
        k = next((k for k, part in enumerate(self.parts) if rows & set(part.tolist())), None)
        whose = "No client uses them, but some" if k is None else f"Client {k}'s"
        raise InputError(f"{whose} {what} contain NaN or infinity ({len(rows)} examples in all): clean the data first.")


def materialise(whose: str, pair: object) -> tuple[Tensor, Tensor]:
    """The `(x, y)` tensors of a pair or of a dataset of pairs; `whose` names the client or test set in errors."""
    if isinstance(pair, tuple | list) and len(pair) == 2:
        x, y = (torch.as_tensor(a) for a in pair)
    # an array also has a length and items, but its rows are not pairs
    elif isinstance(pair, tuple) and any(isinstance(part, Tensor | np.ndarray) for part in pair):
        raise InputError(f"{whose} has {len(pair)} tensors: give a pair (x, y).")
    elif hasattr(pair, "__len__") and hasattr(pair, "__getitem__") and not isinstance(pair, Tensor | np.ndarray | str):
        items = [pair[i] for i in range(len(pair))]  # type: ignore[arg-type, index]
        if not items:
            raise InputError(f"{whose} has no examples: leave it out, or give it some.")
        x, y = (torch.stack([torch.as_tensor(item[j]) for item in items]) for j in (0, 1))
    else:
        raise InputError(f"{whose} is a {type(pair).__name__}: give a pair (x, y) of tensors, or a dataset of pairs.")
    if x.dim() == 0 or y.dim() == 0:
        raise InputError(f"{whose} has an x or y without a first axis: give one row for each example.")
    return x, y


def _are_arrays(values: Sequence[object]) -> bool:
    return all(isinstance(value, Tensor | np.ndarray) for value in values)
