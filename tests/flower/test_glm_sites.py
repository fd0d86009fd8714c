"""A federated regression on Flower has the simulator's table, whatever happens to the sites."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Error, Message
from glm_federation import FORMULA, FRAMES, Sites, first, kind

from fedual import glm
from fedual.errors import FedualError
from fedual.glm.fitting import simulate
from fedual.glm.flower import client_app, exchange
from fedual.glm.flower import sites as sites_module
from fedual.glm.guards import Guards
from fedual.glm.ledger import opened
from fedual.glm.settings import Settings


@pytest.fixture(autouse=True)
def _clock(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sites_module, exchange):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """The server's log."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO, "flwr")
    return lambda: caplog.text


@pytest.fixture(scope="module")
def expected() -> pd.DataFrame:
    torch.set_default_dtype(torch.float64)
    return glm.fit(FORMULA, FRAMES, family="binomial").table


def agrees(fit: glm.Fit, expected: pd.DataFrame, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(fit.table, expected, rtol=tolerance, atol=tolerance)


def test_the_simulators_table(tmp_path: Path, expected: pd.DataFrame, capsys: pytest.CaptureFixture[str]):
    agrees(Sites(tmp_path).fit(), expected)
    assert "C(sex)[T.male]" in capsys.readouterr().out


SETTINGS = {
    "own intercepts": {"formula": FORMULA, "family": "binomial", "site": "fixed"},
    "splines": {"formula": "sick ~ bs(age, df=4) + C(sex)", "family": "binomial"},
    "a named class": {"formula": "sex ~ scale(age)", "family": "binomial", "event": "female"},
    "gaussian": {"formula": "age ~ C(sex) + sick"},
    "poisson": {"formula": "visits ~ age + C(sex)", "family": "poisson"},
    "gamma": {"formula": "age ~ C(sex) + sick", "family": "gamma"},
    "negative binomial": {"formula": "visits ~ age", "family": "negative-binomial"},
    "cox": {"formula": "Surv(time, died) ~ age + C(sex)"},
    "cox with strata and late entries": {"formula": "Surv(entry, time, died) ~ age + strata(sex)", "ties": "breslow"},
    "piecewise": {"formula": "Surv(time, died) ~ age + C(sex)", "baseline": "piecewise", "pieces": 5},
    "random intercepts": {"formula": FORMULA, "family": "binomial", "site": "random"},
    "random slopes": {"formula": "visits ~ age + (1 + age | site)", "family": "poisson"},
    "linear mixed": {"formula": "age ~ C(sex) + (1 | site)"},
    "posterior": {"formula": FORMULA, "family": "binomial", "estimate": "posterior", "prior": 0.5},
    "variational": {"formula": FORMULA, "family": "binomial", "estimate": "variational"},
}


@pytest.mark.parametrize("what", SETTINGS)
def test_every_model_has_the_simulators_table(tmp_path: Path, what: str):
    settings = Settings(**SETTINGS[what])  # type: ignore[arg-type]
    generous = Guards(min_cell=1, numbers_per_unknown=9.0, numbers_per_exposed=99.0, max_rounds=40)
    fit = Sites(tmp_path, app=client_app(guards=generous)).fit(settings=settings)
    expected = simulate(settings, FRAMES)
    agrees(fit, expected.table)
    assert fit.loglik == pytest.approx(expected.loglik, rel=1e-12)
    if fit.components is not None and expected.components is not None:
        np.testing.assert_allclose(fit.components.covariance, expected.components.covariance, rtol=1e-8, atol=1e-12)
        for name, table in FRAMES.items():  # each site's own effects are in its own folder
            (path,) = (tmp_path / f"state-{name}").glob("*/site-effects.json")
            found = pd.DataFrame(json.loads(path.read_text())).set_index("term")
            own = glm.site_effects(expected, table)[["estimate", "sd"]]
            np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-7)
    if fit.survival is not None and expected.survival is not None:
        assert fit.survival.c == expected.survival.c
        assert fit.survival.trends == expected.survival.trends
    assert fit.convergence.rounds == expected.convergence.rounds


KINDS = ("hello", "describe", "moments", "round", "figures")


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("answered", [True, False])
def test_a_reply_that_is_lost(tmp_path: Path, expected: pd.DataFrame, what: str, answered: bool):
    """The request is sent again; the site may have answered it before."""
    grid = Sites(tmp_path, first(101, what, lambda message, answer: answer() and None if answered else None))
    agrees(grid.fit(), expected)
    assert grid.asked(101).count(what) > grid.asked(100).count(what)


def spent(grid: Sites) -> list[Any]:
    """What the ledger of south says."""
    (folder,) = (grid.path / "state-south").glob("glm-*")
    with opened(folder / "ledger") as book:
        return [book.spent, book.rounds]


@pytest.mark.parametrize("answer_file", ["kept", "damaged"])
def test_an_answer_that_is_sent_again_costs_nothing(tmp_path: Path, expected: pd.DataFrame, answer_file: str):
    """Unless the site has lost it: then it may be another answer, which counts."""
    ledgers = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        grid = Sites(tmp_path / str(number))

        def lost(message: Message, answer: Callable[[], Message], grid: Sites = grid) -> None:
            answer()
            (folder,) = (grid.path / "state-south").glob("glm-*")
            if answer_file == "damaged":
                (folder / "answer.safetensors").write_bytes(b"damaged")

        if number == 2:
            grid.between = first(101, "round", lost, nth=2)  # the answer depends on the memory
        agrees(grid.fit(), expected, 1e-8)
        ledgers.append(spent(grid))
    assert (ledgers[0] == ledgers[1]) == (answer_file == "kept")


def test_a_reply_that_comes_late_counts(tmp_path: Path, expected: pd.DataFrame):
    """The answer to the first attempt arrives after the second was sent, which stays without one."""
    late = list[tuple[str, Message]]()

    def between(node: int, message: Message, answer: Callable[[], Message]) -> Message | None:
        if node != 101 or kind(message) != "round" or len(late) > 1:
            return answer()
        late.append((message.metadata.message_id, answer()))
        if len(late) == 2:
            id, reply = late[0]
            grid.replies[id] = reply
        return None

    grid = Sites(tmp_path, between)
    agrees(grid.fit(), expected)


@pytest.mark.parametrize("what", KINDS[1:])
@pytest.mark.parametrize("node", [101, 205])
@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_a_site_that_is_killed_and_returns(
    tmp_path: Path, expected: pd.DataFrame, said: Callable[[], str], what: str, node: int, memory: str
):
    """At the same node or at another one, with or without its state."""

    def killed(message: Message, answer: Callable[[], Message]) -> None:
        grid.returns[node] = grid.apps.pop(101)
        if memory == "lost":
            shutil.rmtree(tmp_path / "state-south", ignore_errors=True)

    grid = Sites(tmp_path, first(101, what, killed))
    agrees(grid.fit(), expected, 1e-8)
    assert "south is gone; waiting until its SuperNode is back" in said()
    assert "south is back" in said()
    assert "north is gone" not in said()
    assert grid.asked(100).count(what) == (grid.asked(101) + (grid.asked(205) if node == 205 else [])).count(what) - 1


def test_a_node_whose_death_flower_reports(tmp_path: Path, expected: pd.DataFrame, said: Callable[[], str]):
    dead = lambda message, answer: Message(Error(5, "Node unavailable"), reply_to=message)
    agrees(Sites(tmp_path, first(101, "round", dead)).fit(), expected)
    assert "south did not answer: its app failed (Node unavailable)" in said()


def test_a_site_that_does_not_return(tmp_path: Path):
    def gone(message: Message, answer: Callable[[], Message]) -> None:
        del grid.apps[101]

    grid = Sites(tmp_path, first(101, "round", gone))
    with pytest.raises(FedualError, match=r"^After 200 s south did not answer 'round': start the missing SuperNodes"):
        grid.fit()


def test_an_app_that_fails_again_and_again(tmp_path: Path):
    def between(node: int, message: Message, answer: Callable[[], Message]) -> Message:
        if node == 101 and kind(message) == "round":
            return Message(Error(8, "killed"), reply_to=message)
        return answer()

    grid = Sites(tmp_path, between)
    with pytest.raises(
        FedualError, match=r"^south failed 5 times at 'round', its app failed \(killed\): look at the log"
    ):
        grid.fit()
    assert grid.asked(101).count("round") == 5
