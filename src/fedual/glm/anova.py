"""Compare two nested fits."""

import math
from dataclasses import dataclass

import pandas as pd

from fedual.errors import InputError
from fedual.glm.figures import Figures
from fedual.glm.inference import likelihood_test
from fedual.glm.layout import Block, Facts, Grid, Notes, Page, number, p_value

OWN = "an intercept for each site"
SAME = 1e-6  # relative difference of null deviances up to which two fits have the same responses


@dataclass(frozen=True, eq=False, repr=False)
class Anova(Page):
    """A test of the terms that only the larger of two nested fits has.

    Attributes:
        small: The smaller fit.
        large: The larger fit.
        test: "LR χ²", the likelihood-ratio test, if the family knows its dispersion, else "F".
        statistic: 2 (log L₁ − log L₀), or F = (D₀ − D₁) / (df φ₁).
        p: The p-value of χ² with `df` degrees of freedom, or of F with `df` and the larger fit's residual ones.
        df: Parameters that only the larger fit has.
    """

    small: Figures
    large: Figures
    test: str
    statistic: float
    p: float
    df: int

    @property
    def added(self) -> list[str]:
        """The terms that are tested."""
        own = [OWN] if self.small.site_effects != self.large.site_effects else []
        found = own + [term for term in self.large.terms if term not in self.small.terms]
        effects = [() if fit.components is None else fit.components.terms for fit in (self.small, self.large)]
        return found + [f"random {term}" for term in effects[1] if term not in effects[0]]

    def frame(self) -> pd.DataFrame:
        """One row a fit: formula, parameters, df_resid, loglik, deviance, and in the second row df, statistic and p."""
        rows = [
            {name: getattr(fit, name) for name in ("formula", "parameters", "df_resid", "loglik", "deviance")}
            for fit in (self.small, self.large)
        ]
        tested = {"df": [math.nan, self.df], "statistic": [math.nan, self.statistic], "p": [math.nan, self.p]}
        return pd.DataFrame(rows, index=pd.Index([1, 2], name="fit")).assign(**tested)

    def blocks(self) -> list[Block]:  # noqa: D102 (`Page` documents it)
        fits = (self.small, self.large)
        tested = [["", "", ""], [str(self.df), number(self.statistic), p_value(self.p)]]
        rows = [
            [str(i + 1), str(fit.df_resid), number(fit.loglik), number(fit.deviance), *tested[i]]
            for i, fit in enumerate(fits)
        ]
        title = f"{'F test' if self.test == 'F' else 'Likelihood-ratio test'} of {', '.join(self.added)}"
        header = ("fit", "resid. df", "log-likelihood", "deviance", "df", self.test, "p")
        own = {"pooled": "", "fixed": f", and {OWN}", "random": ", with random effects of the sites"}
        blocks: list[Block] = [
            Facts([(f"Fit {i + 1}", fit.formula + own[fit.site_effects]) for i, fit in enumerate(fits)])
        ]
        blocks.append(Grid(title, header, rows))
        if any(fit.covariance_kind != "model" for fit in fits):
            blocks.append(Notes(["The test compares likelihoods: robust standard errors have no part in it."]))
        return blocks


def anova(fit1: Figures, fit2: Figures) -> Anova:
    """Test the terms by which the larger of two nested fits exceeds the smaller one.

    A likelihood-ratio test if the family knows its dispersion, else an F test with the larger fit's dispersion, as R's
    `anova(small, large, test=…)`. Fits with and without an intercept for each site are compared, too; and a line with a
    spline or polynomial of the same column, of which it is a special case.

    Raises:
        InputError: The fits are not nested, or not of the same rows, family and link.
    """
    small, large = sorted((fit1, fit2), key=lambda fit: fit.parameters)
    _check(small, large)
    df = large.parameters - small.parameters
    return Anova(small, large, *likelihood_test(large, small.loglik, small.deviance, df), df)


def _check(small: Figures, large: Figures) -> None:
    remedy = "compare fits that differ in their terms only"
    facts = {
        "family": lambda fit: fit.family,
        "link": lambda fit: fit.link,
        "response": lambda fit: fit.response,
        "sites": lambda fit: ", ".join(site.name for site in fit.sites),
        "weights": lambda fit: fit.schema.weights,
        "offset": lambda fit: fit.schema.offset,
        "trials": lambda fit: fit.schema.trials,
        "event": lambda fit: fit.schema.event,
        "estimated alpha": lambda fit: fit.alpha_se is not None,
    }
    for name, fact in facts.items():
        if fact(small) != fact(large):
            raise InputError(f"The fits have different {name} ({fact(small)} and {fact(large)}): {remedy}.")
    for one, other in zip(small.sites, large.sites, strict=True):
        if one.n != other.n:
            cause = f"The fits have different rows ({one.n} and {other.n} at {one.name}), because values are missing"
            raise InputError(f"{cause}: fit both to the rows without missing values.")
    if "random" in (small.site_effects, large.site_effects):
        _check_random(small, large)
    comparable = small.alpha is None and small.site_effects == large.site_effects != "random"
    if comparable and not math.isclose(small.null_deviance, large.null_deviance, rel_tol=SAME):
        nulls = f"{number(small.null_deviance)} and {number(large.null_deviance)}"
        raise InputError(f"The fits have different responses (null deviances {nulls}): {remedy}.")
    if penalised := next((fit for fit in (small, large) if fit.ml is None), None):
        raise InputError(f"{penalised.formula!r} has no maximum-likelihood estimate: compare fits that have one.")
    fixed = {"fixed": {"Intercept"}, "pooled": set(), "random": set()}
    names = [set(fit.terms) - set(fit.aliased) | fixed[fit.site_effects] for fit in (small, large)]
    kinds = (small.site_effects, large.site_effects)
    if extra := sorted(names[0] - names[1] - _spanned(large)) or ([OWN] if kinds == ("fixed", "pooled") else []):
        raise InputError(f"The fits are not nested: the larger one lacks {', '.join(extra)}; {remedy}.")
    if small.parameters == large.parameters:
        raise InputError(f"The fits have the same {small.parameters} parameters: {remedy}.")


def _check_random(small: Figures, large: Figures) -> None:
    """Refuse mixed models whose likelihoods cannot be compared."""
    one, other = small.components, large.components
    if one is None or other is None:
        raise InputError("One of the fits has random effects of sites: its summary has the test of σ = 0.")
    if lost := [term for term in one.terms if term not in other.terms]:
        raise InputError(f"The fits are not nested: the larger one has no random effect of {lost[0]!r}.")
    if (one.restricted or other.restricted) and small.terms != large.terms:
        raise InputError("REML's likelihoods are of different responses where terms differ: fit with estimate='ml'.")


def _spanned(fit: Figures) -> set[str]:
    """Columns of whose splines or polynomials a fit has terms: straight lines are among them."""
    calls = [call for call in fit.schema.parsed.calls.values() if call.transform.several]
    return {call.argument.text for call in calls if getattr(call.transform, "degree", 1) > 0}
