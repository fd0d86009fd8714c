"""Parts of a method that are not in the paper: extrapolation of λ_g, and weights of clients by their examples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedual.errors import InputError, require_positive
from fedual.families import Family


@dataclass(frozen=True)
class Extrapolation:
    """Send clients λ_g + β (λ_g − λ_g⁻): λ_g extrapolated by a fraction β of its last change.

    The two coincide at convergence, so that the fixed point stays the same.
    """

    beta: float

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise InputError(f"momentum = {self.beta}: it must be at least 0 and below 1.")

    def ahead(self, family: Family, before: Tensor, lam_g: Tensor) -> Tensor:
        """The extrapolated point, cut back to the domain."""
        return family.backtrack(lam_g, torch.lerp(before, lam_g, 1 + self.beta))[0]


@dataclass(frozen=True)
class ExampleWeights:
    """Multiply client k's ρ, γ and weight in the server's mean by w_k = N_k/unit."""

    unit: float

    def __post_init__(self) -> None:
        require_positive("unit", self.unit)

    def __call__(self, num_examples: Tensor) -> Tensor:
        """w_k, `(K,)`."""
        return num_examples / self.unit
