"""Attacks on a site's times and events: each succeeds where nothing is refused, and is refused by the default rules."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from guarded import OFF, guard
from test_survival_against_r import TABLE, sites

from fedual import glm
from fedual.glm.fitting import asking
from fedual.glm.formula import parse
from fedual.glm.guards import Guard, Guards, Refusal
from fedual.glm.messages import Message, packed_lam, unpacked_lam
from fedual.glm.models import estimate
from fedual.glm.schema import Columns, agree
from fedual.glm.settings import Settings
from fedual.glm.site import Site

Array = np.ndarray


@dataclass
class Server:
    """A server that asks one site what it likes about a survival model."""

    site: Site
    formula: str
    cuts: list[float] | None = None

    def ask(self, kind: str, **content: Any) -> Message:
        columns = Columns()
        facts = {"formula": self.formula, "categorical": [], "columns": vars(columns), "levels": {}}
        told = self.site.answer(Message("describe", facts))
        schema = agree(parse(self.formula), columns, {"north": told.facts}, event=content.pop("event", None))
        family = "cox" if self.cuts is None else "piecewise-exponential"
        model = {"schema": schema.to_dict(), "family": family, "link": "log", "ties": "efron", "cuts": self.cuts}
        model["transform"] = None
        size = len(schema.terms)
        facts = {"method": "newton", "previous": "", "anchor": "eta", "null": None, "unit": 1.0}
        units = {"centre": torch.zeros(size), "scale": torch.ones(size)}
        return self.site.answer(Message(kind, {"model": model, **facts}, {**units, **content}))

    def evaluate(self, theta: Array) -> tuple[Array, Array]:
        """∇ℓ and ∇²ℓ at θ."""
        pieces = 0 if self.cuts is None else len(self.cuts) + 1
        point = torch.tensor(theta)
        lam = torch.cat([point[None], -torch.eye(len(point)) / 2])
        eta = unpacked_lam(self.ask("round", lam=packed_lam(lam, pieces)).tensors["eta"], pieces)
        hessian = -2 * eta[1:]
        return (hessian @ point - eta[0]).numpy(), hessian.numpy()


def table(rows: int = 400, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    x = {"visits": rng.integers(1, 5, rows), "dose": rng.normal(size=rows), "weight": rng.normal(size=rows)}
    return pd.DataFrame({"time": rng.permutation(rows) + 1.0, "event": rng.integers(0, 2, rows), **x})


@dataclass
class Attack:
    """What the attacker does to a site with a table, and what it finds of the truth."""

    frame: pd.DataFrame
    formula: str
    run: Callable[[Server], Array]
    truth: Array
    rule: str
    cuts: list[float] | None = None


def last_two() -> Attack:
    """How the last two rows differ: one with many visits hides all others until it leaves."""
    frame = table().sort_values("time", ignore_index=True)
    frame.loc[397, "visits"], frame.loc[398:, "visits"] = 9, 2
    frame.loc[397:, "event"] = 1
    pair = frame.loc[398:, ["visits", "dose", "weight"]].to_numpy()

    def run(server: Server) -> Array:
        _, hessian = server.evaluate(np.array([12.0, 0, 0]))
        return hessian[1] / np.sqrt(hessian[1, 1]) * 2

    difference = pair[1] - pair[0]
    truth = difference * np.sign(difference[1])
    return Attack(frame, "Surv(time, event) ~ visits + dose + weight", run, truth, "min_effective_rows")


def one_event() -> Attack:
    """The covariates of the only row with an event, at the first time: the gradient at 0, and the means."""
    frame = table().assign(event=0)
    frame.loc[7, ["time", "event"]] = 0.5, 1

    def run(server: Server) -> Array:
        gradient, _ = server.evaluate(np.zeros(3))
        return server.ask("moments").tensors["centre"][1:].numpy() - gradient

    truth = frame.loc[7, ["visits", "dose", "weight"]].to_numpy(float)
    return Attack(frame, "Surv(time, event) ~ visits + dose + weight", run, truth, "min_events")


def one_in_a_stratum() -> Attack:
    """How the two rows of a small stratum differ: what a fit has more than one whose strata leave them alone."""
    frame = table().assign(group=lambda one: 1 + one.index % 2, other=lambda one: 1 + one.index % 2)
    frame.loc[:1, "group"], frame.loc[:1, "other"] = 3, [4, 5]
    frame.loc[:1, "time"], frame.loc[:1, "event"] = [1.0, 2.0], 1

    def run(server: Server) -> Array:
        found = [
            Server(server.site, f"Surv(time, event) ~ visits + dose + weight + strata({name})").evaluate(np.zeros(3))[0]
            for name in ("group", "other")
        ]
        return -2 * (found[0] - found[1])

    truth = np.diff(frame.loc[[1, 0], ["visits", "dose", "weight"]].to_numpy(), axis=0)[0]
    return Attack(frame, "Surv(time, event) ~ 1", run, truth, "min_events")


def events_of_a_level() -> Attack:
    """How many of the rows of a level had an event: with a slope far below zero it has no weight in the means."""
    frame = table().assign(sick=lambda one: (one.index < 40).astype(int))
    frame.loc[:39, "event"] = 0
    frame.loc[5, "event"] = 1

    def run(server: Server) -> Array:
        return -server.evaluate(np.array([-40.0, 0]))[0][:1]

    return Attack(frame, "Surv(time, event) ~ sick + dose", run, np.ones(1), "min_cell")


def last_piece() -> Attack:
    """The only row at risk in the last piece of a common baseline."""
    frame = table().sort_values("time", ignore_index=True)
    cuts = [100.0, 399.5]

    def run(server: Server) -> Array:
        _, hessian = server.evaluate(np.array([0, 0, 0, -4.0, -4, -4]))
        return hessian[:3, 5] / hessian[5, 5]

    truth = frame.loc[399, ["visits", "dose", "weight"]].to_numpy(float)
    return Attack(frame, "Surv(time, event) ~ visits + dose + weight", run, truth, "min_cell", cuts)


ATTACKS = [last_two, one_event, one_in_a_stratum, events_of_a_level, last_piece]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_an_attack_succeeds_with_the_guards_off(attack: Callable[[], Attack], tmp_path: Path):
    made = attack()
    for one in (None, guard(tmp_path, OFF)):
        server = Server(Site("north", made.frame, one), made.formula, made.cuts)
        np.testing.assert_allclose(made.run(server), made.truth, atol=1e-6)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_it_is_refused_with_the_guards_on(attack: Callable[[], Attack], tmp_path: Path):
    made = attack()
    server = Server(Site("north", made.frame, guard(tmp_path)), made.formula, made.cuts)
    with pytest.raises(Refusal, match=f"rule {made.rule}: "):
        made.run(server)


@pytest.mark.parametrize("options", [{}, {"baseline": "piecewise", "pieces": [6, 14]}])
def test_an_ordinary_fit_is_not_refused(options: dict[str, Any], tmp_path: Path):
    rows = TABLE.assign(site=np.arange(len(TABLE)) % 3)
    tables = {f"site {k}": frame for k, frame in rows.groupby("site")}
    members = [
        Site(name, frame, Guard(Guards(), tmp_path / name / "ledger", enforce=True, site=name))
        for name, frame in tables.items()
    ]
    settings = Settings("Surv(time, status) ~ age + dose + sex", **options)
    found = estimate(asking(members), settings)
    np.testing.assert_allclose(found.coefficients, glm.fit(settings.formula, tables, **options).coefficients)


def test_a_site_without_events_is_not_refused(tmp_path: Path):
    """It tells nothing; how many events there are is told, and 0 is one of the numbers that may be."""
    tables = sites() | {"east": TABLE.head(60).assign(status=0)}
    members = [
        Site(name, frame, Guard(Guards(), tmp_path / name / "ledger", enforce=True, site=name))
        for name, frame in tables.items()
    ]
    found = estimate(asking(members), Settings("Surv(time, status) ~ age + dose"))
    assert found.site_table.loc["east", "events"] == 0


def test_messages_count_all_numbers(tmp_path: Path):
    """The ledger has as many numbers as were told, shared out among the five columns of the table."""
    members = [Site("north", TABLE, guard(tmp_path), memory=None)]
    said: list[Message] = []
    ask = asking(members)

    def listening(message: Message) -> dict[str, Message]:
        replies = dict(ask(message))
        said.extend(replies.values())
        return replies

    estimate(listening, Settings("Surv(time, status) ~ age + dose"))
    from fedual.glm.ledger import opened

    with opened(tmp_path / "ledger") as book:
        (spent,) = book.spent
    assert spent.keys() == {"time", "status", "age", "dose"}
    numbers = sum(reply.numbers for reply in said if reply.kind not in ("describe", "measure"))
    assert spent["age"].numbers == pytest.approx(numbers / (len(TABLE) * 4))
