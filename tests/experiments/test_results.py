"""What the repository's own tables say is what its records say."""

from pathlib import Path

import pytest

from fedual.experiments import records, report, tables
from fedual.experiments.records import Record
from fedual.experiments.reproduce import TABLES

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def found() -> list[Record]:
    return [record for record in records.read_all(RESULTS) if records.current(record)]


@pytest.mark.parametrize("name", [name for name in TABLES if name != "fig2"])  # whose page is made while it is drawn
def test_tables_are_those_of_the_records(name: str, found: list[Record]):
    page = (RESULTS / "tables" / f"{name}.md").read_text(encoding="utf-8")
    text = report.calibration(found) if name == "calibration" else tables.markdown(name, tables.blocks(name, found))
    assert page.startswith(text)
