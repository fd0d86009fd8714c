# ruff: noqa: D102 (`Loss` documents these methods)
"""The partial likelihood of one site's rows (Cox 1972), with tied times as Efron (1977) or Breslow (1974) treat them.

Of a time with d events D and the rows R at risk, with r_i = exp(x_iᵀθ + o_i) and the mean weight w̄ of the events:

    ℓ = Σ_times [ Σ_{l<d} w̄ log S_l − Σ_D w_i f_i ],    S_l = Σ_R w_i r_i − (l/d) Σ_D w_i r_i   (Breslow: without l/d)

Each l is a *term* with weights p_i = w_i r_i (1 − (l/d)[i ∈ D]) / S_l of the rows at risk. With their mean M_l of x,

    ∇ℓ = Xᵀ(v − wδ),    ∇²ℓ = Xᵀ diag(v) X − Σ_l w̄ M_l M_lᵀ,    v_i = Σ_l w̄ p_i

so that a pass needs sums over times in order, and no sum of products for each time. A row is at risk in (entry, time],
and is compared with rows of its own stratum at its own site.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.errors import DomainError
from fedual.families import Curvature, Gaussian, Rule
from fedual.glm.distributions import Cox, Distribution
from fedual.glm.likelihood import Expansion, weighted_products
from fedual.glm.survival.times import Times
from fedual.solvers import Loss
from fedual.solvers.base import Moments


class Terms(NamedTuple):
    """The terms of one stratum, in order of time."""

    rows: Tensor  # of the stratum, from the latest time to the earliest, (n,)
    events: Tensor  # places of the events within `rows`, in order of time, (D,)
    time: Tensor  # of each term, (D,)
    first: Tensor  # the first term of each term's time, (D,)
    last: Tensor  # and the one after its last, (D,)
    share: Tensor  # l/d, (D,)
    weight: Tensor  # w̄, (D,)
    at_risk: Tensor  # how many of `rows` are seen at the term's time or later, (D,)
    until: Tensor  # how many terms are up to each row's time, (n,)
    entered: Tensor | None  # `rows` from the latest entry to the earliest, (n,)
    before: Tensor | None  # how many of `entered` enter at the term's time or later, (D,)
    since: Tensor | None  # how many terms are up to each row's entry, (n,)


class Risks(NamedTuple):
    """The terms of one stratum at θ."""

    terms: Terms
    hazard: Tensor  # w_i r_i of each row, (n,)
    total: Tensor  # S_l, (D,)
    shift: Tensor  # log r is given relative to it

    def sums(self, x: Tensor) -> Tensor:
        """Σ_i p_i S_l x_i of each term, `(D, …)`; `x` are the rows', `(n, …)`."""
        terms = self.terms
        each = self.hazard.reshape(-1, *[1] * (x.dim() - 1)) * x
        found = _cumulated(each)[terms.at_risk]
        if terms.entered is not None:
            found = found - _cumulated(each[terms.entered])[terms.before]
        if terms.share.any():
            events = _cumulated(each[terms.events])
            tied = events[terms.last] - events[terms.first]
            found = found - terms.share.reshape(-1, *[1] * (x.dim() - 1)) * tied
        return found

    def of_rows(self, each: Tensor, power: int = 1) -> Tensor:
        """Σ_l c_l (1 − (l/d)[i ∈ D])^power over the terms at which a row is at risk, `(n, …)`; c is `(D, …)`."""
        terms = self.terms
        cumulated = _cumulated(each)
        found = cumulated[terms.until]
        if terms.since is not None:
            found = found - cumulated[terms.since]
        if terms.share.any():
            lost = 1 - (1 - terms.share) ** power
            tied = _cumulated(lost.reshape(-1, *[1] * (each.dim() - 1)) * each)
            found = found.index_add(0, terms.events, tied[terms.first] - tied[terms.last])
        return found


@dataclass(frozen=True)
class PartialLikelihood(Loss):
    """The loss of one site, with a client axis of one; x has no intercept."""

    x: Tensor  # (N, p)
    event: Tensor  # (N,)
    weight: Tensor  # (N,)
    offset: Tensor  # (N,)
    times: Times
    ties: str = "efron"
    last: list = field(default_factory=list, compare=False, repr=False)  # θ and the expansion there

    @property
    def distribution(self) -> Distribution:
        """Its name, for the server's rounds."""
        return Cox()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, clients: Any) -> "PartialLikelihood":
        return self

    @property
    def dim(self) -> int:
        return self.x.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def num_examples(self) -> Tensor:
        return torch.tensor([len(self.x)])

    @property
    def says_nothing(self) -> bool:
        """True if no row has an event: the loss is zero."""
        return not self.event.any()

    @cached_property
    def strata(self) -> list[Terms]:
        """The terms of each stratum that has some."""
        made = (_terms(rows, self.times, self.event, self.weight, self.ties) for rows in self.times.strata())
        return [terms for terms in made if len(terms.events)]

    @cached_property
    def centred(self) -> Tensor:
        """x less its mean in each stratum: the partial likelihood is the same, and sums lose fewer digits."""
        x = self.x.clone()
        for rows in self.times.strata():
            x[rows] -= x[rows].mean(0)
        return x

    def risks(self, theta: Tensor) -> list[Risks]:
        """The terms of all strata at θ."""
        f = self.centred @ theta + self.offset
        found = []
        for terms in self.strata:
            log = f[terms.rows]
            shift = log.max()
            hazard = self.weight[terms.rows] * (log - shift).exp()
            made = Risks(terms, hazard, torch.zeros(()), shift)
            found.append(made._replace(total=made.sums(torch.ones_like(hazard))))
        return found

    def separated(self, theta: Tensor) -> bool:
        """True if each event has a larger predictor than all rows that are at risk after it."""
        f = self.centred @ theta + self.offset
        for terms in self.strata:
            log, after = f[terms.rows], terms.at_risk - (terms.last - terms.first)
            highest = torch.cat([log.new_full((1,), -torch.inf), log.cummax(0).values])[after]
            if bool((log[terms.events] <= highest).any()):  # entries do not count: more rows are a stricter test
                return False
        return True

    def hides(self, start: Tensor) -> bool:
        return False

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients and, for other likelihoods, what follows them in θ."""
        return theta, theta[:0]

    def __call__(self, theta: Tensor) -> Tensor:
        flat = theta.reshape(-1, theta.shape[-1])
        return torch.stack([self.loss(point) for point in flat]).reshape(theta.shape[:-1])

    def moments(
        self, family: Gaussian, lam: Tensor, rule: Rule, step: int = 0, curvature: Curvature | None = None
    ) -> Moments:
        """The loss, its gradient and its Hessian at the mean."""
        if rule(1, step, lam)[0].any():
            raise DomainError("The partial likelihood has no quadrature: use estimate='both'.")
        found = self.expand(family.mean(lam)[0])
        return Moments(found.loss[None], found.gradient[None], found.hessian[None])

    def loss(self, theta: Tensor) -> Tensor:
        return self._loss(theta, self.risks(theta))

    def _loss(self, theta: Tensor, risks: Sequence[Risks]) -> Tensor:
        f = self.centred @ theta + self.offset
        total = -((self.weight * self.event) @ f)
        for risk in risks:
            total = total + risk.terms.weight @ (risk.total.log() + risk.shift)
        return total

    def expand(self, theta: Tensor) -> Expansion:
        """The loss and its derivatives at θ `(P,)`; those at the last θ are kept.

        A row's weight in the Hessian is Σ_l w̄ p_i (1 − p_i): a row that is nearly alone at risk says nothing.
        """
        if not self.last or not torch.equal(self.last[0], theta):
            self.last[:] = [theta, self._expand(theta)]
        return self.last[1]

    def _expand(self, theta: Tensor) -> Expansion:
        risks = self.risks(theta)
        expected, weights = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        for risk in risks:
            terms = risk.terms
            expected[terms.rows] = risk.hazard * risk.of_rows(terms.weight / risk.total)
            squares = risk.hazard**2 * risk.of_rows(terms.weight / risk.total**2, power=2)
            weights[terms.rows] = (expected[terms.rows] - squares).clamp_min(0)
        scores = expected - self.weight * self.event
        hessian = self.information(risks, [torch.ones_like(risk.total) for risk in risks])
        return Expansion(self._loss(theta, risks), self.centred.mT @ scores, hessian, hessian, weights, scores)

    def information(self, risks: Sequence[Risks], factors: Sequence[Tensor]) -> Tensor:
        """Σ_l a_l w̄ Var_l(x), with a factor a_l for each term of each stratum, `(p, p)`."""
        found = self.x.new_zeros(self.dim, self.dim)
        for risk, factor in zip(risks, factors, strict=True):
            x, weight = self.centred[risk.terms.rows], factor * risk.terms.weight
            means = risk.sums(x) / risk.total[:, None]
            found += x.mT @ ((risk.hazard * risk.of_rows(weight / risk.total))[:, None] * x)
            found -= means.mT @ (weight[:, None] * means)
        return (found + found.mT) / 2

    def row_scores(self, theta: Tensor) -> Tensor:
        """Each row's part in −∇ℓ, weighted: R's score residuals, `(N, p)`."""
        found = torch.zeros_like(self.centred)
        for risk in self.risks(theta):
            terms, rows = risk.terms, risk.terms.rows
            x = self.centred[rows]
            means, each = risk.sums(x) / risk.total[:, None], terms.weight / risk.total
            spread = risk.of_rows(each)[:, None] * x - risk.of_rows(each[:, None] * means)
            own = -risk.hazard[:, None] * spread
            tied = _cumulated(means)
            mean = (tied[terms.last] - tied[terms.first]) / (terms.last - terms.first)[:, None]
            weight = self.weight[rows][terms.events]
            own.index_add_(0, terms.events, weight[:, None] * (x[terms.events] - mean))
            found[rows] = own
        return found

    def meat(self, theta: Tensor) -> Tensor:
        """Σ_i s_i s_iᵀ of `row_scores`."""
        scores = self.row_scores(theta)
        return weighted_products(scores, torch.ones_like(self.weight))


def _terms(rows: Tensor, times: Times, event: Tensor, weight: Tensor, ties: str) -> Terms:
    """The terms of a stratum, whose rows are given in any order."""
    rows = rows[event[rows].argsort(stable=True)]  # at one time those that are censored are seen last
    rows = rows[times.time[rows].argsort(descending=True, stable=True)]
    time = times.time[rows]
    events = event[rows].nonzero()[:, 0].flip(0)
    at = time[events]
    first, last = (torch.searchsorted(at, at, right=right) for right in (False, True))
    number = (last - first).to(weight)
    cumulated = _cumulated(weight[rows][events])
    share = (torch.arange(len(at)) - first) / number if ties == "efron" else torch.zeros_like(at)
    entered = before = since = None
    if times.truncated:
        entry = times.entry[rows]
        entered = entry.argsort(descending=True, stable=True)
        before = _reached(entry[entered], at)
        since = torch.searchsorted(at, entry, right=True)
    return Terms(
        rows, events, at, first, last, share, (cumulated[last] - cumulated[first]) / number,
        _reached(time, at), torch.searchsorted(at, time, right=True), entered, before, since,
    )  # fmt: skip


def _reached(falling: Tensor, at: Tensor) -> Tensor:
    """How many of some falling times are at least as late as each of `at`."""
    return len(falling) - torch.searchsorted(falling.flip(0).contiguous(), at, right=False)


def _cumulated(each: Tensor) -> Tensor:
    """Sums of the first 0, 1, …, n entries along the first axis."""
    return torch.cat([torch.zeros_like(each[:1]), each.cumsum(0)])
