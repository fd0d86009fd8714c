"""The attacks of test_attacks.py as a server would mount them: by messages to a `Site` with λ_g of its choice."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from attacks import Array, compare_columns, isolate, nearest, read_cell, reconstruct, subtract
from guarded import guard, table
from hostile import Server

from fedual.errors import DataError
from fedual.glm.guards import Guards, Refusal
from fedual.glm.ledger import opened
from fedual.glm.messages import Message
from fedual.glm.schema import unmeasured
from fedual.glm.site import Site, variables


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
    sites = [Site("north", attack.frame, None if ledger is None else guard(ledger)) for _ in attack.formulas]
    servers = [Server.agreed(site, formula) for site, formula in zip(sites, attack.formulas, strict=True)]
    return attack.run(*(server.evaluate for server in servers))


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


def honest(folder: Path, formula: str = "sick ~ age + bmi", rules: Guards | None = None) -> Server:
    found, _ = frame(1000, 4)
    return Server.agreed(Site("north", found, guard(folder, rules)), formula)


@pytest.mark.parametrize("kind", ["round", "figures", "points", "look"])
def test_no_point_is_evaluated_at_which_one_row_has_the_weight(tmp_path: Path, kind: str):
    """Also not for its loss alone: that of one row, if all others are far on the right side."""
    origin, hostile = np.zeros(3), np.array([-3000 * 3.2, 3000, 0])
    beside = {"points": torch.tensor(hostile[None]), "look": torch.tensor(hostile)}
    point, tensors = (origin, {kind: beside[kind]}) if kind in beside else (hostile, {})
    server = honest(tmp_path)
    with pytest.raises(Refusal, match="min_effective_rows"):
        server.ask("round" if tensors else kind, point, "cavity", **tensors)


def test_columns_that_a_formula_does_not_use_give_no_budget(tmp_path: Path):
    server = honest(tmp_path)
    more = {**server.schema.kinds, **{f"x{i}": "numeric" for i in range(1000)}}
    levels = {**server.schema.levels, "sick": tuple(map(str, range(1000)))}
    assert variables(replace(server.schema, kinds=more, levels=levels)) == {"sick": 1, "age": 1, "bmi": 1}


def test_measurements_are_checked_and_counted(tmp_path: Path):
    found, _ = frame(1000, 4)
    for i in range(20):
        measure(Site("north", found, guard(tmp_path)), f"sick ~ scale(I(age > {i / 20}))")
    with opened(tmp_path / "ledger") as book:
        assert book.spent[0]["age"].numbers == pytest.approx(20 * 3 / 2000)
    with pytest.raises(Refusal, match="min_cell"):
        measure(Site("north", found, guard(tmp_path)), f"sick ~ scale(I(age >= {found['age'].max()}))")


def measure(site: Site, formula: str) -> Message:
    schema = Server.agreed(site, formula).schema
    return site.answer(Message("measure", {"schema": schema.to_dict(), "request": unmeasured(schema)}))


def test_errors_about_an_expression_of_the_server_are_counted_as_refusals(tmp_path: Path):
    server = honest(tmp_path, "sick ~ log(age)", Guards(max_refusals=1))
    with pytest.raises(DataError, match="not finite"):
        server.evaluate(np.zeros(2))
    with pytest.raises(Refusal, match="max_refusals"):
        honest(tmp_path, rules=Guards(max_refusals=1))


def test_the_listed_formulas_hold_for_every_message(tmp_path: Path):
    server = honest(tmp_path, rules=Guards(formulas=frozenset({"sick ~ age + bmi"})))
    server.evaluate(np.zeros(3))
    for change in ({"formula": "sick ~ bmi + age"}, {"weights": "exp(age)"}):
        other = Server(Site("north", frame(1000, 4)[0], server.site.guard), replace(server.schema, **change))
        with pytest.raises(Refusal, match="rule formulas"):
            other.evaluate(np.zeros(3))


def test_a_site_that_could_not_finish_a_fit_does_not_begin_it(tmp_path: Path):
    """The usual rounds of a fit would be over the budget: refused with the moments, with nothing told."""
    found, _ = frame(30, 4)
    found["sick"] = np.arange(30) % 2
    watch = guard(tmp_path, Guards(min_pair=0))
    server = Server.agreed(Site("north", found, watch), "sick ~ age + bmi + dose")
    with pytest.raises(Refusal, match="numbers_per_unknown"):
        server.ask("moments", np.zeros(4))
    with opened(tmp_path / "ledger") as book:
        assert not any(told.numbers for each in book.spent for told in each.values())
