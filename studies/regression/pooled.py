"""The fit to the pooled rows that a federated one must equal, and losses for the other methods: no code of fedual's.

Maximum likelihood is statsmodels'; a mode under a prior is found by Newton's method in NumPy. Columns are standardised
first, for the numbers' sake. The negative binomial's last parameter is log α.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd
from formulaic import model_matrix
from numpy.typing import NDArray
from scipy import special

from studies.regression.tables import Table

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
PRIOR_SD, PRIOR_INTERCEPT_SD = 2.5, 10.0
"""Of the default prior: standardised slopes, and the intercept at the means of all columns."""
MOST = 100
"""Steps of the fits to the pooled rows; the last ones are at rounding."""


@dataclass(frozen=True)
class Expansion:
    """A loss and its derivatives at a point, with the observed and the expected Hessian."""

    loss: float
    gradient: Vector
    hessian: Matrix
    expected: Matrix


@dataclass(frozen=True)
class Design:
    """Rows of some sites: standardised columns, response, weight, and a quadratic penalty of the coefficients."""

    family: str
    link: str
    x: Matrix
    y: Vector
    weight: Vector
    penalty: Vector  # the diagonal of its Hessian
    centre: Vector  # of the penalty

    def expand(self, theta: Vector) -> Expansion:
        """The negative log-likelihood at dispersion 1, up to a constant, and the penalty."""
        p = self.x.shape[1]
        with np.errstate(all="ignore"):  # a point outside of the domain has an infinite loss
            loss, first, second, expected = bends(self.family, self.link, self.x @ theta[:p], self.y)
            curve = lambda w: (self.x.T * (self.weight * w)) @ self.x
            gradient, observed, fisher = self.x.T @ (self.weight * first), curve(second), curve(expected)
            total = float(self.weight @ loss)
            if self.family == "negative-binomial":
                total, gradient, observed = self._with_alpha(theta)
                fisher = np.zeros_like(observed)
                fisher[:p, :p], fisher[p, p] = curve(1 / (1 / expected + math.exp(theta[p]))), observed[p, p]
        away = theta - self.centre
        ridge = np.diag(self.penalty)
        total += float(self.penalty @ away**2) / 2
        total = total if math.isfinite(total) else math.inf
        return Expansion(total, gradient + self.penalty * away, observed + ridge, fisher + ridge)

    def _with_alpha(self, theta: Vector) -> tuple[float, Vector, Matrix]:
        """ℓ of the negative binomial, and its derivatives in the coefficients and in log α, where r = 1/α."""
        x, y, w, r = self.x, self.y, self.weight, math.exp(-theta[-1])
        mean = np.exp(x @ theta[:-1])
        gamma = special.gammaln(y + r) - special.gammaln(r)
        loss = (y + r) * np.log(r + mean) - r * math.log(r) - special.xlogy(y, mean) - gamma
        in_f, in_ff = r * (mean - y) / (r + mean), r * mean * (y + r) / (r + mean) ** 2
        in_r = np.log1p(mean / r) - 1 + (y + r) / (r + mean) - special.digamma(y + r) + special.digamma(r)
        in_rr = 1 / (r + mean) - 1 / r + (mean - y) / (r + mean) ** 2
        in_rr += special.polygamma(1, r) - special.polygamma(1, y + r)
        in_fr = mean * (mean - y) / (r + mean) ** 2
        mixed = x.T @ (w * -r * in_fr)
        corner = w @ (r**2 * in_rr + r * in_r)
        hessian = np.block([[(x.T * (w * in_ff)) @ x, mixed[:, None]], [mixed[None], np.array([[corner]])]])
        return float(w @ loss), np.append(x.T @ (w * in_f), w @ (-r * in_r)), hessian


def bends(family: str, link: str, f: Vector, y: Vector) -> tuple[Vector, Vector, Vector, Vector]:
    """ℓ, ℓ', ℓ'' and E[ℓ''] of every row at the linear predictor f; of the negative binomial, a Poisson's."""
    if link == "logit":
        mean = special.expit(f)
        curve = mean * special.expit(-f)
        return np.logaddexp(0, f) - y * f, mean - y, curve, curve
    if family == "gaussian":
        return (y - f) ** 2 / 2, f - y, np.ones_like(f), np.ones_like(f)
    mean, slope, bend = {
        "probit": lambda: (special.ndtr(f), _density(f), -f * _density(f)),
        "cloglog": lambda: (-np.expm1(-np.exp(f)), np.exp(f - np.exp(f)), np.exp(f - np.exp(f)) * (1 - np.exp(f))),
        "log": lambda: (np.exp(f),) * 3,
        "inverse": lambda: (np.where(f > 0, 1 / f, np.nan), -(f**-2), 2 * f**-3),
    }[link]()
    if family == "binomial":
        other = special.ndtr(-f) if link == "probit" else np.exp(-np.exp(f))
        loss, variance, change = -special.xlogy(y, mean) - special.xlogy(1 - y, other), mean * other, other - mean
    elif family == "gamma":
        loss, variance, change = y / mean + np.log(mean), mean**2, 2 * mean
    else:
        loss, variance, change = mean - special.xlogy(y, mean), mean, np.ones_like(mean)
    expected = slope**2 / variance
    observed = expected - (y - mean) * (bend / variance - slope**2 * change / variance**2)
    return loss, -(y - mean) * slope / variance, observed, expected


def _density(f: Vector) -> Vector:
    return np.exp(-(f**2) / 2) / math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class Pooled:
    """The fit to the pooled rows.

    Args:
        terms: Names of the coefficients.
        estimate: Coefficients in own units, log α after them if there is one.
        se: Their standard errors.
        units: Own coefficients are `units @` standardised ones.
        sites: Each site's rows.
        start: The fit with an intercept alone.
        whole: All rows.
        left: The step that is left at the estimate, in standard errors: how exact it is.
    """

    terms: tuple[str, ...]
    estimate: Vector
    se: Vector
    units: Matrix
    sites: list[Design]
    start: Vector
    whole: Design
    left: float

    def error(self, estimate: Vector) -> float:
        """The largest error of own coefficients, in standard errors."""
        return float(np.abs((estimate - self.estimate) / self.se).max())

    def se_error(self, se: Vector) -> float:
        """The largest relative error of standard errors."""
        return float(np.abs(se / self.se - 1).max())


def pooled(table: Table) -> Pooled:
    """Fit the pooled rows of a table."""
    frame, (response, _, right) = table.pooled, table.formula.partition("~")
    x, y = pd.DataFrame(model_matrix(right.strip(), frame)), frame[response.strip()].to_numpy(float)
    weight = np.ones_like(y) if table.trials is None else frame[table.trials].to_numpy(float)
    y = y / weight
    terms = tuple(x.columns)
    centre, scale = x.mean().to_numpy(copy=True), x.std().to_numpy(copy=True)
    centre[0], scale[0] = 0.0, 1.0
    alpha = int(table.family == "negative-binomial")
    units = np.diag(np.append(1 / scale, np.ones(alpha)))
    units[0, : len(terms)] -= centre / scale
    link = table.link or {"gaussian": "identity", "binomial": "logit"}.get(table.family, "log")
    first = {
        "logit": special.logit, "probit": special.ndtri, "cloglog": lambda m: np.log(-np.log1p(-m)), "log": np.log,
        "inverse": lambda m: 1 / m, "identity": lambda m: m,
    }[link](np.average(y, weights=weight))  # fmt: skip
    start = np.zeros(len(terms) + alpha)
    start[0] = first
    precision = np.zeros_like(start)
    if table.penalised:
        precision[:] = PRIOR_SD**-2
        precision[0] = PRIOR_INTERCEPT_SD**-2
    z = (x.to_numpy() - centre) / scale
    parts = np.split(np.arange(len(z)), np.cumsum([len(each) for each in table.sites.values()])[:-1])
    share = [len(rows) / len(z) * precision for rows in parts]
    rows_of = lambda rows, penalty: Design(table.family, link, z[rows], y[rows], weight[rows], penalty, start)
    sites = [rows_of(rows, penalty) for rows, penalty in zip(parts, share, strict=True)]
    whole = rows_of(np.arange(len(z)), precision)
    theta, covariance = mode(whole, start) if table.penalised else statsmodels(whole, start)
    found = whole.expand(theta)
    left = np.abs(np.linalg.solve(found.hessian, found.gradient)) / np.sqrt(np.diag(np.linalg.inv(found.hessian)))
    se = np.sqrt(np.diag(units @ covariance @ units.T))
    return Pooled(terms, units @ theta, se, units, sites, start, whole, float(left.max()))


def statsmodels(whole: Design, start: Vector) -> tuple[Vector, Matrix]:
    """The maximum likelihood and its covariance."""
    import statsmodels.api as sm
    from statsmodels.discrete.discrete_model import NegativeBinomial

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tolerance below rounding is never met
        if whole.family == "negative-binomial":
            done = NegativeBinomial(whole.y, whole.x).fit(method="newton", tol=1e-14, maxiter=MOST, disp=0)
            into = np.diag(np.append(np.ones(len(done.params) - 1), 1 / done.params[-1]))
            return np.append(done.params[:-1], math.log(done.params[-1])), into @ done.cov_params() @ into
        links, families = sm.families.links, sm.families
        link = {
            "logit": links.Logit, "probit": links.Probit, "cloglog": links.CLogLog, "log": links.Log,
            "inverse": links.InversePower, "identity": links.Identity,
        }[whole.link]()  # fmt: skip
        family = {
            "gaussian": families.Gaussian, "binomial": families.Binomial, "poisson": families.Poisson,
            "gamma": families.Gamma,
        }[whole.family](link)  # fmt: skip
        model = sm.GLM(whole.y, whole.x, family, var_weights=whole.weight)
        done = model.fit(start_params=start, tol=1e-14, tol_criterion="params", maxiter=MOST)
        return done.params, done.cov_params()


def mode(whole: Design, theta: Vector) -> tuple[Vector, Matrix]:
    """The minimum and its inverse Hessian, by Newton's method with halved steps."""
    found = whole.expand(theta)
    for _ in range(MOST):
        step = -np.linalg.solve(found.hessian, found.gradient)
        while whole.expand(theta + step).loss > found.loss + 1e-13 * abs(found.loss):
            step = step / 2
        theta = theta + step
        found = whole.expand(theta)
    return theta, np.asarray(np.linalg.inv(found.hessian), float)
