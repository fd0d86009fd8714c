import csv
import json
import statistics
from pathlib import Path

import pytest
from synthetic import record

from fedual.errors import DataError
from fedual.scenarios import load
from studies.pages import calibration, write
from studies.tables import TABLES, TITLES

FMNIST, MNIST = "fmnist-heterog-10", "mnist-2class-100"
pytestmark = pytest.mark.usefixtures("no_drawing")


def runs(scenario: str) -> list:
    """Two seeds of two methods."""
    both = []
    for seed in (62, 63):
        nll = lambda r, seed=seed: 1 + (seed - 62) / 8 + 1 / r
        both.append(record(scenario, "fedavg", seed=seed, nll=nll))
        both.append(record(scenario, "ivon-admm", seed=seed, nll=nll, under=(0.75, lambda r, n=nll: n(r) - 0.25)))
    return both


def names_of(paths: list[Path]) -> set[str]:
    assert all(path.stat().st_size for path in paths)
    assert len(set(paths)) == len(paths)
    return {path.name for path in paths}


def pictures(*stems: str) -> set[str]:
    return {f"{stem}.{kind}" for stem in stems for kind in ("svg", "png", "json")}


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("table1", []),
        ("table2", ["table2"]),
        ("table3", ["table3"]),
        ("pvi", [f"pvi-{FMNIST}", f"pvi-{MNIST}", "pvi"]),
        ("tau", [f"tau-{FMNIST}", f"tau-{MNIST}", "tau"]),
        ("rho", [f"rho-{FMNIST}", f"rho-{MNIST}", "rho"]),
        ("why", [f"why-{MNIST}", "why"]),
    ],
)
def test_a_table_its_numbers_and_its_pictures(tmp_path: Path, name: str, drawn: list[str]):
    text, paths = write(name, [*runs(FMNIST), *runs(MNIST)], tmp_path / "tables")
    assert names_of(paths) == {f"{name}.md", f"{name}.csv", *pictures(*drawn)}
    assert {path.parent for path in paths} == {tmp_path / "tables"}
    assert (tmp_path / "tables" / f"{name}.md").read_text(encoding="utf-8") == text
    assert text.startswith(f"## {TITLES[name]}\n")
    with (tmp_path / "tables" / f"{name}.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["scenario"] for line in lines} == {block for block in (FMNIST, MNIST) if block in text and drawn}


def test_figure_2(tmp_path: Path):
    text, paths = write("fig2", [*runs(FMNIST), *runs(MNIST)], tmp_path)
    assert names_of(paths) == {"fig2.md", *pictures(f"fig2-{FMNIST}", f"fig2-{MNIST}", "runtimes")}
    for scenario, last in ((FMNIST, 50), (MNIST, 100)):
        nll = statistics.fmean(1 + i / 8 + 1 / last for i in range(2))
        assert f"FedAvg ends at 50.0 % and an NLL of {nll:.3f} after round {last} (mean of 2 seeds)." in text
        assert f"IVON-ADMM ends at 75.0 % and an NLL of {nll - 0.25:.3f} after round {last}" in text
        assert f"### {scenario}\n" in text
    assert "IVON-ADMM takes 1.0 times FedAvg's time" in text


@pytest.mark.parametrize("name", TABLES)
def test_without_any_record_there_is_a_table_and_no_picture(tmp_path: Path, name: str):
    text, paths = write(name, [], tmp_path)
    assert names_of(paths) == {f"{name}.md"} | ({f"{name}.csv"} if name not in ("fig2", "calibration") else set())
    assert text.startswith(f"## {TITLES[name]}\n")
    assert ("Nothing has been run yet." in text) == (name in ("fig2", "calibration"))
    assert name in ("fig2", "calibration") or "not run" in text


def test_the_curve_of_the_scenario_s_own_value_is_in_a_sweep_s_picture(tmp_path: Path):
    own = load(FMNIST).settings["tau"]
    found = [record(method="ivon-admm", nll=0.5), record(method="ivon-admm", variant="tau=0.03", nll=0.75)]
    write("tau", found, tmp_path)
    lines = json.loads((tmp_path / f"tau-{FMNIST}.json").read_text())["numbers"]["lines"]
    assert {label: line["nll"][-1] for label, line in lines.items()} == {
        f"IVON-ADMM (tau={own})": 0.5,
        "IVON-ADMM (tau=0.03)": 0.75,
    }


def test_the_ceiling_is_no_curve(tmp_path: Path):
    write("fig2", [record(), record(variant="central")], tmp_path)
    lines = json.loads((tmp_path / f"fig2-{FMNIST}.json").read_text())["numbers"]["lines"]
    assert list(lines) == ["FedAvg"]


def test_runs_without_a_round_have_no_picture(tmp_path: Path):
    found = [record(rounds=0, diverged="Round 1 diverged.")]
    for name in ("fig2", "table3", "pvi"):
        _, paths = write(name, found, tmp_path)
        assert not [path for path in paths if path.suffix == ".svg"]


def test_no_fedavg_no_runtimes(tmp_path: Path):
    text, paths = write("fig2", [record(method="feddyn"), record(rounds=1)], tmp_path)
    assert not [path for path in paths if path.stem == "runtimes"]
    assert "FedDyn ends at" in text


def test_times_of_different_machines_are_not_compared(tmp_path: Path):
    """IVON-ADMM took 100 times as long as FedAvg on a machine that FedAvg did not run on."""
    slow = record(method="ivon-admm", device="cpu")
    slow["history"]["seconds"] = [200.0] * 50
    found = [record(device="gpu"), record(device="gpu", seed=63), record(device="cpu", seed=64), slow]
    found.append(record(method="feddyn", device="gpu"))
    text, _ = write("fig2", found, tmp_path)
    numbers = json.loads((tmp_path / "runtimes.json").read_text())["numbers"][FMNIST]
    assert {label: bar["of_fedavg"] for label, bar in numbers.items()} == {"FedAvg": 1.0, "FedDyn": 1.0}
    assert "The seconds are of several machines: cpu, gpu." in text


def test_one_machine_is_not_worth_a_word(tmp_path: Path):
    assert "machines" not in write("fig2", runs(FMNIST), tmp_path)[0]


def cells_of(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return line.strip("| ").split(" | ")[1:]


def test_calibration_is_that_of_the_last_round():
    """ECE 0.1 · 50, 0.1 · 50 + 0.3; AUROC 0.5 and 0.75 at the mean, 0.25 more under q_g."""
    found = []
    for i, seed in enumerate((62, 63)):
        ece = lambda r, i=i: r / 100 + i / 8
        outliers = {"data": "mnist", "auroc": 0.5 + i / 4, "auroc_mc": 0.625 + i / 4}
        own = {"ece": ece, "ece_mc": lambda r, e=ece: e(r) / 2, "outliers": outliers}
        found.append(record(FMNIST, "ivon-admm", seed=seed, under=(0.5, 1.0), **own))
    found.append(record(FMNIST, "fedavg", ece=0.25, outliers={"data": "mnist", "auroc": 0.875, "auroc_mc": 0.875}))
    found.append(record(FMNIST, "feddyn", diverged="Round 9 diverged."))
    found.append(record("cifar10-resnet20-heterog-10", "fedavg", ece=0.5))
    text = calibration(found)
    spread = lambda *values: f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"
    under = [spread(0.5, 0.625), spread(0.25, 0.3125), spread(0.5, 0.75), spread(0.625, 0.875)]
    assert cells_of(text, "IVON-ADMM") == [*under, "62, 63"]
    fmnist, photographs = text.partition(f"### `{FMNIST}`")[2], text.partition("### `cifar10-resnet20")[2]
    assert cells_of(fmnist, "FedAvg") == ["0.250", "–", "0.875", "–", "62"]  # a point has no q_g
    assert cells_of(photographs.partition("###")[0], "FedAvg") == ["0.500", "–", "–", "–", "62"]
    assert "FedDyn" not in text
    assert MNIST not in text


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path):
    (tmp_path / "tables").write_text("a file")
    with pytest.raises(DataError, match=r"tables cannot be written \(File exists\): .*records are intact\.$"):
        write("table3", [], tmp_path / "tables")
