from pathlib import Path

import numpy as np
import pytest
import torch
from data.make_files import cifar_binary, images, labels
from data.make_files import write as write_files
from sklearn.metrics import roc_auc_score
from slow import rest_slow
from synthetic import keep, record

from fedual import data
from fedual.data import Dataset
from fedual.errors import DataError, InputError
from fedual.posterior import Posterior
from fedual.scenarios import load, read
from studies import records, tables
from studies.pages import write as write_page
from studies.records import Cell
from studies.tables import SEEDS, TABLES, TITLES, cells, missing, outliers, run, unavailable

CIFAR100 = "cifar100-resnet20-heterog-10"
QUICK = "train.rounds=2,train.local_epochs=1,data.fraction=1.0"


def stand_in(name: str, scale: int, seed: int) -> Dataset:
    """100 training and 40 test images: stripes, as wide and as bright as the class says, and noise."""
    rng = np.random.default_rng(seed)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = np.arange(count) % 10
        rows = np.arange(28)[None, :, None] // (1 + y[:, None, None] // 2) % 2
        x = rows * (40 + 20 * y[:, None, None]) + rng.integers(0, 10 * seed, (count, 28, 28))
        return torch.tensor(x.astype(np.uint8)), torch.tensor(y)

    return Dataset(*some(100), *some(40), name, 10, scale)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Dataset]:
    """MNIST and FMNIST, as far as anybody can tell."""
    known = {"mnist": stand_in("mnist", 255, 1), "fmnist": stand_in("fmnist", 1, 2)}

    def load_small(name: str, root: object = None) -> Dataset:
        if name not in known:
            raise DataError(f"{name} is not in {root}")
        return known[name]

    monkeypatch.setattr(data, "load", load_small)
    return known


def silent(label: str, rounds: int):
    return lambda run, record: None


def the_run(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return a list to which `tables.run` adds its runs."""
    seen, execute = [], tables.execute
    monkeypatch.setattr(tables, "execute", lambda *given, **more: seen.append(execute(*given, **more)) or seen[-1])
    return seen


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_of_every_table_builds(name: str):
    assert name in TITLES
    for cell in cells(name, seeds=[62]):
        scenario = cell.load()
        scenario.spec()
        (part,) = [part for part in TABLES[name] if part.scenario == cell.scenario]
        assert max(part.rounds) <= scenario.train["rounds"]


def test_seed_by_seed_and_no_cell_twice():
    found = cells("table1")
    assert len(set(found)) == len(found)
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found)
    assert {cell.seed for cell in found} == set(SEEDS)
    one, two = ([(c.scenario, c.method, c.variant) for c in found if c.seed == seed] for seed in SEEDS[:2])
    assert one == two
    assert cells("table3", seeds=[7, 7]) == cells("table3", seeds=[7])


def test_every_method_is_in_the_tables_of_the_paper():
    for name in ("table1", "table2", "table3"):
        for part in TABLES[name]:
            if part.scenario != "cifar10-resnet20-heterog-10":
                methods = {method for method, variant in part.runs if not variant}
                assert methods == {"ivon-admm", "ivon-pvi", "fedavg", "fedprox", "feddyn", "fedlap", "fedlap-cov"}
                assert ("ivon-admm", "paper") in part.runs
                assert ("fedavg", "central") in part.runs


def test_a_value_that_the_scenario_has_anyway_is_its_own_cell():
    own = load("mnist-2class-100").settings["tau"]
    variants = [cell.variant for cell in cells("tau", ["mnist-2class-100"], seeds=[62])]
    assert "" in variants
    assert f"tau={own}" not in variants
    assert len(variants) == len(set(variants)) == 5


def test_filters():
    assert cells("table3", methods=["fedavg", "ivon-admm:paper"], seeds=[62]) == [
        Cell("fmnist-heterog-10", "fedavg", 62),
        Cell("fmnist-heterog-10", "ivon-admm", 62, "paper"),
    ]
    some = cells("table1", ["fmnist-homog-10"])
    assert {cell.scenario for cell in some} == {"fmnist-homog-10"}
    assert len(some) == 9 * 3
    assert cells("rho", [CIFAR100], ["ivon-admm:rho=5.0"], [1]) == [Cell(CIFAR100, "ivon-admm", 1, "rho=5.0")]


@pytest.mark.parametrize(
    ("name", "scenarios", "methods", "message"),
    [
        (
            "table9",
            [],
            [],
            "no table 'table9': choose one of table1, table2, table3, pvi, tau, rho, defaults, participation",
        ),
        ("table1", ["fmnist-homog"], [], "table1 has no scenario 'fmnist-homog': did you mean 'fmnist-homog-10'?"),
        ("table3", ["xxx"], [], "table3 has no scenario 'xxx': choose one of fmnist-heterog-10."),
        ("table1", ["fmnist-homog-10", "mnist"], [], "has no scenario 'mnist'"),  # one that exists does not hide it
        ("pvi", [], ["x"], "pvi has no method 'x': choose one of ivon-pvi, ivon-admm."),
        ("table3", [], ["fedavg:centrall"], "did you mean 'fedavg:central'?"),
        (
            "table2",
            ["cifar10-resnet20-heterog-10"],
            ["fedprox"],
            "on cifar10-resnet20-heterog-10: choose among ivon-ad",
        ),
    ],
)
def test_unknown_names_are_refused(name: str, scenarios: list[str], methods: list[str], message: str):
    with pytest.raises(InputError) as info:
        cells(name, scenarios, methods)
    assert message in str(info.value)
    assert "\n" not in str(info.value)


def test_missing_are_those_without_a_current_record(tmp_path: Path):
    wanted = cells("table3", methods=["fedavg", "fedprox", "feddyn"], seeds=[62, 63])
    assert missing(wanted, tmp_path) == wanted
    keep(record(), tmp_path)
    keep(record(method="feddyn", seed=63, rounds=0, diverged="Round 1 diverged."), tmp_path)  # a result as well
    stale = record(method="fedprox")
    stale["config"]["scenario"]["settings"]["lr"] = 1.0
    keep(stale, tmp_path)
    left = [(cell.method, cell.seed) for cell in missing(wanted, tmp_path)]
    assert left == [("fedprox", 62), ("feddyn", 62), ("fedavg", 63), ("fedprox", 63)]


def test_missing_names_a_damaged_record(tmp_path: Path):
    keep(record(), tmp_path).write_text("{\n")
    with pytest.raises(DataError, match=r"line 1 of .*fmnist-heterog-10\.jsonl is no record"):
        missing(cells("table3"), tmp_path)


def test_absent_data_are_named_once_per_reason(small: dict[str, Dataset], tmp_path: Path):
    wanted = cells("pvi", seeds=[62])
    reason = f"cifar100 is not in {tmp_path}"
    assert unavailable(wanted, tmp_path) == {reason: [cell for cell in wanted if cell.scenario == CIFAR100]}
    assert unavailable([], tmp_path) == {}


def test_the_other_images_must_be_there_before_a_run(small: dict[str, Dataset]):
    del small["mnist"]
    wanted = cells("table3", methods=["fedavg"], seeds=[62])
    assert unavailable(wanted) == {"mnist is not in None": wanted}


def entropy(posterior: Posterior, x: torch.Tensor, samples: int) -> np.ndarray:
    """Of the predictive, network by network."""
    assert posterior.network.scale is not None
    thetas = posterior.sample(samples) if samples else [posterior.mean]
    with torch.no_grad():
        outputs = [posterior.module(theta)(x.double() / posterior.network.scale) for theta in thetas]
    p = np.mean([output.softmax(-1).numpy() for output in outputs], 0)
    return -(p * np.log(p)).sum(-1)


@pytest.mark.parametrize(
    ("cell", "other"),
    [
        pytest.param(Cell("fmnist-heterog-10", "ivon-admm", 62, QUICK), "mnist", marks=pytest.mark.slow),
        (Cell("mnist-2class-100", "fedlap-cov", 3, f"{QUICK},split.clients=5,per_class=4"), "fmnist"),
    ],
)
def test_a_run_leaves_its_record(
    small: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell, other: str
):
    seen, watched = the_run(monkeypatch), []
    found = run(cell, tmp_path, watch=lambda *asked: watched.append(asked) or silent(*asked), device="cpu")
    (done,) = seen
    assert [found] == records.read(cell.path(tmp_path))
    assert watched == [(str(cell), 2)]
    assert found["diverged"] is None
    assert records.current(found)
    assert missing([cell], tmp_path) == []
    assert (found["config"]["seed"], found["config"]["scenario"]["name"]) == (cell.seed, cell.scenario)
    assert found["total_seconds"] > 0
    assert found["environment"]["torch"] == torch.__version__
    assert found["history"]["round"] == [1, 2]
    for key in ("accuracy", "nll", "ece", "nll_mc", "seconds"):
        assert found["history"][key] == pytest.approx([row[key] for row in done.history], rel=1e-5)
    own = {"mnist": "fmnist", "fmnist": "mnist"}[other]
    for key, samples in (("auroc", 0), ("auroc_mc", 32)):
        scores = [entropy(done.posterior, small[name].x_test, samples) for name in (other, own)]
        wanted = roc_auc_score([1] * 40 + [0] * 40, np.concatenate(scores))
        assert found["outliers"][key] == pytest.approx(wanted, abs=1e-9)
    assert found["outliers"]["data"] == other


def test_there_is_no_other_data_set_for_photographs():
    assert outliers(None, "cifar10") == {}  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_that_diverges_leaves_a_record_that_says_so(small: dict[str, Dataset], tmp_path: Path, no_drawing: None):
    wild = Cell("fmnist-heterog-10", "ivon-admm", 62, f"{QUICK},clip=0.0,lr=1e30")
    found = run(wild, tmp_path, watch=silent, device="cpu")
    assert "Round 1 diverged" in found["diverged"]
    assert found["outliers"] == {}
    assert found["history"]["round"] == []
    assert records.read(wild.path(tmp_path)) == [found]
    assert missing([wild], tmp_path) == []
    for name in TABLES:  # nor does it spoil a table
        text, _ = write_page(name, [{**found, "variant": ""}], tmp_path / "tables")
        assert text.count("diverged: seed 62: Round 1") == (name in ("table3", "pvi", "tau", "rho", "defaults"))


@pytest.fixture
def cifar100(tmp_path: Path) -> Path:
    """The root of a CIFAR-100 of 2 training and 2 test images, in the standard binary format.

    No more, because FedLap-Cov needs 100 backward passes for each of them.
    """
    some = lambda seed: cifar_binary(images(2, seed, (3, 32, 32)), labels(2, 20), labels(2, 100) + 98)
    write_files(tmp_path / "data" / "cifar100" / "cifar-100-binary", {"train.bin": some(0), "test.bin": some(1)})
    return tmp_path / "data"


METHODS = ("ivon-admm", "ivon-pvi", "fedavg", "fedprox", "feddyn", "fedadmm", "fedlap", "fedlap-cov")
SHORT = "train.rounds=1,train.local_steps=1,train.batch_size=1,train.samples=1,split.clients=2"


@pytest.mark.parametrize("method", rest_slow(METHODS, "ivon-admm", "fedavg"))
def test_the_recipe_for_cifar100(cifar100: Path, tmp_path: Path, method: str):
    torch.set_default_dtype(torch.float32)
    cell = Cell(CIFAR100, method, 62, SHORT)
    assert unavailable([cell], cifar100) == {}
    found = run(cell, tmp_path, watch=silent, device="cpu", root=cifar100)
    assert found["diverged"] is None
    assert found["config"]["parameters"] == 275_572  # 269 722 with 10 classes, and 90 · 65
    assert 0 < found["history"]["nll"][0] < 50
    assert found["outliers"] == {}
    assert set(load(CIFAR100, method=method).describe()["settings"]) <= set(found["config"]["scenario"]["settings"])


def test_every_method_of_the_recipe_is_tried():
    assert set(read(CIFAR100)[1]["method"]) == set(METHODS)
