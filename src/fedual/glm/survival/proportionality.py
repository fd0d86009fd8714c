"""Are hazards proportional? The score test of β + γ g(t) against γ = 0 (Grambsch and Therneau 1994), from sums.

With the terms' means M_l and variances V_l of x, and g(t) centred by nothing (the test does not depend on it):

    u = Σ_l g_l w̄ (x_l − M_l),    A = Σ_l g_l w̄ V_l,    B = Σ_l g_l² w̄ V_l

are added over the sites. With H = Σ_l w̄ V_l, the score of γ given β has the covariance B − A H⁻¹ A. This is the test of
R's `cox.zph(fit, transform, terms = FALSE)` from survival 3.0 on.
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats
from torch import Tensor

from fedual.glm.messages import packed
from fedual.glm.survival.figures import Test
from fedual.glm.survival.partial import PartialLikelihood


def proportionality(partial: PartialLikelihood, theta: Tensor, transform: str) -> dict[str, Tensor]:
    """u, A and B of one site."""
    risks = partial.risks(theta)
    times = [risk.terms.time for risk in risks]
    factors = [time.log() if transform == "log" else time for time in times]
    score = partial.x.new_zeros(partial.dim)
    for risk, factor in zip(risks, factors, strict=True):
        x, terms = partial.centred[risk.terms.rows], risk.terms
        weight = partial.weight[terms.rows][terms.events]
        means = risk.sums(x) / risk.total[:, None]
        score += (factor * weight) @ x[terms.events] - (factor * terms.weight) @ means
    once = partial.information(risks, factors)
    twice = partial.information(risks, [factor**2 for factor in factors])
    return {"trend": score, "once": packed(once), "twice": packed(twice)}


def tests(score: np.ndarray, once: np.ndarray, twice: np.ndarray, information: np.ndarray) -> Sequence[Test]:
    """One test for each term, and the last for all together, from the sums of all sites.

    As in R, the test of one term has γ for this term alone, given all β.
    """
    covariance = twice - once @ np.linalg.solve(information, once)
    alone = [chi2_test(float(score[j] ** 2 / covariance[j, j]), 1) for j in range(len(score))]
    return [*alone, chi2_test(float(score @ np.linalg.solve(covariance, score)), len(score))]


def chi2_test(statistic: float, df: int) -> Test:
    """A statistic with its p-value."""
    return Test(statistic, df, float(stats.chi2.sf(statistic, df)))
