"""CITATION.cff names the version that is released."""

from pathlib import Path

import fedual


def test_the_citation_has_the_version_and_the_licence():
    lines = (Path(__file__).parents[1] / "CITATION.cff").read_text().splitlines()
    assert f"version: {fedual.__version__}" in lines
    assert "license: Apache-2.0" in lines
