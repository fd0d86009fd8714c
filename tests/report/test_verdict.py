from pathlib import Path
from typing import Any

import pytest
from folders import METHOD, POINT, record, written

from fedual.report.run_data import read
from fedual.report.verdict import Remark, absences, verdict
from fedual.rundir import artifacts


def judged(tmp_path: Path, history: list[dict[str, Any]], **config: Any) -> dict[str, Remark]:
    return {remark.head: remark for remark in verdict(read(written(tmp_path / "run", history, **config)))}


def falling(rate: float, rounds: int = 16, /, **more: Any) -> list[dict[str, Any]]:
    return [record(number, 1.0 + rate * (rounds - number), **more) for number in range(1, rounds + 1)]


def test_converged_needs_a_settled_nll_and_small_residuals(tmp_path: Path):
    found = judged(tmp_path, falling(0.001, primal=0.09, dual=0.05))
    assert next(iter(found)) == "Converged"
    assert "0.9% of ‖λ_g‖" in found["Converged"].text


@pytest.mark.parametrize("large", ["primal", "dual"])
def test_a_settled_nll_with_a_large_residual_is_settled_and_not_converged(tmp_path: Path, large: str):
    found = judged(tmp_path, falling(0.001, **{"primal": 0.01, "dual": 0.01, large: 0.11}))
    assert "Settled" in found
    assert "Converged" not in found


def test_improving_and_worsening_compare_the_last_two_quarters(tmp_path: Path):
    found = judged(tmp_path, falling(0.1))
    # rounds 13–16 have 1.3, 1.2, 1.1, 1.0 and rounds 9–12 have 1.7, 1.6, 1.5, 1.4
    assert "is 1.15 on average over the last 4 evaluations, 1.55 over the 4 before" in found["Still improving"].text
    worse = judged(tmp_path / "other", falling(-0.1))
    assert worse["Getting worse"].kind == "bad"
    assert "lowest in round 1: -0.5" in worse["Getting worse"].text


def test_the_nll_under_q_is_judged_where_there_is_one(tmp_path: Path):
    history = [{**one, "nll_mc": 0.5} for one in falling(0.1)]
    assert "under q_g is 0.5" in judged(tmp_path, history)["Settled"].text


def test_few_rounds_are_not_judged(tmp_path: Path):
    assert "Too short to say" in judged(tmp_path, falling(0.0, 7))
    assert "Settled" in judged(tmp_path / "other", falling(0.0, 8))


def test_without_a_test_set_residuals_alone_are_judged(tmp_path: Path):
    found = judged(tmp_path, [record(1), record(2)])
    assert list(found) == ["Still moving", "No test set"]
    still = judged(tmp_path / "other", [record(1), record(2, primal=0.01, dual=0.01)])
    assert list(still) == ["Converged", "No test set"]


def test_an_unfinished_run_says_so_and_is_not_judged(tmp_path: Path):
    found = judged(tmp_path, falling(0.0), rounds=40)
    assert list(found) == ["Not finished"]
    assert "round 16 of 40" in found["Not finished"].text
    assert list(judged(tmp_path / "new", [], rounds=3)) == ["No round is finished"]


def test_a_run_that_ended_early_was_stopped_or_says_why_it_could_not_go_on(tmp_path: Path):
    folder = written(tmp_path / "run", falling(0.0), rounds=40)
    (folder / "posterior.safetensors").touch()
    assert verdict(read(folder))[0].head == "Stopped early"
    artifacts.write_end(folder, "Round 17 diverged: lower lr.")
    assert verdict(read(folder))[0] == ("bad", "Diverged", "Round 17 diverged: lower lr.")


def test_figures_that_are_no_numbers_or_huge_mean_diverged(tmp_path: Path):
    lost = judged(tmp_path, [*falling(0.0), record(17, nll_mc=None)])
    assert "nll_mc is not a finite number" in lost["Diverged"].text
    assert "Diverged" in judged(tmp_path / "huge", [*falling(0.0), record(17, 2e4)])


@pytest.mark.parametrize(("nll", "worse"), [(1.38, False), (1.39, True)])  # log 4 = 1.386
def test_worse_than_guessing(tmp_path: Path, nll: float, worse: bool):
    assert ("Worse than guessing" in judged(tmp_path, [record(1, nll)])) == worse


def test_a_regression_has_no_guessing(tmp_path: Path):
    assert "Worse than guessing" not in judged(tmp_path, [record(1, 50.0)], loss="mse")


@pytest.mark.parametrize(
    ("r2", "worse"), [({"r2": 0.1}, False), ({"r2": 0.1, "r2_mc": -0.2}, True), ({"r2": 0.0}, True)]
)
def test_a_regression_that_is_worse_than_predicting_the_mean(tmp_path: Path, r2: dict[str, float], worse: bool):
    found = judged(tmp_path, [record(1, 1.0, **r2)], loss="mse")
    assert ("Worse than predicting the mean" in found) == worse
    if worse:
        assert "R²" in found["Worse than predicting the mean"].text


def test_refused_clients_of_a_simulation(tmp_path: Path):
    history = [record(1), record(2, refused=2, refused_clients=[3, 4]), record(3, refused=1, refused_clients=[4])]
    found = judged(tmp_path, history)["Clients left out"]
    assert found.text.startswith("3 of 15 updates of clients were left out: 4 2 times (its update left the domain), 3")


def test_sites_left_out_have_names_and_reasons(tmp_path: Path):
    late = {"left_out": {"Oslo": "no reply in time"}, "refused": 1, "counted": 0, "active": 1}
    odd = {"left_out": {"Oslo": "a NaN.", "Rome": "no reply in time"}, "refused": 2, "active": 2}
    folder = written(tmp_path / "run", [record(1, **late), record(2, **late), record(3, **odd)], engine="flower")
    oslo, rome = absences(read(folder))
    assert (oslo.client, oslo.rounds, oslo.reasons) == ("Oslo", [1, 2, 3], ["no reply in time", "a NaN."])
    assert rome.rounds == [3]
    remark = next(one for one in verdict(read(folder)) if one.head == "Clients left out")
    assert remark.kind == "bad"
    assert "Oslo 3 times (no reply in time), Rome once" in remark.text
    assert "In 2 rounds no update counted" in remark.text


def test_sites_that_go_too_far_or_claim_too_much_have_names(tmp_path: Path):
    history = [record(1, cut={"Oslo": 0.001, "Rome": 0.5}, capped={"Bern": [1e9, 6.0]}), record(2, cut={"Oslo": 1e-6})]
    found = judged(tmp_path, history)
    assert found["Updates far too large"].text.endswith("before they counted: Oslo in 2 rounds.")
    assert found["Examples capped"].text.startswith("Bern said so many examples")


def test_shortened_steps(tmp_path: Path):
    found = judged(tmp_path, [record(1, shortened=0.25), record(2), record(3, shortened=0.5)])
    assert found["Steps shortened"].text.startswith("In 2 rounds")
    assert "at least 0.25" in found["Steps shortened"].text


def test_tempered_and_point(tmp_path: Path):
    found = judged(tmp_path, [record(1)], method={**METHOD, "tau": 0.02})
    assert found["Tempered"].text == "q_g is tempered, τ = 0.02; it counts every example 50 times."
    assert "Tempered" not in judged(tmp_path / "plain", [record(1)])
    point = judged(tmp_path / "point", [record(1)], method=POINT)
    assert "A point" in point
    assert "Tempered" not in point  # although its τ is below 1: a mean has no spread


def test_a_run_that_diverged_in_its_last_round_has_not_settled(tmp_path: Path):
    lost = judged(tmp_path, [*falling(0.0), record(17, nll=None)])
    assert list(lost) == ["Diverged"]


def test_simulated_clients_have_their_sites_names(tmp_path: Path):
    found = judged(tmp_path, [record(1, refused=1, refused_clients=[1])], sites=["Bern", "Oslo"], clients=2)
    assert "Oslo once (its update left the domain)" in found["Clients left out"].text
