"""What is wrong with a user's scenario or files is said in one sentence that names it."""

import re
from pathlib import Path

import numpy as np
import pytest
from own_files import EVEN, chosen, patients, scenario, write

from fedual.errors import DataError, FedualError, InputError
from fedual.scenarios import load
from fedual.scenarios.federation import materialise

FILE = 'file = "all.csv"\ntarget = "label"\n'
SITES = 'kind = "sites"'


@pytest.mark.parametrize(
    ("data", "split", "message"),
    [
        ('name = "digits"\nfile = "all.csv"', EVEN, r"\[data\] has name and file: give one of them"),
        ('file = "all.csv"\nsites = ["a.csv"]', EVEN, r"\[data\] has file and sites: give one"),
        ('name = "digits"\ntarget = "label"', EVEN, "data.target is for files of your own, not for digits"),
        ('file = "all.csv"\ntest_fraction = 0.2', EVEN, r"target is missing from \[data\]: name the column"),
        ('file = "all.npz"\ntarget = "y"', EVEN, "data.target: an .npz file has arrays x and y"),
        (FILE + 'tset = "a.csv"', EVEN, r"unknown setting of \[data\] 'tset': did you mean 'test'"),
        (FILE + "test = 3", EVEN, "test = 3: it must be a text"),
        (FILE + 'drop = "id"', EVEN, "drop = 'id': it must be a list"),
        (FILE + "drop = [3]", EVEN, r"data.drop = \[3\]: it must be a list of texts"),
        (FILE + 'standardise = "yes"', EVEN, "standardise = 'yes': it must be true or false"),
        (FILE + 'test = "a.csv"\ntest_fraction = 0.2', EVEN, "has test and test_fraction: give one"),
        (FILE + "scale = 2\nstandardise = true", EVEN, "has scale and standardise: give one"),
        (FILE + "scale = 0", EVEN, "data.scale = 0: it must be above 0"),
        (FILE + "test_fraction = 1.0", EVEN, "data.test_fraction = 1.0: it must be above 0 and below 1"),
        ('sites = []\ntarget = "label"', SITES, r"data.sites = \[\]: it must be a list of texts"),
        ('sites = 3\ntarget = "label"', SITES, "data.sites = 3: it must be a list of texts"),
        (FILE, SITES, 'data.sites and split.kind = "sites" need each other'),
        ('sites = ["a.csv"]\ntarget = "label"', EVEN, 'data.sites and split.kind = "sites" need each other'),
        (FILE, 'kind = "homogeneous"', r"clients is missing from \[split\]: a homogeneous split has one"),
        (FILE, 'kind = "column"', r"column is missing from \[split\]"),
        (FILE, 'kind = "column"\ncolumn = "x"\nclients = 3', "a column split has no clients: leave it out"),
        ('file = "all.npz"', 'kind = "column"\ncolumn = "x"', "split.column needs data.file to be a .csv or .parquet"),
        ('name = "digits"', 'kind = "column"\ncolumn = "x"', "split.column needs data.file"),
        ("fraction = 0.5", EVEN, r"name is missing from \[data\] \(or file, sites\)"),
    ],
)
def test_a_scenario_that_says_too_much_or_too_little(tmp_path: Path, data: str, split: str, message: str):
    with pytest.raises(InputError, match=message):
        load(scenario(tmp_path, data, split))


def refused(folder: Path, data: str, split: str = EVEN, train: str = "") -> str:
    """The one sentence about files that cannot be used."""
    with pytest.raises((InputError, DataError)) as caught:
        materialise(load(scenario(folder, data, split, train=train)), 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,label\n1,x\n,y\n", "all.csv, column 'a', row 2: a value is missing"),
        ("a,label\n1,x\nNA,y\n", "all.csv, column 'a', row 2: a value is missing"),
        ("a,label\n1,x\nnan,y\n", "all.csv, column 'a', row 2: a value is missing"),
        ("a,label\n1,x\n2, \n", "all.csv, column 'label', row 2: a value is missing"),
        ("a,label\n1,x\ninf,y\n", "all.csv, column 'a', row 2: a value is infinite"),
        ("a,label\n1,x\nabc,y\n", "column 'a', row 2: 'abc' is not a number, but others of this column are"),
        ("a,label\n1_0,x\n2,y\n", "column 'a', row 1: '1_0' is not a number"),
        ("a,lable\n1,x\n2,y\n", "has no column 'label': did you mean 'lable'"),
        ("a,label\n1,x\n2,x\n", "column 'label': there is one class only, 'x'"),
        (
            "a,label\n1,0.5\n2,1.5\n",
            "row 1: '0.5' is no class: give names or whole numbers, or set train.loss = \"mse\"",
        ),
        ("label\nx\ny\n", "has no column but the target"),
        ("a,label\n", "all.csv has no rows"),
        ("", "all.csv has no rows"),
        ("a,a,label\n1,2,x\n", "has the column name 'a' twice"),
        ("a,,label\n1,2,x\n", r"has the column name '' \(empty\)"),
        ("a,label\n1,x\n2,y,3\n", "row 2 has 3 cells under 2 names"),
        ('a,label\n1,"x\n', "is no CSV in UTF-8"),
        ("a,label\n1,\udcff\n", "is no CSV in UTF-8"),
        (
            "a,label\n" + "".join(f"n{i},{'xy'[i % 2]}\n" for i in range(250)),
            "holds 12[4-6] different texts, more than 100",
        ),
    ],
)
def test_a_csv_that_cannot_be_used(tmp_path: Path, text: str, message: str):
    (tmp_path / "all.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert re.search(message, refused(tmp_path, FILE + "test_fraction = 0.5"))


def test_a_target_that_is_no_number(tmp_path: Path):
    write(tmp_path / "all.csv", chosen(patients(), "age", "label"))
    told = refused(tmp_path, FILE + "test_fraction = 0.2", train='loss = "mse"')
    assert "column 'label', row 1: '" in told
    assert "is not a number: a regression needs numbers" in told


class TestSites:
    """Files that do not go together."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("a", "b", "test"):
            write(tmp_path / f"{name}.csv", chosen(patients(), "age", "dose", "label"))
        return tmp_path

    TOLD = 'sites = ["a.csv", "b.csv"]\ntarget = "label"\ntest = "test.csv"'

    def test_all_is_well(self, folder: Path):
        assert len(materialise(load(scenario(folder, self.TOLD, SITES)), 0).clients) == 2

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            (("age", "label"), "b.csv has no column 'dose', but "),
            (("age", "dose", "days", "label"), "a.csv has no column 'days', but "),
            (("age", "dose"), "b.csv has no column 'label'"),
        ],
    )
    def test_different_columns(self, folder: Path, columns: tuple[str, ...], message: str):
        write(folder / "b.csv", chosen(patients(), *columns))
        assert message in refused(folder, self.TOLD, SITES)

    def test_texts_here_and_numbers_there(self, folder: Path):
        write(folder / "b.csv", {"age": ["old", "young"], "dose": [1, 2], "label": ["mild", "none"]})
        told = refused(folder, self.TOLD, SITES)
        assert told.startswith("Column 'age' holds numbers in ")
        assert "b.csv" in told

    def test_a_test_set_with_texts_for_numbers(self, folder: Path):
        write(folder / "test.csv", {"age": ["old", "young"], "dose": [1, 2], "label": ["mild", "none"]})
        told = refused(folder, self.TOLD, SITES)
        assert "test.csv, column 'age' holds texts, but numbers in training, as in row 1, 'old'" in told

    def test_a_class_that_no_site_has(self, folder: Path):
        write(folder / "test.csv", {"age": [1, 2], "dose": [1, 2], "label": ["mild", "fatal"]})
        assert "test.csv has the class 'fatal', which no training example has" in refused(folder, self.TOLD, SITES)

    def test_a_site_with_no_rows(self, folder: Path):
        (folder / "b.csv").write_text("age,dose,label\n")
        assert "b.csv has no rows: leave the file out" in refused(folder, self.TOLD, SITES)

    def test_a_site_whose_rows_are_all_drawn_for_the_test(self, folder: Path):
        (folder / "b.csv").write_text("age,dose,label\n1,1,only\n")
        write(folder / "a.csv", {"age": [1, 2], "dose": [1, 2], "label": ["only", "other"]})
        (folder / "c.csv").write_text("age,dose,label\n" + "1,1,only\n" * 2)
        told = 'sites = ["a.csv", "b.csv", "c.csv"]\ntarget = "label"\ntest_fraction = 0.9'
        assert "has no rows left to train on: give it more, or lower data.test_fraction" in refused(folder, told, SITES)

    def test_files_that_are_not_there_or_there_twice(self, folder: Path):
        for sites, message in (
            ('["a.csv", "c.csv"]', "c.csv cannot be read (No such file"),
            ('["a.csv", "a.csv"]', "a.csv is twice in data.sites"),
            ('"*.csv"', "test.csv is a site, and data.test: name it once"),
            ('"*.tsv"', "data.sites = '*.tsv': no file in "),
            ('["a.txt"]', "a.txt is no table that fedual reads"),
        ):
            told = f'sites = {sites}\ntarget = "label"\ntest = "test.csv"'
            assert message in refused(folder, told, SITES)

    def test_a_column_to_drop_that_is_not_there(self, folder: Path):
        assert "has no column 'agee': did you mean 'age'" in refused(folder, self.TOLD + '\ndrop = ["agee"]', SITES)

    def test_a_column_of_clients_that_is_not_there(self, folder: Path):
        told = 'file = "a.csv"\ntarget = "label"\ntest = "test.csv"'
        split = 'kind = "column"\ncolumn = "hospital"'
        assert "a.csv has no column 'hospital'" in refused(folder, told, split)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": [[1.0]], "y": [0, 1]}, "1 inputs in x, but 2 targets in y"),
        ({"x": [["a"], ["b"]], "y": [0, 1]}, "x holds texts: give numbers"),
        ({"x": [[1.0], [np.nan]], "y": [0, 1]}, "column 'x', row 2: a value is missing or infinite"),
        ({"x": [[1.0], [2.0]]}, "has no column 'y'"),
        ({"y": [1, 2]}, "has no column 'x'"),
        ({"x": [[1.0], [2.0]], "y": [[0], [1]]}, "y has shape (2, 1): give one class for each example"),
        ({"x": [[1.0], [2.0]], "y": [0.5, 1.5]}, "'0.5' is no class"),
        ({"x": 3.0, "y": [1]}, "array 'x', is float64 (): give arrays of numbers or texts"),
        ({"x": [[1j]], "y": [1]}, "array 'x', is complex128"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "has no rows"),
    ],
)
def test_an_npz_that_cannot_be_used(tmp_path: Path, arrays: dict, message: str):
    write(tmp_path / "all.npz", {name: np.asarray(values) for name, values in arrays.items()})
    assert message in refused(tmp_path, 'file = "all.npz"\ntest_fraction = 0.5')


def test_pickled_arrays_are_not_read(tmp_path: Path):
    np.savez(tmp_path / "all.npz", x=np.array([{}], object), y=np.array([1]))
    assert "array 'x', is object (1,): give arrays of numbers" in refused(tmp_path, 'file = "all.npz"')


@pytest.mark.parametrize("ending", ["npz", "parquet"])
@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"PK\x03\x04 cut off"])
def test_damaged_files(tmp_path: Path, ending: str, content: bytes):
    (tmp_path / f"all.{ending}").write_bytes(content)
    target = '\ntarget = "y"' if ending == "parquet" else ""
    told = refused(tmp_path, f'file = "all.{ending}"{target}\ntest_fraction = 0.2')
    assert f"all.{ending} is damaged" in told


def test_missing_values_in_parquet(tmp_path: Path):
    write(tmp_path / "all.parquet", {"a": [1.0, None, 3.0], "label": ["x", "y", "x"]})
    told = refused(tmp_path, 'file = "all.parquet"\ntarget = "label"\ntest_fraction = 0.2')
    assert "all.parquet, column 'a', row 2: a value is missing" in told


def test_without_any_test_set_or_with_two(tmp_path: Path):
    x, y = np.zeros((4, 1)), np.arange(4) % 2
    np.savez(tmp_path / "all.npz", x=x, y=y)
    assert "has no test set: say data.test" in refused(tmp_path, 'file = "all.npz"')
    np.savez(tmp_path / "all.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert "has a test set, x_test: leave" in refused(tmp_path, 'file = "all.npz"\ntest_fraction = 0.5')


def test_inputs_that_the_network_cannot_take(tmp_path: Path):
    from fedual.scenarios.federation import execute

    write(tmp_path / "all.csv", chosen(patients(), "age", "dose", "colour", "label"))
    path = scenario(tmp_path, FILE + "test_fraction = 0.2", inputs=3)  # colour has three categories
    with pytest.raises(FedualError, match=r"cannot take the clients' inputs, torch.float64 \(8, 5\)"):
        execute(load(path), 0, device="cpu")
