# ruff: noqa: D102 (`Rule` documents these methods)
"""Rules for expectations: standard-normal nodes and weights, Σ_n w_n f(ε_n) ≈ E[f(ε)], ε ~ N(0, I).

A rule returns nodes in the requested dimension; families transform them to their own distribution.
The delta method of the paper (E_q[ℓ] ≈ ℓ(m)) is the rule with one node at zero.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedual.errors import InputError

MAX_NODES = 200_000
"""Limit of a grid, which grows exponentially with the dimension."""


class Rule(Protocol):
    """A source of nodes."""

    @property
    def random(self) -> bool:
        """True if the nodes change from step to step."""
        ...

    def __call__(self, dim: int, step: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes `(N, dim)` and weights `(N,)`, with the dtype and device of `like`."""
        ...


@dataclass(frozen=True)
class Delta:
    """One node at the mean: E_q[f] ≈ f(m)."""

    random: bool = field(default=False, init=False, repr=False)

    def __call__(self, dim: int, step: int, like: Tensor) -> tuple[Tensor, Tensor]:
        return like.new_zeros(1, dim), like.new_ones(1)


@dataclass(frozen=True)
class GaussHermite:
    """The tensor product of `points` Gauss–Hermite nodes in each dimension (exact to degree 2·points − 1)."""

    points: int = 20
    random: bool = field(default=False, init=False, repr=False)

    def __call__(self, dim: int, step: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if self.points**dim > MAX_NODES:
            raise InputError(
                f"GaussHermite({self.points}) in {dim} dimensions needs {self.points}^{dim} nodes "
                f"(limit {MAX_NODES}): use fewer points, MonteCarlo, or Delta."
            )
        nodes, weights = _hermite(self.points)
        grid = torch.cartesian_prod(*[torch.from_numpy(nodes)] * dim).reshape(-1, dim)
        weight = torch.cartesian_prod(*[torch.from_numpy(weights)] * dim).reshape(-1, dim).prod(-1)
        return grid.to(like), weight.to(like)


@lru_cache
def _hermite(points: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    return nodes, weights / weights.sum()


@dataclass(frozen=True)
class MonteCarlo:
    """`samples` antithetic normal draws: the same at every step, or drawn anew (`fresh`) from (seed, step)."""

    samples: int = 32
    seed: int = 0
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.samples < 2 or self.samples % 2:
            raise InputError(f"MonteCarlo samples = {self.samples}: antithetic draws come in pairs; use 2, 4, ….")

    @property
    def random(self) -> bool:
        return self.fresh

    def __call__(self, dim: int, step: int, like: Tensor) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng([self.seed, step if self.fresh else 0])
        half = torch.from_numpy(rng.standard_normal((self.samples // 2, dim))).to(like)
        return torch.cat([half, -half]), like.new_full((self.samples,), 1 / self.samples)
