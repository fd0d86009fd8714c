"""The repository's own tables have the digits of its records."""

from pathlib import Path

import pytest
from synthetic import keep, record
from typer.testing import CliRunner

from studies import pages, robustness
from studies.__main__ import app
from studies.tables import TABLES

ROOT = Path(__file__).parents[2]
RESULTS, PAGES = ROOT / "results", ROOT / "docs" / "tables"


def check(results: Path, out: Path):
    return CliRunner().invoke(app, ["check", "--results", str(results), "--out", str(out)])


def test_all_tables_are_rebuilt_to_the_same_digits():
    done = check(RESULTS, PAGES)
    assert done.exit_code == 0, done.output
    assert "all tables have the same digits" in done.output
    pages_there = {path.stem for path in PAGES.glob("*.md")}
    assert pages_there == {*TABLES, "attacks", "robustness", "regression", "calibrated"}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with two records, and `out` with all the tables that they make."""
    keep(record(), tmp_path)
    keep(record(method="ivon-admm", under=(0.5, 1.0)), tmp_path)
    found = [record(), record(method="ivon-admm", under=(0.5, 1.0))]
    (tmp_path / "out").mkdir()
    for name in TABLES:
        for file, text in pages.build(name, found)[0].items():
            (tmp_path / "out" / file).write_text(text, encoding="utf-8")
    (tmp_path / "out" / "robustness.md").write_text(robustness.table([]))
    return tmp_path


@pytest.mark.slow
def test_a_changed_digit_and_a_missing_table_are_named(small: Path):
    out = small / "out"
    page, text = out / "table3.csv", (out / "table3.csv").read_text()
    assert "50.0000" in text
    page.write_text(text.replace("50.0000", "50.0001", 1))
    (out / "tau.md").unlink()
    done = check(small, out)
    assert done.exit_code == 1
    assert f"{page} differs from the records in line 2\n" in done.output
    assert f"{out / 'tau.md'} is missing\n" in done.output
    assert "rebuild them" in done.output


def test_a_folder_without_records_is_refused(tmp_path: Path):
    done = check(tmp_path, PAGES)
    assert "has no records of present settings" in str(done.exception)
