"""Concordance of predictors and times: of pairs in which one row has its event while the other is at risk.

A pair is concordant if the row with the event has the larger predictor. Pairs within a site and a stratum are compared.
A pair counts by the product of its weights, as in R's `concordance`; of two events at one time there is no order.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedual.glm.survival.partial import PartialLikelihood, Terms

BLOCK = 1024
"""Events at a time: pairs within a block are compared one by one."""


class Concordance(NamedTuple):
    """Sums of pairs."""

    concordant: float
    discordant: float
    tied: float  # equal predictors

    @property
    def c(self) -> float:
        """Harrell's C: half of the pairs with equal predictors count; NaN without a pair."""
        pairs = sum(self)
        return (self.concordant + self.tied / 2) / pairs if pairs else float("nan")


def concordance(partial: PartialLikelihood, theta: Tensor) -> Concordance:
    """The pairs of one site."""
    f = (partial.centred @ theta + partial.offset).numpy()
    weight, total = partial.weight.numpy(), np.zeros(3)
    for terms in partial.strata:
        rows = terms.rows.numpy()
        total += _of_stratum(terms, f[rows].round(12), weight[rows])
    return Concordance(*map(float, total))


def _of_stratum(terms: Terms, f: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pairs of an event and a row at risk after it, or censored at its time; of truncated rows those at risk."""
    events, at_risk = terms.events.numpy(), terms.at_risk.numpy()
    places = np.flatnonzero(np.ones(len(f)))
    found = _compared(f, weight, events, at_risk, places)
    if terms.entered is not None and terms.before is not None:
        found = found - _compared(f, weight, events, terms.before.numpy(), terms.entered.numpy())
    first, last = terms.first.numpy(), terms.last.numpy()
    tied = np.flatnonzero(last - first > 1)  # events of one time, which are among those at risk
    same, others = [], []
    for k in tied:
        group = events[first[k] : last[k]]
        same.append(_signs(f[events[k]] - f[group], weight[events[k]] * weight[group]))
    alone = np.flatnonzero(last - first == 1)
    others = [0.0, 0.0, float((weight[events[alone]] ** 2).sum())]  # each with itself
    return found - np.sum(same, 0) * bool(same) - others


def _compared(
    f: NDArray[np.float64],
    weight: NDArray[np.float64],
    events: NDArray[np.int64],
    number: NDArray[np.int64],
    order: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Each event with the first `number` rows in `order`."""
    found = np.zeros(3)
    for start in range(0, len(events), BLOCK):
        part = slice(start, start + BLOCK)
        own, mine, many = f[events[part]], weight[events[part]], number[part]
        least = int(many.min(initial=len(f)))
        sure = np.sort(order[:least])
        ranked = sure[np.argsort(f[sure], kind="stable")]
        values, sums = f[ranked], np.append(0.0, np.cumsum(weight[ranked]))
        below, upto = (sums[np.searchsorted(values, own, side)] for side in ("left", "right"))
        found += [mine @ below, mine @ (sums[-1] - upto), mine @ (upto - below)]
        for k in range(len(own)):  # the rows between the block's times
            rest = order[least : many[k]]
            found += _signs(own[k] - f[rest], mine[k] * weight[rest])
    return found


def _signs(difference: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([weight[difference > 0].sum(), weight[difference < 0].sum(), weight[difference == 0].sum()])
