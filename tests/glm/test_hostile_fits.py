"""Files of fits with a right checksum and other content, and tables whose texts a spreadsheet would compute."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedual.errors import DataError
from fedual.glm import Fit, fit


@pytest.fixture(scope="module")
def made() -> Fit:
    rng = np.random.default_rng(0)
    tables = [{"=1+1": rng.normal(size=40), "age": rng.normal(size=40)} for _ in range(2)]
    tables = [{**table, "y": rng.normal(size=40) + table["age"]} for table in tables]
    return fit("y ~ age + `=1+1`", tables)


def changed(content: dict[str, Any], place: str, new: Any) -> dict[str, Any]:
    content = json.loads(json.dumps(content))
    *path, last = place.split(".")
    inner: Any = content
    for key in path:
        inner = inner[int(key)] if isinstance(inner, list) else inner[key]
    inner[last] = new
    return content


@pytest.mark.parametrize(
    ("place", "new"),
    [
        ("ml", [1]),
        ("ml.coefficients", [[1.0]]),
        ("ml.covariance", [1.0]),
        ("ml.covariance", [[1.0]]),
        ("posterior_kind", "quadratßc"),
        ("schema.formula", 3),
        ("schema.terms", "abc"),
        ("schema.levels", {"age": 3}),
        ("sites.0.n", "many"),
        ("sites.0.missing", [1]),
        ("convergence.step", [1]),
        ("convergence.history", 3),
        ("dispersion", {"a": 1}),
        ("warnings", [3.5]),
        ("residuals", {"edges": 3, "counts": []}),
        ("n", 10**30),
        ("n", -1),
        ("prior", None),
        ("family", "\x1b[31m"),
        ("alpha", json.loads("[" * 200 + "]" * 200)),
    ],
)
def test_other_content_is_one_sentence(made: Fit, tmp_path: Path, place: str, new: Any):
    made.save(path := tmp_path / "fit.json")
    whole = json.loads(path.read_text())
    text = json.dumps(changed(json.loads(whole["fit"]), place, new))
    path.write_text(json.dumps(whole | {"fit": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    with pytest.raises(DataError) as raised:
        Fit.load(path)
    assert "fit.json" in str(raised.value)
    assert str(raised.value).isprintable()


def test_deep_json_is_one_sentence(tmp_path: Path):
    for text in ("[" * 100_000, '{"format": ' * 100_000, "1" * 5000):
        (tmp_path / "fit.json").write_text(text)
        with pytest.raises(DataError, match="is damaged or not JSON"):
            Fit.load(tmp_path / "fit.json")


def test_no_cell_of_a_table_is_a_formula(made: Fit, tmp_path: Path):
    made.to_csv(tmp_path / "table.csv")
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["term", "Intercept", "age", "'=1+1"]
