"""What a site computes for a mixed model: that of a GLM, and the loss with its own effects integrated out."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedual.glm.likelihood import Likelihood
from fedual.glm.mixed.cholesky import entries
from fedual.glm.mixed.effects import spread
from fedual.glm.mixed.integrated import Integrated
from fedual.glm.mixed.own import Own, closing, known, own, slices
from fedual.glm.mixed.posterior import NODES
from fedual.glm.model import Model

ROUNDS, BESIDE = 4, 2
"""Rounds of a usual fit after the first, and those of them that have the GLM beside."""


class MixedModel(Model):
    """A generalised linear mixed model."""

    @property
    def random(self) -> tuple[str, ...]:
        """The columns whose coefficients differ by site."""
        return tuple(self.facts["random"])

    @property
    def usual_numbers(self) -> int:
        """How many numbers a site tells in a usual fit; those of the grid of σ, too, if there is one effect."""
        one = lambda dim: dim * (dim + 3) // 2 + 1
        plain = len(self.schema.terms)
        if self.distribution.name == "gaussian":
            return one(plain)
        grid = NODES * one(plain) if len(self.random) == 1 else 0
        return (1 + BESIDE) * one(plain) + ROUNDS * one(plain + entries(len(self.random))) + grid

    def loss(self, plain: Likelihood, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """What a message is about: the GLM, or, if it says so, the model with the site's effects integrated out."""
        if not facts.get("integrated"):
            return plain
        return Integrated(plain, spread(self.random, self.schema.terms, tensors["centre"], tensors["scale"]))

    def points(self, theta: Tensor, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
        """Where the figures at the estimate are evaluated: there, and on the grid of σ."""
        return torch.cat([theta[None], tensors["points"]]) if "points" in tensors else theta[None]

    def figures(
        self, likelihood: Integrated, theta: Tensor, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], least: int
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Sums at the estimate, and on the grid of σ where there is one; the site's own effects are not in them."""
        found, told = closing(likelihood, theta, float(facts["dispersion"]), least), dict[str, Tensor]()
        if "points" in tensors:
            found["grid"], told = slices(likelihood, tensors["points"])
        return found, told

    def own(
        self, likelihood: Integrated, theta: Tensor, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Own:
        """The site's own effects, which stay there."""
        whole = known(likelihood, float(facts["dispersion"]))
        return own(whole, theta, self.random, self.schema.terms, (tensors["centre"], tensors["scale"]))
