"""The summary of a fit: as text, as HTML and as a data frame."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedual.glm.figures import Figures
from fedual.glm.heterogeneity import Heterogeneity, heterogeneity
from fedual.glm.inference import available, chosen, has, interval, likelihood_test, ratio_name, reference, table
from fedual.glm.layout import Block, Facts, Grid, Notes, Page, number, p_value, p_words, percent, ratio, rounded
from fedual.glm.mixed import shown as effects
from fedual.glm.survival import summary as survival

SHOWN = 12  # sites that are listed one by one, and warnings; more are counted
OVERDISPERSED = 1.5  # Pearson's χ²/df above which counts are said to vary more than their family allows
FEW = 10  # sites below which errors that are clustered by site are said to be rough
POSTERIORS = {
    "quadratic": "from the quadratic at the maximum likelihood",
    "laplace": "mode and curvature",
    "variational": "variational: mean and standard deviation",
    "integrated": "mean and standard deviation, with σ integrated",
}
COVARIANCES = {
    "model": "from the information matrix",
    "hc0": "HC0: robust to a wrong variance",
    "cluster": "clustered by site",
}


@dataclass(frozen=True, eq=False, repr=False)
class Summary(Page):
    """What `print(fit.summary())` and notebooks show, see `Fit.summary`."""

    fit: Figures
    level: float = 0.95

    def frame(self) -> pd.DataFrame:
        """The coefficients, as in `Fit.table`."""
        return table(self.fit, self.level)

    def blocks(self) -> list[Block]:  # noqa: D102 (`Page` documents it)
        compared = heterogeneity(self.fit)
        blocks: list[Block] = [Facts(self._model(compared)), coefficients(self.fit, self.level)]
        if (ratios := self._ratios()) is not None:
            blocks.append(ratios)
        blocks += effects.blocks(self.fit)
        blocks += [Facts(effects.figures(self.fit) or _fit_figures(self.fit), "Fit")]
        if self.fit.survival is not None:
            blocks += survival.blocks(self.fit, self.fit.survival)
        blocks += _sites(self.fit)
        warnings = self.fit.warnings[:SHOWN]
        if found := [*self._notes(compared), *warnings]:
            if more := len(self.fit.warnings) - len(warnings):
                found.append(f"{more} more warnings are in the fit's `warnings`.")
            blocks.append(Notes(found, "Notes"))
        return blocks

    def _model(self, compared: Heterogeneity) -> list[tuple[str, str]]:
        fit = self.fit
        dropped = sum(sum(site.missing.values()) for site in fit.sites)
        events = "" if fit.survival is None else f", {fit.survival.events:,} with an event,"
        rows = f"{fit.n:,}{events} at {len(fit.sites)} site{'s' * (len(fit.sites) != 1)}"
        event = fit.schema.event
        model = ("Family", f"{fit.family}, link {fit.link}")
        if fit.survival is not None:
            model = ("Model", survival.model(fit.survival))
        facts = [
            ("Formula", fit.formula),
            model,
            *[("Event", f"{fit.schema.parsed.plain_response} = {event}")] * (event is not None),
            ("Rows", rows + (f"; {dropped:,} values are missing" if dropped else "")),
        ]
        columns = {name: getattr(fit.schema, name) for name in ("weights", "offset", "trials")}
        facts += [(name.capitalize(), column) for name, column in columns.items() if column]
        if fit.site_effects == "fixed":
            facts.append(("Site effects", "fixed: each site has an intercept of its own, which stays there"))
        facts += effects.facts(fit)
        facts.append(("Convergence", fit.convergence.words()))
        if fit.ml is not None:
            facts.append(("Standard errors", COVARIANCES[fit.covariance_kind]))
        facts.append(("Prior", fit.prior.words()))
        if fit.posterior is not None:
            facts.append(("Posterior", POSTERIORS[fit.posterior_kind]))
        if fit.components is None:
            facts.append(("Heterogeneity", compared.words()))
        return facts

    def _ratios(self) -> Grid | None:
        """exp(β) with intervals, for links where it is a ratio."""
        fit, name = self.fit, ratio_name(self.fit)
        calls = fit.schema.parsed.calls.values()
        curves = [call.text for call in calls if call.transform.several]  # their columns have no unit to rise by
        slopes = [
            i for i, term in enumerate(fit.terms) if term != "Intercept" and not any(text in term for text in curves)
        ]
        if name is None or not slopes:
            return None
        header, columns = [""], []
        uses = available(fit)
        for use in uses[-1:] if fit.posterior_kind == "integrated" else uses:
            estimate, of = chosen(fit, use)
            header += ["exp(β)" if use == "ml" else "posterior", "lower", "upper"]
            with np.errstate(over="ignore"):
                found = [np.exp(column) for column in (estimate.coefficients, *interval(estimate, of, self.level))]
            columns += [[ratio(*pair) for pair in zip(column, estimate.se, strict=True)] for column in found]
        rows = [[fit.terms[i], *(column[i] for column in columns)] for i in slopes]
        plural = name.replace("ratio", "ratios")
        return Grid(f"{plural.capitalize()}: {percent(self.level)} intervals", header, rows)

    def _notes(self, compared: Heterogeneity) -> list[str]:
        fit, notes = self.fit, []
        if fit.ml is None:
            reason = fit.separation or "Only the posterior was asked for."
            notes.append(f"{reason} Fit figures are those at the posterior's centre; there are no p-values.")
        elif fit.separation:
            notes.append(fit.separation)
        if fit.survival is not None:
            notes += survival.notes(fit, fit.survival)
        if fit.aliased:
            notes.append(f"Aliased, so not estimated (other terms determine them): {', '.join(fit.aliased)}.")
        if compared.left_out and not math.isnan(compared.q):
            left_out = ", ".join(compared.left_out)
            notes.append(f"Left out of the test of heterogeneity (singular or unknown Hessian): {left_out}.")
        if fit.covariance_kind == "cluster" and len(fit.sites) < FEW:
            notes.append(f"Standard errors clustered by {len(fit.sites)} sites are rough, whatever the number of rows.")
        counts = fit.family == "poisson" or (fit.family == "binomial" and fit.schema.trials is not None)
        spread = fit.pearson / fit.df_resid if counts and fit.df_resid > 0 else math.nan
        if spread > OVERDISPERSED and fit.covariance_kind == "model":
            other = "the family negative-binomial or " if fit.family == "poisson" else ""
            notes.append(
                f"Pearson's χ²/df is {number(spread)}: the counts vary more than the family allows, and standard "
                f"errors are too small; use {other}robust('hc0')."
            )
        return notes


def coefficients(fit: Figures, level: float) -> Grid:
    """Maximum likelihood beside the posterior; one of them where there is no other."""
    if fit.posterior_kind == "integrated":
        return effects.coefficients(fit, level)
    of = reference(fit, "ml")
    both = has(fit, "ml") and has(fit, "posterior")
    header = ["", "estimate", "SE" if has(fit, "ml") else "sd", "lower", "upper"]
    header += [of.name if of.df is None else f"{of.name}({of.df:g})", "p"] if has(fit, "ml") else []
    header += ["posterior", "sd"] if both else []
    rows = []
    for row in table(fit, level).reset_index().to_dict("records"):
        cells = [row["term"], *(rounded(row[column], row["se"]) for column in ("estimate", "se", "lower", "upper"))]
        cells += [_statistic(row["z"]), p_value(row["p"])] if has(fit, "ml") else []
        cells += [rounded(row[column], row["posterior_sd"]) for column in ("posterior", "posterior_sd")] if both else []
        rows.append(cells)
    what = "maximum likelihood" if has(fit, "ml") else "posterior"
    what = "restricted " * (fit.components is not None and fit.components.restricted) + what
    beside = "; beside it the posterior" if both else ""
    return Grid(f"Coefficients: {what}, {percent(level)} intervals{beside}", header, rows)


def _statistic(z: float) -> str:
    return "–" if math.isnan(z) else f"{z:.2f}" if abs(z) < 1e4 else f"{z:.2e}"


def _fit_figures(fit: Figures) -> list[tuple[str, str]]:
    if fit.survival is not None:
        return survival.figures(fit, fit.survival)
    null_df = fit.df_resid + fit.df_model
    facts = [
        ("Deviance", f"{number(fit.deviance)} on {fit.df_resid:,} df"),
        ("Null deviance", f"{number(fit.null_deviance)} on {null_df:,} df"),
        ("Log-likelihood", number(fit.loglik) + f" (null {number(fit.null_loglik)})" * fit.known_dispersion),
    ]
    if fit.ml is not None and fit.has_intercept and fit.df_model:
        name, statistic, p = likelihood_test(fit, fit.null_loglik, fit.null_deviance, fit.df_model)
        df = f"{fit.df_model}" if fit.known_dispersion else f"{fit.df_model} and {fit.df_resid:,}"
        held = "" if fit.alpha is None else "; alpha held, anova() finds it anew"
        facts.append(("Against null", f"{name} = {number(statistic)} on {df} df, {p_words(p)}{held}"))
    if fit.ml is not None:
        facts.append(("AIC, BIC", f"{number(fit.aic)}, {number(fit.bic)}"))
    if fit.known_dispersion:
        if not math.isnan(fit.pseudo_r2) and fit.df_model:
            facts.append(("Pseudo-R²", f"{number(fit.pseudo_r2)} (McFadden)"))
        if fit.df_resid > 0:
            facts.append(("Pearson χ²/df", number(fit.pearson / fit.df_resid)))
    else:
        residual = f" (residual SD {number(math.sqrt(fit.dispersion))})" if fit.family == "gaussian" else ""
        facts.append(("Dispersion", f"{number(fit.dispersion)}{residual}"))
        if not math.isnan(fit.adjusted_r2):
            facts.append(("R²", f"{number(fit.pseudo_r2)}, adjusted {number(fit.adjusted_r2)}"))
        elif not math.isnan(fit.pseudo_r2):
            facts.append(("Deviance explained", percent(round(fit.pseudo_r2, 4))))
    if fit.alpha is not None:
        estimated = f" (SE {rounded(fit.alpha_se, fit.alpha_se)})" if fit.alpha_se is not None else ""
        alpha = rounded(fit.alpha, math.nan if fit.alpha_se is None else fit.alpha_se)
        facts.append(("Alpha", f"{alpha}{estimated}: the variance is μ + αμ²; θ = 1/α = {number(1 / fit.alpha)} in R"))
    return facts


def _sites(fit: Figures) -> list[Block]:
    """A table of the sites, or their range where there are many; and missing values by column."""
    sites, total = fit.sites, sum(sum(site.missing.values()) for site in fit.sites)
    columns = sorted({column for site in sites for column in site.missing})
    lost = {column: sum(site.missing.get(column, 0) for site in sites) for column in columns}
    missing = [("Missing values", ", ".join(f"{column} {lost[column]:,}" for column in columns if lost[column]))]
    if len(sites) > SHOWN:
        rows, means = [site.n for site in sites], [site.mean_response for site in sites]
        facts = [("Rows", f"{min(rows):,} to {max(rows):,} a site")]
        facts += [("Mean response", f"{number(min(means))} to {number(max(means))}")]
        return [Facts(facts + missing * bool(total), f"Sites: {len(sites)}")]
    last = lambda site: number(site.mean_response) if site.events is None else f"{site.events:,}"
    name = "mean response" if fit.survival is None else "events"
    header = ["", "rows", name, *["missing values"] * bool(total)]
    lines = [
        [site.name, f"{site.n:,}", last(site), *[f"{sum(site.missing.values()):,}"] * bool(total)] for site in sites
    ]
    return [Grid("Sites", header, lines), *[Facts(missing)] * bool(total)]
