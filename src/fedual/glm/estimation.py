"""The server of a generalised linear model: handshake, rounds, certificate, and the figures that follow from sums."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedual.errors import DataError, NotConvergedError
from fedual.families import Full
from fedual.glm import handshake
from fedual.glm.closing import RESIDUAL_EDGES
from fedual.glm.distributions import distribution
from fedual.glm.figures import Convergence, Estimate, PosteriorKind, SiteFigures
from fedual.glm.messages import Ask, Message, unpacked
from fedual.glm.plan import cavity_rounds
from fedual.glm.prior import FLAT, INTERCEPT, Prior, prior
from fedual.glm.result import Fit
from fedual.glm.rounds import AliasedError, IndefiniteError, Rounds, SeparatedError
from fedual.glm.settings import Settings

FAMILY = Full()
MOST_VARIATIONAL, VARIATIONAL_TOL = 20, 1e-3
"""Rounds of a variational posterior, and the change of its mean, in sds, that ends them."""
POISSON = 0.05
"""Where α ȳ, the part of the variance beyond a Poisson's, is smaller and still falls, there is no α to find."""
CONSTANT = 1e-12
"""The sd of a response that has an error to estimate, relative to its mean, is more."""
MOST_NAMES = 5
"""Terms that an error names."""
NOT_CONVERGED = "The rounds ended before the estimate rested: raise max_rounds."
WEAK, WEAK_EXTRA_SD = Prior(sd=2.5, intercept_sd=10.0), 1.5
"""Of the first λ_g: the prior of the coefficients, and the sd of the distribution's extra parameters."""


class Estimation:
    """One fit: what its steps share."""

    def __init__(self, ask: Ask, settings: Settings):
        self.ask, self.settings = ask, settings
        self.schema = handshake.agree(ask, settings)
        self.distribution = distribution(settings.family, settings.link)
        self.own_intercepts = settings.site == "fixed"
        self.model = {
            "schema": self.schema.to_dict(), "family": settings.family, "link": settings.link, **self._about()
        }  # fmt: skip
        self.moments = handshake.moments(ask, self.schema, {"model": self.model})
        self.terms, self.extra = self._terms(), self._extra()
        self.kept = torch.tensor([t in self.terms for t in self.schema.terms])
        self.unit = self.moments.sd if self.distribution.link == "identity" else 1.0
        self.dim = len(self.terms) + len(self.extra)
        self.prior = prior(settings.prior)
        self.intercept = self._first_intercept()
        self.noise = self.moments.sd if settings.family == "gaussian" else 1.0  # rounds divide errors by it
        self.rounds = Rounds(
            ask,
            facts={"model": self.model, "unit": self.noise},
            units={"centre": self.moments.centre, "scale": self.moments.scale},
            prior=self._natural(FLAT),
            start=self._start(),
            most=settings.max_rounds,
            tol=settings.tol,
            rows=sum(self.moments.rows.values()),
            null=self.intercept if INTERCEPT in self.terms else None,
            null_is_final=settings.offset is None,
            packing=self._packing(),
        )

    def _about(self) -> dict[str, Any]:
        """What the messages say of the model besides its schema, family and link."""
        if self.own_intercepts and INTERCEPT not in self.schema.terms:
            cause = f"{self.settings.formula!r} has no intercept that could differ by site"
            raise DataError(f"{cause}: use site='pooled'.")
        return {"site": self.settings.site}

    def _terms(self) -> tuple[str, ...]:
        """The terms with a coefficient that all sites share."""
        return tuple(t for t in self.schema.terms if not (self.own_intercepts and t == INTERCEPT))

    def _extra(self) -> tuple[str, ...]:
        """Names of the parameters after the coefficients in θ."""
        return self.distribution.extra

    def _packing(self) -> int:
        """See `Model.packing`."""
        return 0

    def _start(self) -> Tensor:
        """The first λ_g."""
        return self._natural(WEAK, WEAK_EXTRA_SD)

    def fit(self) -> Fit:
        """The rounds, and what follows from them."""
        settings, rounds, known = self.settings, self.rounds, self.distribution.known_dispersion
        plan = settings.cavity_rounds or cavity_rounds(self.distribution)
        if settings.estimate == "posterior" and known:
            rounds.restart(self._natural(self.prior))
            converged = self._run(plan)
            return Fit(ml=None, posterior=self._laplace(1.0), posterior_kind="laplace", **self._figures(converged))
        try:
            converged = self._run(plan, runaway=known)
        except SeparatedError as error:
            return self._penalised(self._separated(error))
        figures = self._figures(converged)
        dispersion = figures["dispersion"] / self.noise**2
        ml = self._ml(dispersion)
        if self.prior.flat:
            return Fit(ml=ml, posterior=None, **figures)
        if settings.estimate == "ml":
            return Fit(ml=ml, posterior=self._quadratic(dispersion), posterior_kind="quadratic", **figures)
        posterior, kind = self._posterior(dispersion)
        return Fit(ml=ml, posterior=posterior, posterior_kind=kind, **figures)

    def _run(self, plan: int, runaway: bool = False) -> bool:
        binary = self.distribution.name == "binomial"
        try:
            converged = self.rounds.run(plan, self._smallest(), self.moments.weight, binary, runaway)
        except IndefiniteError:
            self._require_overdispersion(most=math.inf)
            raise
        except AliasedError as error:
            raise DataError(self._aliased(error.entries)) from None
        if not converged:
            self._require_overdispersion(most=POISSON)
        return converged

    def _smallest(self) -> float:
        """Rows of the smallest site; one with few events is small, however many rows it has."""
        binary = self.distribution.name == "binomial"
        events = lambda mean: min(1.0, 2 * mean, 2 * (1 - mean)) if binary else 1.0
        return min(n * events(self.moments.means[site]) for site, n in self.moments.rows.items())

    def _aliased(self, entries: list[int]) -> str:
        """Why terms have no estimate, in a sentence."""
        names, n = ", ".join(repr(self._name(j)) for j in entries), sum(self.moments.rows.values())
        remedy = ", or fit with estimate='posterior'" if self.distribution.known_dispersion else ""
        if n < len(self.terms):
            return f"{n} rows cannot tell {len(self.terms)} coefficients apart: use fewer terms{remedy}."
        if len(entries) == 1:
            beside = self._beside()
            return f"{names} cannot be estimated, because it follows from {beside}: leave it out{remedy}."
        others = "the others" + " and the intercepts of the sites" * self.own_intercepts
        return f"{names} cannot be told apart, because each follows from {others}: drop one of them{remedy}."

    def _beside(self) -> str:
        """What a single term can follow from."""
        return "the intercepts of the sites" if self.own_intercepts else "the other terms"

    def _require_overdispersion(self, most: float) -> None:
        """Refuse counts that have no α, where α ȳ is below a limit."""
        if self.distribution.extra and float(self.rounds.mean[-1].exp()) * self.moments.mean < most:
            raise NotConvergedError(
                f"The counts of {self.settings.formula!r} vary hardly more than a Poisson's, and alpha is not found: "
                "use family='poisson'."
            )

    def _separated(self, error: SeparatedError) -> str:
        """Why there is no maximum likelihood, in a sentence without its period."""
        names = [repr(self._name(j)) for j in error.entries] or ["the terms together"]
        names = ", ".join(names[:MOST_NAMES]) + f" and {len(names) - MOST_NAMES} more" * (len(names) > MOST_NAMES)
        if error.step is None:
            return f"The responses are separated by {names}, so that the likelihood has no maximum"
        left = f"after {len(self.rounds.history)} rounds a step of {error.step:.2g} standard errors is left"
        return f"The responses seem to be separated by {names}, and the likelihood to have no maximum: {left}"

    def _penalised(self, sentence: str) -> Fit:
        """The posterior's mode, where the likelihood has no maximum, as the sentence says."""
        if self.prior.flat:
            raise NotConvergedError(f"{sentence}: fit under a prior, for example prior='default'.")
        self.rounds.fall_back(self._natural(self.prior))
        self.rounds.most = len(self.rounds.history) + self.settings.max_rounds
        converged = self._run(0)
        posterior, kind = self._laplace(1.0), "laplace"
        figures = self._figures(converged, f"{sentence}. The estimates are those under the prior.")
        if self.settings.estimate == "variational":
            posterior, kind = self._variational()
        return Fit(ml=None, posterior=posterior, posterior_kind=kind, **figures)

    def _posterior(self, dispersion: float) -> tuple[Estimate, PosteriorKind]:
        """The posterior from an expansion at its own mode, or as the best Gaussian.

        With a dispersion φ the rounds minimise φ times the negative log posterior, whose prior is φλ_0.
        """
        self.rounds.under(self._natural(self.prior) * dispersion)
        self.rounds.most = len(self.rounds.history) + self.settings.max_rounds
        self._run(1)
        if self.settings.estimate == "variational":
            return self._variational()
        return self._laplace(dispersion), "laplace"

    def _variational(self) -> tuple[Estimate, PosteriorKind]:
        for _ in range(MOST_VARIATIONAL):
            self.rounds.exchange("variational")
            if self.rounds.history[-1]["step_se"] < VARIATIONAL_TOL:
                break
        return self._laplace(1.0), "variational"

    def _natural(self, prior: Prior, extra_sd: float = math.inf) -> Tensor:
        """A prior's λ_0 in standardised columns."""
        scale = self.moments.scale[self.kept]
        lam = prior.natural(self.terms, scale, self.unit, self.intercept, self.dim)
        for j in range(len(self.terms), self.dim):
            lam[1 + j, j] = -(extra_sd**-2) / 2
        return lam

    def _first_intercept(self) -> float:
        """f(ȳ): the fit with an intercept alone, but for the offset's spread."""
        mean, family = self.moments.mean, self.distribution
        constant = not family.known_dispersion and not self.moments.sd > CONSTANT * abs(mean)
        if constant or (family.positive_mean and not mean > 0) or (family.name == "binomial" and mean >= 1):
            raise DataError(
                f"The response of {self.settings.formula!r} has the same value at all sites, to twelve digits."
            )
        return float(family.predictor(torch.tensor(mean, dtype=torch.float64))) - self.moments.offset

    def _name(self, entry: int) -> str:
        return self.terms[entry] if entry < len(self.terms) else "alpha"

    def _own_units(self) -> Tensor:
        """T: coefficients in the terms' own units are T θ of standardised ones, `(p, p)`."""
        scale, centre = self.moments.scale[self.kept], self.moments.centre[self.kept]
        matrix = torch.diag(1 / scale)
        if INTERCEPT in self.terms:
            matrix[self.terms.index(INTERCEPT)] -= centre / scale
        return matrix

    def _estimate(self, mean: Tensor, covariance: Tensor) -> Estimate:
        """A mean and a covariance of θ as those of the coefficients in their own units."""
        p, units = len(self.terms), self._own_units()
        return Estimate((units @ mean[:p]).numpy(), (units @ covariance[:p, :p] @ units.mT).numpy())

    def _ml(self, dispersion: float) -> Estimate:
        """From the expected information at the estimate; from the observed one where they are the same."""
        expected = self._matrix("expected")
        information = FAMILY.precision(self.rounds.state.eta_sum) if expected is None else expected
        return self._estimate(self.rounds.mean, dispersion * torch.linalg.inv(information))

    def _laplace(self, dispersion: float) -> Estimate:
        """The current mode and its curvature."""
        return self._estimate(self.rounds.mean, dispersion * torch.linalg.inv(self.rounds.precision))

    def _quadratic(self, dispersion: float) -> Estimate:
        """The posterior from the quadratic of the likelihood at its maximum, and the prior."""
        lam = self.rounds.state.eta_sum / dispersion + self._natural(self.prior)
        return self._estimate(FAMILY.mean(lam), FAMILY.covariance(lam))

    def _figures(self, converged: bool, separation: str | None = None) -> dict[str, Any]:
        """The figures of `Fit` at the estimate, for which all sites are asked once more."""
        rounds, moments = self.rounds, self.moments
        n, parameters = sum(moments.rows.values()), len(self.terms) + self.own_intercepts * len(moments.rows)
        if n <= parameters and not self.distribution.known_dispersion:
            raise DataError(
                f"{n} rows for {parameters} coefficients leave nothing for the dispersion: use fewer terms."
            )
        if lost := [site for site, reply in rounds.replies.items() if reply.facts["loss"] is None]:
            raise NotConvergedError(
                f"The rounds ended where the likelihood of site {lost[0]!r} is zero: raise max_rounds, or choose "
                "another link."
            )
        known = self.distribution.known_dispersion
        facts = {**rounds.facts, "null": rounds.null, "dispersion": rounds.dispersion}
        self.closing = self.ask(Message("figures", facts, {**rounds.units, "theta": rounds.mean}))
        total = lambda name: sum(float(reply.facts[name]) for reply in self.closing.values())
        information, meat = torch.linalg.inv(rounds.precision), self._matrix("meat")
        p, units = len(self.terms), self._own_units()
        hc0 = units @ (information @ meat @ information)[:p, :p] @ units.mT
        alpha = float(rounds.mean[-1].exp()) if self.distribution.extra else None
        return {
            "schema": self.schema, "family": self.settings.family, "link": self.settings.link, "n": n,
            "sites": self._sites(), "site_effects": self.settings.site, "parameters": parameters, "prior": self.prior,
            "dispersion": 1.0 if known else self.noise**2 * total("pearson") / (n - parameters),
            **{name: total(name) for name in ("loglik", "null_loglik")},
            **{name: self.noise**2 * total(name) for name in ("deviance", "null_deviance", "pearson")},
            "df_model": len(self.terms) - (INTERCEPT in self.terms), "df_resid": n - parameters,
            "hc0": None if rounds.prior.any() else hc0.numpy(), "alpha": alpha,
            "alpha_se": None if alpha is None else alpha * float(information[-1, -1].sqrt()),
            "convergence": Convergence(
                converged, len(rounds.history), rounds.history[-1]["step_se"], rounds.tol, tuple(rounds.history)
            ),
            "separation": separation,
            "residuals": self._residuals(),
            "calibration": self._calibration(),
            "warnings": () if converged else (NOT_CONVERGED,),
        }  # fmt: skip

    def _site_facts(self, name: str) -> list[Any]:
        """A fact of the sites that told it at the end."""
        return [reply.facts[name] for reply in self.closing.values() if name in reply.facts]

    def _matrix(self, name: str) -> Tensor | None:
        """The sum of a matrix that all sites told at the end; None if they did not."""
        matrices = [unpacked(reply.tensors[name]) for reply in self.closing.values() if name in reply.tensors]
        return torch.stack(matrices).sum(0) if matrices else None

    def _sites(self) -> tuple[SiteFigures, ...]:
        """Each site's rows, and its gradient and Hessian at the maximum, from its expansion at the certificate."""
        p, inverse, moments = len(self.terms), torch.linalg.inv(self._own_units()), self.moments
        sites = []
        for site, eta in self.rounds.etas.items():
            gradient, hessian = None, None
            if not self.rounds.prior.any():
                curve = FAMILY.precision(eta)
                gradient = self.noise**2 * (inverse.mT @ (curve @ self.rounds.mean - eta[0])[:p]).numpy()
                hessian = self.noise**2 * (inverse.mT @ curve[:p, :p] @ inverse).numpy()
            of_table = moments.rows[site], moments.missing[site], moments.means[site]
            sites.append(SiteFigures(site, *of_table, gradient, hessian))
        return tuple(sites)

    def _residuals(self) -> dict[str, Any] | None:
        counts = self._site_facts("residuals")
        return {"edges": RESIDUAL_EDGES, "counts": np.sum(counts, 0).tolist()} if counts else None

    def _calibration(self) -> list[dict[str, float]] | None:
        if not (bins := self._site_facts("calibration")):
            return None
        sums = np.sum(bins, 0)
        return [{"predicted": m / w, "observed": y / w, "n": int(n)} for n, w, m, y in sums.tolist() if n]
