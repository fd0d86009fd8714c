"""Variance components: how much the sites differ, as a mixed model's result shows it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy import stats

LATENT = {"logit": math.pi**2 / 3, "probit": 1.0, "cloglog": math.pi**2 / 6}
"""Variances of the latent errors of binomial models, by link."""


@dataclass(frozen=True, eq=False)
class Components:
    """The random effects of a mixed model.

    Args:
        terms: The columns whose coefficients differ by site.
        covariance: Of the sites' effects, `(q, q)`, in the terms' own units.
        se: Standard errors of the standard deviations, `(q,)`; NaN where one is zero.
        statistic: 2 (log L − log L₀), where no effects differ in L₀.
        df: The entries of the covariance.
        icc: The share of the variance of an observation that is between sites.
        scale: The scale on which the share is one.
        restricted: True for REML.
        prior_scale: s of the prior |N(0, s²)| of the standard deviation, over which the posterior integrates it; None
            if the posterior takes it as it was estimated.
        posterior: Mean and sd of the standard deviation under that prior.
    """

    terms: tuple[str, ...]
    covariance: np.ndarray
    se: np.ndarray
    statistic: float
    df: int
    icc: float
    scale: str
    restricted: bool = False
    prior_scale: float | None = None
    posterior: tuple[float, float] | None = None

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> "Components":
        """From its fields as JSON has them."""
        arrays = {name: np.array(values[name], float) for name in ("covariance", "se")}
        posterior = None if values["posterior"] is None else tuple(values["posterior"])
        return cls(**{**values, **arrays, "terms": tuple(values["terms"]), "posterior": posterior})

    def to_json(self) -> dict[str, Any]:
        """All of it and what follows from it, for other programs."""
        names = (*(one.name for one in fields(self)), "sd", "correlation", "p", "reference")
        values = {name: getattr(self, name) for name in names}
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}

    @property
    def sd(self) -> np.ndarray:
        """σ of each effect, `(q,)`."""
        return np.sqrt(np.diagonal(self.covariance))

    @property
    def correlation(self) -> np.ndarray:
        """Of the effects, `(q, q)`; NaN with one that does not differ."""
        scale = np.where(self.sd > 0, self.sd, np.nan)
        return self.covariance / np.outer(scale, scale)

    @property
    def p(self) -> float:
        """The p-value of no differences between sites.

        With one effect it is half that of χ²₁, because σ = 0 is at the edge of its range. With several it is that of χ²
        with `df` degrees of freedom: rather too large than too small.
        """
        half = 0.5 if self.df == 1 and self.statistic > 0 else 1.0
        return half * float(stats.chi2.sf(max(self.statistic, 0.0), self.df))

    @property
    def reference(self) -> str:
        """The distribution behind `p`, in words."""
        return "½χ²₀ + ½χ²₁" if self.df == 1 else f"χ² on {self.df} df, conservative"


def latent_share(variance: float, family: str, link: str, mean: float, dispersion: float) -> tuple[float, str]:
    """The intraclass correlation, and the scale that it is on (Nakagawa, Johnson and Schielzeth 2017).

    Args:
        variance: Between sites, of the predictor.
        family: The family's name.
        link: The link's name.
        mean: Of the response: a Poisson's variance is log(1 + 1/mean) on the scale of the predictor.
        dispersion: φ of the gaussian family.
    """
    if family == "gaussian":
        return variance / (variance + dispersion), "of the response"
    if family == "poisson":
        return variance / (variance + math.log1p(1 / mean)), "of log counts (lognormal approximation)"
    return variance / (variance + LATENT[link]), f"latent, {link}"
