"""Sites' tables: from files, frames, columns and arrays to data frames; and what cannot be read."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedual.errors import DataError, InputError
from fedual.glm.tables import read, sources

FRAME = pd.DataFrame({"x": [1.0, 2.5], "sex": ["m", "f"]})


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "north.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


class TestSources:
    def test_a_mapping_names_them(self):
        assert list(sources({"b": FRAME, "a": "x.csv"})) == ["b", "a"]

    def test_files_name_themselves(self):
        assert list(sources(["data/north.csv", Path("south.parquet"), FRAME])) == ["north", "south", "site 3"]

    def test_functions_mappings_and_pairs(self):
        found = sources([lambda: FRAME, {"x": [1.0]}, (np.ones((2, 1)), np.ones(2))])
        assert list(found) == ["site 1", "site 2", "site 3"]

    @pytest.mark.parametrize(
        ("sites", "message"),
        [
            ([], "empty"),
            ({}, "empty"),
            (FRAME, "is a DataFrame: give a list"),
            ("north.csv", "is a str: give a list"),
            (3, "is a int"),
            (["a/north.csv", "b/north.csv"], "Two sites have the name 'north'"),
            ({"": FRAME}, "no name of a site"),
            ({3: FRAME}, "no name of a site"),
            ({"x": np.ones(3), "y": np.ones(3)}, "Site 'x' is a ndarray: give a data frame"),
            ([3.5], "Site 'site 1' is a float"),
        ],
    )
    def test_others_are_refused(self, sites, message):
        with pytest.raises(InputError, match=message):
            sources(sites)


class TestCSV:
    def test_types_and_missing_values(self, tmp_path):
        text = "\ufeffage, sex ,smoker,note\n1,m ,True,a\n2.5, f,False,NA\n,NA,,\nNaN,N/A,True,null\nnan,,False,nan\n"
        frame = read(written(tmp_path, text), "north")
        assert list(frame) == ["age", "sex", "smoker", "note"]
        np.testing.assert_array_equal(frame["age"], [1, 2.5, np.nan, np.nan, np.nan])
        assert frame["sex"].tolist()[:2] == ["m", "f"]
        assert frame["smoker"].tolist()[:2] == [True, False]
        assert frame.isna().sum().tolist() == [3, 3, 1, 4]

    def test_quotes_commas_and_blank_lines(self, tmp_path):
        frame = read(written(tmp_path, 'x,place\n1,"a, b"\n\n2,"c ""d"""\n'), "north")
        assert frame["place"].tolist() == ["a, b", 'c "d"']

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("x,z\n1,2\n3\n", "row 2 has 1 cells under 2 names"),
            ("x,z\n1,2,3\n", "row 1 has 3 cells under 2 names"),
            ('x,z\n1,"a"b\n', "no CSV in UTF-8"),
            ('x,z\n1,"ab\n', "no CSV in UTF-8"),
            (b"x,z\n1,caf\xe9\n", "no CSV in UTF-8"),
            ("x,x\n1,2\n", "two columns 'x'"),
            ("x,\n1,2\n", "without a name"),
            ("x;z\n1;2\n", "';' between its cells: save it with commas"),
            ("x\tz\n1\t2\n", "between its cells"),
            ("x,z\n", "has no row"),
            ("", "is empty"),
        ],
    )
    def test_damaged_files(self, tmp_path, text, message):
        with pytest.raises(DataError, match=message) as caught:
            read(written(tmp_path, text), "north")
        assert "'north'" in str(caught.value)

    @pytest.mark.parametrize("name", ["absent.csv", ".", "table.xlsx"])
    def test_other_paths(self, tmp_path, name):
        with pytest.raises(DataError, match="'north'"):
            read(tmp_path / name, "north")

    def test_a_folder(self, tmp_path):
        (tmp_path / "table.csv").mkdir()
        with pytest.raises(DataError, match="cannot be read"):
            read(tmp_path / "table.csv", "north")


class TestParquet:
    def test_the_same_table(self, tmp_path):
        frame = pd.DataFrame(
            {
                "x": [1.0, np.nan],
                "n": pd.array([1, None], "Int64"),
                "sex": pd.Categorical(["m", None]),
                "b": [True, False],
            }
        )
        frame.to_parquet(tmp_path / "t.parquet", index=False)
        found = read(str(tmp_path / "t.parquet"), "a")
        assert found.isna().sum().tolist() == [1, 1, 1, 0]
        assert found["sex"].tolist()[0] == "m"
        assert found["b"].tolist() == [True, False]

    def test_damaged(self, tmp_path):
        FRAME.to_parquet(tmp_path / "t.parquet")
        content = (tmp_path / "t.parquet").read_bytes()
        (tmp_path / "t.parquet").write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match=r"'a': .*t\.parquet is damaged"):
            read(tmp_path / "t.parquet", "a")


class TestArrays:
    def test_names(self):
        frame = read((np.arange(6.0).reshape(3, 2), np.ones(3)), "a")
        assert list(frame) == ["x1", "x2", "y"]
        assert frame["x2"].tolist() == [1, 3, 5]

    def test_one_column_lists_tensors_and_frames(self):
        assert list(read(([1.0, 2.0], [0, 1]), "a")) == ["x1", "y"]
        assert read((torch.ones(2, 2), torch.zeros(2)), "a")["x2"].tolist() == [1, 1]
        frame = read((FRAME, pd.Series([0, 1], index=[7, 8], name="died")), "a")
        assert frame["died"].tolist() == [0, 1]
        assert list(FRAME) == ["x", "sex"]

    def test_nothing_is_copied(self):
        x = np.ones((100, 3))
        assert np.shares_memory(read((x, np.zeros(100)), "a")["x2"].to_numpy(), x)
        assert np.shares_memory(read({"x": x[:, 0]}, "a")["x"].to_numpy(), x)
        assert read(FRAME, "a") is FRAME

    def test_memory_maps_stay_on_disk(self, tmp_path):
        np.save(tmp_path / "x.npy", np.ones((100, 3)))
        x = np.load(tmp_path / "x.npy", mmap_mode="r")
        assert np.shares_memory(read((x, np.zeros(100)), "a")["x3"].to_numpy(), x)

    def test_columns(self):
        frame = read(
            {"x": [1, 2], "s": pd.Series(["m", None], index=[5, 6]), "m": np.ma.masked_equal([1.0, 2.0], 2.0)}, "a"
        )
        assert frame.isna().sum().tolist() == [0, 1, 1]

    def test_functions(self):
        assert read(lambda: FRAME, "a") is FRAME
        assert list(read(lambda: (np.ones((2, 1)), np.ones(2)), "a")) == ["x1", "y"]

    def test_names_that_are_numbers(self):
        assert list(read(pd.DataFrame([[1.0, 2.0]]), "a")) == ["0", "1"]

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ((np.ones((3, 2)), np.ones(2)), r"X is \(3, 2\) and y is \(2,\)"),
            ((np.ones((3, 2, 2)), np.ones(3)), "X is"),
            ((np.ones((3, 2)),), "give \\(X, y\\)"),
            ((pd.DataFrame({"y": [1.0]}), [1.0]), "X has a column 'y'"),
            ((object(), [1.0]), "X is no array"),
            ({"x": [1.0], "z": [1.0, 2.0]}, "column 'z' has 2 rows, others have 1"),
            ({"x": np.ones((3, 2))}, "column 'x' has 2 axes"),
            ({"x": 3.0}, "column 'x' has 0 axes"),
            (pd.DataFrame([[1, 2]], columns=["x", "x"]), "two columns 'x'"),
            (pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", 1), ("a", 2)])), "several levels"),
            (pd.DataFrame({"x": []}), "has no row"),
            (lambda: 1 / 0, "its function failed \\(ZeroDivisionError"),
            (lambda: 3, "is a int"),
        ],
    )
    def test_others_are_refused(self, source, message):
        with pytest.raises(DataError, match=message) as caught:
            read(source, "a")
        assert "Site 'a'" in str(caught.value)


def test_the_labels_of_rows_in_a_parquet_file_are_no_column(tmp_path):
    """pandas stores them where the rows are not in order; a dot in the formula would take them for a variable."""
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0]}, index=[2, 0, 1])
    frame.to_parquet(tmp_path / "north.parquet")
    assert list(read(tmp_path / "north.parquet", "north").columns) == ["x"]
