"""Mean and standard deviation of the inputs of a federation, from sums that every client gives.

    pass 1   N_k, Σ x                        → mean m
    pass 2   Σ (x − m), Σ (x − m)²           → standard deviation s, also where m is much larger than s
    pass 3   number of values with |x − m| > 6 s

The server needs the sums over all clients only, and never a minimum or a maximum. The third pass tells it about codes,
sparse counts and heavy tails, of which training itself had values beyond 6 s. For these the limit is s √(N − 1), which
none of N values can exceed. No value that training had is therefore beyond the limit.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.networks.client_data import Clients

FEATURES = 512
"""Most features with moments of their own: more than most tables have columns, fewer than a 28 × 28 picture has pixels.

The pixels of a picture share one mean and one standard deviation: a margin that was always black says nothing alone.
"""
DEVIATIONS = 6.0
_BLOCK = 2**16  # values that are summed at a time
_CONSTANT = 1e-14  # a standard deviation below this fraction of the mean is a rounding error
_EQUAL = 1e-5  # relative difference that a constant has after conversion to another type
_SLACK = 1 + 1e-9  # for the rounding of scores


class Moments(NamedTuple):
    """N values of each of D features, or of all features together, where D is 1; each tensor is `(D,)`."""

    number: int  # N
    mean: Tensor
    deviation: Tensor  # 0 for a constant
    beyond: Tensor  # number of training values that are more than 6 standard deviations from the mean

    @classmethod
    def of(cls, clients: Clients) -> "Moments | None":
        """The moments of all clients' inputs, in double precision; None if squares of the inputs overflow."""
        x = clients.x
        size = math.prod(x.shape[1:])
        pooled = x.dim() > 2 or x.dtype == torch.uint8 or size > FEATURES
        columns, rows = 1 if pooled else size, max(1, _BLOCK // max(1, size))

        def total(sums: Callable[[Tensor], Tensor]) -> Tensor:
            """Σ_k of sums over the values `(n, D)` of client k."""
            parts = (block for part in clients.parts for block in part.split(rows))
            blocks = (x[block.to(x.device)].to("cpu", torch.float64).reshape(-1, columns) for block in parts)
            return torch.stack([sums(block) for block in blocks]).sum(0)

        number = sum(clients.sizes) * (size if pooled else 1)
        mean = total(lambda values: values.sum(0)) / number
        powers = lambda gap: torch.stack([gap.sum(0), gap.square().sum(0)])
        shift, square = total(lambda values: powers(values - mean)) / number  # the shift is the mean's rounding error
        mean, deviation = mean + shift, (square - shift.square()).clamp(min=0).sqrt()
        deviation = torch.where(deviation <= _CONSTANT * mean.abs(), 0.0, deviation)
        if not (mean.isfinite() & deviation.isfinite()).all():
            return None
        beyond = total(lambda values: ((values - mean).abs() > DEVIATIONS * deviation).sum(0)) * (deviation > 0)
        return cls(number, mean, deviation, beyond.double())

    def to_dict(self) -> dict[str, Any]:
        """The moments as JSON, which gives back the same numbers."""
        return {"number": self.number} | {name: getattr(self, name).tolist() for name in self._fields[1:]}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], shape: tuple[int, ...]) -> "Moments":
        """The inverse of `to_dict`, for inputs of a shape; raises ValueError, TypeError or KeyError otherwise."""
        tensors = [torch.tensor(stored[name], dtype=torch.float64) for name in cls._fields[1:]]
        if any(values.shape not in ((1,), (math.prod(shape),)) for values in tensors):
            raise ValueError("moments of another shape")
        return cls(int(stored["number"]), *tensors)

    def in_units(self, offset: Tensor, scale: Tensor) -> "Moments":
        """The moments of offset + scale · x."""
        return self._replace(mean=offset + scale * self.mean, deviation=scale * self.deviation)

    def scores(self, values: Tensor) -> Tensor:
        """(x − m)/s of values `(n, D)`; for a constant 0, and ±∞ if the value is another."""
        gap = values - self.mean
        other = torch.where(gap.abs() > _EQUAL * self.mean.abs(), gap.sign() * math.inf, 0.0)
        return torch.where(self.deviation > 0, gap / self.deviation, other)

    @property
    def limit(self) -> Tensor:
        """The largest |(x − m)/s| that is not far from anything seen, `(D,)`."""
        limits = torch.tensor([DEVIATIONS, math.sqrt(max(1, self.number - 1))], dtype=torch.float64) * _SLACK
        return limits[(self.beyond > 0).long()]
