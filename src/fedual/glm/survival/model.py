"""What a site computes for a survival model, and what it tells of its events."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedual.glm.columns import refuse_row
from fedual.glm.design import Design
from fedual.glm.guards import Guard
from fedual.glm.messages import packed
from fedual.glm.model import Model
from fedual.glm.prior import INTERCEPT
from fedual.glm.survival.concordance import concordance
from fedual.glm.survival.partial import PartialLikelihood
from fedual.glm.survival.piecewise import PiecewiseLikelihood
from fedual.glm.survival.proportionality import proportionality

USUAL_ROUNDS = 5
"""Newton rounds of a usual fit."""


class SurvivalModel(Model):
    """A survival model; `facts` say how ties are treated, and where the pieces of a common baseline end."""

    @property
    def cuts(self) -> list[float] | None:
        """Where the pieces of a common baseline end, but for the last one; None if each site has a baseline."""
        return self.facts["cuts"]

    @property
    def packing(self) -> int:
        """The pieces."""
        return 0 if self.cuts is None else len(self.cuts) + 1

    @property
    def usual_numbers(self) -> int:
        """η_k and the loss in every round; scores, the test of proportional hazards and concordance at the end."""
        p, pieces = len(self.schema.terms) - 1, self.packing
        products = p * (p + 1) // 2
        quadratic = p + products + pieces * (p + 2)
        return USUAL_ROUNDS * (quadratic + 1) + 3 * products + p + 5

    def responses(self, design: Design, site: str) -> tuple[Tensor, Tensor]:
        """Events and weights; an event at time 0 has no logarithm to test."""
        assert design.times is not None
        if self.facts["transform"] == "log":
            bad = (design.times.time == 0) & (design.y > 0)
            what, remedy = "an event at time 0 has no logarithm", "use transform='identity', or give a later time"
            refuse_row(site, what, bad.numpy(), design.kept, remedy)
        return super().responses(design, site)

    def counts(self, design: Design) -> dict[str, Any]:
        """Rows with an event; of each piece of a common baseline the weights of these, and the time at risk."""
        told: dict[str, Any] = {"events": int(design.y.sum())}
        if self.cuts is not None:
            found = self.likelihood(design, design.x, 1.0, "")
            assert isinstance(found, PiecewiseLikelihood)
            rates = found.weight * found.offset.exp()
            told |= {"deaths": found.deaths.tolist(), "exposure": (rates @ found.exposure).tolist()}
        return told

    def guard(self, guard: Guard, design: Design) -> None:
        """Let the guard see the events, their strata, and the pieces of the baseline."""
        assert design.times is not None
        strata = [int(design.y[rows].sum()) for rows in design.times.strata()]
        guard.events(self.schema.terms, design.x[design.y > 0], strata)
        if self.cuts is not None:
            found = self.likelihood(design, design.x, 1.0, guard.site)
            assert isinstance(found, PiecewiseLikelihood)
            pieces = found.pieces
            guard.pieces(pieces.events.tolist(), pieces.at_risk.tolist())

    def likelihood(self, design: Design, x: Tensor, unit: float, site: str) -> PartialLikelihood | PiecewiseLikelihood:
        """The likelihood of the site's rows; a baseline takes the place of the intercept."""
        y, weight = self.responses(design, site)
        assert design.times is not None
        x = x[:, torch.tensor([term != INTERCEPT for term in self.schema.terms])]
        partial = PartialLikelihood(x, y, weight, design.offset, design.times, self.facts["ties"])
        if self.cuts is None:
            return partial
        return PiecewiseLikelihood(x, y, weight, design.offset, partial, torch.tensor(self.cuts))

    def figures(
        self,
        likelihood: PartialLikelihood | PiecewiseLikelihood,
        theta: Tensor,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        least: int,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The log-likelihood, Σ s sᵀ of the scores, concordance, and the score test of proportional hazards."""
        partial = likelihood if isinstance(likelihood, PartialLikelihood) else likelihood.partial
        beta, _ = likelihood.split(theta)
        found = {"loglik": -float(likelihood.loss(theta)), "concordance": list(concordance(partial, beta))}
        lean = [tensors["lean"]] if isinstance(likelihood, PiecewiseLikelihood) else []
        told = {"meat": packed(likelihood.meat(theta, *lean))}
        if (transform := self.facts["transform"]) is not None:
            told |= proportionality(partial, beta, transform)
        return found, told
