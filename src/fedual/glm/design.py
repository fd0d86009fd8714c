"""One site's numbers for a fit: the design matrix, the response and what goes with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.glm import matrix
from fedual.glm.agreement import Schema
from fedual.glm.columns import complete, inspect, levels, refuse_row, require_rows
from fedual.glm.expressions import Expression, merged
from fedual.glm.formula import Formula
from fedual.glm.identity import row_digests
from fedual.glm.matrix import Rows
from fedual.glm.survival.times import Times, times

DEFAULTS = {"y": np.nan, "weights": 1.0, "offset": 0.0, "trials": 1.0}


@dataclass(frozen=True, eq=False)
class Design:
    """A site's complete rows; all tensors are float64.

    Args:
        x: The design `(N, P)`; its columns are `Schema.terms`.
        y: The response `(N,)`; NaN where it was not asked for.
        weights: Weights `(N,)`, 1 by default.
        offset: What is added to the predictor `(N,)`, 0 by default.
        trials: Numbers of trials `(N,)`, 1 by default.
        kept: The rows' places in the table `(N,)`, counted from 0.
        table: The site's table.
        missing: How many values each column misses; rows that miss one are left out.
        times: Of a survival model, whose response is 1 for an event.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    offset: Tensor
    trials: Tensor
    kept: np.ndarray
    table: pd.DataFrame
    missing: Mapping[str, int]
    times: Times | None = None

    @property
    def row_digests(self) -> np.ndarray:
        """A hash of all values of each row in the table `(N,)`, uint64, whatever the fit needs."""
        return row_digests(self.table)[self.kept]


def design(frame: pd.DataFrame, site: str, schema: Schema, response: bool = True) -> Design:
    """A site's numbers for a fit, or `DataError` that names the site, the column and the first row at fault.

    Args:
        frame: The site's table.
        site: Its name, for errors.
        schema: What all sites agreed on.
        response: Whether the response is needed. If not, as for predictions, the table may lack weights and trials too,
            and may have no complete row.
    """
    formula, roles = schema.parsed, schema.columns.expressions
    if matrix.names(formula, schema.kinds, schema.levels) != tuple(schema.terms):
        raise InputError("The schema's columns are not those of its formula: run one version of fedual everywhere.")
    strata = {text for text, one in formula.expressions.items() if {use for _, use in one.uses} == {"strata"}}
    beside = {formula.response, *strata}
    needed = [one for text, one in formula.expressions.items() if response or text not in beside]
    if not response:
        roles = {
            role: one for role, one in roles.items() if role == "offset" or merged([one]).keys() <= {*frame.columns}
        }
    kinds = inspect(frame, site, [*needed, *roles.values()])
    for name, kind in kinds.items():
        if kind != schema.kinds[name] and formula.uses.get(name) != {"levels"}:
            raise DataError(
                f"Site {site!r}, column {name!r} is {kind}, not {schema.kinds[name]} as agreed: correct it."
            )
    kept, missing = complete(frame, site, kinds)
    if response:
        require_rows(site, kept, missing)
    places = np.flatnonzero(kept)
    x = np.empty((len(places), len(schema.terms)))
    arrays = {name: np.full(len(places), value) for name, value in DEFAULTS.items()}
    for part, where in matrix.chunks(places):
        rows = Rows(frame, where, site, schema.kinds, schema.levels, schema.states)
        matrix.fill(x[part], formula, rows)
        _require_finite(x[part], schema.terms, site, places[part])
        for role, expression in roles.items():
            arrays[role][part] = expression.value(rows)
        if response:
            arrays["y"][part] = _response(rows, formula, schema)
    _check(arrays, roles, formula if response else None, site, places)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    found = None
    if response and formula.survival is not None:
        found = times(Rows(frame, places, site, schema.kinds, schema.levels, schema.states), formula, places)
    return Design(torch.from_numpy(x), **tensors, kept=places, missing=missing, table=frame, times=found)


def _require_finite(x: np.ndarray, terms: Sequence[str], site: str, places: np.ndarray) -> None:
    if not (finite := np.isfinite(x)).all():
        j = int(finite.all(0).argmin())
        remedy = "change the term, or leave the row out"
        refuse_row(site, f"the term {terms[j]!r} is not finite", ~finite[:, j], places, remedy)


def _response(rows: Rows, formula: Formula, schema: Schema) -> np.ndarray:
    name = formula.plain_response
    if schema.event is None or name is None:
        return formula.expressions[formula.response].value(rows)
    if name in schema.levels:
        rows.categories(name)  # refuses other levels
    codes, found = levels(rows.column(name))
    return np.array([level == schema.event for level in found], float)[codes]


def _check(
    arrays: Mapping[str, np.ndarray],
    roles: Mapping[str, Expression],
    formula: Formula | None,
    site: str,
    places: np.ndarray,
) -> None:
    """Refuse weights and trials that are not positive, successes beyond 0 … trials, and what is not finite."""
    remedy = "correct it, or leave the row out"
    for role, expression in roles.items():
        bad, sign = ~np.isfinite(arrays[role]), ""
        if role != "offset":
            bad, sign = bad | (arrays[role] <= 0), "positive and "
        refuse_row(site, f"{role} {expression.text!r} must be {sign}finite", bad, places, remedy)
    if formula is not None:
        refuse_row(site, f"the response {formula.response!r} is not finite", ~np.isfinite(arrays["y"]), places, remedy)
        if "trials" in roles:
            response = f"the response {formula.response!r}"
            refuse_row(
                site, f"{response} has more successes than trials", arrays["y"] > arrays["trials"], places, remedy
            )
            refuse_row(site, f"{response} is negative", arrays["y"] < 0, places, remedy)
