"""Data of the user's: what becomes of files, against NumPy; and runs on every kind of source."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from own_files import EVEN, chosen, patients, scenario, write

from fedual.data import user_files
from fedual.data.partition import held_out
from fedual.errors import DataError
from fedual.scenarios import load
from fedual.scenarios.federation import execute, materialise
from fedual.scenarios.sweep import compare

NUMBERS = ("age", "dose", "label")


def run(path: Path, seed: int = 0, sets: tuple[str, ...] = (), **options):
    return execute(load(path, sets=sets), seed, device="cpu", **options)


def figures(run) -> list[dict]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in run.history]


def rows(found: torch.Tensor) -> list:
    return sorted(found.tolist())


def test_the_same_data_give_the_same_run_from_every_format(tmp_path: Path):
    table, results = patients(), []
    for ending in ("npz", "csv", "parquet"):
        folder = tmp_path / ending
        columns = chosen(table, *NUMBERS)
        if ending == "npz":
            columns = {"x": np.stack([table["age"], table["dose"]], 1), "y": table["label"]}
        write(folder / f"all.{ending}", columns)
        target = "" if ending == "npz" else 'target = "label"\n'
        path = scenario(folder, f'file = "all.{ending}"\n{target}test_fraction = 0.25\nstandardise = true')
        done = run(path, out=folder / "run")
        config = json.loads((folder / "run" / "config.json").read_text())
        results.append((figures(done), done.posterior.lam, config["data"], config["test"], config["classes"]))
    (history, lam, *digests), others = results[0], results[1:]
    assert len(history) == 2
    for other_history, other_lam, *other in others:
        assert (other_history, other) == (history, digests)
        assert torch.equal(other_lam, lam)


def test_numbers_of_parquet_and_numbered_classes(tmp_path: Path):
    """Whole numbers are inputs like others; classes 2 and 10 keep the order of numbers."""
    columns = {"a": [3, 1, 2, 5] * 5, "label": [10, 2, 10, 2] * 5}
    found = []
    for ending in ("csv", "parquet"):
        write(tmp_path / f"all.{ending}", columns)
        told = {"file": f"all.{ending}", "target": "label", "test": f"test.{ending}"}
        write(tmp_path / f"test.{ending}", {"label": [10.0, 2.0], "a": [7, 8], "note": ["x", "y"]})
        found.append(user_files.load(tmp_path, told))
    for data in found:
        assert data.classes == ["2", "10"]
        assert data.x_train.dtype == torch.get_default_dtype()
        assert data.x_train[:, 0].tolist() == columns["a"]
        assert data.y_train.tolist() == [1, 0, 1, 0] * 5
        assert (data.x_test.tolist(), data.y_test.tolist()) == ([[7], [8]], [1, 0])
        assert data.groups is None


def test_arrays_keep_their_type(tmp_path: Path):
    """Pixels are divided when a batch is made, numbers of words are for an embedding, everything else is a float."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(30, 2, 2), dtype=np.uint8)
    arrays = {"x_train": pixels, "y_train": np.arange(30) % 3, "x_test": pixels[:5], "y_test": np.arange(5) % 3}
    write(tmp_path / "all.npz", arrays)
    path = scenario(tmp_path, 'file = "all.npz"\nscale = 255', inputs=4)
    federation = materialise(load(path), 0)
    assert (federation.clients.x.dtype, federation.model.scale) == (torch.uint8, 255)
    assert np.array_equal(federation.clients.x.numpy(), pixels)
    assert np.array_equal(federation.test[0].numpy(), pixels[:5])
    assert len(run(path).history) == 2
    for kind, kept in ((np.int32, torch.int64), (np.float32, torch.get_default_dtype()), (bool, torch.float64)):
        write(tmp_path / "all.npz", {**arrays, "x_train": pixels.astype(kind), "x_test": pixels[:5].astype(kind)})
        assert user_files.load(tmp_path, {"file": "all.npz"}).x_train.dtype == kept


class TestSites:
    """One file for each client."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        table = patients()
        for name, part in (("a", slice(0, 30)), ("b", slice(30, 38)), ("c", slice(38, 50))):
            write(tmp_path / "sites" / f"{name}.csv", chosen(table, *NUMBERS, rows=part))
        write(tmp_path / "test.csv", chosen(table, "label", "dose", "age", rows=slice(50, 60)))
        return tmp_path

    @pytest.mark.parametrize("sites", ['"sites/*.csv"', '["sites/a.csv", "sites/b.csv", "sites/c.csv"]'])
    def test_each_file_is_a_client(self, folder: Path, sites: str):
        path = scenario(folder, f'sites = {sites}\ntarget = "label"\ntest = "test.csv"', 'kind = "sites"')
        table, found = patients(), materialise(load(path), 3)
        x = np.stack([table["age"], table["dose"]], 1)
        y = np.unique(table["label"], return_inverse=True)[1]
        for part, (start, end) in zip(found.clients.parts, ((0, 30), (30, 38), (38, 50)), strict=True):
            assert np.array_equal(found.clients.x[part].numpy(), x[start:end])
            assert np.array_equal(found.clients.y[part].numpy(), y[start:end])
        assert np.array_equal(found.test[0].numpy(), x[50:])  # whatever the order of its columns
        assert np.array_equal(found.test[1].numpy(), y[50:])
        assert (found.clients.description or {})["sites"] == ["a", "b", "c"]
        assert (found.clients.description or {})["classes"] == ["mild", "none", "severe"]

    def test_run_and_resume(self, folder: Path):
        path = scenario(folder, 'sites = "sites/*.csv"\ntarget = "label"\ntest = "test.csv"', 'kind = "sites"')
        whole = run(path, out=folder / "whole")
        run(path, sets=("rounds=1",), out=folder / "run")
        resumed = run(path, out=folder / "run", resume=True)
        assert figures(resumed) == figures(whole)
        assert torch.equal(resumed.posterior.lam, whole.posterior.lam)

    def test_a_part_of_each(self, folder: Path):
        path = scenario(
            folder, 'sites = "sites/*.csv"\ntarget = "label"\ntest = "test.csv"\nfraction = 0.5', 'kind = "sites"'
        )
        parts = materialise(load(path), 0).clients.parts
        assert sum(map(len, parts)) == 25
        limits = ((0, 30), (30, 38), (38, 50))
        assert all(start <= part.min() and part.max() < end for part, (start, end) in zip(parts, limits, strict=True))

    def test_settings_are_chosen_on_a_part_of_every_site(self, folder: Path):
        more = "[sweep.fedavg]\nlr = [1e-3, 1e-2]"
        told = 'sites = "sites/*.csv"\ntarget = "label"\ntest = "test.csv"'
        path = scenario(folder, told, 'kind = "sites"', more=more)
        found = compare([load(path, method="fedavg")], [0], sweep=True, device="cpu")
        assert len(found["methods"][0]["trials"]) == 2
        assert found["methods"][0]["summary"]["diverged"] == 0


def test_the_values_of_a_column_are_the_clients(tmp_path: Path):
    table = patients()
    write(tmp_path / "all.csv", chosen(table, "hospital", *NUMBERS))
    data = 'file = "all.csv"\ntarget = "label"\ntest_fraction = 0.2'
    path = scenario(tmp_path, data, 'kind = "column"\ncolumn = "hospital"')
    found = materialise(load(path), 0)
    assert (found.clients.description or {})["sites"] == ["east", "north"]
    assert found.clients.x.shape[1] == 2  # where a patient is, is no input
    both = [rows(found.clients.x[part]) for part in found.clients.parts]
    held = rows(found.test[0])
    for name, own_rows in zip(("east", "north"), both, strict=True):
        here = table["hospital"] == name
        of_it = np.stack([table["age"], table["dose"]], 1)[here].tolist()
        assert own_rows == sorted(row for row in of_it if row not in held)
    assert len(run(path).history) == 2


def test_the_test_set_is_a_fixed_part_of_each_class(tmp_path: Path):
    table = patients(200)
    write(tmp_path / "all.csv", chosen(table, *NUMBERS))
    path = scenario(tmp_path, 'file = "all.csv"\ntarget = "label"\ntest_fraction = 0.2')
    one, other = (materialise(load(path), seed) for seed in (0, 1))
    assert torch.equal(one.test[0], other.test[0])
    assert not all(torch.equal(a, b) for a, b in zip(one.clients.parts, other.clients.parts, strict=True))
    _, counts = np.unique(table["label"], return_counts=True)
    assert torch.bincount(one.test[1]).tolist() == [round(0.2 * count) for count in counts.tolist()]
    everything = np.stack([table["age"], table["dose"]], 1).tolist()
    assert sorted(rows(one.test[0]) + rows(one.clients.x)) == sorted(everything)


@pytest.mark.parametrize(
    ("counts", "fraction", "held"), [((10, 5), 0.2, (2, 1)), ((2, 9), 0.9, (1, 8)), ((1, 3), 0.1, (0, 1))]
)
def test_no_class_is_only_for_the_test(counts: tuple[int, int], fraction: float, held: tuple[int, int]):
    labels = np.repeat([0, 1], counts)
    assert np.bincount(labels[held_out(labels, fraction)], minlength=2).tolist() == list(held)


def test_nothing_to_draw():
    with pytest.raises(DataError, match="2 rows are too few"):
        held_out(np.array([0, 1]), 0.5)


class TestInputs:
    """How columns become inputs."""

    TOLD = {"sites": ["a.csv", "b.csv"], "target": "label", "drop": ["hospital", "days"], "test": "test.csv"}  # noqa: RUF012

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        table = patients()
        for name, part in (("a", slice(0, 7)), ("b", slice(7, 50)), ("test", slice(50, 60))):
            columns = chosen(table, *table, rows=part)
            columns["age"] = 1e5 + columns["age"]
            columns["same"] = np.full(len(columns["age"]), 0.1)
            write(tmp_path / f"{name}.csv", columns)
        return tmp_path

    def test_one_column_for_each_category(self, folder: Path):
        table, found = patients(), user_files.load(folder, self.TOLD)
        expected = [
            [1e5 + a, d, c == "blue", c == "green", c == "red", 0.1] for a, d, c in self.of(table, slice(0, 50))
        ]
        assert found.x_train.tolist() == expected
        assert found.inputs["categories"] == {"colour": ["blue", "green", "red"]}

    @staticmethod
    def of(table: dict, part: slice):
        return zip(*(table[name][part].tolist() for name in ("age", "dose", "colour")), strict=True)

    def test_standardised_by_the_pooled_training_data(self, folder: Path):
        """The sums of two sites of different size are those of all rows; categories and constants are left alone."""
        plain, found = (user_files.load(folder, {**self.TOLD, "standardise": yes}) for yes in (False, True))
        x = plain.x_train.numpy()
        mean, deviation = x.mean(0), x.std(0)
        for place in (0, 1):
            expected = (x[:, place] - mean[place]) / deviation[place]
            assert np.abs(found.x_train[:, place].numpy() - expected).max() < 1e-12 * (1e5 if place == 0 else 1)
            of_test = (plain.x_test[:, place].numpy() - mean[place]) / deviation[place]
            assert np.abs(found.x_test[:, place].numpy() - of_test).max() < 1e-12 * (1e5 if place == 0 else 1)
        assert torch.equal(found.x_train[:, 2:5], plain.x_train[:, 2:5])
        assert found.x_train[:, 5].abs().max() < 1e-15

    def test_moments_are_those_of_all_rows(self):
        rng = np.random.default_rng(0)
        parts = [3 + 2 * rng.standard_normal((size, 4, 2)) for size in (1, 20, 300)]
        together = np.concatenate(parts)
        for found, expected in zip(user_files.moments(parts), (together.mean(0), together.std(0)), strict=True):
            assert np.abs(found - expected).max() < 1e-12

    def test_another_file_is_treated_as_the_training_data(self, folder: Path):
        found = user_files.load(folder, {**self.TOLD, "standardise": True})
        inputs = json.loads(json.dumps(found.inputs))  # as a run keeps it
        x, unseen = user_files.encode(folder / "test.csv", inputs)
        assert torch.equal(x, found.x_test)
        assert not unseen
        table = patients()
        one = {"same": [0.1], "colour": ["pink"], "dose": [1.0], "age": [1e5 + table["age"].mean()]}
        write(folder / "new.csv", {name: values * 2 for name, values in one.items()})
        x, unseen = user_files.encode(folder / "new.csv", inputs)
        assert x[0, 2:5].tolist() == [0, 0, 0]
        assert unseen == [("colour", "pink", [0, 1])]

    @pytest.mark.parametrize("colours", [["7"], ["blue", "7", "pink"]])
    def test_a_number_among_texts_is_refused_with_its_row(self, folder: Path, colours: list[str]):
        inputs = user_files.load(folder, self.TOLD).inputs
        many = len(colours)
        write(folder / "new.csv", {"colour": colours, "same": [0.1] * many, "dose": [1] * many, "age": [1] * many})
        row = colours.index("7") + 1
        with pytest.raises(DataError, match=f"column 'colour', row {row}: '7' is a number, but training had texts"):
            user_files.encode(folder / "new.csv", inputs)

    def test_columns_have_their_names_and_units(self, folder: Path):
        found = user_files.load(folder, {**self.TOLD, "standardise": True})
        names, offset, scale = user_files.units(found.inputs)
        assert names == ["age", "dose", None, None, None, "same"]
        plain = user_files.load(folder, self.TOLD).x_train
        torch.testing.assert_close(found.x_train * torch.from_numpy(scale) + torch.from_numpy(offset), plain)

    def test_arrays_are_standardised_too(self, tmp_path: Path):
        x = np.random.default_rng(0).integers(256, size=(40, 3, 3)).astype(np.uint8)
        write(tmp_path / "all.npz", {"x": x, "y": np.arange(40) % 2})
        write(tmp_path / "test.npz", {"x": x[:4], "y": np.arange(4) % 2})
        found = user_files.load(tmp_path, {"file": "all.npz", "test": "test.npz", "standardise": True})
        wide = x.astype(np.float64)
        assert np.abs(found.x_train.numpy() - (wide - wide.mean(0)) / wide.std(0)).max() < 1e-12


def test_a_regression(tmp_path: Path):
    table = patients()
    write(tmp_path / "all.csv", chosen(table, "age", "dose", "days"))
    data = 'file = "all.csv"\ntarget = "days"\ntest_fraction = 0.2\nstandardise = true'
    path = scenario(tmp_path, data, outputs=1, train='loss = "mse"')
    federation = materialise(load(path), 0)
    assert rows(torch.cat([federation.clients.y, federation.test[1]])) == sorted(table["days"].tolist())
    assert len(federation.test[1]) == 12
    assert sorted(len(part) for part in federation.clients.parts) == [16, 16, 16]  # dealt out as if of one class
    assert "classes" not in (federation.clients.description or {})
    done = run(path)
    assert {"rmse", "rmse_mc"} <= done.history[-1].keys()
    assert run(path, sets=('split.kind="dirichlet"',)).history


def test_settings_by_hand_change_files(tmp_path: Path):
    for name in ("all", "other"):
        write(tmp_path / f"{name}.csv", chosen(patients(seed=len(name)), *NUMBERS))
    path = scenario(tmp_path, 'file = "all.csv"\ntarget = "label"\ntest_fraction = 0.2', EVEN)
    found = [
        materialise(load(path, sets=sets), 0).clients.x for sets in ((), ("file=other.csv",), ("standardise=true",))
    ]
    assert not torch.equal(found[0], found[1])
    assert found[2].mean(0).abs().max() < 1e-12


def test_a_description_has_no_folder_and_runs_elsewhere(tmp_path: Path):
    """The same files in another folder go on with the run."""
    for place in ("one", "two"):
        write(tmp_path / place / "all.csv", chosen(patients(), *NUMBERS))
        path = scenario(tmp_path / place, 'file = "all.csv"\ntarget = "label"\ntest_fraction = 0.2')
        run(path, sets=(f"rounds={len(list(tmp_path.iterdir()))}",), out=tmp_path / "run", resume=True)
    assert str(tmp_path / "one") not in (tmp_path / "run" / "config.json").read_text()


def test_other_data_do_not_go_on_with_a_run(tmp_path: Path):
    path = scenario(tmp_path, 'file = "all.csv"\ntarget = "label"\ntest_fraction = 0.2')
    for seed in (0, 1):
        write(tmp_path / "all.csv", chosen(patients(seed=seed), *NUMBERS))
        if seed == 0:
            run(path, out=tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run with data"):
        run(path, out=tmp_path / "run", resume=True)


def test_shipped_scenarios_are_described_as_before():
    """Records of runs are compared with it."""
    found = load("digits-heterog-10").describe()
    keys = {"name", "title", "preset", "data", "split", "model", "train", "method", "settings"}
    assert found.keys() == keys
    assert (materialise(load("digits-heterog-10"), 0).clients.description or {}).keys() == {"scenario"}
