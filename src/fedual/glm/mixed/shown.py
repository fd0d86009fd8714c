"""What the summary of a mixed model shows: how the sites differ, and coefficients with the intervals to report."""

import math

from fedual.glm.figures import Figures
from fedual.glm.inference import table
from fedual.glm.layout import Block, Facts, Grid, number, p_value, p_words, percent, rounded
from fedual.glm.mixed.components import Components


def facts(fit: Figures) -> list[tuple[str, str]]:
    """Of the model; nothing without random effects."""
    if (found := fit.components) is None:
        return []
    how = "restricted maximum likelihood (REML)" if found.restricted else "maximum likelihood"
    return [("Site effects", f"random: {', '.join(found.terms)}; integrated out at the sites"), ("Estimated by", how)]


def blocks(fit: Figures) -> list[Block]:
    """The variance components, the intraclass correlation and the test of no differences."""
    if (found := fit.components) is None:
        return []
    header, rows = ["", "sd", "SE", "variance"], []
    header += [f"corr {term}" for term in found.terms[:-1]]
    for i, term in enumerate(found.terms):
        sd, se = float(found.sd[i]), float(found.se[i])
        cells = [term, rounded(sd, se) if se > 0 else number(sd), number(se), number(float(found.covariance[i, i]))]
        own = [number(float(found.correlation[i, j])) if j < i else "" for j in range(len(found.terms) - 1)]
        rows.append([*cells, *own])
    if fit.family == "gaussian":
        rows.append(["Residual", number(math.sqrt(fit.dispersion)), "", number(fit.dispersion), *header[4:]])
        rows[-1][4:] = [""] * len(header[4:])
    about = [("ICC", f"{number(found.icc)} ({found.scale})"), ("Test of σ = 0", _tested(found))]
    if found.posterior is not None and found.prior_scale is not None:
        mean, sd = found.posterior
        prior = f"under the prior |N(0, {number(found.prior_scale)}²)|"
        about.append(("Posterior of σ", f"mean {number(mean)}, sd {number(sd)}, {prior}"))
    return [Grid("Site effects: how coefficients differ by site", header, rows), Facts(about)]


def figures(fit: Figures) -> list[tuple[str, str]]:
    """The figures of fit; nothing without random effects."""
    if (found := fit.components) is None:
        return []
    name = "REML criterion" if found.restricted else "Log-likelihood"
    value = -2 * fit.loglik if found.restricted else fit.loglik
    shown = [(name, number(value)), ("AIC, BIC", f"{number(fit.aic)}, {number(fit.bic)}")]
    if fit.known_dispersion:
        shown.append(("Pearson χ²", f"{number(fit.pearson)}, at the sites' own effects"))
    else:
        shown.append(("Dispersion", f"{number(fit.dispersion)} (residual SD {number(math.sqrt(fit.dispersion))})"))
    return shown


def coefficients(fit: Figures, level: float) -> Grid:
    """Maximum likelihood, and the posterior with its intervals, which do not take one σ for the truth."""
    header = ["", "estimate", "SE", "z", "p", "posterior", "sd", "lower", "upper"]
    rows = []
    for row in table(fit, level).reset_index().to_dict("records"):
        ml = [rounded(row[name], row["se"]) for name in ("estimate", "se")]
        names = ("posterior", "posterior_sd", "posterior_lower", "posterior_upper")
        posterior = [rounded(row[name], row["posterior_sd"]) for name in names]
        rows.append([row["term"], *ml, f"{row['z']:.2f}", p_value(row["p"]), *posterior])
    restricted = "restricted " * (fit.components is not None and fit.components.restricted)
    title = f"Coefficients: {restricted}maximum likelihood; the posterior with σ integrated, {percent(level)} intervals"
    return Grid(title, header, rows)


def _tested(found: Components) -> str:
    return f"LR χ² = {number(max(found.statistic, 0.0))}, {p_words(found.p)} ({found.reference})"
