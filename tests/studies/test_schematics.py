"""The two schematic figures: their files, and that what they draw is true."""

import json
import math

import pytest

pytest.importorskip("matplotlib")

from studies.figures import draw


def drawn(name, folder):
    """Draw a figure and read its numbers back."""
    drawing, paths = draw(name, folder)
    assert [path.name for path in paths] == [f"{name}.svg", f"{name}.png", f"{name}.json"]
    assert all(path.stat().st_size > 500 for path in paths)
    text = json.loads(paths[-1].read_text())
    assert text["findings"] == drawing.findings
    return text["numbers"], text["findings"]


@pytest.mark.slow
def test_duality_eq4_eq13_hold_at_the_fixed_points(tmp_path):
    numbers, findings = drawn("duality", tmp_path)
    assert len(findings) == 2
    assert set(numbers["residuals"]) == {"admm_eq4", "bayesian_duality_eq13"}
    for residuals in numbers["residuals"].values():
        assert len(residuals) == 4
        assert max(residuals.values()) < 1e-10


@pytest.fixture(scope="module")
def expfam(tmp_path_factory):
    return drawn("expfam", tmp_path_factory.mktemp("expfam"))


def test_expfam_gaussian_has_the_largest_entropy_of_its_moments(expfam):
    numbers, findings = expfam
    densities = numbers["densities"]
    for facts in densities.values():
        assert [facts["mass"], facts["mean"], facts["second_moment"]] == pytest.approx([1, 0, 1], abs=1e-6)
    entropies = {name: facts["entropy"] for name, facts in densities.items()}
    assert entropies["Gaussian"] == pytest.approx(math.log(2 * math.pi * math.e) / 2, abs=1e-6)
    assert entropies["Laplace"] == pytest.approx(1 + math.log(2) / 2, abs=1e-6)
    assert max(entropies, key=lambda name: entropies[name]) == "Gaussian"
    assert findings[0].startswith("Gaussian has the largest entropy")


def test_expfam_points_in_both_coordinates(expfam):
    numbers, _ = expfam
    points = numbers["points"]
    for (first, second), mu in zip(points["lambda"], points["mu"], strict=True):
        mean, variance = -first / (2 * second), -1 / (2 * second)
        assert mu == pytest.approx([mean, mean**2 + variance], abs=1e-12)
    assert max(*points["round_trip_error"], numbers["grid_round_trip_error"]) < 1e-12
