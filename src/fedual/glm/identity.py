"""Which row of a site's table is which, whatever columns a fit uses: by a hash of all of its values.

Two fits can be subtracted where their rows differ by a few. A fit with one more column may lack the rows in which this
column is missing; a hash of the columns that a fit uses would differ for all rows and hide that.
"""

from typing import Any

import numpy as np
import pandas as pd
import pandas.util
from numpy.typing import NDArray

hash_array: Any = pandas.util.hash_array  # an `object` to its stubs

MIX = np.uint64(0x9E3779B97F4A7C15)
"""The multiplier that makes a digest depend on which column has a value: 2⁶⁴ over the golden ratio, odd."""


def row_digests(frame: pd.DataFrame) -> NDArray[np.uint64]:
    """A hash of each row `(N,)`, the same in every process, for every order of the columns, and for 1, "1" and True."""
    total, names = np.zeros(len(frame), np.uint64), [str(name) for name in frame.columns]
    for name in sorted(names):
        total = total * MIX + _hashed(frame.iloc[:, names.index(name)])
    return total


def _hashed(values: pd.Series) -> NDArray[np.uint64]:
    if pd.api.types.is_numeric_dtype(values.dtype) and not pd.api.types.is_complex_dtype(values.dtype):
        return _of_numbers(values.to_numpy(np.float64, na_value=np.nan))
    try:
        codes, levels = pd.factorize(values)  # a missing value has the code −1
    except TypeError:  # a column of lists
        codes, levels = pd.factorize(values.map(str))
    numbers = np.array([*map(_number, levels), np.nan])
    texts = np.array([*map(str, levels), ""], object)
    hashed = hash_array(texts, categorize=False)
    return np.where(np.isnan(numbers) & (texts != ""), hashed, _of_numbers(numbers))[codes]


def _of_numbers(numbers: NDArray[np.float64]) -> NDArray[np.uint64]:
    return hash_array(np.where(np.isnan(numbers), np.nan, numbers + 0.0))  # one NaN, and no −0


def _number(level: Any) -> float:
    """A level of a column of texts as a number: the column had another type before a text or a gap came in."""
    try:
        return float(level)
    except (ValueError, TypeError):
        return np.nan
