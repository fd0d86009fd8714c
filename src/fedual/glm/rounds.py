"""The server of a federated regression: cavity rounds in the delta limit, and a Newton step as the certificate.

    start      λ_g = N(b₀, P_w⁻¹) around the fit with an intercept alone, no duals
    round r    sites: lines 1 and 2 of Bayesian-ADMM with ρ = 1 (`plan.METHODS["cavity"]`); server: λ_g ← λ_0 + Σ_k η_k
    last       sites: expansion at m_g ("newton"); λ_g ← λ_0 + Σ_k η_k is then a pooled Newton step, whose length in
               standard errors certifies the result

P_w is weak and no part of the result. Where a site has few rows, or few of one class, round 1 is poor: round 2 then
also looks at a linear discriminant's solution, and the better of the two points is the next anchor. A point whose
objective is worse than the best so far is left for Newton steps with a line search from the best.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedual.algorithm import ServerState, Totals, server_step
from fedual.errors import DomainError, NotConvergedError
from fedual.families import Full
from fedual.glm.messages import Ask, Message, packed_lam, unpacked_lam
from fedual.glm.plan import METHODS
from fedual.solvers.newton import solve

FAMILY = Full()
ROUNDING = 1e-11
"""Relative rise of the objective that counts as rounding."""
SMALL = 3
"""Rows for each coefficient: with fewer at a site, round 1 is poor."""
STEPS = (0.5, 0.25, 0.1, 0.03)
"""Shorter steps of the line search, beside the full one."""
NEAR = 0.1
"""A change of m_g, in standard errors, after which the certificate comes next: it leaves about the square over 50."""
SLOW, GROWING, LOST = 0.4, 1.5, 0.5
"""A likelihood without a maximum: steps, in SE, are each more than 0.4 of the one before. And either a coefficient's SE
grew by 1.5 twice, though steps were below 1, or the step at a certificate is longer than 0.5.

Along a coefficient that runs away, the factors are 1/√e and √e. Of tables that have a maximum, steps at the first
certificate were below 0.05."""
PERFECT = 1e-16
"""Least φ̂ in units of the response's variance: below it rounding would count as steps of many standard errors."""
ALIASED, EMPTY = 1e-10, 1e-13
"""Smallest eigenvalue of the information, scaled to a unit diagonal, of terms that others do not determine; and the
smallest entry of its diagonal, relative to the largest, of a column that is not constant at each site."""


@dataclass
class Rounds:
    """The rounds of one fit.

    Args:
        ask: Sends a message to all sites.
        facts: What every message of the fit says.
        units: The centre and scale of every column.
        prior: λ_0, `(P + 1, P)`; zeros are flat.
        start: The first λ_g.
        most: Rounds at most.
        tol: The largest next step, in standard errors, of a result that counts as converged.
        rows: Of all sites.
        null: The intercept of the model without covariates; None if it has none.
        null_is_final: False if every round is to improve it by a Newton step.
        packing: See `packed_lam`.
        history: A record for each round.
    """

    ask: Ask
    facts: Mapping[str, Any]
    units: Mapping[str, Tensor]
    prior: Tensor
    start: Tensor
    most: int
    tol: float
    rows: int
    null: float | None = None
    null_is_final: bool = True
    packing: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = ServerState(self.prior, self.start, torch.zeros_like(self.start))
        self.best: tuple[float, Tensor] | None = None  # the lowest objective that was seen, and where
        self.previous, self.anchor = "", "eta"
        self.replies: Mapping[str, Message] = {}
        self.etas: dict[str, Tensor] = {}
        self.dispersion = 1.0  # φ̂ where the family has one to estimate: deviance / rows at the last certificate
        self.first: Tensor | None = None  # Σ_k η_k of a "newton" round at the first point, where that was looked at
        self._widths: list[Tensor] = []
        self._steps = torch.zeros(0)  # of m_g in the last round, in standard errors
        self.visited: list[tuple[float, Tensor, Tensor]] = []  # the loss at m_g, m_g, and Σ_k η_k from there

    @property
    def mean(self) -> Tensor:
        """m_g."""
        return FAMILY.mean(self.state.lam_g)

    @property
    def precision(self) -> Tensor:
        """S_g."""
        return FAMILY.precision(self.state.lam_g)

    @property
    def left(self) -> int:
        """Rounds that may still be asked for."""
        return self.most - len(self.history)

    def objective(self, loss: float, point: Tensor) -> float:
        """The summed loss and the prior's part, −⟨λ_0, T(θ)⟩."""
        return loss - float(self.prior[0] @ point + point @ self.prior[1:] @ point)

    def exchange(self, method: str, tensors: Mapping[str, Tensor] | None = None) -> float:
        """One round: ask all sites, and take λ_g ← λ_0 + Σ_k η_k; the objective at the m_g that was sent."""
        sent, null = self.mean, None if self.null_is_final else self.null
        facts = dict(self.facts, method=method, previous=self.previous, anchor=self.anchor, null=null)
        request = Message(
            "round", facts, {**self.units, "lam": packed_lam(self.state.lam_g, self.packing), **(tensors or {})}
        )
        self.replies = self.ask(request)
        self.previous, self.anchor = request.digest(), "eta"
        if all("deviance" in reply.facts for reply in self.replies.values()):
            total = sum(float(reply.facts["deviance"]) for reply in self.replies.values())
            self.dispersion = max(total / self.rows, PERFECT)
        self._server_step("eta", method)
        loss = self._total_loss("loss")
        objective = self.objective(loss, sent)
        self.visited.append((loss, sent, self.state.eta_sum))
        if self.best is None or objective < self.best[0]:
            self.best = objective, sent
        if not self.null_is_final and self.null is not None:
            parts = [reply.facts["null"] for reply in self.replies.values()]
            slope, curve = torch.tensor(parts, dtype=torch.float64).sum(0).tolist()
            self.null -= slope / curve
        self._steps = self._steps_se(sent)
        self.history.append({"kind": method, "loss": objective, "step_se": float(self._steps.max())})
        return objective

    def _total_loss(self, name: str) -> float:
        """The sum of the losses that the sites told by this name."""
        return sum(_loss(reply.facts[name]) for reply in self.replies.values())

    def _server_step(self, name: str, method: str) -> None:
        """Line 3, with the sum of the η_k that the sites sent by this name."""
        self.etas = {site: unpacked_lam(reply.tensors[name], self.packing) for site, reply in self.replies.items()}
        eta = torch.stack(list(self.etas.values())).sum(0)
        number, change = len(self.etas), eta - self.state.eta_sum
        if self.state.round == 0:
            self._require_information(eta)
        everybody = torch.ones(number, dtype=torch.bool)
        totals = Totals(everybody, ~everybody, weight=float(number), lam=number * self.state.lam_g + change, eta=change)
        self.state, info = server_step(METHODS[method], self.state, totals)
        if info.shortened < 1:
            raise IndefiniteError(
                "The information of all sites together is not positive definite: drop terms that others nearly "
                "determine, or fit under a prior with estimate='posterior'."
            )

    def run(self, plan: int, smallest: float, weight: float, scaled: bool, runaway: bool = False) -> bool:
        """Cavity rounds, then certificates until the next step is short; True if it is at most `tol`.

        Args:
            plan: Cavity rounds, fewer if m_g rests before.
            smallest: Rows of the smallest site.
            weight: The sum of all weights.
            scaled: Lengthen a linear discriminant's solution, as suits the binomial family.
            runaway: Stop with `SeparatedError` when there is no maximum of the likelihood.
        """
        first = self.mean
        small = smallest < SMALL * len(first) and self.state.round == 0
        look = first if small else None
        for r in range(plan):
            objective = self.exchange("cavity", {} if look is None else {"look": look})
            if look is not None and r == 0:
                look = self._discriminant(first, weight, scaled)
            elif look is not None:
                if (at_look := self.objective(self._total_loss("look"), look)) < objective:
                    self.best = at_look, look
                    self.anchor, objective = "look", at_look
                    self._server_step("look", "newton")
                look = None
            self._require_descent(objective)
            if runaway:
                self._require_maximum()
            if self.history[-1]["step_se"] < NEAR or self.left <= 1:
                break
        return self._certify(runaway, after_cavity=plan > 0)

    def _certify(self, runaway: bool, after_cavity: bool) -> bool:
        while True:
            objective = self.exchange("newton")
            if self.history[-1]["step_se"] <= self.tol and self._is_best(objective):
                return True
            self._require_descent(objective)
            if runaway:
                self._require_maximum(at_certificate=after_cavity)
            if self.left <= 0:
                return False

    def _is_best(self, objective: float) -> bool:
        assert self.best is not None
        return objective <= self.best[0] + ROUNDING * (1 + abs(self.best[0]))

    def _require_descent(self, objective: float) -> None:
        """Where the last point is worse than the best one: Newton steps from there, until a full one is better."""
        while not self._is_best(objective) and self.left > 2:
            assert self.best is not None
            _, point = self.best
            self.state = self.state._replace(lam_g=FAMILY.natural(point, self.precision))
            self.exchange("newton")
            step = self.mean - point
            points = torch.stack([point + t * step for t in STEPS])
            objective = self.exchange("newton", {"points": points})
            for i, shorter in enumerate(points):
                loss = sum(_loss(reply.facts["losses"][i]) for reply in self.replies.values())
                if (value := self.objective(loss, shorter)) < self.best[0]:
                    self.best = value, shorter

    def _require_maximum(self, at_certificate: bool = False) -> None:
        """Raise `SeparatedError` where coefficients run away, or m_g tells the classes apart without an error."""
        self._widths.append(torch.linalg.inv(self.precision).diagonal().sqrt())
        if len(self._widths) > 2:
            first, second, third = self._widths[-3:]
            before, step = (record["step_se"] for record in self.history[-2:])
            away = (third > GROWING * second) & (second > GROWING * first) & (step < before < 1)
            if at_certificate:
                away = away | (self._steps > LOST)
            if away.any() and step > SLOW * before:
                raise SeparatedError(away.nonzero()[:, 0].tolist(), step)
        if all(reply.facts["separated"] for reply in self.replies.values()):
            raise SeparatedError([])

    def _discriminant(self, first: Tensor, weight: float, scaled: bool) -> Tensor:
        """One Newton step from the first point; for classes lengthened by 1/(1 − R²), as a discriminant analysis is."""
        told = [unpacked_lam(reply.tensors["look"], self.packing) for reply in self.replies.values()]
        self.first = total = torch.stack(told).sum(0)
        hessian = FAMILY.precision(total + self.prior)
        gradient = hessian @ first - total[0] - self.prior[0]
        step = -solve(hessian, gradient)
        share = min(float(-step @ gradient) / weight, 0.95) if scaled else 0.0
        return first + step / (1 - share)

    def under(self, prior: Tensor) -> None:
        """Go on from here under another prior."""
        self.prior, self.best = prior, None
        self.state = self.state._replace(prior=prior, lam_g=prior + self.state.eta_sum)

    def fall_back(self, prior: Tensor) -> None:
        """Go on under a prior from the visited point that is best under it, not from where a coefficient ran to."""
        self.prior, self.best = prior, None
        _, _, eta = min(self.visited, key=lambda visited: self.objective(*visited[:2]))
        self.state = self.state._replace(prior=prior, lam_g=prior + eta, eta_sum=eta)

    def restart(self, prior: Tensor) -> None:
        """Begin anew under another prior; rounds that were asked for count on."""
        self.prior, self.best, self.previous = prior, None, ""
        self.state = ServerState(prior, self.start, torch.zeros_like(self.start))

    def _require_information(self, eta: Tensor) -> None:
        """Refuse terms that others determine, which only a prior could tell apart."""
        if silent := [site for site, reply in self.replies.items() if reply.facts["loss"] is None]:
            raise NotConvergedError(
                f"The likelihood of site {silent[0]!r} is zero without covariates: check the size of the offset and of "
                "the response, or choose another link."
            )
        information = FAMILY.precision(self.prior + eta)
        empty = information.diagonal() <= EMPTY * information.diagonal().max()
        if empty.any() and not self.prior.any():
            raise AliasedError(empty.nonzero()[:, 0].tolist())
        scale = information.diagonal().clamp_min(torch.finfo(eta.dtype).tiny).rsqrt()
        values, vectors = torch.linalg.eigh(information * scale * scale[:, None])
        if values[0] < ALIASED:
            raise AliasedError((vectors[:, 0].abs() > 0.1).nonzero()[:, 0].tolist())

    def _steps_se(self, sent: Tensor) -> Tensor:
        """The change of every entry of m_g in standard errors."""
        se = (self.dispersion * torch.linalg.inv(self.precision).diagonal()).sqrt()
        return ((self.mean - sent) / se).abs()


class IndefiniteError(DomainError):
    """Σ_k S_k and the prior's precision are not positive definite."""


class UndeterminedError(DomainError):
    """The likelihood does not determine θ; `entries` are the positions at fault."""

    def __init__(self, entries: list[int]):
        super().__init__(f"the likelihood does not determine θ: entries {entries}")
        self.entries = entries


class AliasedError(UndeterminedError):
    """Some terms are combinations of others."""


class SeparatedError(UndeterminedError):
    """The likelihood has no maximum, because the classes are told apart without an error, or seems to have none.

    If it seems so, `step` is what is left of the last one.
    """

    def __init__(self, entries: list[int], step: float | None = None):
        super().__init__(entries)
        self.step = step


def _loss(loss: float | None) -> float:
    """A loss as sites tell it: None is infinite."""
    return math.inf if loss is None else float(loss)
