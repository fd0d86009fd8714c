"""Priors of a regression's coefficients: independent normals, by default in units of the columns' sd."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedual.errors import InputError, hint

INTERCEPT = "Intercept"


@dataclass(frozen=True)
class Prior:
    """Independent normal priors.

    A slope is N(0, (sd · u / sd(x))²) with the sd of its column over all sites; the intercept, at the mean of all
    columns, is N(f(ȳ), (intercept_sd · u)²). The unit u is 1, but the sd of the response with an identity link.

    Args:
        sd: Of a slope; infinity is flat.
        intercept_sd: Of the intercept.
        terms: Priors `term → (mean, sd)` of single slopes in their own units, in the place of the rule.
        site_sd: s of the prior |N(0, (s u)²)| of the sd of sites' random effects, where the posterior integrates it.
    """

    sd: float = 2.5
    intercept_sd: float = 10.0
    terms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    site_sd: float = 0.5

    def __post_init__(self) -> None:
        sds: dict[str, Any] = {"sd": self.sd, "intercept_sd": self.intercept_sd}
        if not (_is_finite(self.site_sd) and self.site_sd > 0):
            raise InputError(f"The prior's site_sd is {self.site_sd!r}: give a positive number, such as 0.5.")
        for term, pair in self.terms.items():
            if not (isinstance(pair, tuple | list) and len(pair) == 2 and _is_finite(pair[0])):
                raise InputError(f"The prior of {term!r} is {pair!r}: give (mean, sd).")
            sds[f"sd of {term!r}"] = pair[1]
        for name, value in sds.items():
            if not isinstance(value, int | float) or not value > 0:
                raise InputError(f"The prior's {name} is {value!r}: give a positive number, or infinity for flat.")

    @property
    def flat(self) -> bool:
        """True if the posterior is the likelihood."""
        return math.isinf(self.sd) and math.isinf(self.intercept_sd) and not self.terms

    def words(self) -> str:
        """The prior in one line."""
        if self.flat:
            return "flat"
        slopes = "flat" if math.isinf(self.sd) else f"N(0, {self.sd:g}/sd(x))"
        own = "".join(f"; {term} ~ N({mean:g}, {sd:g})" for term, (mean, sd) in self.terms.items())
        return f"slopes {slopes}{own}"

    def natural(self, terms: Sequence[str], scale: Tensor, unit: float, centre: float, dim: int) -> Tensor:
        """λ_0 `(P + 1, P)` for standardised columns; entries beyond the terms are flat.

        Args:
            terms: Names of the coefficients.
            scale: Their columns' sd, `(p,)`.
            unit: u.
            centre: f(ȳ), where the intercept's prior is centred.
            dim: P.
        """
        if unknown := [term for term in self.terms if term not in terms or term == INTERCEPT]:
            slopes = [term for term in terms if term != INTERCEPT]
            raise InputError(f"The prior names the slope {unknown[0]!r}: {hint(unknown[0], slopes)}")
        mean, precision = torch.zeros(dim, dtype=scale.dtype), torch.zeros(dim, dtype=scale.dtype)
        for j, term in enumerate(terms):
            at, sd = 0.0, self.sd * unit
            if term == INTERCEPT:
                at, sd = centre, self.intercept_sd * unit
            elif term in self.terms:
                at, sd = (value * float(scale[j]) for value in self.terms[term])
            mean[j], precision[j] = at, sd**-2
        return torch.cat([(precision * mean)[None], -torch.diag(precision) / 2])

    def to_dict(self) -> dict[str, Any]:
        """JSON values; infinity is None."""
        plain = lambda value: None if math.isinf(value) else float(value)
        terms = {term: [float(mean), plain(sd)] for term, (mean, sd) in self.terms.items()}
        return {"sd": plain(self.sd), "intercept_sd": plain(self.intercept_sd), "terms": terms, "site_sd": self.site_sd}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Prior":
        """The inverse of `to_dict`."""
        number = lambda value: math.inf if value is None else float(value)
        terms = {term: (float(mean), number(sd)) for term, (mean, sd) in values["terms"].items()}
        return cls(number(values["sd"]), number(values["intercept_sd"]), terms, values.get("site_sd", cls.site_sd))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


FLAT = Prior(math.inf, math.inf)
"""No prior: maximum likelihood alone."""
PriorLike = Prior | str | float | Mapping[str, tuple[float, float]]
"""A prior as a user writes it: also "default", "flat", the slopes' sd, or `term → (mean, sd)`."""


def prior(given: PriorLike) -> Prior:
    """The prior that a user means."""
    if isinstance(given, Prior):
        return given
    if isinstance(given, Mapping):
        return Prior(terms=dict(given))
    if given in ("default", "flat"):
        return Prior() if given == "default" else FLAT
    try:
        sd = float(given)
    except (TypeError, ValueError):
        raise InputError(f"prior = {given!r}: give 'default', 'flat', the sd of slopes, or a Prior.") from None
    return Prior(sd)
