# ruff: noqa: D102 (`expressions.Columns` documents these methods)
"""The design matrix: terms of a formula with a site's values, in chunks of rows.

The columns and their names depend on the formula, the agreed kinds, levels and states only, never on a site's data.
formulaic multiplies factors, and drops a level where the columns would be collinear otherwise.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from formulaic import ModelSpec, SimpleFormula
from formulaic.materializers import NAAction

from fedual.errors import DataError, InputError
from fedual.glm.columns import Kind, levels, numbers
from fedual.glm.expressions import Call, Columns
from fedual.glm.formula import Formula
from fedual.glm.splines import MAX_KNOTS

CHUNK = 16_384
"""Rows at a time: what formulaic makes of them stays small beside the design."""
MAX_COLUMNS = 5_000
"""Of a design: a Hessian has then 200 MB."""
ONE = np.array(1.0)
"""The values of the factor 1, the intercept."""


class Rows:
    """Some rows of a site's table, as expressions see them.

    Args:
        frame: The table.
        places: Which rows.
        site: The site's name.
        kinds: The agreed kind of each column.
        known: The agreed levels of each column that has some.
        states: What the federation measured, by the source of the call.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        places: slice | np.ndarray,
        site: str,
        kinds: Mapping[str, Kind],
        known: Mapping[str, Sequence[str]],
        states: Mapping[str, Any],
    ):
        self.frame, self.places, self.site = frame, places, site
        self.kinds, self.known, self.states = kinds, known, states

    def column(self, name: str) -> pd.Series:
        """A column's values in these rows."""
        return self.frame[name].iloc[self.places]

    def plain(self, name: str) -> Any:
        return pd.Series(self.categories(name)) if self.kinds[name] == "categorical" else self.numbers(name)

    def numbers(self, name: str) -> np.ndarray:
        return numbers(self.column(name))

    def texts(self, name: str) -> np.ndarray:
        codes, found = levels(self.column(name))
        return np.array(found, object)[codes]

    def categories(self, name: str) -> pd.Categorical:
        """A column as the agreed levels `(N,)`; refuse others."""
        codes, found = levels(self.column(name))
        places = {level: i for i, level in enumerate(self.known[name])}
        if any(level not in places for level in found):
            raise DataError(
                f"Site {self.site!r}, column {name!r} holds a level that the federation did not agree on: "
                "correct it, or add it to levels=."
            )
        codes = np.array([places[level] for level in found], int)[codes]
        return pd.Categorical.from_codes(codes, categories=_index(self.known[name]))

    def state(self, call: Call) -> Mapping[str, Any]:
        if call.text not in self.states:
            raise InputError(f"The schema has no state of {call.text!r}: measure it first.")
        return self.states[call.text]


class Example:
    """A row that gives the names of the design's columns before anything else is known."""

    def __init__(self, kinds: Mapping[str, Kind], known: Mapping[str, Sequence[str]]):
        self.kinds, self.known = kinds, known

    plain = Rows.plain

    def numbers(self, name: str) -> np.ndarray:
        return np.array([0.5])

    def texts(self, name: str) -> np.ndarray:
        return np.array([""], object)

    def categories(self, name: str) -> pd.Categorical:
        return pd.Categorical.from_codes([0], categories=_index(self.known[name]))

    def state(self, call: Call) -> None:
        """Nothing is measured."""


def fill(out: np.ndarray, formula: Formula, rows: Columns) -> None:
    """Write the design of some rows to `out` `(N, P)`."""
    values = _values(formula, rows, len(out))
    terms = sorted(formula.terms, key=lambda term: term.degree)  # formulaic's order
    factors = [term.factors[0].expr for term in terms if len(term.factors) == 1]
    arrays = [values.get(factor, ONE) for factor in factors]
    if len(factors) == len(terms) and all(type(array) is np.ndarray and array.ndim < 2 for array in arrays):
        for j, array in enumerate(arrays):  # nothing to multiply or to encode: this is three times as fast
            out[:, j] = array
    else:
        out[:] = _product(formula, values, len(out))


def _values(formula: Formula, rows: Columns, length: int) -> dict[str, Any]:
    """The values of each factor by its source, `(N,)` or several columns."""
    factors = dict.fromkeys(factor.expr for term in formula.terms for factor in term.factors)
    values = {text: formula.expressions[text].value(rows) for text in factors if text in formula.expressions}
    for text, value in values.items():
        if isinstance(value, np.ndarray) and value.ndim == 0:  # a constant such as I(2)
            values[text] = np.full(length, value)
    return values


def _product(formula: Formula, values: Mapping[str, Any], length: int) -> Any:
    """formulaic's model matrix."""
    terms: Any = SimpleFormula(list(formula.terms))
    spec = ModelSpec(terms, output="numpy", na_action=NAAction.IGNORE)
    return spec.get_model_matrix(pd.DataFrame(index=range(length)), context=values)


def names(formula: Formula, kinds: Mapping[str, Kind], known: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The names of the design's columns, whatever the data."""
    size = sum(math.prod(_width(formula, factor.expr, known) for factor in term.factors) for term in formula.terms)
    if size > MAX_COLUMNS:
        raise InputError(f"The design would have up to {size} columns: use at most {MAX_COLUMNS}.")
    example = _product(formula, _values(formula, Example(kinds, known), 1), 1)
    found = tuple(str(name) for name in example.model_spec.column_names)
    if len(set(found)) < len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise InputError(f"The design has two columns {twice!r}: rename a column of the tables.")
    return found


def _width(formula: Formula, factor: str, known: Mapping[str, Sequence[str]]) -> int:
    """How many columns a factor has, at most."""
    if (expression := formula.expressions.get(factor)) is None:
        return 1
    several = any(call.transform.several for call in expression.calls)
    return MAX_KNOTS if several else math.prod(len(known.get(name, "1")) for name, _ in expression.uses)


def _index(known: Sequence[str]) -> pd.Index:
    return pd.Index(list(known), dtype=object)


def chunks(places: np.ndarray) -> Iterator[tuple[slice, slice | np.ndarray]]:
    """Parts of a design's rows, and where they are in the table, given the places of all."""
    for start in range(0, len(places), CHUNK):
        part = places[start : start + CHUNK]
        whole = part[-1] - part[0] + 1 == len(part)  # a slice of a table is a view
        yield slice(start, start + len(part)), slice(part[0], part[-1] + 1) if whole else part
