"""`python -m studies small`: its tables, which cells it runs, and how it compares."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedual.rundir.jsonable import plain
from studies.__main__ import app
from studies.small import page
from studies.small.cells import METHODS, Cell, resolved
from studies.small.commands import LEAST_TRIED, SEEDS
from studies.small.tables import OTHERS, REPORTED, Table

SIZES = [30, 40, 50]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that would be run, on one small table."""
    seen = []
    nothing = Table("any", [(torch.zeros(n, 1), torch.zeros(n)) for n in SIZES], (torch.zeros(1, 1),) * 2, None, "mse")  # type: ignore[arg-type]

    def run(self: Cell, table: Table) -> dict:
        seen.append(self)
        return line(self.table, self.method, self.settings, self.seed, 0.5)

    monkeypatch.setattr(Cell, "load", lambda self: nothing)
    monkeypatch.setattr(Cell, "run", run)
    return seen


def line(table: str, method: str, settings: dict, seed: int, nll: float, sizes: list[int] = SIZES) -> dict:
    about = {"table": table, "method": method, "settings": settings, "seed": seed, "sizes": sizes, "error": None}
    return about | {
        "resolved": plain(resolved(method, settings, SIZES).to_dict()),
        **({"nll": nll, "nll_mc": nll} if method == "ivon-admm" else {"nll": nll}),
        "seconds": 1.0,
    }


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["small", *arguments])
    if done.exception:
        raise done.exception
    return done.output


@pytest.mark.parametrize("name", ["clinics", "tree", "sine", "wine", "diabetes", "spector"])
def test_a_table_is_a_function_of_its_seed_and_standardised(name):
    first, again, other = ((REPORTED | OTHERS)[name].table(name, seed) for seed in (3, 3, 4))
    for (x, y), (x_again, y_again) in zip(first.sites, again.sites, strict=True):
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
    assert not torch.equal(first.test[0], other.test[0])
    x = torch.cat([x for x, _ in first.sites]).double()
    torch.testing.assert_close(x.mean(0), torch.zeros_like(x[0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones_like(x[0]), atol=1e-4, rtol=0)
    sizes = [len(y) for _, y in first.sites]
    assert 3 <= len(sizes) <= 5
    assert max(sizes) > min(sizes)


def test_what_is_tuned_on_is_not_reported():
    assert not REPORTED.keys() & OTHERS.keys()
    assert max(SEEDS) < LEAST_TRIED


def test_no_cell_is_run_twice(asked: list[Cell], tmp_path: Path):
    invoke("run", "--table", "spector", "--records", str(tmp_path))
    assert len(asked) == len(METHODS) * len(SEEDS)
    invoke("run", "--table", "spector", "--records", str(tmp_path))
    assert len(asked) == len(METHODS) * len(SEEDS)
    records = [json.loads(text) for text in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert records[0]["environment"]["torch"] == torch.__version__


def test_a_cell_is_run_again_when_its_rules_have_changed(asked: list[Cell], tmp_path: Path, monkeypatch):
    invoke("run", "--table", "spector", "--records", str(tmp_path))
    monkeypatch.setattr("fedual.defaults.FEW", 0)
    del asked[:]
    invoke("run", "--table", "spector", "--records", str(tmp_path))
    assert {(cell.method, *cell.settings) for cell in asked} == {("ivon-admm",)}


def test_trials_have_seeds_and_tables_of_their_own(asked: list[Cell], tmp_path: Path):
    invoke("try", "ivon-admm tau=0.1,1", "fedavg", "--table", "wine", "--seeds", "2", "--records", str(tmp_path))
    assert [(cell.settings, cell.seed) for cell in asked] == [
        *(({"tau": 0.1}, 100), ({"tau": 1.0}, 100), ({}, 100), ({"tau": 0.1}, 101), ({"tau": 1.0}, 101), ({}, 101)),
    ]
    with pytest.raises(Exception, match="spector"):
        invoke("try", "fedavg", "--table", "spector", "--records", str(tmp_path))


def test_the_default_is_compared_with_the_best_other_seed_by_seed():
    lines = [line("spector", "ivon-admm", {}, seed, value) for seed, value in ((0, 0.2), (1, 0.5))]
    lines += [line("spector", "fedavg", {}, seed, value) for seed, value in ((0, 0.3), (1, 0.4))]
    lines += [line("spector", "fedprox", {"lr": 1e-3}, seed, value) for seed, value in ((0, 0.1), (1, 0.5), (2, 9.0))]
    assert page.best(lines, "spector") == "fedavg"
    found = page.paired(lines, "spector")
    assert found is not None
    assert found == pytest.approx((0.0, 0.1))
    assert "+0.0000 ± 0.1000" in page.text(lines)
    assert page.paired(lines[2:], "spector") is None


def test_a_record_of_other_rules_is_shown_as_the_earlier_default():
    now, then = line("spector", "ivon-admm", {}, 0, 0.2), line("spector", "ivon-admm", {}, 0, 0.7, [900, 800])
    assert page.by_seed([then, now], "spector", "ivon-admm", "nll") == {0: 0.2}
    assert page.by_seed([then, now], "spector", page.BEFORE + "ivon-admm", "nll") == {0: 0.7}
