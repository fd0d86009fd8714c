"""The figures of a federated regression, as the rounds leave them; `fedual.glm.result.Fit` shows them to the user.

Coefficients, covariances, gradients and Hessians are in the terms' own units and in the order of `Figures.terms`.
An aliased term has NaN as its maximum-likelihood coefficient, and NaN in its row and column of the covariances.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedual.errors import InputError
from fedual.glm.agreement import Schema
from fedual.glm.distributions import distribution
from fedual.glm.mixed.components import Components
from fedual.glm.prior import FLAT, Prior
from fedual.glm.survival.figures import Survival

SiteEffects = Literal["pooled", "fixed", "random"]
PosteriorKind = Literal["quadratic", "laplace", "variational", "integrated"]
CovarianceKind = Literal["model", "hc0", "cluster"]


@dataclass(frozen=True, eq=False)
class Estimate:
    """Coefficients `(P,)` and their covariance `(P, P)`."""

    coefficients: np.ndarray
    covariance: np.ndarray

    @property
    def se(self) -> np.ndarray:
        """Standard errors, or standard deviations of a posterior, `(P,)`."""
        return np.sqrt(np.diagonal(self.covariance))


@dataclass(frozen=True, eq=False)
class SiteFigures:
    """What the fit knows of one site.

    Args:
        name: The site's name.
        n: Rows that were used.
        missing: For each column the rows that were dropped because its value is missing.
        mean_response: The mean of the response, with its weights.
        gradient: ∇ℓ_k, `(P,)`, of the negative log-likelihood at dispersion 1, at the maximum-likelihood estimate; None
            where sites send sums only, or where that estimate does not exist.
        hessian: ∇²ℓ_k, `(P, P)`, there.
        events: Of a survival model, rows with an event.
    """

    name: str
    n: int
    missing: Mapping[str, int] = field(default_factory=dict)
    mean_response: float = math.nan
    gradient: np.ndarray | None = None
    hessian: np.ndarray | None = None
    events: int | None = None


@dataclass(frozen=True)
class Convergence:
    """How the rounds ended.

    Args:
        converged: True if the last step was at most the tolerance.
        rounds: Rounds with the certificate, without the handshake.
        step: The largest entry of the next Newton step, in standard errors of its coefficient.
        tolerance: The largest step that counts as converged.
        history: A record for each round: kind, loss, step_se.
    """

    converged: bool
    rounds: int
    step: float
    tolerance: float
    history: tuple[Mapping[str, Any], ...] = ()

    def words(self) -> str:
        """One line: converged, how far the next step would go, and after how many rounds."""
        rounds = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        if self.converged:
            return f"converged: next step {self.step:.1g} SE, {rounds}"
        return f"NOT converged: next step {self.step:.1g} SE after {rounds} (tolerance {self.tolerance:.1g} SE)"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Figures:
    """All figures of a fit.

    Args:
        schema: The agreed schema, with the formula and the names of the design's columns.
        family: The family's name.
        link: The link's name.
        n: Rows that were used, at all sites.
        sites: The sites' figures, in order.
        site_effects: "fixed" if each site has an intercept of its own, which is profiled out there.
        parameters: Coefficients that were estimated: aliased ones and the dispersion do not count, the intercepts of
            the sites do.
        ml: The maximum-likelihood estimate; None where it does not exist.
        posterior: The posterior under the prior; None if the prior is flat.
        prior: The prior of the coefficients.
        posterior_kind: How the posterior was found: from the quadratic at the maximum likelihood, from one at its own
            mode, or variationally.
        dispersion: φ, from Pearson's χ²/df; 1 for families that know it.
        loglik: The log-likelihood with all constants, as R's `logLik`: φ of the gaussian and gamma families is the
            deviance divided by the rows. At the posterior's mean where `ml` is None.
        null_loglik: The same of the null model, an intercept alone or the sites' own intercepts alone, with the φ and α
            of this one.
        deviance: The residual deviance, without φ.
        null_deviance: That of the null model.
        pearson: Pearson's χ², without φ.
        df_model: Parameters that the null model does not have.
        df_resid: `n` − `parameters`.
        hc0: White's covariance of `ml`, `(P, P)`; None if it is not known.
        alpha: The negative binomial α: the variance is μ + αμ².
        alpha_se: Its standard error if it was estimated.
        convergence: How the rounds ended.
        separation: A sentence that names separated terms, if any.
        aliased: Terms that others determine.
        residuals: A histogram of Pearson residuals: its `edges` and `counts`.
        calibration: Bins of the fitted mean: mean `predicted`, mean `observed` and `n` of each.
        warnings: Sentences for the user.
        covariance_kind: Where the covariance of `ml` is from.
        survival: What is particular to a survival model.
        components: How the coefficients differ by site, where `site_effects` is "random". `loglik` then has these
            integrated out, `deviance` is −2 of it, there is no null model, and `pearson`, `residuals` and `calibration`
            are those at the sites' own effects.
    """

    schema: Schema
    family: str
    link: str
    n: int
    sites: tuple[SiteFigures, ...]
    site_effects: SiteEffects = "pooled"
    parameters: int
    ml: Estimate | None
    posterior: Estimate | None = None
    prior: Prior = FLAT
    posterior_kind: PosteriorKind = "quadratic"
    dispersion: float = 1.0
    loglik: float
    null_loglik: float
    deviance: float
    null_deviance: float
    pearson: float
    df_model: int
    df_resid: int
    hc0: np.ndarray | None = None
    alpha: float | None = None
    alpha_se: float | None = None
    convergence: Convergence
    separation: str | None = None
    aliased: tuple[str, ...] = ()
    residuals: Mapping[str, Any] | None = None
    calibration: list[dict[str, Any]] | None = None
    warnings: tuple[str, ...] = ()
    covariance_kind: CovarianceKind = "model"
    survival: Survival | None = None
    components: Components | None = None

    def __post_init__(self) -> None:
        if self.ml is None and self.posterior is None:
            raise InputError("A fit has neither a maximum-likelihood estimate nor a posterior: give one of them.")
        distribution(self.family, self.link)  # refuses unknown ones
        terms = len(self.terms)
        arrays = {"ml": self.ml and self.ml.coefficients, "posterior": self.posterior and self.posterior.coefficients}
        arrays |= {"survival.means": self.survival and self.survival.means}
        arrays |= {f"the gradient of {site.name}": site.gradient for site in self.sites}
        for name, array in arrays.items():
            if array is not None and array.shape != (terms,):
                raise InputError(f"{name} has shape {array.shape} in a fit of {terms} terms: give ({terms},).")
        matrices = {"ml": self.ml and self.ml.covariance, "posterior": self.posterior and self.posterior.covariance}
        matrices |= {"hc0": self.hc0, **{f"the Hessian of {site.name}": site.hessian for site in self.sites}}
        for name, array in matrices.items():
            if array is not None and array.shape != (terms, terms):
                raise InputError(f"{name} is a matrix {array.shape} in a fit of {terms} terms: give {(terms, terms)}.")

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the coefficients; sites' own intercepts are not among them."""
        own = self.site_effects == "fixed" or self.survival is not None  # a baseline hazard is an intercept
        return tuple(term for term in self.schema.terms if not (own and term == "Intercept"))

    @property
    def formula(self) -> str:
        """The formula as it was given."""
        return self.schema.formula

    @property
    def response(self) -> str:
        """The left side of the formula."""
        return self.schema.response

    @property
    def estimate(self) -> Estimate:
        """The maximum-likelihood estimate, or the posterior where that does not exist."""
        found = self.posterior if self.ml is None else self.ml
        assert found is not None  # __post_init__
        return found

    @property
    def kept(self) -> np.ndarray:
        """Indices of the terms that are not aliased."""
        return np.array([i for i, term in enumerate(self.terms) if term not in self.aliased], dtype=int)

    @property
    def has_intercept(self) -> bool:
        """True if an intercept, or one for each site, is among the parameters."""
        return self.site_effects == "fixed" or self.survival is not None or "Intercept" in self.terms

    @property
    def known_dispersion(self) -> bool:
        """True if the family knows its φ, so that z and χ² take the place of t and F."""
        return distribution(self.family, self.link).known_dispersion

    @property
    def likelihood_parameters(self) -> int:
        """Parameters as AIC counts them, as R does: φ, or an estimated α, is one more."""
        return self.parameters + (not self.known_dispersion or self.alpha_se is not None)

    @property
    def aic(self) -> float:
        """−2 log L + 2 parameters; NaN without a maximum-likelihood estimate."""
        return -2 * self.loglik + 2 * self.likelihood_parameters if self.ml else math.nan

    @property
    def bic(self) -> float:
        """−2 log L + log(n) parameters, n being events of survival; NaN without a maximum-likelihood estimate."""
        rows = self.n if self.survival is None else self.survival.events
        return -2 * self.loglik + math.log(rows) * self.likelihood_parameters if self.ml else math.nan

    @property
    def pseudo_r2(self) -> float:
        """McFadden's 1 − log L / log L₀ of a family with known dispersion; the deviance explained, 1 − D/D₀, of others.

        For the gaussian family with the identity link that is R². NaN without an intercept, because the model of the
        intercept alone is then no part of this one.
        """
        one, none = (self.loglik, self.null_loglik) if self.known_dispersion else (self.deviance, self.null_deviance)
        return 1 - one / none if self.has_intercept and none else math.nan

    @property
    def adjusted_r2(self) -> float:
        """R² adjusted for the number of parameters; NaN unless the model is linear and gaussian."""
        linear = (self.family, self.link) == ("gaussian", "identity")
        if not linear or self.df_resid <= 0:
            return math.nan
        return 1 - (1 - self.pseudo_r2) * (self.df_resid + self.df_model) / self.df_resid
