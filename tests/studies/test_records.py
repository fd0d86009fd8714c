import json
import math
from pathlib import Path
from typing import Any

import pytest
from synthetic import keep, record

from fedual import defaults
from fedual.errors import DataError, InputError
from fedual.scenarios import load
from studies import records
from studies.records import Cell, current, logged, read, read_all, write

MNIST, FMNIST = "mnist-2class-100", "fmnist-heterog-10"
CONTENT = {"diverged": None, "outliers": {}, "environment": {}, "config": {"rounds": 2, "scenario": {}}}


def test_no_variant_is_the_scenario_itself():
    assert Cell(MNIST, "feddyn", 62).load() == load(MNIST, method="feddyn")


def test_a_word_is_a_preset():
    found = Cell(MNIST, "ivon-admm", 62, "paper").load()
    assert found.preset == "paper"
    assert (found.settings["rho"], found.settings["clip"]) == (5.0, 0.0)
    assert (found.train["batch_size"], found.train["noise"]) == (64, "shared-fixed")


def test_central_is_all_data_in_one_place():
    found = Cell(MNIST, "fedavg", 62, "central").load()
    assert found.split == {"kind": "homogeneous", "clients": 1}
    assert (found.train["local_epochs"], found.settings["lr"]) == (1, 3e-4)
    assert found.train["rounds"] == 100


def test_an_equation_is_a_setting():
    bare, found = load(MNIST), Cell(MNIST, "ivon-admm", 62, "tau=0.03").load()
    assert found.settings == {**bare.settings, "tau": 0.03}
    assert (found.train, found.preset) == (bare.train, None)


def test_several_words_are_laid_over_each_other():
    paper = load(MNIST, preset="paper")
    found = Cell(MNIST, "ivon-admm", 62, "paper,rho=0.3,train.batch_size=7").load()
    assert found.settings == {**paper.settings, "rho": 0.3}
    assert found.train == {**paper.train, "batch_size": 7}


def test_an_unknown_word_is_refused():
    with pytest.raises(InputError, match="unknown preset 'papper': did you mean 'paper'"):
        Cell(MNIST, "ivon-admm", 62, "papper").load()


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (Cell(MNIST, "fedavg", 62), "fedavg, seed 62"),
        (Cell(MNIST, "ivon-admm", 3, "paper"), "ivon-admm, paper, seed 3"),
        (Cell(MNIST, "ivon-admm", 62, "tau=0.03"), "ivon-admm, tau=0.03, seed 62"),
    ],
)
def test_names_of_cells(cell: Cell, words: str):
    assert cell.path(Path("here")) == Path("here") / f"{MNIST}.jsonl"
    assert str(cell) == f"{MNIST}, {words}"


def test_a_variant_that_says_nothing_new_is_none():
    bare = Cell(MNIST, "ivon-admm", 62)
    said = bare.load().settings
    assert Cell(MNIST, "ivon-admm", 62, f"tau={said['tau']}").own() == bare
    assert Cell(MNIST, "ivon-admm", 62, f"rho={said['rho']},clip={said['clip']}").own() == bare
    assert bare.own() == bare
    for variant in (f"tau={2 * said['tau']}", "paper", f"paper,tau={said['tau']}"):
        other = Cell(MNIST, "ivon-admm", 62, variant)
        assert other.own() == other


def test_what_is_written_is_read(tmp_path: Path):
    cell = Cell(FMNIST, "ivon-admm", 62, "tau=0.03")
    history = [
        {"round": 1, "nll": 1.23456789, "seconds": 1e-9 / 3, "refused": 2, "primal": 1.0, "bytes_up": 71244001},
        {"round": 2, "nll": math.nan, "nll_mc": math.inf, "seconds": 12345678.9, "refused": 0, "bytes_up": 71244001},
    ]
    content = {**CONTENT, "outliers": {"auroc": math.nan}, "hidden": (1, 2)}
    written = write(cell, tmp_path, content, history)
    assert [written] == read(cell.path(tmp_path)) == [json.loads(cell.path(tmp_path).read_text())]
    about = {"scenario": FMNIST, "method": "ivon-admm", "variant": "tau=0.03", "seed": 62}
    assert written == {
        **about,
        **CONTENT,
        "outliers": {"auroc": None},
        "hidden": [1, 2],
        "history": {  # `primal` is no column; whole numbers keep their digits
            "round": [1, 2],
            "nll": [1.23457, None],
            "nll_mc": [None, None],
            "refused": [2, 0],
            "seconds": [3.33333e-10, 12345700.0],
            "bytes_up": [71244001, 71244001],
        },
    }
    assert read_all(tmp_path) == [written]
    assert [path.name for path in tmp_path.iterdir()] == [f"{FMNIST}.jsonl"]


def test_a_cell_that_is_run_again_replaces_its_line(tmp_path: Path):
    cells = [Cell(FMNIST, "fedavg", seed) for seed in (62, 63, 64)]
    for cell in cells:
        write(cell, tmp_path, CONTENT, [{"round": 1, "nll": 1.0, "seconds": 1.0}])
    before = cells[0].path(tmp_path).read_text().splitlines()
    again = write(cells[1], tmp_path, CONTENT, [{"round": 1, "nll": 0.5, "seconds": 1.0}])
    after = cells[0].path(tmp_path).read_text().splitlines()
    assert (after[0], after[2], len(after)) == (before[0], before[2], 3)
    assert json.loads(after[1]) == again != json.loads(before[1])


def test_a_run_is_stored_beside_a_damaged_line(tmp_path: Path):
    """The line stays as it is, and `read` names it: hours of training are not lost to it."""
    path = keep(record(), tmp_path)
    torn = path.read_bytes()[:100]
    path.write_bytes(torn + b"\xff")
    found = write(Cell(FMNIST, "fedavg", 63), tmp_path, CONTENT, [{"round": 1, "seconds": 1.0}])
    first, second = path.read_bytes().splitlines()
    assert first == torn + b"\xff"
    assert json.loads(second) == found


def test_a_run_that_diverged_at_once_has_columns_of_no_rounds(tmp_path: Path):
    cell = Cell(FMNIST, "fedavg", 62)
    found = write(cell, tmp_path, {**CONTENT, "diverged": "Round 1 diverged."}, [])
    assert [found] == read(cell.path(tmp_path))
    assert {"round", "seconds", "nll", "bytes_up"} <= found["history"].keys()
    assert set(map(tuple, found["history"].values())) == {()}
    assert logged(found, "nll", 10) is None


def test_what_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "results").write_text("a file, not a folder")
    with pytest.raises(DataError, match=r"fmnist-heterog-10\.jsonl cannot be written .*the other records are intact"):
        write(Cell(FMNIST, "fedavg", 62), tmp_path / "results", CONTENT, [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found.pop("config"),
        lambda found: found.pop("history"),
        lambda found: found.pop("diverged"),
        lambda found: found.pop("outliers"),
        lambda found: found.pop("environment"),
        lambda found: found.pop("seed"),
        lambda found: found["config"].pop("rounds"),
        lambda found: found["config"].pop("scenario"),
        lambda found: found.update(config=None),
        lambda found: found.update(history=[1, 2]),
        lambda found: found["history"].pop("round"),
        lambda found: found["history"].pop("seconds"),
        lambda found: found["history"]["nll"].pop(),
        lambda found: found["history"]["round"].append(51),
        lambda found: found["history"].update(nll=3),
    ],
)
def test_a_record_that_is_not_whole_is_refused(tmp_path: Path, damage):
    found = record(seed=63)
    keep(record(), tmp_path)
    path = keep(found, tmp_path)
    assert read(path)[1] == found
    lines = path.read_text().splitlines()
    damage(found)
    path.write_text(f"{lines[0]}\n{json.dumps(found)}\n")
    message = r"line 2 of .*fmnist-heterog-10\.jsonl is not whole: delete the line, and its cell will be run again\.$"
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize("content", [b"\n", b'{"scenario": \n'])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes):
    path = keep(record(), tmp_path)
    path.write_bytes(path.read_bytes() + content)
    with pytest.raises(
        DataError,
        match=r"^line 2 of [^\n]* is no record of a run \([^\n]+\): delete the line, and its cell will be run",
    ):
        read(path)


def test_what_is_no_text_is_refused(tmp_path: Path):
    path = keep(record(), tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"^[^\n]*jsonl cannot be read \([^\n]+\): restore it, or delete it"):
        read(path)


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_a_torn_last_line_is_noticed_and_named(tmp_path: Path, part: float):
    keep(record(), tmp_path)
    text = keep(record(seed=63), tmp_path).read_bytes()
    path, start = Cell(FMNIST, "fedavg", 62).path(tmp_path), text.index(b"\n") + 1
    path.write_bytes(text[: start + int(part * (len(text) - start))])
    with pytest.raises(
        DataError, match=r"^line 2 of [^\n]* is torn \([^\n]+\): delete the line, and its cell will be run"
    ):
        read(path)


def test_a_last_line_without_its_end_is_read(tmp_path: Path):
    """Editors may drop the last newline; the record is whole."""
    path = keep(record(), tmp_path)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read(path) == [record()]


@pytest.mark.parametrize("content", ["[]", "3", "null"])
def test_json_that_is_no_record_is_refused(tmp_path: Path, content: str):
    path = keep(record(), tmp_path)
    path.write_text(f"{content}\n")
    with pytest.raises(DataError, match="is not whole"):
        read(path)


def test_a_second_record_of_a_cell_is_refused(tmp_path: Path):
    """It would count as one more seed."""
    path = keep(record(), tmp_path)
    path.write_text(2 * path.read_text())
    with pytest.raises(DataError, match=r"line 2 of .* is a second record of fmnist-heterog-10, fedavg, seed 62"):
        read_all(tmp_path)


def test_a_record_in_another_scenario_s_file_is_refused(tmp_path: Path):
    path = keep(record(), tmp_path)
    path.rename(path.with_name(f"{MNIST}.jsonl"))
    message = (
        r"line 1 of .* is the record of fmnist-heterog-10, fedavg, seed 62: move the line to .*fmnist-heterog-10\.j"
    )
    with pytest.raises(DataError, match=message):
        read_all(tmp_path)


def test_no_records(tmp_path: Path):
    assert read_all(tmp_path) == []


@pytest.mark.parametrize("variant", ["", "paper", "tau=0.03", "default"])
def test_a_record_of_the_present_settings_is_current(variant: str):
    assert current(record(MNIST, "ivon-admm", variant))


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["scenario"]["settings"].update(tau=0.5),
        lambda config: config["scenario"]["settings"].pop("tau"),
        lambda config: config["scenario"]["train"].update(batch_size=1),
        lambda config: config["scenario"]["split"].update(clients=3),
        lambda config: config["scenario"].update(title="Another"),
        lambda config: config["scenario"].update(validation=0.1),
        lambda config: config.update(rounds=99),
    ],
)
def test_a_record_of_other_settings_is_not_current(change):
    found = record(MNIST, "ivon-admm")
    change(found["config"])
    assert not current(found)


@pytest.mark.parametrize(
    ("key", "value"),
    [("clients", 20), ("examples", 12000.0), ("participation", 0.5), ("local_epochs", 90), ("examples", None)],
)
def test_rules_that_have_other_numbers_in_its_federation_make_a_record_old(key: str, value: Any):
    found = record(MNIST, "ivon-admm", "default")
    config = found["config"] if key in found["config"] else found["config"]["training"]
    config.pop(key) if value is None else config.update({key: value})
    assert not current(found)


def test_a_change_of_rules_that_leaves_its_numbers_leaves_a_record_current(monkeypatch: pytest.MonkeyPatch):
    found = record(MNIST, "ivon-admm", "default")
    monkeypatch.setattr(defaults, "LONG", 2 * defaults.LONG)  # its rounds are short either way
    assert current(found)


@pytest.mark.parametrize("gone", [{"scenario": "fmnist-old"}, {"variant": "old"}, {"method": "sgd"}])
def test_a_record_of_a_cell_that_is_no_more_is_not_current(gone: dict[str, str]):
    assert not current({**record(), **gone})


def test_current_notices_a_scenario_that_changed(monkeypatch: pytest.MonkeyPatch):
    found = record()
    assert current(found)
    changed = lambda name, sets=(), **more: load(name, sets=[*sets, "train.batch_size=7"], **more)
    monkeypatch.setattr(records, "load", changed)
    assert not current(found)


@pytest.mark.parametrize(
    ("round", "mean"),
    [(1, 1.0), (2, (1 + 2) / 2), (3, (1 + 2 + 4) / 3), (5, (4 + 8 + 16) / 3), (6, None), (100, None)],
)
def test_logged_is_the_mean_of_three_rounds(round: int, mean: float | None):
    run = record(nll=lambda r: 2.0 ** (r - 1), rounds=5)
    assert logged(run, "nll", round) == (None if mean is None else pytest.approx(mean))


def test_rounds_that_were_not_evaluated_are_no_part_of_the_mean():
    run = record(nll=lambda r: float(r) if r % 2 == 0 else None, rounds=10)
    assert logged(run, "nll", 10) == 9.0  # of 8 and 10
    assert logged(run, "nll", 9) is None


def test_a_figure_that_the_method_does_not_have():
    assert logged(record(rounds=5), "nll_mc", 3) is None
