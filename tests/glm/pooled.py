"""Fits made by hand from statsmodels' fits to the pooled table, and from gradients and Hessians in NumPy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import statsmodels.api as sm
from formulaic import model_matrix
from scipy import stats

from fedual.glm.figures import Convergence, Estimate, SiteFigures
from fedual.glm.formula import parse
from fedual.glm.prior import FLAT, Prior
from fedual.glm.result import Fit
from fedual.glm.schema import Columns, agree, describe

FAMILIES = {  # made anew for each fit, because statsmodels keeps trials in a family
    "gaussian": ("identity", sm.families.Gaussian),
    "binomial": ("logit", sm.families.Binomial),
    "poisson": ("log", sm.families.Poisson),
    "gamma": ("log", lambda: sm.families.Gamma(sm.families.links.Log())),
}


@dataclass
class Pooled:
    """A pooled table, statsmodels' fit to it, and the federation's fit made of both."""

    fit: Fit
    oracle: Any
    x: pd.DataFrame
    y: np.ndarray
    sites: np.ndarray
    table: pd.DataFrame


def derivatives(family: str, x: np.ndarray, y: np.ndarray, beta: np.ndarray, w: Any = 1.0, alpha: float = 1.0):
    """∇ℓ and ∇²ℓ of the negative log-likelihood at dispersion 1."""
    f = x @ beta
    mu = f if family == "gaussian" else 1 / (1 + np.exp(-f)) if family == "binomial" else np.exp(f)
    first, second = {
        "gaussian": (mu - y, np.ones_like(mu)),
        "binomial": (mu - y, mu * (1 - mu)),
        "poisson": (mu - y, mu),
        "gamma": (1 - y / mu, y / mu),
        "negative-binomial": ((mu - y) / (1 + alpha * mu), mu * (1 + alpha * y) / (1 + alpha * mu) ** 2),
    }[family]
    return x.T @ (w * first), (x.T * (w * second)) @ x


def pooled(
    formula: str,
    table: pd.DataFrame,
    family: str,
    site: str = "site",
    prior: Prior = FLAT,
    trials: str | None = None,
    **changes: Any,
) -> Pooled:
    """Fit the pooled table; `site` is the column that says where a row is from."""
    left, _, right = formula.partition("~")
    x, y = pd.DataFrame(model_matrix(right, table)), table[left.strip()].to_numpy(float)
    sites, n, p = table[site].to_numpy().astype(str), len(table), x.shape[1]
    w = np.ones(n) if trials is None else table[trials].to_numpy(float)
    alpha = alpha_se = None
    if family == "negative-binomial":
        joint = sm.NegativeBinomial(y, x).fit(method="newton", tol=1e-13, disp=0)
        alpha, alpha_se = joint.params.iloc[-1], joint.bse.iloc[-1]
        oracle = sm.GLM(y, x, sm.families.NegativeBinomial(alpha=alpha)).fit(tol=1e-13)
        link = "log"
    else:
        link, kind = FAMILIES[family]
        response = y if trials is None else np.column_stack([y, w - y])
        oracle = sm.GLM(response, x, kind()).fit(tol=1e-13)
        y = y if trials is None else y / w
    beta, dispersion = oracle.params.to_numpy(), oracle.scale
    found, names = [], list(dict.fromkeys(sites))
    for name in names:
        rows = sites == name
        gradient, hessian = derivatives(family, x.to_numpy()[rows], y[rows], beta, w[rows], alpha or 1.0)
        mean = float(np.average(y[rows], weights=w[rows]))
        found.append(SiteFigures(name, int(rows.sum()), {}, mean, gradient, hessian))
    mu, null = oracle.fittedvalues, np.full(n, np.average(y, weights=w))
    loglik = log_likelihoods(family, oracle, y, mu, null, w)
    posterior = None
    if not prior.flat:
        precision = np.diag([0.0 if term == "Intercept" else prior.sd**-2 for term in x.columns])
        total = sum(s.hessian for s in found if s.hessian is not None) / dispersion
        covariance = np.linalg.inv(total + precision)
        posterior = Estimate(covariance @ total @ beta, covariance)
    parsed, columns = parse(formula), Columns(trials=trials)
    schema = agree(parsed, columns, {"all": describe(table, "all", parsed, columns)[0]}, binary=family == "binomial")
    assert schema.terms == tuple(x.columns)
    figures: Mapping[str, Any] = {
        "schema": schema, "family": family, "link": link, "n": n, "sites": tuple(found), "parameters": p,
        "ml": Estimate(beta, oracle.cov_params().to_numpy()), "posterior": posterior, "prior": prior,
        "dispersion": dispersion, "loglik": loglik[0], "null_loglik": loglik[1], "deviance": oracle.deviance,
        "null_deviance": oracle.null_deviance, "pearson": oracle.pearson_chi2, "df_model": p - 1, "df_resid": n - p,
        "alpha": alpha, "alpha_se": alpha_se, "convergence": Convergence(True, 4, 3e-7, 1e-4, ({"kind": "newton"},)),
    }  # fmt: skip
    return Pooled(Fit(**{**figures, **changes}), oracle, x, y, sites, table)


def log_likelihoods(family: str, oracle: Any, y: np.ndarray, mu: np.ndarray, null: np.ndarray, w: np.ndarray):
    """As R's `logLik`: the dispersion is the deviance divided by the rows, for the null model too."""
    phi = oracle.deviance / len(y)
    if family == "gaussian":
        return [stats.norm.logpdf(y, m, math.sqrt(phi)).sum() for m in (mu, null)]
    if family == "gamma":
        return [stats.gamma.logpdf(y, 1 / phi, scale=m * phi).sum() for m in (mu, null)]
    return [oracle.llf, oracle.llnull]


def simulated(family: str, n: int = 240, sites: int = 4, seed: int = 0, spread: float = 0.0) -> pd.DataFrame:
    """A table with a number, a factor of three levels and a site; `spread` is that of the sites' slopes."""
    rng = np.random.default_rng(seed)
    age, group = rng.normal(50, 10, n), rng.choice(["a", "b", "c"], n)
    site = rng.integers(0, sites, n)
    slope = 0.03 + spread * rng.normal(size=sites)[site]
    f = -0.4 + slope * (age - 50) + 0.5 * (group == "b") - 0.3 * (group == "c")
    y = {
        "gaussian": lambda: f + rng.normal(0, 0.7, n),
        "binomial": lambda: (rng.random(n) < 1 / (1 + np.exp(-f))).astype(float),
        "poisson": lambda: rng.poisson(np.exp(f + 1)).astype(float),
        "gamma": lambda: rng.gamma(2.5, np.exp(f) / 2.5),
        "negative-binomial": lambda: rng.poisson(np.exp(f + 1) * rng.gamma(2, 1 / 2, n)).astype(float),
    }[family]()
    names = np.array([f"site {k + 1}" for k in range(sites)])
    return pd.DataFrame({"y": y, "age": age, "group": group, "site": names[site]})


def dataset(name: str) -> Any:
    """A data set of statsmodels as a data frame."""
    return getattr(sm.datasets, name).load_pandas().data


FORMULA = "y ~ age + C(group)"
ALL = ("gaussian", "binomial", "poisson", "gamma", "negative-binomial")
