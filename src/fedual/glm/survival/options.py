"""The settings of a survival model: what is refused, and what follows."""

import math
from collections.abc import Sequence
from typing import Any, get_args

from fedual.errors import InputError, hint
from fedual.glm.survival.figures import BaselineKind, Ties, Transform
from fedual.glm.survival.response import is_survival

PIECES, MOST_PIECES = 10, 200
"""Pieces of a common baseline: with ten, standard errors differ from Cox regression's by less than a percent."""
FAMILIES = {"stratified": "cox", "piecewise": "piecewise-exponential"}
BASELINES = {
    "stratified": "each site has a baseline hazard of its own already",
    "piecewise": "all sites have the same baseline hazard",
}


def family(formula: str, family: str, site: str, estimate: str, baseline: str, ties: str, transform: str) -> str:
    """The family of a model; that of a survival model follows from its baseline."""
    for name, value, known in (
        ("baseline", baseline, BaselineKind), ("ties", ties, Ties), ("transform", transform, Transform)
    ):  # fmt: skip
        if value not in get_args(known):
            raise InputError(f"{name} = {value!r}: {hint(value, get_args(known))}")
    if not is_survival(formula):
        if family in FAMILIES.values():
            raise InputError(f"family = {family!r} needs times: write Surv(time, event) ~ … as the formula.")
        for name, value, default in (("baseline", baseline, "stratified"), ("ties", ties, "efron")):
            if value != default:
                raise InputError(f"{name} = {value!r} needs times: write Surv(time, event) ~ …, or leave it out.")
        return family
    found = FAMILIES[baseline]
    if family not in ("gaussian", found):  # gaussian is what those have who gave none
        raise InputError(f"family = {family!r} with a response of Surv(…): leave the family out.")
    if site != "pooled":
        raise InputError(
            f"site = {site!r} with Surv(…), where {BASELINES[baseline]}: leave it out, or choose baseline=."
        )
    if estimate == "variational":
        raise InputError("estimate = 'variational' with Surv(…), which has no quadrature: use estimate='both'.")
    return found


def pieces(given: int | str | Sequence[float]) -> int | tuple[float, ...]:
    """The number of pieces, or the cuts, which may be given as a text such as "90, 365"."""
    found: Any = given
    if isinstance(given, str):
        try:
            numbers = [float(text) for text in given.split(",")]
        except ValueError:
            numbers = []
        found = int(numbers[0]) if len(numbers) == 1 and numbers[0].is_integer() else numbers
    if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= MOST_PIECES:
        return found
    cuts = list(found) if isinstance(found, list | tuple) else []
    if not cuts or not all(isinstance(cut, int | float) and 0 < cut < math.inf for cut in cuts):
        raise InputError(f"pieces = {given!r}: give a number from 1 to {MOST_PIECES}, or the times to cut at.")
    if cuts != sorted(set(cuts)) or len(cuts) >= MOST_PIECES:
        raise InputError(f"pieces = {given!r}: give at most {MOST_PIECES - 1} cuts, each later than the one before.")
    return tuple(map(float, cuts))
