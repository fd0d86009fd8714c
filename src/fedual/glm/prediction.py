"""Predictions with intervals for new rows."""

import math
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from scipy import stats

from fedual.errors import InputError, hint
from fedual.glm.distributions import distribution
from fedual.glm.figures import Figures
from fedual.glm.inference import Use, check_level, chosen
from fedual.glm.schema import Design, design

Kind = Literal["mean", "observation", "link", "hazard-ratio"]
NODES = 40
"""Of a mean over sites."""
INTERVALS = {
    "link": "of the linear predictor",
    "mean": "of the mean, from that of the linear predictor",
    "observation": "quantiles of the family's distribution at the estimated mean",
    "hazard-ratio": "of the log hazard ratio to the means of all columns, mapped",
    "gaussian observation": "t quantiles, with the variance of the mean and of an observation",
}
"""What an interval is, by kind."""


def predict(
    fit: Figures,
    frame: pd.DataFrame,
    level: float,
    kind: str | None,
    use: Use | None,
    intercept: float | None,
    new_site: bool = False,
) -> pd.DataFrame:
    """See `Fit.predict`."""
    kinds = ("mean", "observation", "link") if fit.survival is None else ("hazard-ratio", "link")
    if kind in get_args(Kind) and kind not in kinds:
        curves = "" if fit.survival is None else ", or curves() for survival"
        raise InputError(f"kind = {kind!r} of the family {fit.family}: use one of {', '.join(kinds)}{curves}.")
    kind = kinds[0] if kind is None else kind
    if kind not in get_args(Kind):
        raise InputError(f"kind = {kind!r}: {hint(kind, get_args(Kind))}")
    check_level(level)
    fixed = fit.site_effects == "fixed"
    if fixed and intercept is None:
        cause = "each site has an intercept of its own, which stays there"
        raise InputError(f"intercept = None in a fit where {cause}: give intercept=, on the scale of the link.")
    if intercept is not None and not fixed:
        raise InputError(f"intercept = {intercept} in a fit that has its own: leave it out.")
    if new_site and fit.components is None:
        raise InputError("new_site = True in a fit without random effects of sites: leave it out.")
    if kind == "observation" and fit.components is not None and fit.family != "gaussian":
        raise InputError(f"kind = 'observation' in a mixed model of the family {fit.family}: use 'mean' or 'link'.")
    estimate, of = chosen(fit, use)
    if not isinstance(frame, pd.DataFrame):
        raise InputError(f"frame = {type(frame).__name__}: give a pandas data frame with the formula's columns.")
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InputError(f"The data frame has two columns {twice!r}: rename one.")
    rows = design(frame, "new rows", fit.schema, response=False)
    columns = [fit.schema.terms.index(fit.terms[i]) for i in fit.kept]
    x = rows.x[:, columns].numpy()
    if fit.survival is not None:
        x = x - fit.survival.means[fit.kept]
    covariance = estimate.covariance[np.ix_(fit.kept, fit.kept)]
    link = x @ estimate.coefficients[fit.kept] + rows.offset.numpy() + (intercept or 0.0)
    variance = np.einsum("ni,ij,nj->n", x, covariance, x)
    between = _between(fit, rows, estimate is fit.posterior) if new_site else np.zeros(len(x))
    se = np.sqrt(variance + between)
    bounds = link - of.width(level) * se, link + of.width(level) * se
    if kind == "hazard-ratio":
        link, bounds = np.exp(link), (np.exp(bounds[0]), np.exp(bounds[1]))
        se = link * se
    elif kind != "link":
        over_sites = _over_sites(fit, link, between)
        link, se, bounds = _means(fit, link, se, bounds)
        link = over_sites if new_site else link
    if kind == "observation":
        link, se, bounds = _observations(fit, rows, link, se, level)
    predicted = pd.DataFrame(math.nan, frame.index, ["fit", "se", "lower", "upper"])
    predicted.iloc[rows.kept] = np.column_stack([link, se, *bounds])
    what = INTERVALS.get(f"{fit.family} {kind}", INTERVALS[kind]) + ", at a new site" * new_site
    predicted.attrs = {"kind": kind, "level": level, "interval": what}
    return predicted


def _between(fit: Figures, rows: Design, posterior: bool) -> np.ndarray:
    """The variance of the predictor between sites, `(N,)`: E[σ²] where the posterior integrates σ, else σ̂²."""
    found = fit.components
    assert found is not None
    covariance = found.covariance
    if posterior and found.posterior is not None:
        covariance = np.array([[found.posterior[0] ** 2 + found.posterior[1] ** 2]])
    z = rows.x[:, [fit.schema.terms.index(term) for term in found.terms]].numpy()
    return np.einsum("ni,ij,nj->n", z, covariance, z)


def _over_sites(fit: Figures, link: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """E[μ(f + u)] with u ~ N(0, variance), `(N,)`."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    at = torch.from_numpy(link[:, None] + np.sqrt(variance)[:, None] * nodes)
    return distribution(fit.family, fit.link).mean(at).numpy() @ (weights / weights.sum())


def _means(
    fit: Figures, link: np.ndarray, se: np.ndarray, bounds: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The mean, its standard error to first order, and its bounds: f → μ may fall, as 1/f does."""
    of = distribution(fit.family, fit.link)
    f = torch.from_numpy(link).requires_grad_()
    mean = of.mean(f)
    (slope,) = torch.autograd.grad(mean.sum(), f)
    ends = [of.mean(torch.from_numpy(bound)).numpy() for bound in bounds]
    if fit.link == "inverse":  # beyond a pole the mean is unbounded
        ends = [np.where(bound > 0, end, np.inf) for bound, end in zip(bounds, ends, strict=True)]
    if fit.link == "sqrt":
        ends = [np.where(bound > 0, end, 0.0) for bound, end in zip(bounds, ends, strict=True)]
    return mean.detach().numpy(), slope.abs().numpy() * se, (np.minimum(*ends), np.maximum(*ends))


def _observations(
    fit: Figures, rows: Design, mean: np.ndarray, se: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """A new response: its mean, standard deviation and bounds."""
    weights, trials, share = rows.weights.numpy(), rows.trials.numpy(), (1 - level) / 2
    if fit.family == "gaussian":
        sd = np.sqrt(fit.dispersion / weights + se**2)
        width = stats.t.ppf(1 - share, fit.df_resid) * sd
        return mean, sd, (mean - width, mean + width)
    response: Any
    if fit.family == "binomial":
        response, scale = stats.binom(trials, mean), trials
    elif fit.family == "poisson":
        response, scale = stats.poisson(mean), 1.0
    elif fit.family == "negative-binomial":
        assert fit.alpha is not None
        response, scale = stats.nbinom(1 / fit.alpha, 1 / (1 + fit.alpha * mean)), 1.0
    else:
        shape = weights / fit.dispersion
        response, scale = stats.gamma(shape, scale=mean / shape), 1.0
    sd = np.sqrt(response.var() + (scale * se) ** 2)
    return scale * mean, sd, (response.ppf(share), response.ppf(1 - share))
