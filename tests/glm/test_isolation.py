"""What of a table's columns singles out few rows, against counting and against planted groups."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedual.glm.isolation import effective_rows, groups, largest_share, nearly_constant, singled_out


@given(arrays(float, st.tuples(st.integers(9, 14), st.just(3)), elements=st.sampled_from([0.0, 0.0, 0.0, 1.0, 2.5])))
def test_nearly_constant_columns_are_those_whose_most_frequent_value_lacks_few_rows(columns: np.ndarray):
    others = [len(column) - np.unique(column, return_counts=True)[1].max() for column in columns.T]
    assert nearly_constant(torch.tensor(columns), 5).tolist() == [0 < other < 5 for other in others]


def test_nearly_constant_columns_of_few_rows():
    assert nearly_constant(torch.tensor([[0.0, 0], [0, 1], [1, 2]]), 2).tolist() == [True, False]


def test_effective_rows_are_those_of_equal_weights():
    for scale in (1.0, 1e-200, 1e200):
        weights = scale * torch.where(torch.arange(50) < 7, 1.0, 0.0)
        assert effective_rows(weights) == pytest.approx(7)
        assert largest_share(weights) == pytest.approx(1 / 7)
    assert effective_rows(torch.zeros(5)) == largest_share(torch.zeros(5)) == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [3, 12])
@pytest.mark.parametrize("seed", range(5))
def test_a_planted_combination_is_found_whatever_hides_it(rows: int, size: int, seed: int):
    """Columns are mixed at random, one of them is repeated, and the planted one may be a millionth of the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5 * size + 20, size, generator=generator)
    assert not singled_out(x, 4)
    planted = torch.zeros(len(x))
    planted[torch.randperm(len(x), generator=generator)[:rows]] = torch.rand(rows, generator=generator) + 0.5
    x[:, 1] = x[:, 0] + 10.0 ** (-3 * (seed % 3)) * planted
    others = [torch.ones(len(x), 1), torch.zeros(len(x), 1), x[:, 2:3] * 3]
    mixed = torch.cat([x[:, 2:3], *others, x @ torch.randn(size, size, generator=generator)], 1)
    assert singled_out(mixed, 4)
    assert not singled_out(mixed, rows - 1) if rows > 1 else True


def test_more_columns_than_rows_single_out_all_of_them():
    assert singled_out(torch.randn(5, 8), 1)


def test_levels_of_enough_rows_are_not_singled_out():
    levels = torch.arange(60) % 4
    x = torch.cat([torch.eye(4)[levels], torch.ones(60, 1), torch.randn(60, 3)], 1)
    assert not singled_out(x, 4)
    rare = torch.where(torch.arange(60) < 3, 4, levels)  # the base level
    assert singled_out(torch.cat([torch.ones(60, 1), torch.eye(5)[rare][:, :4]], 1), 4)


@pytest.mark.parametrize("seed", range(20))
def test_small_cells_of_pairs_are_those_of_cross_tables(seed: int):
    rng = np.random.default_rng(seed)
    x = np.column_stack([np.ones(80), rng.random((80, 3)) < [0.5, 0.3, 0.15], rng.normal(size=80)])
    found = groups(torch.tensor(x), 5, 10)
    sizes = [min(n, 80 - n) for n in x[:, 1:4].sum(0)]
    assert found.smallest == min(sizes)
    expected = set()
    for a, b in ((1, 2), (1, 3), (2, 3)):
        cells = [np.flatnonzero((x[:, a] == i) & (x[:, b] == j)) for i in (0, 1) for j in (0, 1)]
        for i, j, cell in zip((0, 0, 1, 1), (0, 1, 0, 1), cells, strict=True):
            other = 6 - a - b
            free = len({*x[x[:, a] == i, other]}) == 2 and len({*x[x[:, b] == j, other]}) == 2
            if 0 < len(cell) * (1 + free) < 5:
                expected.add((a, b))
    assert found.exposed in expected if expected else found.exposed is None


def test_levels_of_the_same_factor_are_known_in_a_cell():
    """In a cell of one row, the factor's other levels are zero: only the age is left to find."""
    region, sex = torch.arange(100) % 4, torch.arange(100) < 50
    sex[region == 3] = False
    sex[3] = True
    x = torch.cat([torch.ones(100, 1), torch.eye(4)[region][:, 1:], sex[:, None], torch.randn(100, 1)], 1)
    assert groups(x, 2, 10).exposed == (3, 4)
    assert groups(x, 1, 10).exposed is None


def test_without_columns_of_two_values_there_are_no_groups():
    assert groups(torch.cat([torch.ones(20, 1), torch.randn(20, 2)], 1), 5, 3) == (20, None)
