"""A site's columns as the formula needs them: as numbers, as names of levels, or missing."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from fedual.data.tables import names, number
from fedual.errors import DataError, hint
from fedual.glm.expressions import Expression, merged

Kind = Literal["numeric", "boolean", "categorical"]
COMMA = re.compile(r"\s*[+-]?\d+,\d+\s*")
_NUMBERS = ("integer", "floating", "mixed-integer-float", "decimal")


def column(frame: pd.DataFrame, site: str, name: str) -> pd.Series:
    """A column by name, or `DataError` with the site's nearest name."""
    if name not in frame.columns:
        near = hint(name, list(map(str, frame.columns)))  # never the list of all: a server would learn it
        remedy = near if near.startswith("did you mean") else "correct the formula, or the table there."
        raise DataError(f"Site {site!r} has no column {name!r}: {remedy}")
    found = frame[name]
    assert isinstance(found, pd.Series)  # `tables.read` refuses two columns of a name
    return found


def kind(values: pd.Series, site: str) -> Kind:
    """Whether a column holds numbers, True and False, or names of levels."""
    if isinstance(values.dtype, pd.CategoricalDtype | pd.StringDtype):
        return "categorical"
    if pd.api.types.is_bool_dtype(values.dtype):
        return "boolean"
    if pd.api.types.is_numeric_dtype(values.dtype) and not pd.api.types.is_complex_dtype(values.dtype):
        return "numeric"
    if values.dtype == object:
        inferred = pd.api.types.infer_dtype(values, skipna=True)
        if inferred in _NUMBERS:
            return "numeric"
        if inferred == "boolean":
            return "boolean"
        if all(isinstance(one, str | int | float | np.number) for one in values[values.notna()]):
            return "categorical"
    raise DataError(
        f"Site {site!r}, column {values.name!r} holds values of type {values.dtype}: give numbers, texts or booleans."
    )


def numbers(values: pd.Series) -> np.ndarray:
    """A numeric or boolean column as float64 `(N,)`, without a copy if it is that already; missing values are NaN."""
    if isinstance(values.dtype, np.dtype) and values.dtype.kind in "fiub":
        return values.to_numpy(np.float64)
    return values.to_numpy(np.float64, na_value=np.nan)


def levels(values: pd.Series) -> tuple[np.ndarray, list[str]]:
    """The codes `(N,)` of a column's values, −1 where missing, and the names of its levels in order of appearance.

    The numbers 1 and 1.0 and the text "1" are one level, "007" is another than "7".
    """
    codes, unique = pd.factorize(values, use_na_sentinel=True)
    spelled = names(np.array(list(unique), object), f"Column {values.name!r}")
    found = {str(name): None for name in spelled}
    index = {name: i for i, name in enumerate(found)}
    places = np.array([*(index[str(name)] for name in spelled), -1])
    return places[codes], list(found)


def spelled(values: Iterable[Any]) -> tuple[str, ...]:
    """Levels that an analyst gave, as names."""
    return tuple(map(str, names(np.array(list(values), object), "levels=")))


def counts(values: pd.Series, kept: np.ndarray) -> dict[str, int]:
    """The number of kept rows of each level that has some."""
    codes, found = levels(values)
    each = np.bincount(codes[kept], minlength=len(found))
    return {name: int(count) for name, count in zip(found, each, strict=True) if count}


def is_binary(values: pd.Series) -> bool:
    """Whether a column of numbers or booleans holds 0 and 1 only."""
    array = numbers(values)
    return bool(((array == 0) | (array == 1) | np.isnan(array)).all())


def inspect(frame: pd.DataFrame, site: str, expressions: Sequence[Expression]) -> dict[str, Kind]:
    """The kinds of the columns that expressions need; refuse those that are missing, or cannot be used so."""
    uses = merged(expressions)
    why = {(name, use): one.text for one in expressions for name, use in one.uses}
    kinds: dict[str, Kind] = {}
    for name in uses:
        values = column(frame, site, name)
        kinds[name] = kind(values, site)
        if kinds[name] == "categorical" and not uses[name] <= {"levels", "text", "event", "strata"}:
            _check_texts(values, site, why.get((name, "number"), ""))
        elif kinds[name] != "categorical" and "text" in uses[name]:
            raise DataError(
                f"Site {site!r}, column {name!r} holds no texts, but {why[name, 'text']} compares it with one: "
                "compare with a number."
            )
    return kinds


def _check_texts(values: pd.Series, site: str, why: str) -> None:
    """Refuse texts if `why` needs numbers, if some of them are numbers, or if they have decimal commas."""
    codes, found = levels(values)
    odd = np.array([math.isnan(number(text)) for text in found], bool)
    commas = odd.any() and all(COMMA.fullmatch(text) for text, is_odd in zip(found, odd, strict=True) if is_odd)
    if not (why or commas or not odd.all()):
        return
    row = int(np.append(odd, False)[codes].argmax()) + 1
    where = f"Site {site!r}, column {values.name!r}" + (f", row {row}" if odd.any() else "")
    factor = f", or use C({values.name}) if it names levels"
    correct = "correct it, or leave it empty if it is missing"
    if commas:
        raise DataError(f"{where}: a number has a decimal comma: write a point.")
    if not odd.any():
        how = "holds numbers as texts: convert it to numbers, without zeros in front"
        raise DataError(f"{where} {how}{'' if why else factor}.")
    cause, remedy = (f"{why!r} needs numbers", "") if why else ("other rows hold numbers", factor)
    raise DataError(f"{where}: a text, but {cause}: {correct}{remedy}.")


def complete(frame: pd.DataFrame, site: str, kinds: Mapping[str, Kind]) -> tuple[np.ndarray, dict[str, int]]:
    """Which rows have no missing value `(N,)`, and how many values each column misses; refuse infinite ones."""
    kept, missing = np.ones(len(frame), bool), {}
    for name, kind in kinds.items():
        if kind == "numeric":
            array = numbers(column(frame, site, name))
            present = np.isfinite(array)
            if not present.all() and (infinite := np.isinf(array)).any():
                raise DataError(
                    f"Site {site!r}, column {name!r}, row {infinite.argmax() + 1}: an infinite value: "
                    "correct it, or leave it empty."
                )
        else:
            present = frame[name].notna().to_numpy()
        if absent := len(frame) - int(np.count_nonzero(present)):
            missing[name] = absent
            kept &= present
    return kept, missing


def require_rows(site: str, kept: np.ndarray, missing: Mapping[str, int]) -> None:
    """Raise `DataError` if no row is complete."""
    if kept.any():
        return
    if not len(kept):
        raise DataError(f"Site {site!r} has no row: leave the site out.")
    worst = max(missing, key=lambda name: missing[name])
    many = "Every row" if missing[worst] == len(kept) else "Every row misses something, and most"
    raise DataError(f"Site {site!r} has no complete row ({many} misses {worst!r}): leave the site or the column out.")


def refuse_row(site: str, what: str, bad: Any, places: np.ndarray, remedy: str) -> None:
    """Raise `DataError` with the first of the marked rows `(N,)`; `places` are where they are in the table."""
    if (marked := np.asarray(bad)).any():
        raise DataError(f"Site {site!r}, row {places[int(marked.argmax())] + 1}: {what}: {remedy}.")
