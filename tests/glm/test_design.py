"""The stacked designs of the sites are the design of the pooled table: formulaic's, and patsy's."""

import builtins
import itertools
import tracemalloc
from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from agreeing import agreed, designs, sent, stacked
from formulaic import model_matrix
from formulaic.transforms import natural_cubic_spline
from patsy.highlevel import dmatrices

from fedual.errors import DataError, InputError
from fedual.glm import matrix
from fedual.glm.schema import Columns, Design, describe, design, measure, unmeasured
from fedual.glm.splines import CELLS
from fedual.glm.tables import read

CONTEXT = {"sqrt": np.sqrt, "log1p": np.log1p, "expm1": np.expm1}


def table(rows: int = 90, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "y": rng.normal(size=rows),
            "x": rng.normal(3, 2, size=rows),
            "z": rng.gamma(2, size=rows),
            "n": rng.integers(0, 9, size=rows),
            "sex": rng.choice(["m", "f"], rows),
            "grade": rng.choice([1, 2, 10], rows),
            "b": rng.random(rows) < 0.5,
            "odd name": rng.normal(size=rows),
            "a.b": rng.normal(size=rows),
            "type": rng.choice(["p", "q", "r"], rows),
        }
    )
    frame.loc[:30, "grade"] = 2  # the first site has one level only
    frame.loc[:30, "sex"] = "m"
    return frame


def split(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Three sites, one of them with one row."""
    return {"a": frame.iloc[:30], "b": frame.iloc[30:31], "c": frame.iloc[31:]}


FORMULAS = [
    "y ~ x",
    "y ~ x + z + n",
    "y ~ 1",
    "y ~ 0 + x",
    "y ~ x - 1",
    "y ~ sex",
    "y ~ 0 + sex",
    "y ~ sex + type - 1",
    "y ~ C(grade)",
    "y ~ C(grade) * x + sex:z",
    "y ~ sex * type",
    "y ~ sex:type",
    "y ~ C(grade):sex:x + type",
    "y ~ 0 + C(grade) + C(grade):x",
    "y ~ (sex + x + z)**2",
    "y ~ sex / x",
    "y ~ x:z + x",
    "y ~ 2.5:x + z",
    "y ~ b + b:x",
    "y ~ b * sex",
    "y ~ C(b)",
    "y ~ I(x**2) + I(x / (1 + z)) + I(-x)",
    "y ~ I(x > 3) + I((x > 3) & (z < 2)) + I(~(n == 3))",
    "y ~ I(sex == 'm') + I(sex != 'm'):x",
    "y ~ log(z) + sqrt(z) + log1p(z) + exp(-z) + abs(x) + expm1(z) + log10(z) + log2(z)",
    "y ~ `odd name` + log(abs(`odd name`)) + `odd name`:sex",
    "y ~ a.b + I(`a.b` * 2)",
    "y ~ C(sex, Treatment('m'))",
    "y ~ C(grade, Treatment(2)) + x",
    "y ~ C(grade, Treatment(reference=10)):x",
    "y ~ C(grade, Sum)",
    "y ~ C(grade, Helmert) * x",
    "y ~ C(grade, Diff)",
    "y ~ C(grade) + grade",
    "y ~ I(2) + x",
    "y ~ . - y",
    "log(z) ~ .",
    "y ~ poly(x, 2, raw=True)",
    "y ~ bs(x, knots=[2, 4], lower_bound=-9, upper_bound=15)",
    "y ~ bs(x, knots=[2, 4], lower_bound=-9, upper_bound=15, degree=2, include_intercept=True)",
    "y ~ bs(x, df=3, lower_bound=-9, upper_bound=15):sex",
    "y ~ bs(x, knots=[3], lower_bound=1, upper_bound=4, extrapolation='clip')",
    "y ~ bs(x, knots=[3], lower_bound=1, upper_bound=4, extrapolation='extend')",
    "y ~ bs(x, knots=[3], lower_bound=1, upper_bound=4, extrapolation='zero')",
    "y ~ cr(x, knots=[2, 4], lower_bound=-9, upper_bound=15)",
]
MEASURED = [
    "y ~ scale(x)",
    "y ~ scale(x, ddof=0) + scale(z, center=False) + scale(n, scale=False)",
    "y ~ scale(x, center=2) + scale(z, scale=3)",
    "y ~ center(x) + standardize(z)",
    "y ~ standardize(x, center=False) + standardize(x, rescale=False)",
    "y ~ scale(log(z)):sex + I(scale(x)**2)",
    "y ~ scale(scale(x)**2)",
    "y ~ poly(x, 3)",
    "y ~ poly(scale(x), 2):sex",
    "y ~ cr(x, knots=[2, 4], lower_bound=-9, upper_bound=15, constraints='center')",
    "y ~ cs(center(x), knots=[-1, 1], lower_bound=-19, upper_bound=15, constraints='center') + scale(x)",
]


@pytest.mark.parametrize("text", FORMULAS + MEASURED)
def test_stacked_designs_equal_formulaics_of_the_pooled_table(text):
    frame = table()
    schema, found = designs(text, split(frame))
    oracle = model_matrix(schema.formula, frame, context=CONTEXT)
    assert schema.terms == tuple(oracle.rhs.columns)
    np.testing.assert_allclose(stacked(found), oracle.rhs.to_numpy(float), rtol=1e-12, atol=1e-12)
    y = np.concatenate([one.y.numpy() for one in found])
    np.testing.assert_array_equal(y, oracle.lhs.to_numpy(float)[:, 0])


PATSY = {
    "y ~ C(grade) * x + sex:z": None,
    "y ~ 0 + C(grade) + C(grade):x": None,
    "y ~ (n + x + z)**2": None,
    "y ~ C(grade, Treatment(10)) + type:x": None,
    "y ~ C(grade, Sum)": None,
    "y ~ log(z) + I(x**2)": "y ~ np.log(z) + I(x**2)",
    "y ~ scale(x) + center(z)": "y ~ standardize(x, ddof=1) + center(z)",
    "y ~ bs(x, knots=[2, 4], lower_bound=-9, upper_bound=15)": None,
    "y ~ cr(x, knots=[2, 4], lower_bound=-9, upper_bound=15, constraints='center')": None,
    "y ~ `odd name`:sex - 1": "y ~ Q('odd name'):sex - 1",
}


@pytest.mark.parametrize(("text", "theirs"), PATSY.items(), ids=PATSY)
def test_stacked_designs_equal_patsys_of_the_pooled_table(text, theirs):
    frame = table()
    _, oracle = dmatrices(theirs or text, frame)
    found = stacked(designs(text, split(frame))[1])
    np.testing.assert_allclose(found, np.asarray(oracle), rtol=1e-11, atol=1e-11)


def test_the_fast_way_is_the_same_as_formulaics(monkeypatch):
    """Columns that need no multiplication are written without formulaic."""
    frame = table(20_000)
    text = "y ~ x + log(z) + b + I(2) + scale(`odd name`) + n"
    _, fast = designs(text, split(frame))

    def slow(out, formula, rows):
        out[:] = matrix._product(formula, matrix._values(formula, rows, len(out)), len(out))

    monkeypatch.setattr(matrix, "fill", slow)
    _, other = designs(text, split(frame))
    for one, two in zip(fast, other, strict=True):
        torch.testing.assert_close(one.x, two.x, rtol=0, atol=0)


def test_chunks_do_not_matter(monkeypatch):
    frame = table(100)
    frame.loc[[3, 40, 41, 99], "x"] = np.nan
    text = "y ~ C(grade) * x + bs(z, 5) + type"
    whole = stacked(designs(text, split(frame))[1])
    monkeypatch.setattr(matrix, "CHUNK", 7)
    np.testing.assert_array_equal(stacked(designs(text, split(frame))[1]), whole)


def test_python_evaluates_nothing(monkeypatch):
    frames = split(table())
    text = "log(z) ~ sex * scale(x) + bs(x, 5) + C(grade, Treatment(2)) + I(n > 3) + cr(z, 4, constraints='center')"
    schema = agreed(text, frames)

    called = []
    with monkeypatch.context() as patch:
        for name in ("eval", "exec"):
            patch.setattr(builtins, name, lambda *args: called.append(args))
        found = design(frames["c"], "c", schema)
    assert not called
    assert found.x.shape == (59, len(schema.terms))


class TestSplines:
    """bs and cr with knots and bounds of the federation."""

    @pytest.mark.parametrize("call", ["bs(x, knots=[2, 4])", "bs(x, knots=[2], degree=2)", "bs(x, knots=[2.5, 40])"])
    def test_given_knots_span_the_same_functions_as_pooled(self, call):
        frame = table(300)
        theirs = model_matrix(call.replace(")", ", upper_bound=50)"), frame).to_numpy(float)
        ours = stacked(designs(f"y ~ {call}", split(frame))[1])
        assert_same_span(ours, theirs)

    def test_with_df_they_span_the_splines_of_their_knots(self):
        """A spline space holds the cubic polynomials and (x − t)₊³ of each knot t."""
        frame = table(400)
        schema, found = designs("y ~ bs(x, df=6)", split(frame))
        (state,) = schema.states.values()
        x = frame["x"].to_numpy()
        truncated = [np.clip(x - knot, 0, None) ** 3 for knot in state["knots"]]
        assert len(state["knots"]) == 3
        assert_same_span(stacked(found), np.column_stack([x**0, x, x**2, x**3, *truncated]))

    def test_natural_splines_are_linear_beyond_their_bounds(self):
        frame = table(400)
        schema, _ = designs("y ~ cr(x, df=5)", split(frame))
        (state,) = schema.states.values()
        far = frame.assign(x=state["upper_bound"] + np.arange(len(frame)) / 10)
        x = design(far, "a", schema).x.numpy()
        np.testing.assert_allclose(np.diff(x, 2, axis=0), 0, atol=1e-9)
        assert len(schema.terms) == 1 + 5

    @pytest.mark.parametrize("seed", range(3))
    def test_knots_are_near_the_quantiles(self, seed):
        frame = table(3000, seed)
        (state,) = agreed("y ~ bs(z, df=7)", split(frame)).states.values()
        width = 8 * frame["z"].to_numpy().std() / CELLS
        quantiles = np.quantile(frame["z"], np.linspace(0, 1, 6)[1:-1])
        np.testing.assert_allclose(state["knots"], quantiles, atol=width)

    def test_no_basis_function_is_without_data(self):
        """Bounds are where the data are, also if they are skewed."""
        frame = table(2000).assign(z=np.exp(np.random.default_rng(1).normal(0, 1.5, 2000)))
        schema, found = designs("y ~ 0 + bs(z, df=6, include_intercept=True)", split(frame))
        assert (np.abs(stacked(found)).max(0) > 0.1).all()
        assert next(iter(schema.states.values()))["lower_bound"] > -frame["z"].to_numpy().std() / 4

    def test_no_extreme_leaves_a_site(self):
        frames = split(table(500))
        schema = agreed("y ~ bs(x, 5)", frames)
        start = {call: {} for call in schema.states}
        told = []
        for states in (start, {call: {"mean": 3.0, "sd": 2.0} for call in start}):
            before = type(schema)(**{**schema.__dict__, "states": states})
            request = unmeasured(before)
            assert request is not None
            told += sent(measure(frames["c"], "c", before, request)).popitem()[1]
        x = frames["c"]["x"].to_numpy()
        extremes = x.min(), x.max()
        assert not np.isclose(np.array(told)[:, None], extremes, rtol=1e-9).any()
        assert not {*extremes} & {*itertools.chain(*(state["knots"] for state in schema.states.values()))}

    def test_rare_cells_are_suppressed(self):
        frame = pd.DataFrame({"y": 0.0, "x": [*np.linspace(0, 1, 200), 50.0]})
        schema = agreed("y ~ bs(x, 4)", {"a": frame})
        before = type(schema)(**{**schema.__dict__, "states": {"bs(x, 4)": {"mean": 0.5, "sd": 0.5}}})
        assert unmeasured(before) == {"bs(x, 4)": "histogram"}
        (counts,) = measure(frame, "a", before, {"bs(x, 4)": "histogram"}, least=5).values()
        assert min(count for count in counts if count) >= 5
        assert 190 < sum(counts) <= 200
        assert counts[-1] == 0

    def test_beyond_given_bounds(self):
        with pytest.raises(InputError, match=r"bs\(x, .*beyond the bounds.*extrapolation='extend'"):
            designs("y ~ bs(x, knots=[3], lower_bound=2, upper_bound=4)", split(table()))

    @pytest.mark.parametrize("call", ["bs(k, 4)", "scale(k)", "poly(k, 2)", "center(k) + scale(k)"])
    def test_a_constant_argument(self, call):
        with pytest.raises(InputError, match=r"\(k.*constant over all sites"):
            agreed(f"y ~ {call}", split(table().assign(k=2.0)))

    @pytest.mark.parametrize("call", ["poly(k, 3)", "poly(scale(k), 5)"])
    def test_too_few_values(self, call):
        with pytest.raises(InputError, match=r"poly.*too few different values: use a lower degree"):
            agreed(f"y ~ {call}", split(table().assign(k=lambda frame: frame["n"] % 2)))

    def test_moments_of_large_values_keep_their_digits(self):
        frame = table().assign(x=lambda one: 1e9 + one["x"])
        x = frame["x"].to_numpy()
        found = stacked(designs("y ~ 0 + scale(x)", split(frame))[1])[:, 0]
        np.testing.assert_allclose(found, (x - x.mean()) / x.std(ddof=1), atol=1e-6)


def assert_same_span(a: np.ndarray, b: np.ndarray) -> None:
    assert np.linalg.matrix_rank(a) == np.linalg.matrix_rank(b) == np.linalg.matrix_rank(np.hstack([a, b]), tol=1e-6)
    for one, other in ((a, b), (b, a)):
        fitted = one @ np.linalg.lstsq(one, other, rcond=None)[0]
        np.testing.assert_allclose(fitted, other, atol=1e-8 * np.abs(other).max())


@cache
def large() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return read((rng.normal(size=(100_000, 50)), rng.normal(size=100_000)), "a")


def peak_of(make: Callable[[], Design]) -> float:
    """The most memory in use, as a multiple of the design."""
    tracemalloc.start()
    try:
        found = make()
        return tracemalloc.get_traced_memory()[1] / found.x.numpy().nbytes
    finally:
        tracemalloc.stop()


class TestSmall:
    """100,000 rows and 50 columns."""

    def test_it_takes_little_more_memory_than_the_result(self):
        schema = agreed("y ~ .", {"a": large().iloc[:1000]})
        assert peak_of(lambda: design(large(), "a", schema)) < 1.5

    def test_with_categories_too(self):
        frame = large().assign(g=np.arange(100_000) % 4)
        schema = agreed("y ~ . - g + C(g)", {"a": frame.iloc[:1000]})
        assert peak_of(lambda: design(frame, "a", schema)) < 2

    def test_memory_maps_are_read_in_parts(self, tmp_path):
        np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(20_000, 30)))
        x = np.load(tmp_path / "x.npy", mmap_mode="r")
        frame = read((x, np.zeros(len(x))), "a")
        schema = agreed("y ~ .", {"a": frame.iloc[:100]})
        np.testing.assert_array_equal(design(frame, "a", schema).x[:, 1:], x)


def test_descriptions_are_small():
    frame = table(5000)
    reply, _ = describe(frame, "a", agreed("y ~ x + C(grade)", {"a": frame}).parsed, Columns())
    assert len(str(reply)) < 400


def test_values_that_leave_the_domain_of_a_function():
    frame = table()
    row = int((frame["x"] <= 0).to_numpy()[31:].argmax())
    with pytest.raises(DataError, match=rf"Site 'c', row {row + 1}: the term 'log\(x\)' is not finite"):
        designs("y ~ log(x)", {"c": frame.iloc[31:]})


def test_the_basis_of_formulaic_is_what_means_are_of():
    """The state of `constraints="center"` is the mean of the free basis over all rows."""
    frame = table()
    text = "y ~ cr(x, knots=[2, 4], lower_bound=-9, upper_bound=15, constraints='center')"
    (state,) = agreed(text, split(frame)).states.values()
    free = natural_cubic_spline(frame["x"].to_numpy(), knots=[2, 4], lower_bound=-9, upper_bound=15)
    np.testing.assert_allclose(state["means"], [column.mean() for column in free.values()], atol=1e-14)
