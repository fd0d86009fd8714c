"""Attacks on a site: each succeeds where nothing is refused, and is refused by the default rules."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from attacks import Array, Evaluate, compare_columns, isolate, nearest, read_cell, reconstruct, subtract
from guarded import OFF, guard, site, table

from fedual.glm.guards import Guard, Refusal


class Attack(NamedTuple):
    """What an attacker does to the sites that `sites` makes, and what of the truth it has to find."""

    sites: Callable[[Callable[[], Guard | None]], list[Evaluate]]
    run: Callable[..., Array]
    truth: Array
    accuracy: float
    rule: str


def reconstruction() -> Attack:
    """All covariates of 12 rows from eight Hessians."""
    x, y = table(12, 4, seed=5)
    y[:] = np.arange(12) % 2
    run = lambda evaluate: nearest(reconstruct(evaluate, 12, 4, points=8), x)
    return Attack(lambda guard: [site(x, y, guard())], run, np.zeros(12), 1e-6, "numbers_per_unknown")


def isolation() -> Attack:
    """One row of 5,000."""
    x, y = table(5000, 4)
    row = x[x[:, 1].argmax()]
    return Attack(
        lambda guard: [site(x, y, guard())], lambda one: isolate(one, 4, column=1), row, 1e-6, "min_effective_rows"
    )


def differencing() -> Attack:
    """One row, which lacks a value in a column that only the second fit uses."""
    x, y = table(1000, 4)
    sites = lambda guard: [site(x[:, :3], y, guard()), site(x[1:], y[1:], guard(), rows=np.arange(1, 1000))]
    return Attack(sites, lambda *two: subtract(*two, size=3, more=1), x[0, :3], 1e-6, "min_difference")


def crossing() -> Attack:
    """The age of the only row in which two 0/1 columns, each with hundreds of ones, are one."""
    rng = np.random.default_rng(1)
    x, y = table(1000, 4)
    x[:, 1], x[:, 2] = np.arange(1000) < 300, np.arange(1000) >= 600
    x[599, 1] = 1
    x[599, 2], x[:, 3] = 1, rng.integers(20, 50, 1000)
    run = lambda evaluate: np.array(read_cell(evaluate, 4, (1, 2), column=3))
    return Attack(lambda guard: [site(x, y, guard())], run, x[599, 3], 1e-6, "min_pair")


def comparison() -> Attack:
    """The only row in which a column differs from another, as I(x + (age == 97)) does from x."""
    x, y = table(1000, 4)
    x[:, 2] = x[:, 1] + 1e-3 * (np.arange(1000) == 7)
    return Attack(
        lambda guard: [site(x, y, guard())], lambda one: compare_columns(one, 4, (2, 1)), x[7], 1e-6, "min_cell"
    )


ATTACKS = [reconstruction, isolation, differencing, crossing, comparison]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_an_attack_succeeds_with_the_guards_off(attack: Callable[[], Attack], tmp_path: Path):
    made = attack()
    for one in (lambda: None, lambda: guard(tmp_path, OFF)):
        np.testing.assert_allclose(made.run(*made.sites(one)), made.truth, atol=made.accuracy)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_it_is_refused_with_the_guards_on(attack: Callable[[], Attack], tmp_path: Path):
    made = attack()
    with pytest.raises(Refusal) as refusal:
        made.run(*made.sites(lambda: guard(tmp_path)))
    assert refusal.value.rule == made.rule


def test_a_difference_of_sums_over_four_fits_is_refused(tmp_path: Path):
    """Every two sets of rows differ by 20 at least, but 1_A − 1_B − 1_C + 1_D is the one row that lacks both values."""
    x, y = table(1000, 4)
    rows = np.arange(1000)
    lacks_b, lacks_c = rows < 20, (rows >= 19) & (rows < 59)
    sets = [rows, rows[~lacks_b], rows[~lacks_c], rows[~(lacks_b | lacks_c)]]
    first, second, third, fourth = (site(x[each], y[each])(np.zeros(4))[2] for each in sets)
    found = first - second - third + fourth
    np.testing.assert_allclose(found[0] / found[0, 0], x[19], atol=1e-9)
    one = guard(tmp_path)
    for each in sets[:3]:
        site(x[each], y[each], one, rows=each)(np.zeros(4))
    with pytest.raises(Refusal, match="min_difference"):
        site(x[sets[3]], y[sets[3]], one, rows=sets[3])


def test_the_response_can_isolate_a_row_together_with_a_column(tmp_path: Path):
    """One row's class differs from its 0/1 column: at η = ±20 the gradient is that row, and all weights are equal."""
    x, _ = table(1000, 4)
    x[:, 1] = np.arange(1000) < 400
    y = x[:, 1].copy()
    y[7] = 0
    _, gradient, _ = site(x, y)(np.array([-20.0, 40, 0, 0]))
    np.testing.assert_allclose(gradient, x[7], atol=1e-4)
    with pytest.raises(Refusal, match="min_cell"):
        site(x, y, guard(tmp_path))
