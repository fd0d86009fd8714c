"""Standard errors, intervals and tests of the coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from scipy import stats

from fedual.errors import InputError, hint
from fedual.glm.figures import Estimate, Figures, SiteFigures

Use = Literal["ml", "posterior"]
RATIOS = {
    ("binomial", "logit"): "odds ratio",
    ("binomial", "cloglog"): "hazard ratio",
    ("cox", "log"): "hazard ratio",
    ("piecewise-exponential", "log"): "hazard ratio",
    ("poisson", "log"): "rate ratio",
    ("negative-binomial", "log"): "rate ratio",
    ("gaussian", "log"): "ratio of means",
    ("gamma", "log"): "ratio of means",
}
"""What exp(β) is, by family and link; the ratio of means of a duration is a time ratio."""


@dataclass(frozen=True)
class Reference:
    """The distribution of estimate / SE: Student's t with `df` degrees of freedom, or the normal one."""

    df: float | None = None

    @property
    def name(self) -> str:
        """What the statistic is called."""
        return "z" if self.df is None else "t"

    @property
    def distribution(self) -> Any:
        """As scipy has it."""
        return stats.norm() if self.df is None else stats.t(self.df)

    def width(self, level: float) -> float:
        """Half the width of an interval, in standard errors."""
        return float(self.distribution.ppf((1 + level) / 2))

    def p(self, statistic: np.ndarray) -> np.ndarray:
        """Two-sided p-values."""
        return 2 * self.distribution.sf(np.abs(statistic))


def reference(fit: Figures, use: Use) -> Reference:
    """The distribution that intervals use.

    Like R's `summary`: normal if the family knows its dispersion, else t with the residual degrees of freedom. With
    covariances that are clustered by site it is t with K − 1, and for the posterior normal.
    """
    if use == "posterior":
        return Reference()
    if fit.covariance_kind == "cluster":
        return Reference(len(fit.sites) - 1)
    return Reference() if fit.known_dispersion else Reference(fit.df_resid)


def default_use(fit: Figures) -> Use:
    """Maximum likelihood where it exists; but of mixed models with few sites the posterior, which integrates σ."""
    return "posterior" if fit.ml is None or fit.posterior_kind == "integrated" else "ml"


def chosen(fit: Figures, use: Use | None) -> tuple[Estimate, Reference]:
    """The estimate that was asked for, by default that of `default_use`, and its reference."""
    use = default_use(fit) if use is None else use
    if use not in get_args(Use):
        raise InputError(f"use = {use!r}: {hint(use, get_args(Use))}")
    estimate = fit.ml if use == "ml" else fit.posterior
    if estimate is None:
        cause, other = (why_no_ml(fit), "posterior") if use == "ml" else ("the prior is flat", "ml")
        raise InputError(f"use = {use!r}, which this fit does not have ({cause}): use {other!r}.")
    return estimate, reference(fit, use)


def has(fit: Figures, use: Use) -> bool:
    """True if a fit has this estimate."""
    return (fit.ml if use == "ml" else fit.posterior) is not None


def available(fit: Figures) -> list[Use]:
    """The estimates that a fit has."""
    return [use for use in get_args(Use) if has(fit, use)]


def why_no_ml(fit: Figures) -> str:
    """Why a fit has no maximum-likelihood estimate."""
    return fit.separation.split(". ")[0].rstrip(".") if fit.separation else "only the posterior was asked for"


def check_level(level: float) -> None:
    """Raise unless a level is in (0, 1)."""
    if not (isinstance(level, int | float) and 0 < level < 1):
        raise InputError(f"level = {level!r}: give the coverage of an interval between 0 and 1, such as 0.95.")


def interval(estimate: Estimate, of: Reference, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds, each `(P,)`."""
    check_level(level)
    width = of.width(level) * estimate.se
    return estimate.coefficients - width, estimate.coefficients + width


def table(fit: Figures, level: float) -> pd.DataFrame:
    """The columns of `Fit.table`."""
    shown = "posterior" if fit.ml is None else "ml"
    estimate, of = chosen(fit, shown)
    lower, upper = interval(estimate, of, level)
    none = np.full(len(fit.terms), np.nan)
    z = none if fit.ml is None else estimate.coefficients / estimate.se
    columns = {"estimate": estimate.coefficients, "se": estimate.se, "lower": lower, "upper": upper}
    columns |= {"z": z, "p": none if fit.ml is None else of.p(z)}
    columns |= dict.fromkeys(("posterior", "posterior_sd", "posterior_lower", "posterior_upper"), none)
    if fit.posterior is not None:
        columns |= {"posterior": fit.posterior.coefficients, "posterior_sd": fit.posterior.se}
        columns["posterior_lower"], columns["posterior_upper"] = interval(fit.posterior, Reference(), level)
    frame = pd.DataFrame(columns, index=pd.Index(fit.terms, name="term"))
    frame.attrs = {"estimate": shown, "statistic": of.name, "level": level}
    return frame


def likelihood_test(fit: Figures, loglik: float, deviance: float, df: int) -> tuple[str, float, float]:
    """Test a fit against a model within it, by that one's log-likelihood and deviance: name, statistic and p-value.

    2 (log L₁ − log L₀) ~ χ² if the family knows its dispersion, and for mixed models; else F = (D₀ − D₁) / (df φ₁).
    """
    if fit.known_dispersion or fit.components is not None:
        statistic = 2 * (fit.loglik - loglik)
        return "LR χ²", statistic, float(stats.chi2.sf(statistic, df))
    statistic = (deviance - fit.deviance) / df / fit.dispersion
    return "F", statistic, float(stats.f.sf(statistic, df, fit.df_resid))


def ratio_name(fit: Figures) -> str | None:
    """What exp(β) is; None for links where it means nothing."""
    return RATIOS.get((fit.family, fit.link))


def robust(fit: Figures, kind: str) -> Estimate:
    """The maximum-likelihood estimate with its sandwich covariance.

    "hc0" is H⁻¹ (Σ_i g_i g_iᵀ) H⁻¹ over rows. "cluster" is H⁻¹ (Σ_k g_k g_kᵀ) H⁻¹ over sites, times
    K/(K−1) · (n−1)/(n−p). The dispersion cancels in both; a negative binomial α counts as known in the second.
    """
    if kind not in ("hc0", "cluster"):
        raise InputError(f"robust({kind!r}): {hint(kind, ('hc0', 'cluster'))}")
    if fit.components is not None:
        raise InputError(f"robust({kind!r}): a mixed model has the dependence within sites in it; fit site='pooled'.")
    if fit.ml is None:
        cause = why_no_ml(fit)
        raise InputError(
            f"robust({kind!r}) needs the maximum-likelihood estimate ({cause}): use the posterior's table."
        )
    if kind == "hc0":
        if fit.hc0 is None:
            raise InputError("robust('hc0') needs sums of squared scores, which the sites did not send: fit again.")
        return Estimate(fit.ml.coefficients, fit.hc0)
    if len(fit.sites) < 2:
        raise InputError("robust('cluster') compares sites, and there is one only: use 'hc0'.")
    if silent := [site.name for site in fit.sites if site.gradient is None or site.hessian is None]:
        cause = f"that of {silent[0]!r} is not known"
        raise InputError(f"robust('cluster') needs every site's gradient, and {cause}: use 'hc0'.")
    if fit.df_resid <= 0:
        raise InputError(f"robust('cluster') needs more than {fit.n} rows for {fit.parameters} parameters: drop terms.")
    gradients, hessians = stacked(fit.sites, fit.kept)
    bread = np.linalg.inv(hessians.sum(0))
    factor = len(fit.sites) / (len(fit.sites) - 1) * (fit.n - 1) / fit.df_resid
    covariance = np.full(fit.ml.covariance.shape, np.nan)
    covariance[np.ix_(fit.kept, fit.kept)] = factor * bread @ gradients.T @ gradients @ bread
    return Estimate(fit.ml.coefficients, covariance)


def stacked(sites: Sequence[SiteFigures], kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients `(K, p)` and Hessians `(K, p, p)` of sites that have them, without aliased terms."""
    gradients = np.array([site.gradient for site in sites])[:, kept]
    hessians = np.array([site.hessian for site in sites])[:, kept][:, :, kept]
    return gradients, hessians
