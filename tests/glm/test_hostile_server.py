"""The attacks of test_attacks.py as a server would mount them: by messages to a `Site` with λ_g of its choice."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from attacks import Array, Evaluate, compare_columns, isolate, nearest, read_cell, reconstruct, subtract
from guarded import guard, table
from hostile import oracle

from fedual.glm.guards import Refusal
from fedual.glm.site import Site


class Attack(NamedTuple):
    """Fits that the server asks one site for, and what it makes of the answers."""

    frame: pd.DataFrame
    formulas: Sequence[str]
    run: Callable[..., Array]
    truth: Array
    rule: str


def frame(rows: int, size: int) -> tuple[pd.DataFrame, Array]:
    x, y = table(rows, size, seed=5)
    found = pd.DataFrame(x[:, 1:], columns=["age", "bmi", "dose"][: size - 1])
    return found.assign(sick=y.astype(int)), x


def reconstruction() -> Attack:
    found, x = frame(12, 4)
    found["sick"] = np.arange(12) % 2
    run = lambda evaluate: nearest(reconstruct(evaluate, 12, 4, points=8), x)
    return Attack(found, ["sick ~ age + bmi + dose"], run, np.zeros(12), "numbers_per_unknown")


def isolation() -> Attack:
    found, x = frame(5000, 4)
    run = lambda evaluate: isolate(evaluate, 4, column=1)
    return Attack(found, ["sick ~ age + bmi + dose"], run, x[x[:, 1].argmax()], "min_effective_rows")


def differencing() -> Attack:
    found, x = frame(1000, 4)
    found.loc[0, "dose"] = np.nan
    run = lambda *two: subtract(*two, size=3, more=1)
    return Attack(found, ["sick ~ age + bmi", "sick ~ age + bmi + dose"], run, x[0, :3], "min_difference")


def crossing() -> Attack:
    found, _ = frame(1000, 3)
    found["age"] = np.random.default_rng(1).integers(20, 50, 1000)
    row = np.arange(1000)
    found = found.assign(smoker=row < 300, drug=(row == 0) | (row >= 600))
    run = lambda evaluate: np.array(read_cell(evaluate, 4, (1, 2), column=3))
    return Attack(found, ["sick ~ smoker + drug + age"], run, found["age"].to_numpy()[0], "min_pair")


def comparison() -> Attack:
    found, x = frame(1000, 4)
    found["bmi"] = np.arange(1000.0)
    run = lambda evaluate: compare_columns(evaluate, 3, (2, 1))
    return Attack(found, ["sick ~ age + I(age + (bmi == 7))"], run, np.array([1, x[7, 1], x[7, 1] + 1]), "min_cell")


ATTACKS = [reconstruction, isolation, differencing, crossing, comparison]


def mount(attack: Attack, ledger: Path | None) -> Array:
    """The attack; every fit is asked of the site in a new process, as on Flower."""
    oracles: list[Evaluate] = [
        oracle(Site("north", attack.frame, None if ledger is None else guard(ledger)), attack.frame, formula)[0]
        for formula in attack.formulas
    ]
    return attack.run(*oracles)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_an_attack_succeeds_without_a_guard(attack: Callable[[], Attack]):
    made = attack()
    np.testing.assert_allclose(mount(made, None), made.truth, atol=1e-5)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_it_is_refused_by_the_default_guard(attack: Callable[[], Attack], tmp_path: Path):
    made = attack()
    with pytest.raises(Refusal) as refusal:
        mount(made, tmp_path)
    assert refusal.value.rule == made.rule
