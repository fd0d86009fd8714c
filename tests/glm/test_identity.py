"""Rows are the same rows whatever columns a fit uses, and wherever the table comes from."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedual.glm.identity import row_digests


def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "age": [41.0, 52.5, np.nan, 41.0],
            "n": [1, 0, 2, 1],
            "sex": ["f", "m", None, "f"],
            "ill": [True, False, True, True],
        }
    )


def test_equal_rows_and_only_these_are_equal():
    digests = row_digests(frame())
    assert digests.dtype == np.uint64
    assert digests[0] == digests[3]
    assert len({*digests.tolist()}) == 3


@pytest.mark.parametrize("name", list(frame().columns))
def test_every_column_counts(name: str):
    changed = frame()
    changed.loc[0, name] = changed.loc[1, name]
    assert (row_digests(changed) == row_digests(frame())).tolist() == [False, True, True, True]


def test_values_count_in_their_own_column():
    ab, ba = pd.DataFrame({"a": [1.0], "b": [2.0]}), pd.DataFrame({"a": [2.0], "b": [1.0]})
    assert row_digests(ab)[0] != row_digests(ba)[0]


def test_the_order_of_rows_and_columns_does_not_matter():
    turned = frame().iloc[::-1, ::-1]
    assert (row_digests(turned)[::-1] == row_digests(frame())).all()


def test_a_csv_file_and_other_types_of_the_same_values_have_the_same_rows(tmp_path: Path):
    frame().to_csv(tmp_path / "a.csv", index=False)
    assert (row_digests(pd.read_csv(tmp_path / "a.csv")) == row_digests(frame())).all()
    other = frame().astype({"n": "Int64", "sex": "category", "ill": float, "age": "Float64"})
    assert (row_digests(other) == row_digests(frame())).all()
    assert (row_digests(pd.DataFrame({"x": [-0.0]})) == row_digests(pd.DataFrame({"x": [0]}))).all()


def test_a_row_with_a_missing_value_does_not_change_the_others():
    """Columns of integers, booleans and numbers have another type where a value is missing, or a text."""
    for row in ({"age": [1.0]}, {"age": ["unknown"], "n": ["many"]}):
        more = pd.concat([frame(), pd.DataFrame(row)], ignore_index=True)
        assert (row_digests(more)[:4] == row_digests(frame())).all()
    assert (row_digests(frame().astype({"n": str}))[:4] == row_digests(frame())).all()


def test_columns_of_any_content_are_hashed():
    dates = pd.to_datetime(["2026-01-01", "2026-01-01", None])
    odd = pd.DataFrame({"dates": dates, "lists": [[1], [1], [2]], "complex": [1j, 1j, 2j], 3: [0, 0, 1]})
    assert len({*row_digests(odd).tolist()}) == 2


def test_a_table_without_rows_or_columns():
    assert len(row_digests(pd.DataFrame({"x": []}))) == 0
    assert row_digests(pd.DataFrame(index=range(2))).tolist() == [0, 0]
