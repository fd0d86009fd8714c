"""The server of a mixed model: the sites' effects are integrated out, by themselves or from their sums.

A linear model needs one round: its sites' sums have the likelihood of every mixed model in them. Other models take the
same round for their start, and then the rounds of `MixedRounds`.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from fedual.errors import DataError, NotConvergedError
from fedual.families import Full
from fedual.glm.estimation import NOT_CONVERGED, Estimation
from fedual.glm.figures import Convergence, Estimate, SiteFigures
from fedual.glm.messages import Ask, Message, unpacked
from fedual.glm.mixed import effects
from fedual.glm.mixed.cholesky import entries, factor
from fedual.glm.mixed.components import Components, latent_share
from fedual.glm.mixed.posterior import FREE, Grid, Mixture, Slice, grid, mixture
from fedual.glm.mixed.quadratics import Linear, Quadratics, least
from fedual.glm.mixed.rounds import MixedRounds, away_from_zero
from fedual.glm.prior import INTERCEPT
from fedual.glm.result import Fit
from fedual.glm.rounds import AliasedError
from fedual.glm.settings import Settings

FAMILY = Full()
FEW, ENOUGH = 10, 30
"""Sites below which a warning says that they tell little of how sites differ; and those up to which σ is integrated."""
ZERO = 1e-8
"""A σ̂ on the scale of the link that is zero but for rounding."""
WIDE = 10.0
"""A standard error, of a standardised column, with which rounds that did not end count as separated."""


class MixedEstimation(Estimation):
    """One fit of a mixed model."""

    def __init__(self, ask: Ask, settings: Settings):
        super().__init__(ask, settings)
        if len(self.moments.rows) < 2:
            raise DataError("Effects of sites need at least two sites, and there is one: use site='pooled'.")
        self.random = tuple(self.model["random"])
        self.spread = effects.spread(self.random, self.terms, self.moments.centre, self.moments.scale)
        self.scale = self.prior.site_sd * self.unit
        self.integrates = len(self.random) == 1 and len(self.moments.rows) <= ENOUGH

    def _about(self) -> dict[str, Any]:
        return {"site": "random", "random": list(effects.columns(self.schema))}

    def fit(self) -> Fit:
        """The rounds, and what follows from them."""
        linear = self.settings.family == "gaussian"
        try:
            self.rounds.exchange("newton" if linear else "cavity")
        except AliasedError as error:
            raise DataError(self._aliased(error.entries)) from None
        return self._linear() if linear else self._generalised()

    def _linear(self) -> Fit:
        rounds, restricted = self.rounds, self.settings.estimate == "reml"
        at = FAMILY.mean(self.rounds.start)
        sums = self._quadratics(at)
        squares = 2 * sum(float(reply.facts["loss"]) for reply in rounds.replies.values())
        model = Linear(sums, squares, sum(self.moments.rows.values()), restricted)
        if model.df <= 0:
            raise DataError(f"{model.rows} rows for {len(self.terms)} coefficients leave nothing: use fewer terms.")
        theta = least(model.criterion, sums.unit, len(self.random))
        dispersion, found = float(model.dispersion(theta)), sums.integrated(theta)
        own = theta * math.sqrt(dispersion)
        beta = at + torch.linalg.solve(found.precision, found.shift)
        rounds.history[-1]["step_se"] = 0.0
        ml = self._estimate(beta, dispersion * torch.linalg.inv(found.precision))
        known = sums.scaled(1 / dispersion)
        shifted = lambda sigma: _slice(known, sigma, at)
        posterior = None
        if self.integrates:
            over = grid(shifted, self._natural(self.prior), self.scale, float(own.abs().max()), FREE)
            posterior = mixture([shifted(sigma) for sigma in over.sigma], over, self._natural(self.prior), self.scale)
        information = found.precision / dispersion
        self._close(torch.cat([beta, own]), dispersion, None)
        constant = sum(float(reply.facts["constant"]) for reply in self.closing.values())
        loglik = constant + model.rows / 2 * math.log(2 * math.pi) - float(model.criterion(theta))
        if restricted:
            loglik += float(torch.linalg.slogdet(self._own_units())[1])
        fall = float(model.criterion(torch.zeros_like(theta)) - model.criterion(theta))
        spread = model.spread_of_entries(own, dispersion)
        return self._result(True, ml, posterior, information, own, spread, 2 * fall, loglik, dispersion)

    def _generalised(self) -> Fit:
        size, first = len(self.terms), self.rounds
        sums = self._quadratics(torch.zeros(size, dtype=self.spread.dtype))
        theta = away_from_zero(least(sums.profile, sums.unit, len(self.random)), len(self.random))
        found = sums.integrated(theta)
        start = torch.cat([torch.linalg.solve(found.precision, found.shift), theta])
        rounds = MixedRounds(first, start, self._flat(len(start)), len(self.random))
        converged = rounds.run()
        se = rounds.covariance.diagonal()[:size]
        separated = all(reply.facts["separated"] for reply in rounds.replies.values())
        if not converged and (separated or not (se > 0).all() or float(se.max()) > WIDE**2):
            raise NotConvergedError(
                f"{self.settings.formula!r}: the responses seem to be separated, and the likelihood to have no "
                "maximum: use fewer terms, or site='pooled', which fits under a prior."
            )
        psi, covariance = rounds.psi, rounds.covariance
        if len(self.random) == 1 and abs(float(psi[-1])) < ZERO:
            psi = torch.cat([psi[:-1], psi.new_zeros(1)])
        ml = self._estimate(psi[:size], covariance[:size, :size])
        over, points = None, None
        if self.integrates:
            known = lambda sigma: _slice(sums, sigma, torch.zeros(size, dtype=psi.dtype))
            over = grid(known, self._natural(self.prior), self.scale, float(psi[size:].abs().max()))
            points = self._grid_points(sums, over, psi)
        self._close(psi, 1.0, points)
        posterior = None
        if over is not None and points is not None:
            slices = [self._told(points[g, :size], g) for g in range(len(points))]
            posterior = mixture(slices, over, self._natural(self.prior), self.scale)
        total = lambda name: sum(float(reply.facts[name]) for reply in self.closing.values())
        loss = total("marginal")
        return self._result(
            converged, ml, posterior, torch.linalg.inv(covariance[:size, :size]), psi[size:],
            covariance[size:, size:], 2 * (rounds.beside.minimum - loss), total("constant") - loss, 1.0,
        )  # fmt: skip

    def _quadratics(self, at: Tensor) -> Quadratics:
        """The sites' quadratics of the first round about a point."""
        etas = torch.stack(list(self.rounds.etas.values()))
        precision = FAMILY.precision(etas)
        return Quadratics(precision, etas[:, 0] - precision @ at, self.spread)

    def _flat(self, size: int) -> Tensor:
        return torch.zeros(size + 1, size, dtype=self.spread.dtype)

    def _grid_points(self, sums: Quadratics, over: Grid, psi: Tensor) -> Tensor:
        """Where the sites are asked for each σ: β̂ moved as the quadratics of the first round say."""
        size = len(self.terms)

        def best(theta: Tensor) -> Tensor:
            found = sums.integrated(theta)
            return torch.linalg.solve(found.precision, found.shift)

        away = psi[:size] - best(psi[size:])
        return torch.stack([torch.cat([best(sigma[None]) + away, sigma[None]]) for sigma in over.sigma])

    def _told(self, beta: Tensor, g: int) -> Slice:
        """The pooled loss at a σ of the grid, from the sites' expansions at β."""
        replies = list(self.closing.values())
        loss = sum(float(reply.facts["grid"][g]) for reply in replies)
        gradient = torch.stack([reply.tensors["slopes"][g] for reply in replies]).sum(0)
        hessian = unpacked(torch.stack([reply.tensors["curves"][g] for reply in replies]).sum(0))
        shift = hessian @ beta - gradient
        return Slice(hessian, shift, loss - gradient @ beta + beta @ hessian @ beta / 2)

    def _close(self, psi: Tensor, dispersion: float, points: Tensor | None) -> None:
        """Ask for the sums at the estimate; every site finds its own effects, and keeps them."""
        facts = {**self.rounds.facts, "dispersion": dispersion, "integrated": True}
        tensors = {**self.rounds.units, "theta": psi} | ({} if points is None else {"points": points})
        self.closing = self.ask(Message("figures", facts, tensors))

    def _result(
        self, converged: bool, ml: Estimate, posterior: Mixture | None, information: Tensor, theta: Tensor,
        spread: Tensor, statistic: float, loglik: float, dispersion: float,
    ) -> Fit:  # fmt: skip
        rounds, moments, size = self.rounds, self.moments, len(self.terms)
        n, count = sum(moments.rows.values()), len(self.terms) + entries(len(self.random))
        if posterior is not None:
            shown, kind = self._estimate(posterior.mean, posterior.covariance), "integrated"
        else:
            under = information - 2 * self._natural(self.prior)[1:]
            inverse = torch.linalg.inv(self._own_units())
            beta = inverse @ torch.tensor(ml.coefficients)
            mean = torch.linalg.solve(under, information @ beta + self._natural(self.prior)[0])
            shown, kind = (None if self.prior.flat else self._estimate(mean, torch.linalg.inv(under))), "quadratic"
        total = lambda name: sum(float(reply.facts[name]) for reply in self.closing.values())
        return Fit(
            schema=self.schema, family=self.settings.family, link=str(self.settings.link), n=n,
            sites=tuple(
                SiteFigures(site, moments.rows[site], moments.missing[site], moments.means[site])
                for site in moments.rows
            ),
            site_effects="random", parameters=count, ml=ml, posterior=shown, prior=self.prior, posterior_kind=kind,
            dispersion=dispersion * self.noise**2, loglik=loglik, null_loglik=math.nan,
            deviance=-2 * loglik, null_deviance=math.nan,
            pearson=self.noise**2 * total("pearson"), df_model=size - 1, df_resid=n - size,
            convergence=Convergence(
                converged, len(rounds.history), rounds.history[-1]["step_se"], rounds.tol, tuple(rounds.history)
            ),
            components=self._components(theta, spread, statistic, dispersion, posterior),
            residuals=self._residuals(), calibration=self._calibration(), warnings=self._warnings(converged),
        )  # fmt: skip

    def _components(
        self, theta: Tensor, spread: Tensor, statistic: float, dispersion: float, posterior: Mixture | None
    ) -> Components:
        """The variance components in the terms' own units; `spread` is the covariance of Λ's entries."""
        effects, places = len(self.random), [self.terms.index(name) for name in self.random]
        units = (self._own_units() @ self.spread)[places]
        sds = lambda entries: (units @ factor(entries, effects)).square().sum(1).clamp_min(1e-300).sqrt()
        slope = jacobian(sds, theta)
        zero = sds(theta) < 1e-100
        variances = torch.einsum("ij,jk,ik->i", slope, spread, slope)
        se = torch.where(zero | (variances <= 0), torch.nan, variances.abs().sqrt())
        own = self.spread @ factor(theta, effects)
        between = float(own[self.terms.index(INTERCEPT)].square().sum())
        noise = dispersion * self.noise**2
        icc, scale = latent_share(between, self.settings.family, str(self.settings.link), self.moments.mean, noise)
        if effects > 1 or self.random != (INTERCEPT,):
            scale += ", at the means of all columns"
        covariance = units @ factor(theta, effects) @ factor(theta, effects).mT @ units.mT
        unit, tested = float(units[0, 0]), statistic if theta.any() else 0.0
        return Components(
            self.random, covariance.numpy(), se.numpy(), tested, entries(effects), icc, scale,
            self.settings.estimate == "reml",
            *((None, None) if posterior is None else
              (self.scale * unit, (posterior.sigma * unit, posterior.sigma_sd * unit))),
        )  # fmt: skip

    def _warnings(self, converged: bool) -> tuple[str, ...]:
        found = () if converged else (NOT_CONVERGED,)
        sites = len(self.moments.rows)
        if sites >= FEW:
            return found
        said = "the posterior's intervals, which integrate σ, are the ones to report"
        if not self.integrates:
            said = "intervals of what differs between sites are too narrow"
        return (*found, f"{sites} sites tell little of how sites differ: {said}.")


def _slice(sums: Quadratics, sigma: Tensor, at: Tensor) -> Slice:
    """The quadratics at one σ, as of β; they are about the point `at`."""
    found = sums.integrated(sigma[None])
    shift = found.shift + found.precision @ at
    return Slice(found.precision, shift, found.constant + found.logs + found.shift @ at + at @ found.precision @ at / 2)
