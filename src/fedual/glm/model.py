"""What a site computes for a fit: its responses, its likelihood, and the sums of the last message.

`Model` is the generalised linear model; other kinds of models are its siblings, and `fedual.glm.models` knows them all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedual.errors import DataError
from fedual.glm import closing
from fedual.glm.design import Design
from fedual.glm.distributions import Distribution, distribution
from fedual.glm.guards import Guard
from fedual.glm.likelihood import Likelihood
from fedual.glm.plan import usual_numbers
from fedual.glm.schema import Schema


@dataclass(frozen=True)
class Model:
    """What all sites fit: the design, the family, and what else the federation's messages say of it."""

    schema: Schema
    distribution: Distribution
    facts: Mapping[str, Any]

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "Model":
        """The model of a message."""
        return cls(Schema.from_dict(facts["schema"]), distribution(str(facts["family"]), facts["link"]), facts)

    @property
    def own_intercept(self) -> bool:
        """True if each site has an intercept of its own."""
        return self.facts["site"] == "fixed"

    @property
    def usual_numbers(self) -> int:
        """How many numbers a site tells in a usual fit."""
        return usual_numbers(len(self.schema.terms) + len(self.distribution.extra), self.distribution)

    @property
    def packing(self) -> int:
        """How many of θ's last entries have no products with each other in the information: no message has these."""
        return 0

    def responses(self, design: Design, site: str) -> tuple[Tensor, Tensor]:
        """The response and the weights: successes of several trials are a proportion that counts as often."""
        y, weight = design.y, design.weights
        if self.distribution.name == "binomial":
            y, weight = y / design.trials, weight * design.trials
        if objection := self.distribution.objection(y):
            raise DataError(f"Site {site!r}: the response {self.schema.response!r} {objection}.")
        return y, weight

    def counts(self, design: Design) -> dict[str, Any]:
        """What a site tells with the moments of its columns, besides."""
        return {}

    def guard(self, guard: Guard, design: Design) -> None:
        """Let a site's guard see what is particular to this kind of model in the site's design."""

    def likelihood(self, design: Design, x: Tensor, unit: float, site: str) -> Any:
        """The site's likelihood; `x` are the design's columns in the federation's units."""
        y, weight = self.responses(design, site)
        return Likelihood(self.distribution, x, y, weight / unit**2, design.offset, self.own_intercept)

    def loss(self, plain: Any, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """What a message is about, made of the likelihood; `facts` and `tensors` are the message's."""
        return plain

    def points(self, theta: Tensor, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
        """Where the figures at the estimate are evaluated, `(…, P)`, for the guard to see."""
        return theta[None]

    def own(self, likelihood: Any, theta: Tensor, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """What the site finds about itself at the estimate and keeps, if anything."""
        return None

    def figures(
        self, likelihood: Any, theta: Tensor, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], least: int
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Sums at the estimate, from which the figures of fit follow; `facts` and `tensors` are the message's."""
        return closing.figures(likelihood, theta, facts["null"], facts["dispersion"], least)
