"""What a fit knows of a survival model besides its coefficients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

BaselineKind = Literal["stratified", "piecewise"]
Ties = Literal["efron", "breslow"]
Transform = Literal["identity", "log", "none"]


@dataclass(frozen=True)
class Test:
    """χ² with its degrees of freedom and p-value."""

    chi2: float
    df: int
    p: float


@dataclass(frozen=True, eq=False)
class Survival:
    """The figures of a survival model.

    Args:
        baseline: "stratified" if each site, and each of its strata, has a baseline hazard of its own, which stays
            there; "piecewise" if all have the same, constant in pieces.
        ties: How tied times count in the partial likelihood.
        events: Rows with an event.
        strata: The columns of `strata(…)`.
        null_score: The score test of all coefficients at 0.
        concordance: Weights of the pairs within sites and strata that are concordant, discordant and tied.
        means: Means of the design's columns over all rows: a hazard ratio is relative to them, `(P,)`.
        transform: g(t) of the test of proportional hazards.
        trends: The tests of each term, in order, and of all together; none if they were not asked for.
        cuts: Where the pieces of a common baseline end, but for the last one.
        log_hazards: Of each piece, at `means`, `(J,)`.
        joint: The covariance of the coefficients and the log hazards, `(P + J, P + J)`.
        events_by_piece: Rows with an event, weighted, `(J,)`.
    """

    baseline: BaselineKind
    ties: Ties
    events: int
    strata: tuple[str, ...]
    null_score: Test
    concordance: tuple[float, float, float]
    means: np.ndarray
    transform: Transform
    trends: tuple[Test, ...] = ()
    cuts: tuple[float, ...] = ()
    log_hazards: np.ndarray | None = None
    joint: np.ndarray | None = None
    events_by_piece: np.ndarray | None = None

    @property
    def c(self) -> float:
        """Harrell's C: half of the pairs with equal predictors count; NaN without a pair."""
        concordant, _, tied = self.concordance
        pairs = sum(self.concordance)
        return (concordant + tied / 2) / pairs if pairs else math.nan

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Survival":
        """From JSON values, as `export.save` writes them."""
        array = lambda value: None if value is None else np.array(value, dtype=float)
        arrays = {name: array(values[name]) for name in ("means", "log_hazards", "joint", "events_by_piece")}
        tests = {"null_score": Test(**values["null_score"]), "trends": tuple(Test(**one) for one in values["trends"])}
        tuples = {name: tuple(values[name]) for name in ("strata", "concordance", "cuts")}
        return cls(**{**values, **arrays, **tests, **tuples})


def piece_names(cuts: Sequence[float]) -> list[str]:
    """The pieces of time, in words."""
    ends = [0.0, *cuts]
    return [f"({low:g}, {high:g}]" for low, high in pairwise(ends)] + [f"({ends[-1]:g}, ∞)"]
