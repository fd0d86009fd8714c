import json
from pathlib import Path

import pytest
from data.make_files import cifar_binary, images, labels
from data.make_files import write as write_files
from synthetic import keep, record
from typer.testing import CliRunner

from fedual import data
from fedual.errors import DataError, FedualError, InputError
from fedual.scenarios import load
from studies import records, tables
from studies.__main__ import app, main
from studies.records import Cell

FMNIST, CIFAR100 = "fmnist-heterog-10", "cifar100-resnet20-heterog-10"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_drawing: None) -> list[Cell]:
    """The cells that were run, without training, in an empty folder; no data but FMNIST and MNIST."""
    seen: list[Cell] = []

    def run(cell: Cell, results: Path, *, watch, device: str, root: object):
        seen.append(cell)
        watch(str(cell), 3)
        made = {**record(cell.scenario, cell.method, cell.variant, cell.seed), "total_seconds": 2.0}
        keep(made, results)
        return made

    def load_data(name: str, root: object = None) -> None:
        if name not in ("fmnist", "mnist"):
            raise DataError(f"{name} is not in {root}; run `fedual data get {name}`")

    monkeypatch.setattr(tables, "run", run)
    monkeypatch.setattr(data, "load", load_data)
    monkeypatch.chdir(tmp_path)
    return seen


def call(*arguments: str):
    done = CliRunner().invoke(app, arguments)
    if done.exception:
        raise done.exception
    return done


def test_list_trains_nothing_and_writes_nothing(ran: list[Cell], tmp_path: Path):
    keep(record(), tmp_path / "results")
    lines = call("table3", "--method", "fedavg", "--method", "ivon-admm:paper", "--list").stdout.splitlines()
    assert lines == [
        *(f"{FMNIST}, ivon-admm, paper, seed 62", f"{FMNIST}, fedavg, seed 63"),
        *(f"{FMNIST}, ivon-admm, paper, seed 63", f"{FMNIST}, fedavg, seed 64"),
        *(f"{FMNIST}, ivon-admm, paper, seed 64", "5 of 6 cells have no record in results"),
    ]
    assert not ran
    assert not (tmp_path / "docs").exists()


def test_list_as_json(ran: list[Cell]):
    last = call("table3", "--method", "feddyn", "--seed", "3", "--list", "--json").stdout.splitlines()[-1]
    assert json.loads(last) == {"table": "table3", "missing": [f"{FMNIST}, feddyn, seed 3"]}


def test_what_has_a_record_is_skipped_and_what_is_stale_is_not(ran: list[Cell], tmp_path: Path):
    keep(record(seed=62), tmp_path / "here")
    stale = record(seed=63)
    stale["config"]["rounds"] = 3
    keep(stale, tmp_path / "here")
    done = call("table3", "--method", "fedavg", "--results", "here")
    assert [cell.seed for cell in ran] == [63, 64]
    assert "| FedAvg | " in done.stdout
    assert "62, 63, 64" in done.stdout
    assert "left out" not in done.stdout
    assert "fedavg, seed 63, accuracy 0.5000, nll 1.0000, 2 s\n" in done.stderr
    call("table3", "--method", "fedavg", "--results", "here")
    assert len(ran) == 2


def test_from_rebuilds_without_training(ran: list[Cell], tmp_path: Path):
    for seed in (62, 63):
        keep(record(seed=seed, accuracy=0.625), tmp_path / "theirs")
    done = call("table3", "--from", "theirs", "--json")
    assert not ran
    assert "**62.5 ± 0.0** (76.9 ± 0.9) ▼" in done.stdout
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["table"], last["run"], last["left_out"]) == ("table3", 0, {})
    assert {Path(name) for name in last["files"]} == {
        Path("docs/tables") / f"table3.{kind}" for kind in ("md", "csv", "svg", "png", "json")
    }
    assert all(f"wrote {name}" in done.stdout and Path(name).exists() for name in last["files"])
    assert (tmp_path / "docs" / "tables" / "table3.md").read_text() in done.stdout


def test_from_and_list_say_what_is_missing(ran: list[Cell], tmp_path: Path):
    keep(record(), tmp_path / "theirs")
    lines = call("table3", "--method", "fedavg", "--from", "theirs", "--list").stdout.splitlines()
    assert lines[-1] == "2 of 3 cells have no record in theirs"


def test_records_of_other_settings_are_in_no_table(ran: list[Cell], tmp_path: Path):
    old = record(seed=63, accuracy=0.9)
    old["config"]["scenario"]["settings"]["lr"] = 0.5
    keep(old, tmp_path)
    keep(record(seed=62, accuracy=0.5), tmp_path)
    output = call("table3", "--from", str(tmp_path)).stdout
    assert "| 50.0 (69.9 ± 0.4) ▼" in output.replace("**", "")
    assert "left out: 1 records of settings that have changed since" in output


def test_data_that_are_not_there_are_named_once_and_the_others_run(ran: list[Cell]):
    done = call("pvi", "--seed", "62", "--seed", "63", "--root", "nowhere", "--json")
    assert {cell.scenario for cell in ran} == {FMNIST, "mnist-2class-100"}
    assert len(ran) == 2 * 2 * 2
    reason = "cifar100 is not in nowhere; run `fedual data get cifar100`"
    assert f"left out: 4 cells, from {CIFAR100}, ivon-pvi, seed 62 on: {reason}\n" in done.stdout
    assert done.stdout.count(f"on: {reason}") == 1
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["run"] == 8
    assert last["left_out"] == {
        reason: [f"{CIFAR100}, {method}, seed {seed}" for seed in (62, 63) for method in ("ivon-pvi", "ivon-admm")]
    }


def test_a_record_that_cannot_be_written_ends_it(ran: list[Cell], monkeypatch: pytest.MonkeyPatch):
    """It is no reason to train the next one, whose record will not be written either."""

    def full(*given, **more):
        raise DataError("results/fmnist-heterog-10.jsonl cannot be written (No space left on device).")

    monkeypatch.setattr(tables, "run", full)
    with pytest.raises(DataError, match="No space left"):
        call("table3", "--method", "fedavg")


def test_a_cell_that_diverged_is_told_as_it_is(ran: list[Cell], monkeypatch: pytest.MonkeyPatch):
    reason = "Round 1 diverged: the steps of IVON(lr=[bold]5[/bold]) are too large."

    def run(cell: Cell, results: Path, **more):
        made = {**record(rounds=0, diverged=reason), "total_seconds": 4.4}
        keep(made, results)
        return made

    monkeypatch.setattr(tables, "run", run)
    done = call("table3", "--method", "fedavg", "--seed", "62")
    assert done.stderr == f"{FMNIST}, fedavg, seed 62, 4 s, {reason}\n"
    assert f"FedAvg diverged: seed 62: {reason}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table3", "--method", "fedavgg"], "table3 has no method 'fedavgg': did you mean 'fedavg'?"),
        (["table1", "--scenario", "fmnist"], "table1 has no scenario 'fmnist'"),
        (["table3", "--from", "nowhere"], "nowhere has no records: name the folder that holds SCENARIO.jsonl"),
    ],
)
def test_bad_names_are_one_line_and_exit_code_2(
    ran: list[Cell], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str], message: str
):
    monkeypatch.setattr("sys.argv", ["studies", *arguments])
    with pytest.raises(SystemExit) as info:
        main()
    assert info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not ran
    with pytest.raises(InputError):
        call(*arguments)


def test_a_damaged_record_is_named(ran: list[Cell], tmp_path: Path):
    keep(record(), tmp_path / "results").write_text("{\n")
    with pytest.raises(FedualError, match=r"line 1 of .*\.jsonl is no record of a run"):
        call("table3")
    assert not ran


def test_cifar100_is_found_under_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_drawing: None):
    """The command as a user gives it, on two images for which a hundred rounds are shortened to one."""
    some = lambda seed: cifar_binary(images(2, seed, (3, 32, 32)), labels(2, 20), labels(2, 100) + 98)
    write_files(tmp_path / "data" / "cifar100", {"train.bin": some(0), "test.bin": some(1)})
    short = ["train.rounds=1", "train.local_steps=1", "train.batch_size=1", "train.samples=1", "split.clients=2"]
    monkeypatch.setattr(records, "load", lambda name, sets=(), **more: load(name, sets=[*sets, *short], **more))
    monkeypatch.chdir(tmp_path)
    asked = ["--scenario", CIFAR100, "--method", "fedavg", "--seed", "62", "--device", "cpu", "--root", "data"]
    last = json.loads(call("table2", *asked, "--json").stdout.splitlines()[-1])
    assert (last["run"], last["left_out"]) == (1, {})
    (found,) = records.read(Cell(CIFAR100, "fedavg", 62).path(tmp_path / "results"))
    assert found["history"]["round"] == [1]
    assert found["config"]["network"].startswith("Sequential")
    assert call("table2", *asked, "--list").stdout == "0 of 1 cells have no record in results\n"
