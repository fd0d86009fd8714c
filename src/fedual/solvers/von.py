# ruff: noqa: D102 (`BLR` documents `move`)
"""Variational online Newton: the Bayesian learning rule for full Gaussians, kept positive definite.

    S ← S + βG + ½β² G S⁻¹ G,       G = S_target − S
    m ← m − β S_new⁻¹ (S_target m − λ_target[0])                              (KhRu23, Eq. 12)

The quadratic term makes S_new = S^{1/2} (I + βX + ½β²X²) S^{1/2} with X = S^{−1/2} G S^{−1/2}: positive definite
whatever G is (1 + x + x²/2 > 0), and the same as S + βG to first order. Without it the precision can leave the
domain at small ρ, where S_g − V_k/ρ is indefinite.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedual.errors import InputError
from fedual.families import Family, Full
from fedual.solvers.blr import BLR


@dataclass(frozen=True)
class VON(BLR):
    """`BLR` for `Full` with a step that stays inside the domain."""

    def move(self, family: Family, lam: Tensor, target: Tensor, beta: Tensor) -> Tensor:
        if not isinstance(family, Full):
            raise InputError(f"VON works on Full Gaussians, not on {family}: use BLR.")
        beta = beta[:, None, None]
        precision, wanted = family.precision(lam), family.precision(target)
        gap = beta * (wanted - precision)
        factor = torch.linalg.cholesky(precision)
        half = torch.linalg.solve_triangular(factor, gap, upper=False)
        new = precision + gap + half.mT @ half / 2
        mean = family.mean(lam)
        residual = (wanted @ mean.unsqueeze(-1)).mT - target[..., :1, :]
        shift = new @ mean.unsqueeze(-1) - beta * residual.mT
        return torch.cat([shift.mT, -new / 2], -2)
