"""Fits as files, and draws for ArviZ."""

import hashlib
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pooled import ALL, FORMULA, pooled, simulated

from fedual.errors import DataError, InputError
from fedual.glm.export import escaped
from fedual.glm.figures import Estimate
from fedual.glm.prior import Prior
from fedual.glm.result import Fit


def made(family: str = "binomial", prior: Prior = Prior()) -> Fit:  # noqa: B008 (frozen)
    fit = pooled(FORMULA, simulated(family), family, prior=prior).fit
    sites = (replace(fit.sites[0], missing={"age": 3}, mean_response=math.nan), *fit.sites[1:])
    fit = replace(fit, sites=sites, hc0=np.eye(4) / 3, warnings=("careful",), null_loglik=-math.inf)
    bins, cells = [{"predicted": 0.1, "observed": 1 / 3, "n": 7}], {"edges": [-1.0, 1.0], "counts": [7]}
    return replace(fit, calibration=bins, residuals=cells)


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, NaN included."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=True) and one.dtype == other.dtype
    if isinstance(one, Estimate) or type(one).__name__ == "SiteFigures":
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


@pytest.mark.parametrize("family", ALL)
def test_a_fit_that_was_saved_is_the_same(family: str, tmp_path: Path):
    fit = made(family)
    fit.save(tmp_path / "fit.json")
    loaded = Fit.load(tmp_path / "fit.json")
    for field in fields(fit):
        assert same(getattr(fit, field.name), getattr(loaded, field.name)), field.name
    assert str(loaded.summary()) == str(fit.summary())
    assert loaded.robust("cluster").table.equals(fit.robust("cluster").table)


def test_a_fit_without_some_figures_is_saved_too(tmp_path: Path):
    fit = replace(made(), ml=None, hc0=None, residuals=None, calibration=None, separation="Separated.")
    fit.save(tmp_path / "fit.json")
    loaded = Fit.load(tmp_path / "fit.json")
    assert loaded.ml is loaded.hc0 is loaded.residuals is None
    assert loaded.table.equals(fit.table)


def test_damaged_files_are_refused(tmp_path: Path):
    path = tmp_path / "fit.json"
    with pytest.raises(DataError, match="cannot be read"):
        Fit.load(path)
    made().save(path)
    whole = path.read_text()
    for text, message in {
        whole[:1000]: "damaged or not JSON",
        whole.replace("careful", "carefil"): "checksum",
        "[1]": "has the format None",
        json.dumps({"format": "fedual-glm-9"}): "has the format 'fedual-glm-9'",
    }.items():
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            Fit.load(path)


def test_a_file_with_other_fields_is_refused(tmp_path: Path):
    path = tmp_path / "fit.json"
    made().save(path)
    content = json.loads(json.loads(path.read_text())["fit"])
    for change in ({"ml": 3}, {"family": None}, {"extra": 1}):
        text = json.dumps(content | change)
        digest = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"format": "fedual-glm-1", "sha256": digest, "fit": text}))
        with pytest.raises(DataError, match=r"not a fit that this version can read|other content than fedual writes"):
            Fit.load(path)


def test_csv_has_the_table_with_all_digits(tmp_path: Path):
    fit = made()
    fit.to_csv(tmp_path / "table.csv")
    read = pd.read_csv(tmp_path / "table.csv", index_col="term")
    assert read.equals(fit.table)
    penalised = replace(fit, ml=None)
    penalised.to_csv(tmp_path / "table.csv", level=0.5)
    assert pd.read_csv(tmp_path / "table.csv").p.isna().all()


def test_json_is_strict_and_holds_all_figures(tmp_path: Path):
    def refuse(word: str) -> None:
        raise AssertionError(word)

    fit = made("gamma")
    fit.to_json(tmp_path / "figures.json")
    read = json.loads((tmp_path / "figures.json").read_text(), parse_constant=refuse)
    assert pd.DataFrame(read["coefficients"]).set_index("term").equals(fit.table)
    assert np.array_equal(read["covariance"], fit.covariance)
    assert np.array_equal(read["covariance_hc0"], np.eye(4) / 3)
    assert read["terms"] == list(fit.terms)
    assert (read["aic"], read["dispersion"], read["statistic"]) == (fit.aic, fit.dispersion, "t")
    assert read["null_loglik"] is None
    assert read["sites"][0] == {"site": "site 3", "n": 68, "mean_response": None, "missing": {"age": 3}}
    assert read["heterogeneity"]["q"] == fit.heterogeneity.q
    assert len(read["heterogeneity"]["by_site"]) == 16
    assert read["convergence"]["words"] == fit.convergence.words()
    replace(fit, ml=None).to_json(tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text(), parse_constant=refuse)["covariance"] is None


def test_latex_is_escaped_booktabs():
    fit = made()
    fit = replace(fit, schema=replace(fit.schema, terms=(*fit.schema.terms[:3], r"C(a_b)[T.100% & #{x}\~^]")))
    text = fit.to_latex(level=0.9, caption="50% of 1_2", label="tab:fit")
    assert text.startswith("\\begin{table}\n\\centering\n\\caption{50\\% of 1\\_2}\n\\label{tab:fit}\n\\begin{tabular}")
    assert r"C(a\_b)[T.100\% \& \#\{x\}\textbackslash{}\textasciitilde{}\textasciicircum{}] &" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 5
    assert {row.replace(r"\&", "").count("&") for row in rows} == {8}
    assert [text.count(word) for word in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    plain = fit.to_latex()
    assert plain.startswith(r"\begin{tabular}{lrrrrrrrr}")
    assert f"${fit.coefficients['age']:.4f}$" in plain
    assert r"age" in replace(fit, ml=None).to_latex()


def test_latex_shows_powers_of_ten():
    fit = made("gaussian")
    assert fit.ml is not None
    small = replace(fit, ml=Estimate(fit.ml.coefficients * 1e-9, fit.ml.covariance * 1e-18))
    assert r"\times 10^{-11}$" in small.to_latex()
    assert escaped("a<b\n") == r"a\textless{}b"


def test_files_that_cannot_be_written_are_named(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be written"):
        made().to_csv(tmp_path / "no folder" / "table.csv")


def drawn_of(tree: Any, fit: Fit) -> np.ndarray:
    """The only chain `(P, draws)`."""
    return np.array([tree["posterior"][term].to_numpy()[0] for term in fit.terms])


def test_arviz_draws_have_the_posteriors_moments():
    fit = made(prior=Prior(0.3))
    assert fit.posterior is not None
    tree = fit.to_arviz(draws=20_000, seed=3)
    assert set(tree["posterior"].data_vars) == set(fit.terms)
    drawn = drawn_of(tree, fit)
    np.testing.assert_allclose(drawn.mean(1), fit.posterior.coefficients, atol=4 * fit.posterior.se.max() / 141)
    np.testing.assert_allclose(drawn.std(1), fit.posterior.se, rtol=0.05)
    correlation = fit.posterior.covariance / np.outer(fit.posterior.se, fit.posterior.se)
    np.testing.assert_allclose(np.corrcoef(drawn), correlation, atol=0.05)
    assert tree["posterior"].attrs["prior"] == fit.prior.words()
    assert np.array_equal(drawn_of(fit.to_arviz(draws=20_000, seed=3), fit), drawn)
    assert not np.isclose(drawn_of(fit.to_arviz(10, 1), fit), drawn_of(fit.to_arviz(10, 2), fit)).any()
    with pytest.raises(InputError, match="draws = 0"):
        fit.to_arviz(0)


def test_arviz_of_a_flat_prior_draws_around_the_maximum():
    fit = pooled(FORMULA, simulated("poisson"), "poisson").fit
    tree = fit.to_arviz(5000)
    np.testing.assert_allclose(drawn_of(tree, fit).mean(1), fit.coefficients, atol=0.1 * fit.table.se.max())
    assert tree["posterior"].attrs["posterior"] == "quadratic"
