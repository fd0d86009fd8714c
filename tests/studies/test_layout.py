import csv
import io
import statistics

import pytest
from synthetic import record

from fedual.scenarios import load, names
from studies.layout import Block, Row, Spread, best, blocks, comma_separated, markdown, published, records_of, verdict
from studies.records import Record
from studies.tables import TABLES, Part

FMNIST, MNIST, CIFAR100 = "fmnist-heterog-10", "mnist-2class-100", "cifar100-resnet20-heterog-10"
ZENKE, ACAR = "cifar10-zenke-heterog-10", "cifar10-acar-heterog-10"
SEEDS = (62, 63, 64)

# typed from the paper: table, scenario, row, metric@round, mean and standard deviation
TYPED = [
    ("table1", "fmnist-heterog-100", "fedavg", "accuracy@10", 73.9, 0.3),
    ("table1", "fmnist-heterog-100", "fedlap-cov", "accuracy@50", 83.0, 0.1),
    ("table1", "fmnist-heterog-100", "ivon-admm under q_g", "accuracy@25", 82.3, 0.1),
    ("table1", "fmnist-homog-10", "fedprox", "accuracy@50", 80.3, 0.1),
    ("table1", "fmnist-homog-10", "feddyn", "nll@25", 0.63, 0.02),
    ("table1", "fmnist-homog-10", "ivon-admm", "nll@50", 0.60, 0.01),
    ("table1", "fmnist-homog-10", "ivon-admm under q_g", "nll@50", 0.53, 0.01),
    ("table1", ZENKE, "fedlap", "accuracy@50", 79.5, 1.4),
    ("table1", ZENKE, "ivon-admm", "accuracy@10", 71.5, 1.8),
    ("table1", ACAR, "feddyn", "nll@25", 3.6, 1.3),
    ("table1", ACAR, "ivon-admm under q_g", "nll@50", 1.4, 0.0),
    ("table2", MNIST, "feddyn", "accuracy@100", 94.9, 0.1),
    ("table2", MNIST, "ivon-admm", "nll@25", 0.31, 0.02),
    ("table2", MNIST, "ivon-admm under q_g", "nll@25", 0.31, 0.03),
    ("table2", CIFAR100, "fedlap", "accuracy@25", 40.1, 1.1),
    ("table2", CIFAR100, "ivon-admm under q_g", "accuracy@100", 46.6, 0.6),
    ("table3", FMNIST, "fedlap-cov", "accuracy@25", 78.3, 1.0),
    ("table3", FMNIST, "ivon-admm under q_g", "nll@50", 0.50, 0.0),
    ("pvi", CIFAR100, "ivon-pvi under q_g", "accuracy@100", 47.5, 0.5),
    ("pvi", CIFAR100, "ivon-pvi", "nll@25", 2.7, 0.0),
    ("tau", CIFAR100, "ivon-admm tau=0.02 under q_g", "accuracy@50", 23.9, 9.4),
    ("tau", CIFAR100, "ivon-admm tau=1.0 under q_g", "nll@25", 3.3, 0.1),
    ("rho", CIFAR100, "ivon-admm rho=0.2 under q_g", "accuracy@25", 26.7, 10.6),
    ("rho", CIFAR100, "ivon-admm rho=5.0 under q_g", "nll@100", 2.9, 0.0),
]
SHARED = [("table1", "fmnist-heterog-100"), ("table1", ZENKE), ("table1", ACAR), ("table2", MNIST)]
SHARED += [("table2", CIFAR100), ("table3", FMNIST)]


@pytest.mark.parametrize(("table", "scenario", "row", "figure", "mean", "sd"), TYPED)
def test_figures_of_the_paper(table: str, scenario: str, row: str, figure: str, mean: float, sd: float):
    assert published(table)[scenario][row][figure] == [mean, sd]


@pytest.mark.parametrize(("table", "scenario"), SHARED)
def test_fedavg_and_fedprox_share_a_row_of_the_paper(table: str, scenario: str):
    found = published(table)[scenario]
    assert found["fedavg"] == found["fedprox"]


def test_fedavg_and_fedprox_differ_where_the_paper_says_so():
    found = published("table1")["fmnist-homog-10"]
    assert found["fedavg"]["accuracy@10"] == [72.3, 0.4]
    assert found["fedprox"]["accuracy@10"] == [72.2, 0.3]


def test_where_the_paper_diverged():
    found = published("rho")[CIFAR100]
    assert [found[f"ivon-admm rho={rho} under q_g"]["nll@50"] for rho in ("0.1", "0.2")] == [None, None]


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "pvi", "tau", "rho"])
def test_every_figure_of_the_paper_has_its_place_in_our_table(name: str):
    parts = {part.scenario: part for part in TABLES[name]}
    shown = {block.part.scenario: {row.key for row in block.ours} for block in blocks(name, [])}
    assert published(name)
    for scenario, rows in published(name).items():
        assert scenario in names()
        wanted = {f"{metric}@{round}" for metric in ("accuracy", "nll") for round in parts[scenario].rounds}
        for row, figures in rows.items():
            assert row in shown[scenario]
            assert set(figures) == wanted
            assert all(0 <= pair[0] <= 100 and pair[1] >= 0 for pair in figures.values() if pair)


def test_tables_of_our_own_have_no_figures_of_the_paper():
    assert published("why") == published("calibration") == {}


@pytest.mark.parametrize(
    ("metric", "ours", "paper", "digits", "mark"),
    [
        ("accuracy", 82.5, (82.1, 0.1), 1, "▲"),  # within 82.1 ± (0.2 + 0.05)
        ("accuracy", 82.35, (82.1, 0.1), 1, "≈"),
        ("accuracy", 82.36, (82.1, 0.1), 1, "▲"),
        ("accuracy", 81.85, (82.1, 0.1), 1, "≈"),
        ("accuracy", 81.84, (82.1, 0.1), 1, "▼"),
        ("nll", 0.535, (0.51, 0.01), 2, "≈"),  # within 0.51 ± (0.02 + 0.005)
        ("nll", 0.536, (0.51, 0.01), 2, "▼"),
        ("nll", 0.485, (0.51, 0.01), 2, "≈"),
        ("nll", 0.484, (0.51, 0.01), 2, "▲"),
        ("nll", 0.65, (0.6, 0.0), 1, "≈"),  # no spread, but a digit is rounded
        ("nll", 0.651, (0.6, 0.0), 1, "▼"),
    ],
)
def test_verdict_at_its_edges(metric: str, ours: float, paper: tuple[float, float], digits: int, mark: str):
    assert verdict(metric, ours, paper, digits) == mark


def test_digits_are_those_that_the_paper_prints():
    found = {block.part.scenario: block for name in ("table1", "table2", "table3") for block in blocks(name, [])}
    digits = {name: (block.digits("accuracy"), block.digits("nll")) for name, block in found.items()}
    assert digits.pop("cifar10-resnet20-heterog-10") == (1, 1)  # not in the paper
    two = {name for name, pair in digits.items() if pair == (1, 2)}
    assert two == {"fmnist-heterog-100", "fmnist-homog-10", FMNIST, MNIST}
    assert {name for name, pair in digits.items() if pair == (1, 1)} == {ZENKE, ACAR, CIFAR100}


def judged(*spreads: Spread, metric: str = "nll", diverged: int | None = None) -> list[int]:
    """Which of some rows are the best."""
    rows = [Row("fedavg", f"lr={number}", False) for number in range(len(spreads))]
    ours = {row: {(metric, 10): spread} for row, spread in zip(rows, spreads, strict=True)}
    reasons = {row: ["seed 1: far off"] if number == diverged else [] for number, row in enumerate(rows)}
    found = Block(Part(FMNIST, (10,), ()), ours, {}, {}, reasons)
    return [rows.index(row) for row in best(found, metric, 10)]


def test_less_nll_and_more_accuracy_are_better():
    some = Spread(3.0, 0.1, 3), Spread(1.0, 0.1, 3), Spread(2.0, 0.1, 3)
    assert judged(*some) == [1]
    assert judged(*some, metric="accuracy") == [0]


def test_best_and_those_that_cannot_be_told_from_it():
    """The standard error of the difference between two means of three runs is √(0.3²/3 + 0.6²/3)."""
    edge = 2 * ((0.3**2 + 0.6**2) / 3) ** 0.5
    some = Spread(1.0, 0.3, 3), Spread(1 + 0.999 * edge, 0.6, 3), Spread(1 + 1.001 * edge, 0.6, 3)
    assert judged(*some) == [0, 1]
    more = Spread(1 + 0.999 * edge, 0.6, 12)  # more runs, a smaller error
    assert judged(*some, more) == [0, 1]


def test_one_seed_ties_with_nothing_but_its_equal():
    assert judged(Spread(1.0, None, 1), Spread(1.001, 0.5, 3)) == [0]
    assert judged(Spread(1.0, None, 1), Spread(1.0, None, 1), Spread(1.001, None, 1)) == [0, 1]
    assert judged(Spread(1.0, 0.0, 3), Spread(1.0, 0.0, 3)) == [0, 1]


def test_rows_with_diverged_runs_are_never_best():
    assert judged(Spread(1.0, 0.1, 2), Spread(2.0, 0.1, 3), diverged=0) == [1]


def test_the_ceiling_is_never_best():
    ceiling = record(variant="central", accuracy=0.99, nll=0.01)
    (block,) = blocks("table3", [record(), ceiling])
    for metric in ("accuracy", "nll"):
        assert best(block, metric, 50) == [Row("fedavg", "", False)]
    assert block.ours[Row("fedavg", "central", False)]["accuracy", 50].mean == pytest.approx(99)


def test_a_round_that_nobody_reached_has_no_best():
    (block,) = blocks("table3", [record(rounds=30)])
    assert best(block, "nll", 25) == [Row("fedavg", "", False)]
    assert best(block, "nll", 50) == []


def three(method: str, base: float, under: float | None = None, variant: str = "", **more) -> list[Record]:
    """Runs of three seeds that grow better by a thousandth a round; `under`: as much better under q_g."""
    found = []
    for seed in SEEDS:
        accuracy = lambda r, seed=seed: base + r / 1000 + (seed - 62) / 100
        nll = lambda r, seed=seed: 2 * base - r / 1000 - (seed - 62) / 50
        both = None if under is None else (lambda r, a=accuracy: a(r) + under, lambda r, n=nll: n(r) - under)
        found.append(record(FMNIST, method, variant, seed, accuracy=accuracy, nll=nll, under=both, **more))
    return found


def expected(base: float, round: int, under: float = 0.0) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of what `three` made, by its formulae: the mean of three rounds is the middle one."""
    accuracies = [100 * (base + (round - 1) / 1000 + i / 100 + under) for i in range(3)]
    losses = [2 * base - (round - 1) / 1000 - i / 50 - under for i in range(3)]
    return {
        name: (statistics.fmean(values), statistics.stdev(values))
        for name, values in (("accuracy", accuracies), ("nll", losses))
    }


def rows_of(text: str) -> dict[str, list[str]]:
    """The lines of the Markdown tables, by their first cell."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines}


def test_markdown_has_our_figures_beside_those_of_the_paper():
    found = three("ivon-admm", 0.7, under=0.01) + three("fedavg", 0.6)[:1] + three("fedavg", 0.9, variant="central")
    text = markdown("table3", blocks("table3", found))
    assert text.startswith("## Table 3")
    assert f"### `{FMNIST}`: {load(FMNIST).title}" in text
    rows = rows_of(text)
    heads = [f"{what} at {r}" for what in ("accuracy %", "NLL") for r in (10, 25, 50)]
    assert rows["method"] == [*heads, "seeds"]
    paper = published("table3")[FMNIST]
    for label, key, under in (("IVON-ADMM", "ivon-admm", 0.0), ("IVON-ADMM, under q_g", "ivon-admm under q_g", 0.01)):
        cells = iter(rows[label])
        for metric, shown, digits in (("accuracy", 1, 1), ("nll", 3, 2)):
            for round in (10, 25, 50):
                mean, sd = expected(0.7, round, under)[metric]
                their_mean, their_sd = paper[key][f"{metric}@{round}"]
                near = abs(mean - their_mean) <= 2 * their_sd + 10**-digits / 2
                mark = "≈" if near else "▲" if (mean > their_mean) == (metric == "accuracy") else "▼"
                cell = next(cells).replace("**", "")
                theirs = f"({their_mean:.{digits}f} ± {their_sd:.{digits}f})"
                assert cell == f"{mean:.{shown}f} ± {sd:.{shown}f} {theirs} {mark}"
        assert next(cells) == "62, 63, 64"
    one = expected(0.6, 50)["accuracy"][0] - 1  # seed 62 alone
    assert rows["FedAvg"][2] == f"{one:.1f} (76.9 ± 0.9) ▼"
    assert rows["FedAvg"][-1] == "62"
    assert rows["FedProx"] == [f"– ({cell})" for cell in ("69.9 ± 0.4", "74.7 ± 0.6", "76.9 ± 0.9")] + [
        *("– (0.80 ± 0.04)", "– (0.71 ± 0.03)", "– (0.66 ± 0.03)", "not run")
    ]
    mean, sd = expected(0.9, 50)["accuracy"]
    assert rows["all data in one place"][2] == f"{mean:.1f} ± {sd:.1f}"


def test_markdown_says_which_is_best():
    """Under q_g it is better by 0.01, which three seeds with a deviation of 0.01 cannot tell."""
    text = markdown("table3", blocks("table3", three("ivon-admm", 0.7, under=0.01) + three("feddyn", 0.5)))
    rows = rows_of(text)
    assert "Accuracy after 50 rounds: best is IVON-ADMM, under q_g; not to be told from it: IVON-ADMM." in text
    # an NLL of 2 · 0.5 for FedDyn, of 2 · 0.7 for IVON-ADMM
    assert "NLL after 50 rounds: best is FedDyn." in text
    assert [cell.startswith("**") for cell in rows["IVON-ADMM"]] == [True] * 3 + [False] * 4
    assert [cell.startswith("**") for cell in rows["IVON-ADMM, under q_g"]] == [True] * 3 + [False] * 4
    assert [cell.startswith("**") for cell in rows["FedDyn"]] == [False] * 3 + [True] * 3 + [False]


def test_markdown_names_what_diverged_once():
    found = three("ivon-admm", 0.7, under=0.01)
    found[1] = record(method="ivon-admm", seed=63, rounds=12, under=(0.5, 1.0), diverged="Round 13 diverged.")
    text = markdown("table3", blocks("table3", found + three("feddyn", 0.5)))
    assert "IVON-ADMM diverged: seed 63: Round 13 diverged." in text
    assert text.count("Round 13") == 1  # not again under q_g
    assert "best is FedDyn." in text
    assert "best is IVON" not in text
    rows = rows_of(text)
    assert rows["IVON-ADMM"][-1] == "62, 63, 64"
    assert "**" not in "".join(rows["IVON-ADMM"])


def test_csv_is_one_figure_a_line():
    found = three("ivon-admm", 0.7, under=0.01) + three("ivon-admm", 0.65, variant="paper") + three("fedavg", 0.6)[:1]
    lines = list(csv.DictReader(io.StringIO(comma_separated(blocks("table3", found)))))
    assert len(lines) == 4 * 6
    keyed = {(r["method"], r["variant"], r["at"], r["metric"], int(r["round"])): r for r in lines}
    paper = published("table3")[FMNIST]
    for variant, at, base, under in (("", "mean", 0.7, 0.0), ("", "q_g", 0.7, 0.01), ("paper", "mean", 0.65, 0.0)):
        for metric in ("accuracy", "nll"):
            for round in (10, 25, 50):
                line = keyed["ivon-admm", variant, at, metric, round]
                mean, sd = expected(base, round, under)[metric]
                # the preset `paper` is compared with the same figures
                theirs = paper["ivon-admm" + " under q_g" * (at == "q_g")][f"{metric}@{round}"]
                assert (line["scenario"], line["runs"]) == (FMNIST, "3")
                assert float(line["mean"]) == pytest.approx(mean, abs=1e-4)
                assert float(line["sd"]) == pytest.approx(sd, abs=1e-4)
                assert [float(line["paper"]), float(line["paper_sd"])] == theirs
                assert float(line["difference"]) == pytest.approx(mean - theirs[0], abs=1e-4)
                near = abs(mean - theirs[0]) <= 2 * theirs[1] + (0.05 if metric == "accuracy" else 0.005)
                better = (mean > theirs[0]) == (metric == "accuracy")
                assert line["verdict"] == ("within" if near else "better" if better else "worse")
    assert {keyed["fedavg", "", "mean", "nll", round]["sd"] for round in (10, 25, 50)} == {""}


def test_what_the_paper_does_not_have_stays_empty():
    (*_, last) = csv.DictReader(io.StringIO(comma_separated(blocks("table3", three("ivon-pvi", 0.5)))))
    assert (last["method"], last["round"]) == ("ivon-pvi", "50")
    assert {last[key] for key in ("paper", "paper_sd", "difference", "verdict")} == {""}


def test_the_scenario_s_own_value_is_a_row_of_a_sweep():
    own = load(FMNIST).settings["tau"]
    found = [record(method="ivon-admm", nll=0.5), record(method="ivon-admm", variant="tau=0.03", nll=0.75)]
    (block,) = [block for block in blocks("tau", found) if block.part.scenario == FMNIST]
    means = {row.variant: figures["nll", 50].mean for row, figures in block.ours.items() if figures}
    assert means == {f"tau={own}": 0.5, "tau=0.03": 0.75}


def test_records_of_a_part_are_its_own_in_the_order_of_seeds():
    strangers = [record(scenario="fmnist-homog-10"), record(variant="tau=0.03", method="ivon-admm")]
    found = [record(seed=64), record(seed=62), *strangers, record(seed=63)]
    (part,) = TABLES["table3"]
    by_run = records_of(part, found)
    assert list(by_run) == list(part.runs)
    assert [run["seed"] for run in by_run.pop(("fedavg", ""))] == [62, 63, 64]
    assert not any(by_run.values())


@pytest.mark.parametrize(
    ("row", "key", "label"),
    [
        (Row("fedlap-cov", "", False), "fedlap-cov", "FedLap-Cov"),
        (Row("ivon-admm", "paper", True), "ivon-admm under q_g", "IVON-ADMM (settings of the paper), under q_g"),
        (Row("ivon-admm", "tau=0.1", True), "ivon-admm tau=0.1 under q_g", "IVON-ADMM (tau=0.1), under q_g"),
        (Row("ivon-admm", "paper,clip=1.0", False), "ivon-admm paper,clip=1.0", "IVON-ADMM (the paper’s, clip=1.0)"),
        (Row("fedavg", "central", False), "fedavg central", "all data in one place"),
        (Row("ivon-admm", "tau=0.01", False), "ivon-admm tau=0.01", "IVON-ADMM (tau=0.01)"),
        (
            Row("ivon-admm", "default,tau=0.01,train.rounds=25", True),
            "ivon-admm default,tau=0.01,train.rounds=25 under q_g",
            "IVON-ADMM (no setting, without tau from the number of examples), under q_g",
        ),
    ],
)
def test_names_of_rows(row: Row, key: str, label: str):
    assert (row.key, row.label) == (key, label)


@pytest.mark.parametrize("name", sorted(set(TABLES) - {"fig2", "calibration"}))
def test_a_table_without_records(name: str):
    text = markdown(name, blocks(name, []))
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| method")]
    assert lines
    assert all(line.endswith("| not run |") for line in lines)
    assert "best is" not in text
    assert len(comma_separated(blocks(name, [])).splitlines()) == 1
