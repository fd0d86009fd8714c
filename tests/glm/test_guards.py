"""The rules of a site's guard, one by one; attacks are in test_attacks.py."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from guarded import OFF, Design, design, guard, names, table, variables

from fedual.errors import DataError, InputError
from fedual.glm.guards import Guard, Guards, Refusal
from fedual.glm.rules import Guards as Rules


def accept(one: Guard, made: Design) -> None:
    one.table(made, names(made.x.numpy()), variables(made.x.numpy()))


def refused(rule: str, one: Guard, made: Design) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        accept(one, made)
    assert refusal.value.rule == rule
    return refusal.value


def test_an_ordinary_table_is_accepted(tmp_path: Path):
    accept(guard(tmp_path), design(*table(60, 5)))


@pytest.mark.parametrize("field", [field.name for field in fields(Rules) if field.default is not None])
@pytest.mark.parametrize("value", [-1, float("nan"), True, "5", None])
def test_numbers_of_rules_are_checked(field: str, value: object):
    with pytest.raises(InputError, match=field):
        replace(Guards(), **{field: value})


@pytest.mark.parametrize("field", ["columns", "formulas"])
def test_lists_of_rules_are_checked(field: str):
    for value in ("age", [1]):
        with pytest.raises(InputError, match=field):
            replace(Guards(), **{field: value})
    assert getattr(replace(Guards(), **{field: ["a", "b"]}), field) == {"a", "b"}


def test_only_listed_columns_may_be_used(tmp_path: Path):
    one = guard(tmp_path, Guards(columns=frozenset({"y", "x1"})))
    accept(one, design(*table(60, 2)))
    with pytest.raises(Refusal, match=r"'north' refuses by its rule columns: 'x2' is not on its list"):
        accept(one, design(*table(60, 3)))
    with pytest.raises(Refusal, match="'age'"):
        one.columns(["y", "age"])


def test_only_listed_formulas_may_be_used(tmp_path: Path):
    one = guard(tmp_path, Guards(formulas=frozenset({"y ~ age + C(sex)", "days"})))
    one.formulas("y~age+C(sex)", None, "days", None)
    with pytest.raises(Refusal, match=r"rule formulas: 'y ~ age \+ I\(age > 97\)'"):
        one.formulas("y ~ age + I(age > 97)")
    with pytest.raises(Refusal, match="'days - 3'"):
        one.formulas("y ~ age + C(sex)", "days - 3")
    guard(tmp_path).formulas("y ~ anything")


def test_rows_and_rows_per_parameter(tmp_path: Path):
    accept(guard(tmp_path), design(*table(10, 2)))
    found = refused("min_rows", guard(tmp_path), design(*table(9, 2)))
    assert "9" not in str(found)
    assert found.private == "9 rows"
    accept(guard(tmp_path), design(*table(60, 20)))
    found = refused("rows_per_parameter", guard(tmp_path), design(*table(59, 20)))
    assert "59" not in str(found)
    assert "59" in found.private


def test_rare_levels_are_refused_without_their_name_or_count(tmp_path: Path):
    one = guard(tmp_path)
    one.levels({"sex": {"male": 5, "female": 90, "other": 0}})
    with pytest.raises(Refusal) as refusal:
        one.levels({"region": {"a": 9}, "sex": {"male": 3, "female": 90}})
    assert str(refusal.value) == (
        "Site 'north' refuses by its rule min_cell: a level of 'sex' has fewer than 5 rows; "
        "merge levels or leave it out."
    )
    assert refusal.value.private == "levels of 'sex' have {'male': 3} rows"


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("value", [1.0, 17.3])
def test_columns_that_few_rows_differ_in_are_refused(tmp_path: Path, rows: int, value: float):
    x, y = table(60, 4)
    x[:, 2] = np.where(np.arange(60) < rows, value, 0)
    x[0, 2] *= 1 + (value > 1) * (rows > 1)  # not all of them the same
    one = guard(tmp_path)
    with pytest.raises(Refusal, match=r"rule min_cell: fewer than 5 rows differ from the others in 'C\(sex\)'"):
        one.table(design(x, y), ["Intercept", "x1", "C(sex)[T.other]", "x3"], variables(x))


@pytest.mark.parametrize("rows", [0, 5, 30])
def test_none_or_enough_rows_are_accepted(tmp_path: Path, rows: int):
    x, y = table(60, 4)
    x[:, 2] = np.arange(60) < rows
    accept(guard(tmp_path), design(x, y))


@pytest.mark.parametrize("change", ["y", "weights", "trials", "offset", "failures", "counts"])
def test_the_response_and_columns_beside_the_design_are_checked_too(tmp_path: Path, change: str):
    x, y = table(60, 3)
    few = torch.tensor(np.arange(60) % 20 == 0).double()
    made = design(x, y)
    parts = {
        "y": {"y": few},
        "weights": {"weights": 1 + few},
        "trials": {"trials": 1 + few},
        "offset": {"offset": few},
        "failures": {"y": torch.arange(60.0) + 2 - few, "trials": torch.arange(60.0) + 2},
        "counts": {"y": few * torch.arange(1, 61)},
    }
    assert refused("min_cell", guard(tmp_path), replace(made, **parts[change])).rule == "min_cell"


def test_a_measured_column_is_checked(tmp_path: Path):
    guard(tmp_path).values("log(x)", torch.randn(50))
    with pytest.raises(Refusal, match=r"'scale\(I\(age == 97\)\)'"):
        guard(tmp_path).values("scale(I(age == 97))", (torch.arange(50) == 3).double())


def test_effective_rows(tmp_path: Path):
    one, made = guard(tmp_path), design(*table(100, 3))
    accept(one, made)
    one.point(torch.rand(100), torch.randn(100))
    one.point(torch.zeros(100), torch.zeros(100))  # nothing is told
    one.point(torch.where(torch.arange(100) < 5, 1.0, 0.0))
    for weights in (
        torch.where(torch.arange(100) < 4, 1.0, 0.0),
        torch.where(torch.arange(100) < 1, 1e-170, 1e-300),  # their squares are zero
        torch.where(torch.arange(100) < 1, 1.0, 0.04),  # 15 effective rows, but one of them is most of the sum
    ):
        with pytest.raises(Refusal, match="min_effective_rows"):
            one.point(weights)
        with pytest.raises(Refusal, match="min_effective_rows"):
            one.point(torch.ones(100), -weights)
    with pytest.raises(Refusal, match="infinite"):
        one.point(torch.full((100,), float("nan")))


def test_weights_of_the_rows_themselves_must_not_isolate_one(tmp_path: Path):
    x, y = table(100, 3)
    weights = 1 / (1 + np.exp(np.linspace(-20, 30, 100)))
    accept(guard(tmp_path), design(x, y, weights=weights))
    refused("min_effective_rows", guard(tmp_path), design(x, y, weights=weights**9 + np.eye(100)[0] * 30))


def test_a_row_may_dominate_by_its_own_weight_but_not_by_a_point(tmp_path: Path):
    """A district with a hundred times as many pupils as others: 26 effective rows, 93 % of Σw²."""
    x, y = table(1000, 3)
    weights = 1 + 114.0 * np.eye(1000)[0]
    one = guard(tmp_path, Guards(min_cell=0))
    accept(one, design(x, y, weights=weights))
    one.point(torch.tensor(weights) * (torch.rand(1000) / 4 + 0.75))
    with pytest.raises(Refusal, match="min_effective_rows"):
        accept_and_point(guard(tmp_path / "other"), design(x, y), torch.tensor(weights))


def accept_and_point(one: Guard, made: Design, weights: torch.Tensor) -> None:
    accept(one, made)
    one.point(weights)


def small_cell(rows: int) -> np.ndarray:
    """Two 0/1 columns that are one together in some rows only, and one other column."""
    x, _ = table(100, 4)
    x[:, 1] = np.arange(100) < 40
    x[:, 2] = (np.arange(100) < rows) | (np.arange(100) >= 50)
    return x


@pytest.mark.parametrize(("rows", "fits"), [(0, True), (1, False), (4, False), (5, True)])
def test_a_small_cell_of_two_columns_is_refused_where_weights_vary(tmp_path: Path, rows: int, fits: bool):
    x = small_cell(rows)
    one, y = guard(tmp_path), np.linspace(-1, 1, 100)
    accept(one, design(x, y))
    one.point(torch.ones(100))  # weights that are equal tell the number of rows only
    if fits:
        one.point(torch.rand(100) + 1)
    else:
        with pytest.raises(Refusal, match="min_pair: a cell of 'x1' and 'x2'"):
            one.point(torch.rand(100) + 1)


def test_a_cell_with_many_other_columns_is_no_danger(tmp_path: Path):
    """Each evaluation tells one number of the cell: with 5 other values in its row, few rounds do not tell them."""
    rng = np.random.default_rng(0)
    x = np.column_stack([small_cell(1), rng.normal(size=(100, 4))])
    one = guard(tmp_path)
    accept(one, design(x, np.linspace(-1, 1, 100)))
    one.point(torch.rand(100) + 1)
    powers = np.column_stack([small_cell(1), *(x[:, 3] ** k for k in range(2, 6))])  # of one and the same value
    one = guard(tmp_path / "other")
    one.table(design(powers, np.linspace(-1, 1, 100)), names(powers), {"y": 1, "x1": 1, "x2": 1, "x3": 1})
    with pytest.raises(Refusal, match="min_pair"):
        one.point(torch.rand(100) + 1)


def accept_and_charge(one: Guard, made: Design, reply: str, numbers: int, fit: str | None = None) -> None:
    accept(one, made)
    one.charge(reply, numbers, fit)


def charge_until_refused(one: Guard, made: Design, numbers: int, reply: str = "", fit: str | None = None) -> int:
    """How many replies are accepted."""
    for i in range(50):
        accept(one, made)
        try:
            one.charge(f"{reply} {i}", numbers, fit)
        except Refusal:
            return i
    raise AssertionError("all were accepted")


def test_numbers_are_at_most_half_of_the_unknowns(tmp_path: Path):
    """100 rows with 4 values each: 200 numbers, whatever the server calls its fits."""
    made = design(*table(100, 4))
    assert charge_until_refused(guard(tmp_path), made, 20) == 10
    with pytest.raises(Refusal, match=r"numbers_per_unknown: it has told as much of 'y' and 3 other columns as it"):
        accept_and_charge(guard(tmp_path), made, "another", 1)


def test_a_reply_that_was_sent_before_is_free(tmp_path: Path):
    made = design(*table(100, 4))
    for _ in range(20):  # every time by a new process
        accept_and_charge(guard(tmp_path), made, "the same bytes", 150)
    with pytest.raises(Refusal, match="numbers_per_unknown"):
        accept_and_charge(guard(tmp_path), made, "other bytes", 150)


def test_columns_that_follow_from_others_give_no_budget(tmp_path: Path):
    _, y = table(100, 2)
    powers = np.column_stack([np.linspace(-1, 1, 100) ** k for k in range(6)])
    one = guard(tmp_path)
    one.table(design(powers, y), names(powers), {"y": 1, "x1": 1})
    one.charge("first", 100)
    with pytest.raises(Refusal, match="numbers_per_unknown"):
        one.charge("second", 1)


def test_a_fit_of_many_columns_gives_no_budget_to_a_fit_of_few(tmp_path: Path):
    x, y = table(100, 30)
    accept_and_charge(guard(tmp_path), design(x, y), "wide", 500)
    assert charge_until_refused(guard(tmp_path), design(x[:, :2], y), 10) == 6  # (½ − 500/3000) · 200 / 10


def test_fits_of_other_columns_have_budgets_of_their_own(tmp_path: Path):
    x, y = table(100, 3)
    one = guard(tmp_path)
    one.table(design(x[:, :2], y), names(x[:, :2]), {"y": 1, "x1": 1})
    one.charge("first", 100)
    one.table(design(x[:, [0, 2]], y), names(x[:, :2]), {"z": 1, "x2": 1})
    one.charge("second", 100)


def test_new_rows_give_a_budget_for_themselves(tmp_path: Path):
    x, y = table(300, 4)
    assert charge_until_refused(guard(tmp_path), design(x[:100], y[:100]), 20) == 10
    assert charge_until_refused(guard(tmp_path), design(x, y), 20, reply="new") == 20  # of 600 numbers 200 were told


def test_numbers_about_few_effective_rows_have_a_budget_of_their_own(tmp_path: Path):
    """A window of 10 rows has 40 values: no more than 60 numbers, of the 10,000 that the table has."""
    made, window = design(*table(5000, 4)), torch.where(torch.arange(5000) < 10, 1.0, 0.0)
    one = guard(tmp_path)
    accept(one, made)
    for i in range(3):
        one.point(torch.ones(5000))
        one.point(window)
        one.charge(f"reply {i}", 15)
    one.charge("moments", 15)
    one.point(window)
    with pytest.raises(Refusal, match="numbers_per_exposed"):
        one.charge("reply 3", 15)


def test_a_small_level_uses_that_budget_too(tmp_path: Path):
    """Its row of the Hessian has 4 numbers about 5 rows with 4 values: 0.2 a value and evaluation."""
    x, y = table(5000, 4)
    x[:, 2] = np.arange(5000) < 5
    one = guard(tmp_path)
    accept(one, design(x, y))
    for i in range(7):
        one.point(torch.ones(5000))
        one.charge(f"reply {i}", 15)
    one.point(torch.ones(5000))
    with pytest.raises(Refusal, match="numbers_per_exposed"):
        one.charge("reply 7", 15)


def test_rounds_of_a_fit_are_counted_over_processes(tmp_path: Path):
    made = design(*table(1000, 4))
    assert charge_until_refused(guard(tmp_path), made, 1, fit="one") == Guards().max_rounds
    assert charge_until_refused(guard(tmp_path), made, 1, reply="new", fit="two") == Guards().max_rounds
    accept_and_charge(guard(tmp_path), made, "no round", 1)


def test_refusals_are_numbered_because_they_tell_something(tmp_path: Path):
    """Twenty are told; then everything is refused, accepted or not, in the same words."""
    made = design(*table(100, 4))
    for i in range(20):
        for _ in range(3):  # the same request again tells nothing new
            with pytest.raises(Refusal, match="min_cell"):
                guard(tmp_path).levels({f"x{i}": {"a": 1}})
    for _ in range(2):
        with pytest.raises(Refusal) as probe:
            guard(tmp_path).levels({"x20": {"a": 1}})
        with pytest.raises(Refusal) as honest:
            accept_and_charge(guard(tmp_path), made, "reply", 1)
        assert str(probe.value) == str(honest.value)
        assert probe.value.rule == "max_refusals"
    accept_and_charge(guard(tmp_path, Guards(max_refusals=21)), made, "reply", 1)  # as its operator may decide


def test_errors_about_the_content_of_a_table_are_numbered_too(tmp_path: Path):
    for i in range(20):
        guard(tmp_path).failed(DataError(f"row {i} has a weight that is not positive"))
    with pytest.raises(Refusal, match="max_refusals"):
        guard(tmp_path).failed(DataError("row 20 has a weight that is not positive"))


def test_refusals_that_say_nothing_of_the_content_are_not_numbered(tmp_path: Path):
    one = guard(tmp_path, Guards(columns=frozenset("y"), max_refusals=1))
    for name in "abc":
        with pytest.raises(Refusal, match="columns"):
            one.columns([name])


def test_without_enforcement_there_are_warnings_once_each():
    one = Guard(Guards(), None, enforce=False, site="north")
    x, y = table(9, 4)
    y[:] = 0
    y[0] = 1
    for _ in range(2):
        accept(one, design(x, y))
        one.point(torch.tensor(np.eye(9)[0]))
        one.charge("reply", 1000, "fit")
        one.failed(DataError("is raised by the site"))
    told = [warning.split(":")[0] for warning in one.warnings]
    assert sorted(set(told)) == sorted(
        {
            "min_rows",
            "rows_per_parameter",
            "min_cell",
            "min_effective_rows",
            "numbers_per_unknown",
            "numbers_per_exposed",
        }
    )
    assert len(set(one.warnings)) == len(one.warnings)


def test_enforcement_needs_a_ledger():
    with pytest.raises(InputError, match="'north' has no ledger"):
        Guard(Guards(), None, enforce=True, site="north")


def test_rules_can_be_taken_off(tmp_path: Path):
    x, y = table(3, 3)
    one = guard(tmp_path, OFF)
    for i in range(20):
        accept(one, design(x, y))
        one.levels({"sex": {"male": 1}})
        one.point(torch.tensor([1.0, 0, 0]), torch.tensor([0, 1.0, 0]))
        one.charge(str(i), 1000, "fit")
