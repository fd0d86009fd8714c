"""Do the sites have the same coefficients? Tests and estimates by site from gradients at the pooled fit.

No site fits anything: with g_k and H_k, gradient and Hessian of its negative log-likelihood at the pooled estimate β,

    Q = (Σ_k g_kᵀ H_k⁻¹ g_k − gᵀ H⁻¹ g) / φ,    g = Σ_k g_k, H = Σ_k H_k

is χ² distributed with (K − 1) p degrees of freedom if the coefficients are the same. The second term is 0 where all
sites are compared, and centres Q on the rest where a site is left out. One Newton step leads to the site's own estimate
β − H_k⁻¹ g_k with covariance φ H_k⁻¹; for the linear gaussian model the step is exact.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from fedual.glm.figures import Estimate, Figures
from fedual.glm.inference import Reference, interval, stacked
from fedual.glm.layout import Block, Facts, Grid, Notes, Page, number, p_value, p_words, percent

SINGULAR = 1e-10  # smallest eigenvalue of a Hessian with a unit diagonal, below which it counts as singular


@dataclass(frozen=True, eq=False, repr=False)
class Heterogeneity(Page):
    """How much the sites' coefficients differ.

    Attributes:
        q: The score statistic Q; NaN if fewer than two sites can be compared.
        df: Its degrees of freedom, (K − 1) p.
        p: Its p-value.
        by_term: Cochran's Q of each term's estimates by site, with df, p and i2.
        sites: The estimates of the sites that are compared, by name, one Newton step from the pooled fit.
        left_out: Names of the other sites: their Hessian is singular or not known.
        exact: True if one step leads to the site's own fit.
        reason: Why Q is NaN.
    """

    q: float
    df: int
    p: float
    by_term: pd.DataFrame
    sites: dict[str, Estimate]
    left_out: tuple[str, ...]
    exact: bool
    reason: str = ""

    @property
    def i2(self) -> float:
        """I² = max(0, 1 − df/Q): the share of Q that chance does not explain."""
        return _i2(self.q, self.df)

    def frame(self, level: float = 0.95) -> pd.DataFrame:
        """The estimates by site: a row for each site and term, with estimate, se, lower and upper."""
        rows = []
        for name, estimate in self.sites.items():
            bounds = interval(estimate, Reference(), level)
            columns = zip(self.by_term.index, estimate.coefficients, estimate.se, *bounds, strict=True)
            rows += [(name, *row) for row in columns]
        frame = pd.DataFrame(rows, columns=["site", "term", "estimate", "se", "lower", "upper"])
        return frame.set_index(["site", "term"])

    def words(self) -> str:
        """Q, df, p and I² in a line."""
        if math.isnan(self.q):
            return f"not tested: {self.reason}"
        return f"score Q = {number(self.q)} on {self.df} df, {p_words(self.p)}, I² = {percent(round(self.i2, 3))}"

    def blocks(self) -> list[Block]:  # noqa: D102 (`Page` documents it)
        step = "the sites' own fits" if self.exact else "one Newton step from the pooled fit"
        rows = [
            [row["term"], number(row["q"]), str(row["df"]), p_value(row["p"]), percent(round(row["i2"], 3))]
            for row in self.by_term.reset_index().to_dict("records")
        ]
        blocks: list[Block] = [Facts([("Heterogeneity", self.words())])]
        if not math.isnan(self.q):
            title = f"By term (Cochran's Q of estimates by site: {step})"
            blocks.append(Grid(title, ("", "Q", "df", "p", "I²"), rows))
        if self.left_out:
            names = ", ".join(self.left_out)
            blocks.append(Notes([f"Left out, because the Hessian is singular or not known: {names}."]))
        return blocks


def heterogeneity(fit: Figures) -> Heterogeneity:
    """Compare the sites of a fit."""
    kept = fit.kept
    known = [site for site in fit.sites if site.gradient is not None and site.hessian is not None]
    sites = [site for site in known if fit.ml is not None and _regular(stacked([site], kept)[1][0])]
    left_out = tuple(site.name for site in fit.sites if site not in sites)
    names = pd.Index([fit.terms[i] for i in kept], name="term")
    exact = (fit.family, fit.link) == ("gaussian", "identity")

    def untested(reason: str, estimates: dict[str, Estimate]) -> Heterogeneity:
        none = pd.DataFrame(math.nan, names, ["q", "df", "p", "i2"])
        return Heterogeneity(math.nan, 0, math.nan, none, estimates, left_out, exact, reason)

    if fit.components is not None:
        left_out = ()
        return untested("how the sites differ is in the model, see Site effects", {})
    if fit.ml is None:
        return untested("there is no maximum-likelihood estimate", {})
    reason = "fewer than two sites have a Hessian that can be inverted"
    if not sites:
        return untested(reason, {})
    gradients, hessians = stacked(sites, kept)
    inverses = np.linalg.inv(hessians)
    steps = np.einsum("kij,kj->ki", inverses, gradients)
    own = [Estimate(fit.ml.coefficients[kept] - steps[k], fit.dispersion * inverses[k]) for k in range(len(sites))]
    estimates = {site.name: estimate for site, estimate in zip(sites, own, strict=True)}
    df = (len(sites) - 1) * len(kept)
    if not df:
        return untested(reason, estimates)
    total = gradients.sum(0)
    scores = (gradients * steps).sum() - total @ np.linalg.solve(hessians.sum(0), total)
    q = float(scores / fit.dispersion)
    by_term = _cochran(own, names)
    return Heterogeneity(q, df, float(stats.chi2.sf(q, df)), by_term, estimates, left_out, exact)


def _regular(hessian: np.ndarray) -> bool:
    """True if a Hessian is finite and positive definite, whatever the units of the terms."""
    diagonal = np.diagonal(hessian)
    if not (np.isfinite(hessian).all() and (diagonal > 0).all()):
        return False
    scale = 1 / np.sqrt(diagonal)
    return bool(np.linalg.eigvalsh(hessian * scale * scale[:, None])[0] > SINGULAR)


def _cochran(own: list[Estimate], names: pd.Index) -> pd.DataFrame:
    """Q = Σ_k (b_k − b̄)²/v_k of every term, about the mean b̄ weighted by 1/v_k."""
    b = np.array([estimate.coefficients for estimate in own])
    weights = 1 / np.array([np.diagonal(estimate.covariance) for estimate in own])
    q = (weights * (b - (weights * b).sum(0) / weights.sum(0)) ** 2).sum(0)
    df = len(own) - 1
    i2 = [_i2(float(one), df) for one in q]
    return pd.DataFrame({"q": q, "df": df, "p": stats.chi2.sf(q, df), "i2": i2}, index=names)


def _i2(q: float, df: int) -> float:
    return max(0.0, 1 - df / q) if q > 0 else q * 0
