"""The random effects' covariance ΛΛᵀ by the entries of a lower triangular Λ, of any sign.

With σ = Λ of any sign instead of log σ, the likelihood is even and smooth in σ: σ = 0 is a stationary point like
others, and no boundary.
"""

import torch
from torch import Tensor

MOST = 3
"""Random effects of a site: nodes of the quadrature grow as a power of them."""


def entries(effects: int) -> int:
    """How many entries Λ has."""
    return effects * (effects + 1) // 2


def places(effects: int) -> tuple[Tensor, Tensor]:
    """The row and the column of each entry."""
    rows, columns = torch.tril_indices(effects, effects)
    return rows, columns


def factor(theta: Tensor, effects: int) -> Tensor:
    """Λ `(q, q)` from its entries, row by row."""
    rows, columns = places(effects)
    matrix = theta.new_zeros(effects, effects)
    return matrix.index_put((rows, columns), theta)


def diagonal(effects: int) -> list[int]:
    """Where Λ's diagonal is among its entries."""
    rows, columns = places(effects)
    return (rows == columns).nonzero()[:, 0].tolist()
