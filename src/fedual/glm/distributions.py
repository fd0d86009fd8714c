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
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.special import digamma, log_ndtr, polygamma

from fedual.errors import InputError, hint

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Bend(NamedTuple):
    """ℓ(f), ℓ'(f), ℓ''(f) and E_y[ℓ''(f)] of every observation."""

    loss: Tensor
    first: Tensor
    second: Tensor
    expected: Tensor


class Link(NamedTuple):
    """μ(f), μ'(f), μ''(f); `to` is f(μ)."""

    curve: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    to: Callable[[Tensor], Tensor]


def _log(f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = f.exp()
    return mean, mean, mean


LINKS = {
    "identity": Link(lambda f: (f, torch.ones_like(f), torch.zeros_like(f)), lambda mean: mean),
    "log": Link(_log, torch.log),
    "sqrt": Link(lambda f: (f**2, 2 * f, torch.full_like(f, 2.0)), torch.sqrt),
    "inverse": Link(lambda f: (1 / f, -1 / f**2, 2 / f**3), lambda mean: 1 / mean),
}


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
        mean, slope, curve = LINKS[self.link].curve(f)
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
        return LINKS[self.link].curve(f)[0]

    def predictor(self, mean: Tensor) -> Tensor:
        """f(μ)."""
        return LINKS[self.link].to(mean)

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
        """Constant."""
        return torch.ones_like(mean), torch.zeros_like(mean)

    def potential(self, mean: Tensor, y: Tensor) -> Tensor:
        """Half of the squared error."""
        return (y - mean) ** 2 / 2

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """The squared error."""
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
        """As in `Distribution`."""
        yes, no = self._logs(f)
        mean = yes[0].exp()
        mix = lambda i: -torch.lerp(no[i], yes[i], y)
        expected = mean * yes[1] ** 2 + no[0].exp() * no[1] ** 2
        loss = -(torch.where(y > 0, y * yes[0], 0.0) + torch.where(y < 1, (1 - y) * no[0], 0.0))
        return Bend(loss, mix(1), mix(2), expected)

    def mean(self, f: Tensor) -> Tensor:
        """μ(f)."""
        return self._logs(f)[0][0].exp()

    def predictor(self, mean: Tensor) -> Tensor:
        """f(μ)."""
        if self.link == "logit":
            return torch.logit(mean)
        return torch.special.ndtri(mean) if self.link == "probit" else torch.log(-torch.log1p(-mean))

    def _logs(self, f: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """log μ and log(1 − μ), each with its first and second derivative in f."""
        if self.link == "logit":
            mean = torch.sigmoid(f)
            second = -mean * torch.sigmoid(-f)
            logs = torch.nn.functional.logsigmoid
            return (logs(f), torch.sigmoid(-f), second), (logs(-f), -mean, second)
        if self.link == "probit":
            ratio = lambda t: (-(t**2) / 2 - HALF_LOG_2PI - log_ndtr(t)).exp()
            up, down = ratio(f), ratio(-f)
            return (log_ndtr(f), up, -up * (f + up)), (log_ndtr(-f), -down, -down * (down - f))
        rate = f.exp()
        up = rate / torch.expm1(rate)
        up = torch.where(rate > 0, up, torch.ones_like(up))
        return (torch.log(-torch.expm1(-rate)), up, up * (1 - rate - up)), (-rate, -rate, -rate)

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """2 [y log(y/μ) + (1 − y) log((1 − y)/(1 − μ))]."""
        entropy = torch.xlogy(y, y) + torch.xlogy(1 - y, 1 - y)
        return 2 * (entropy - torch.xlogy(y, mean) - torch.special.xlog1py(1 - y, -mean))

    def variance(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """μ (1 − μ)."""
        return mean * (1 - mean), 1 - 2 * mean

    def loglik(self, mean: Tensor, y: Tensor, weight: Tensor, dispersion: float) -> Tensor:
        """Binomial probabilities of wy successes in w trials."""
        each = torch.xlogy(y, mean) + torch.special.xlog1py(1 - y, -mean)
        choices = torch.lgamma(weight + 1) - torch.lgamma(weight * y + 1) - torch.lgamma(weight * (1 - y) + 1)
        return (weight * each + choices).sum()

    def objection(self, y: Tensor) -> str | None:
        """Proportions must be in [0, 1]."""
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
        """μ."""
        return mean, torch.ones_like(mean)

    def potential(self, mean: Tensor, y: Tensor) -> Tensor:
        """μ − y log μ."""
        return mean - torch.xlogy(y, mean)

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """2 [y log(y/μ) − (y − μ)]."""
        return 2 * (torch.xlogy(y, y) - torch.xlogy(y, mean) - (y - mean))

    def loglik(self, mean: Tensor, y: Tensor, weight: Tensor, dispersion: float) -> Tensor:
        """Poisson probabilities."""
        return (weight * (torch.xlogy(y, mean) - mean - torch.lgamma(y + 1))).sum()

    def objection(self, y: Tensor) -> str | None:
        """Counts must not be negative."""
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
        """μ²."""
        return mean**2, 2 * mean

    def potential(self, mean: Tensor, y: Tensor) -> Tensor:
        """y/μ + log μ."""
        return y / mean + mean.log()

    def deviance(self, mean: Tensor, y: Tensor) -> Tensor:
        """2 [(y − μ)/μ − log(y/μ)]."""
        return 2 * ((y - mean) / mean - torch.log(y / mean))

    def loglik(self, mean: Tensor, y: Tensor, weight: Tensor, dispersion: float) -> Tensor:
        """Gamma densities of shape w/φ."""
        shape = weight / dispersion
        return (shape * torch.log(shape * y / mean) - shape * y / mean - y.log() - torch.lgamma(shape)).sum()

    def objection(self, y: Tensor) -> str | None:
        """Responses must be positive."""
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
        """μ + αμ²."""
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


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    kind.name: kind for kind in (Normal, Binomial, Poisson, NegativeBinomial, Gamma)
}


def distribution(family: str, link: str | None = None) -> Distribution:
    """The distribution of a name, with its default link unless one is given."""
    if family not in DISTRIBUTIONS:
        raise InputError(f"family = {family!r}: {hint(family, DISTRIBUTIONS)}")
    kind = DISTRIBUTIONS[family]
    if link is not None and link not in kind.links:
        raise InputError(f"link = {link!r} with the family {family}: choose one of {', '.join(kind.links)}.")
    return kind(link or kind.links[0])
