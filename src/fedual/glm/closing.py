"""What a site tells once, at the estimate: sums from which the figures of fit follow, and no figure of any row."""

from typing import Any

import torch
from torch import Tensor

from fedual.glm.distributions import Binomial, NegativeBinomial
from fedual.glm.likelihood import Likelihood, weighted_products
from fedual.glm.messages import packed

RESIDUAL_EDGES = [-4.0 + 0.5 * i for i in range(17)]
"""Of the histogram of Pearson residuals; residuals beyond count in the outermost cells."""
ENOUGH = 200
"""Rows of a site that tells histograms: with fewer, most cells are too small to tell, and each is a number told."""
CALIBRATION_BINS = 10
"""Bins of equal width of the predicted probability."""


def figures(
    likelihood: Likelihood, theta: Tensor, null: float | None, dispersion: float, least: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Sums at θ: log-likelihoods with all constants, deviances, Pearson's χ², Σ s sᵀ of the scores, histograms.

    Args:
        likelihood: The site's.
        theta: The pooled estimate.
        null: The intercept of the model without covariates; None if it has none, or the site's own.
        dispersion: φ in the log-likelihoods, and of the residuals.
        least: Cells with fewer rows are told as empty.
    """
    distribution = likelihood.distribution.at(likelihood.split(theta)[1])
    y, weight, mean = likelihood.y, likelihood.weight, likelihood.means(theta)
    without = likelihood.null_means(theta, null)
    residual = torch.where(y == mean, 0.0, (y - mean) / distribution.variance(mean)[0].sqrt())
    facts: dict[str, Any] = {
        "deviance": float(weight @ distribution.deviance(mean, y)),
        "pearson": float(weight @ residual**2),
        "loglik": float(distribution.loglik(mean, y, weight, dispersion)),
        "null_loglik": float(distribution.loglik(without, y, weight, dispersion)),
        "null_deviance": float(weight @ distribution.deviance(without, y)),
    }
    if len(y) >= ENOUGH:
        facts["residuals"] = _histogram(residual * (weight / dispersion).sqrt(), least)
    if len(y) >= ENOUGH and isinstance(distribution, Binomial):
        facts["calibration"] = _calibration(mean, y, weight, least)
    tensors = {"meat": packed(meat(likelihood, theta))}
    if not distribution.fisher_is_hessian and not distribution.extra:
        tensors["expected"] = packed(likelihood.expand(theta).expected)
    return facts, tensors


def deviance(likelihood: Likelihood, theta: Tensor) -> float:
    """The deviance at θ."""
    distribution = likelihood.distribution.at(likelihood.split(theta)[1])
    return float(likelihood.weight @ distribution.deviance(likelihood.means(theta), likelihood.y))


def null_expansion(likelihood: Likelihood, theta: Tensor, null: float) -> list[float]:
    """ℓ' and E[ℓ''] of the pooled model with nothing but an intercept, at that intercept."""
    bend = likelihood.bend(likelihood.offset + null, likelihood.y, likelihood.split(theta)[1])
    return [float(likelihood.weight @ bend.first), float(likelihood.weight @ bend.expected)]


def meat(likelihood: Likelihood, theta: Tensor) -> Tensor:
    """Σ_i s_i s_iᵀ of the rows' gradients s_i; a site's own intercept is taken out of them as out of the Hessian."""
    found = theta.new_zeros(len(theta), len(theta))
    if likelihood.says_nothing:
        return found
    coefficients, extra = likelihood.split(likelihood.complete(theta))
    parts = list(likelihood.chunks())
    bends = [likelihood.bend(part.x @ coefficients + part.offset, part.y, extra) for part in parts]
    curves = [part.weight * bend.second for part, bend in zip(parts, bends, strict=True)]
    centre = torch.zeros_like(coefficients)
    if likelihood.own_intercept:
        centre = sum(part.x.mT @ curve for part, curve in zip(parts, curves, strict=True)) / sum(map(torch.sum, curves))
    for part, bend in zip(parts, bends, strict=True):
        scores = (part.x - centre)[:, likelihood.own_intercept :] * (part.weight * bend.first)[:, None]
        if isinstance(likelihood.distribution, NegativeBinomial):
            f = part.x @ coefficients + part.offset
            in_alpha = part.weight * likelihood.distribution.bend_jointly(f, extra[0], part.y)[1]
            scores = torch.cat([scores, in_alpha[:, None]], 1)
        found += weighted_products(scores, torch.ones_like(part.y))
    return found


def _histogram(values: Tensor, least: int) -> list[int]:
    inner = torch.tensor(RESIDUAL_EDGES[1:-1], dtype=values.dtype)
    counts = torch.bincount(torch.bucketize(values, inner), minlength=len(RESIDUAL_EDGES) - 1)
    return [int(n) if n >= least else 0 for n in counts]


def _calibration(mean: Tensor, y: Tensor, weight: Tensor, least: int) -> list[list[float]]:
    """Rows, Σ w, Σ wμ and Σ wy of every bin of the predicted probability."""
    bins = (mean * CALIBRATION_BINS).long().clamp(0, CALIBRATION_BINS - 1)
    sums = torch.stack([torch.ones_like(y), weight, weight * mean, weight * y], 1)
    found = sums.new_zeros(CALIBRATION_BINS, 4).index_add(0, bins, sums)
    return torch.where(found[:, :1] >= least, found, 0.0).tolist()
