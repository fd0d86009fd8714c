# ruff: noqa: D102 (`Distribution` documents these methods)
"""The response's distribution given the linear predictor f: loss, derivatives, and figures of fit.

Losses are negative log-likelihoods of one observation at dispersion 1, without terms that do not depend on f:

| family              | loss ℓ(f)                             | variance     | links (default first)       |
|---------------------|---------------------------------------|--------------|-----------------------------|
| "gaussian"          | ½ (y − μ)²                            | φ            | identity, log               |
| "binomial"          | −y log μ − (1 − y) log(1 − μ)         | μ (1 − μ)    | logit, probit, cloglog      |
| "poisson"           | μ − y log μ                           | μ            | log, sqrt, identity         |
| "gamma"             | y/μ + log μ                           | φ μ²         | log, inverse, identity      |
| "negative-binomial" | see `NegativeBinomial`                | μ + α μ²     | log                         |

A binomial y is a proportion; its number of trials multiplies the weight.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.special import digamma, polygamma

from fedual.errors import InputError, hint
from fedual.glm.links import BINARY_LINKS, HALF_LOG_2PI, LINKS


class Bend(NamedTuple):
    """ℓ(f), ℓ'(f), ℓ''(f) and E_y[ℓ''(f)] of every observation."""

    loss: Tensor
    first: Tensor
    second: Tensor
    expected: Tensor


@dataclass(frozen=True)
class Distribution:
    """A distribution with its link. Where the mean leaves its domain, the loss is infinite."""

    link: str
    name: ClassVar[str]
    links: ClassVar[tuple[str, ...]]
    canonical: ClassVar[str]
    known_dispersion: ClassVar[bool] = True
    extra: ClassVar[tuple[str, ...]] = ()
    """Parameters beside the coefficients, at the end of θ."""
    positive_mean: ClassVar[bool] = True

    def at(self, extra: Tensor) -> "Distribution":
        """This distribution with its extra parameters `(E,)`."""
        return self

    @property
    def fisher_is_hessian(self) -> bool:
        """True if the expected and the observed information are the same."""
        return self.link == self.canonical

    def bend(self, f: Tensor, y: Tensor) -> Bend:
        """The loss of every observation and its derivatives in f."""
        mean, slope, curve = LINKS[self.link].mean(f)
        inside = mean > 0 if self.positive_mean else torch.ones_like(f, dtype=torch.bool)
        if self.link in ("sqrt", "inverse"):
            inside = inside & (f > 0)
        mean = torch.where(inside, mean, torch.ones_like(mean))
        variance, change = self.variance(mean)
        residual = y - mean
        expected = slope**2 / variance
        second = expected - residual * (curve / variance - slope**2 * change / variance**2)
        loss = torch.where(inside, self.potential(mean, y), torch.inf)
        return Bend(loss, -residual * slope / variance, second, expected)

    def mean(self, f: Tensor) -> Tensor:
        """μ(f)."""
        return LINKS[self.link].mean(f)[0]

    def predictor(self, mean: Tensor) -> Tensor:
        """f(μ)."""
        return LINKS[self.link].predictor(mean)

    def variance(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """V(μ) and V'(μ) at dispersion 1."""
        raise NotImplementedError

    def potential(self, mean: Tensor, y: Tensor) -> Tensor:
        """ℓ in terms of μ."""
        raise NotImplementedError

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """The unit deviance: twice the loss above that of a mean that fits y."""
        raise NotImplementedError

    def loglik(self, mean: Tensor, y: Tensor, weight: Tensor, dispersion: float) -> Tensor:
        """Σ of the log-likelihood with all its constants, `()`."""
        raise NotImplementedError

    def objection(self, y: Tensor) -> str | None:
        """Why the responses are not of this family; None if they are."""
        return None


@dataclass(frozen=True)
class Normal(Distribution):
    """Normal errors with a variance φ to estimate."""

    link: str = "identity"
    name = "gaussian"
    links = ("identity", "log")
    canonical = "identity"
    known_dispersion = False
    positive_mean = False

    def variance(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(mean), torch.zeros_like(mean)

    def potential(self, mean: Tensor, y: Tensor) -> Tensor:
        return (y - mean) ** 2 / 2

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        return (y - mean) ** 2

    def loglik(self, mean: Tensor, y: Tensor, weight: Tensor, dispersion: float) -> Tensor:
        """Normal densities with variances φ/w."""
        each = weight * (y - mean) ** 2 / dispersion + math.log(dispersion) - weight.log()
        return -(each / 2 + HALF_LOG_2PI).sum()


@dataclass(frozen=True)
class Binomial(Distribution):
    """Proportions of successes; derivatives come from those of log μ and log(1 − μ), which stay accurate at 0 and 1."""

    link: str = "logit"
    name = "binomial"
    links = ("logit", "probit", "cloglog")
    canonical = "logit"

    def bend(self, f: Tensor, y: Tensor) -> Bend:
        yes, no = BINARY_LINKS[self.link].logs(f)
        mean = yes[0].exp()
        mix = lambda i: -torch.lerp(no[i], yes[i], y)
        expected = mean * yes[1] ** 2 + no[0].exp() * no[1] ** 2
        loss = -(torch.where(y > 0, y * yes[0], 0.0) + torch.where(y < 1, (1 - y) * no[0], 0.0))
        return Bend(loss, mix(1), mix(2), expected)

    def mean(self, f: Tensor) -> Tensor:
        yes, _ = BINARY_LINKS[self.link].logs(f)
        return yes[0].exp()

    def predictor(self, mean: Tensor) -> Tensor:
        return BINARY_LINKS[self.link].predictor(mean)

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """2 [y log(y/μ) + (1 − y) log((1 − y)/(1 − μ))]."""
        entropy = torch.xlogy(y, y) + torch.xlogy(1 - y, 1 - y)
        return 2 * (entropy - torch.xlogy(y, mean) - torch.special.xlog1py(1 - y, -mean))

    def variance(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        return mean * (1 - mean), 1 - 2 * mean

    def loglik(self, mean: Tensor, y: Tensor, weight: Tensor, dispersion: float) -> Tensor:
        """Binomial probabilities of wy successes in w trials."""
        each = torch.xlogy(y, mean) + torch.special.xlog1py(1 - y, -mean)
        choices = torch.lgamma(weight + 1) - torch.lgamma(weight * y + 1) - torch.lgamma(weight * (1 - y) + 1)
        return (weight * each + choices).sum()

    def objection(self, y: Tensor) -> str | None:
        remedy = "give 0/1, name the class that counts by event=, or give successes with trials="
        return f"is outside 0 … 1: {remedy}" if ((y < 0) | (y > 1)).any() else None


@dataclass(frozen=True)
class Poisson(Distribution):
    """Counts with variance μ."""

    link: str = "log"
    name = "poisson"
    links = ("log", "sqrt", "identity")
    canonical = "log"

    def variance(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        return mean, torch.ones_like(mean)

    def potential(self, mean: Tensor, y: Tensor) -> Tensor:
        return mean - torch.xlogy(y, mean)

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """2 [y log(y/μ) − (y − μ)]."""
        return 2 * (torch.xlogy(y, y) - torch.xlogy(y, mean) - (y - mean))

    def loglik(self, mean: Tensor, y: Tensor, weight: Tensor, dispersion: float) -> Tensor:
        """Poisson probabilities."""
        return (weight * (torch.xlogy(y, mean) - mean - torch.lgamma(y + 1))).sum()

    def objection(self, y: Tensor) -> str | None:
        return "is negative: give counts" if (y < 0).any() else None


@dataclass(frozen=True)
class Gamma(Distribution):
    """Positive responses with a constant coefficient of variation √φ."""

    link: str = "log"
    name = "gamma"
    links = ("log", "inverse", "identity")
    canonical = "inverse"
    known_dispersion = False

    def variance(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        return mean**2, 2 * mean

    def potential(self, mean: Tensor, y: Tensor) -> Tensor:
        return y / mean + mean.log()

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """2 [(y − μ)/μ − log(y/μ)]."""
        return 2 * ((y - mean) / mean - torch.log(y / mean))

    def loglik(self, mean: Tensor, y: Tensor, weight: Tensor, dispersion: float) -> Tensor:
        """Gamma densities of shape w/φ."""
        shape = weight / dispersion
        return (shape * torch.log(shape * y / mean) - shape * y / mean - y.log() - torch.lgamma(shape)).sum()

    def objection(self, y: Tensor) -> str | None:
        return "is not positive: give positive numbers" if (y <= 0).any() else None


@dataclass(frozen=True)
class NegativeBinomial(Distribution):
    """Counts with variance μ + αμ² (NB2); log α is the last entry of θ, estimated with the coefficients.

    With r = 1/α: ℓ = −log Γ(y + r) + log Γ(r) − r log(r/(r + μ)) − y log(μ/(r + μ)).
    """

    link: str = "log"
    alpha: float = 1.0
    name = "negative-binomial"
    links = ("log",)
    canonical = ""
    extra = ("log_alpha",)

    def at(self, extra: Tensor) -> "NegativeBinomial":
        """With α = exp of the extra parameter."""
        return NegativeBinomial(self.link, float(extra[0].exp()))

    def bend_jointly(self, f: Tensor, log_alpha: Tensor, y: Tensor) -> tuple[Bend, Tensor, Tensor, Tensor]:
        """As `bend`, and ∂ℓ/∂log α, ∂²ℓ/∂(log α)² and ∂²ℓ/∂f∂log α."""
        mean, r = f.exp(), (-log_alpha).exp()
        total, residual = r + mean, y - mean
        log_share = -torch.log1p(mean / r)  # log(r/(r + μ))
        loss = torch.lgamma(r) - torch.lgamma(y + r) - r * log_share - torch.xlogy(y, mean / total)
        bend = Bend(loss, -r * residual / total, r * mean * (r + y) / total**2, r * mean / total)
        in_r = digamma(y + r) - digamma(r) + log_share + 1 - (y + r) / total
        in_r_twice = polygamma(1, y + r) - polygamma(1, r) + mean / (r * total) + residual / total**2
        return bend, r * in_r, -(r**2 * in_r_twice + r * in_r), r * residual * mean / total**2

    def variance(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        return mean + self.alpha * mean**2, 1 + 2 * self.alpha * mean

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """2 [y log(y/μ) − (y + 1/α) log((1 + αy)/(1 + αμ))]."""
        a = self.alpha
        excess = (y + 1 / a) * (torch.log1p(a * y) - torch.log1p(a * mean))
        return 2 * (torch.xlogy(y, y) - torch.xlogy(y, mean) - excess)

    def loglik(self, mean: Tensor, y: Tensor, weight: Tensor, dispersion: float) -> Tensor:
        """Negative binomial probabilities."""
        loss = self.bend_jointly(mean.log(), mean.new_tensor(math.log(self.alpha)), y)[0].loss
        return -(weight * (loss + torch.lgamma(y + 1))).sum()

    objection = Poisson.objection


@dataclass(frozen=True)
class Cox(Distribution):
    """Events with proportional hazards: `fedual.glm.survival` has the likelihood; the response is 1 for an event."""

    link: str = "log"
    name = "cox"
    links = ("log",)
    canonical = "log"

    def objection(self, y: Tensor) -> str | None:
        remedy = "name its column alone, or compare it, as in status == 2"
        return f"has an event that is neither 0 nor 1: {remedy}" if ((y != 0) & (y != 1)).any() else None


@dataclass(frozen=True)
class PiecewiseExponential(Cox):
    """The same with a hazard that is constant in pieces of time, and common to all sites."""

    name = "piecewise-exponential"


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    kind.name: kind for kind in (Normal, Binomial, Poisson, NegativeBinomial, Gamma)
}
HAZARDS: dict[str, type[Distribution]] = {kind.name: kind for kind in (Cox, PiecewiseExponential)}
"""Of survival models, whose rows have no losses of their own."""


def distribution(family: str, link: str | None = None) -> Distribution:
    """The distribution of a name, with its default link unless one is given."""
    known = DISTRIBUTIONS | HAZARDS
    if family not in known:
        raise InputError(f"family = {family!r}: {hint(family, DISTRIBUTIONS)}")
    kind = known[family]
    if link is not None and link not in kind.links:
        raise InputError(f"link = {link!r} with the family {family}: choose one of {', '.join(kind.links)}.")
    return kind(link or kind.links[0])
