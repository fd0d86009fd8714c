import json

import pytest
from typer.testing import CliRunner

from fedual.cli import build
from fedual.errors import InputError


def test_figure_writes_files_and_says_what_it_found(tmp_path):
    done = CliRunner().invoke(build(), ["figure", "expfam", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    last = json.loads(done.output.splitlines()[-1])
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".png", ".svg"]
    assert last["findings"] == json.loads((tmp_path / "expfam.json").read_text())["findings"]


def test_unknown_figure_is_refused():
    done = CliRunner().invoke(build(), ["figure", "venn"])
    with pytest.raises(InputError, match="choose one of"):
        raise done.exception  # pyright: ignore[reportGeneralTypeIssues]
