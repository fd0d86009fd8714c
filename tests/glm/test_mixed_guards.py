"""What a site tells of a mixed model, counts and refuses; its own effects are in no message."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from attacks import Array, isolate
from guarded import guard, table
from mixed_tables import Setting, draw

from fedual.families import Full
from fedual.glm import models
from fedual.glm.formula import parse
from fedual.glm.guards import Guard
from fedual.glm.ledger import opened
from fedual.glm.messages import Message, packed_lam, unpacked_lam
from fedual.glm.mixed.model import MixedModel
from fedual.glm.rules import Guards, Refusal
from fedual.glm.schema import Columns, Schema, agree
from fedual.glm.settings import Settings
from fedual.glm.site import Site

UNITS = {"centre": torch.zeros(4, dtype=torch.float64), "scale": torch.ones(4, dtype=torch.float64)}
FORMULA = "sick ~ age + bmi + dose + (1 | site)"


def frame() -> tuple[pd.DataFrame, Array]:
    x, y = table(5000, 4, seed=5)
    return pd.DataFrame(x[:, 1:], columns=["age", "bmi", "dose"]).assign(sick=y.astype(int)), x


def agreed(site: Site) -> Schema:
    facts = {"formula": FORMULA, "categorical": [], "columns": vars(Columns()), "levels": {}}
    told = site.answer(Message("describe", facts))
    return agree(parse(FORMULA), Columns(), {site.name: told.facts}, None, binary=True)


def ask(site: Site, kind: str, theta: Array, sigma: float, **tensors: torch.Tensor) -> Message:
    """A message of a mixed model about (β, σ) of the server's choice."""
    model: dict[str, Any] = {"schema": agreed(site).to_dict(), "family": "binomial", "link": "logit", "site": "random"}
    facts = {"method": "newton", "previous": "", "anchor": "eta", "null": None, "unit": 1, "dispersion": 1.0}
    psi = torch.tensor([*theta, sigma], dtype=torch.float64)
    lam = packed_lam(Full().natural(psi, torch.eye(5, dtype=torch.float64)))
    content = {**UNITS, "lam": lam, "theta": psi, **tensors}
    model["random"] = ["Intercept"]
    return site.answer(Message(kind, {"model": model, **facts, "integrated": True}, content))


def evaluate(site: Site, sigma: float):
    def at(theta: Array) -> tuple[float, Array, Array]:
        eta = unpacked_lam(ask(site, "round", theta, sigma).tensors["eta"])
        curve = -2 * eta[1:]
        gradient = curve @ torch.tensor([*theta, sigma]) - eta[0]
        return 0.0, gradient.numpy()[:4], curve.numpy()[:4, :4]

    return at


def test_chosen_coefficients_isolate_a_row_without_a_guard_and_are_refused_with_one(tmp_path: Path):
    """Integrating the site's effect out is no protection, because the server chooses σ, too."""
    (found, x), sigma = frame(), 1e-4
    row = isolate(evaluate(Site("north", found), sigma), 4, column=1)
    np.testing.assert_allclose(row, x[x[:, 1].argmax()], atol=1e-2)
    with pytest.raises(Refusal) as refusal:
        isolate(evaluate(Site("north", found, guard(tmp_path)), sigma), 4, column=1)
    assert refusal.value.rule == "min_effective_rows"


@pytest.mark.parametrize("kind", ["round", "beside", "points", "figures", "grid"])
def test_no_message_evaluates_a_point_at_which_one_row_has_the_weight(tmp_path: Path, kind: str):
    found, _ = frame()
    hostile, origin = np.array([-3000 * 3.2, 3000, 0, 0]), np.zeros(4)
    both = torch.tensor([*hostile, 0.1], dtype=torch.float64)
    site = Site("north", found, guard(tmp_path))
    what, point, tensors = {
        "round": ("round", hostile, {}),
        "beside": ("round", origin, {"beside": torch.tensor(hostile)}),
        "points": ("round", origin, {"points": both[None]}),
        "figures": ("figures", hostile, {}),
        "grid": ("figures", origin, {"points": both[None]}),
    }[kind]
    with pytest.raises(Refusal) as refusal:
        ask(site, what, point, 0.1, **tensors)
    assert refusal.value.rule == "min_effective_rows"


def test_the_covariance_of_gradients_has_its_own_rule(tmp_path: Path):
    found, _ = frame()
    of = guard(tmp_path)
    site = Site("north", found, of)
    ask(site, "round", np.zeros(4), 0.1)  # the guard knows the table
    even, one = torch.ones(5000), torch.zeros(5000)
    one[7] = 1.0
    of.point(even, even, even)
    with pytest.raises(Refusal, match="min_effective_rows"):
        of.point(even, even, one)


def fitted(setting: Setting, rules: Guards, folder: Path | None = None) -> tuple[list[Site], dict[str, list[Message]]]:
    """A fit with the sites' answers."""
    sites = [
        Site(name, rows, Guard(rules, folder and folder / name, folder is not None, name))
        for name, rows in draw(setting).items()
    ]
    said: dict[str, list[Message]] = {site.name: [] for site in sites}

    def ask(message: Message) -> dict[str, Message]:
        replies = {site.name: site.answer(message) for site in sites}
        for name, reply in replies.items():
            said[name].append(reply)
        return replies

    models.estimate(ask, Settings("y ~ x + z + (1 | site)", setting.family, max_rounds=9))
    return sites, said


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [one for each in value.values() for one in numbers(each)]
    if isinstance(value, list | tuple):
        return [one for each in value for one in numbers(each)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.parametrize("family", ["binomial", "gaussian"])
def test_a_sites_own_effect_is_in_none_of_its_messages(family: str):
    sites, said = fitted(Setting(family, 4, 1.0), Guards())
    for site in sites:
        assert site.own is not None
        (estimate,), (sd,) = site.own.estimate, site.own.sd
        assert abs(estimate) > 1e-3
        for reply in said[site.name]:
            told = [*numbers(dict(reply.facts)), *(float(each) for t in reply.tensors.values() for each in t.flatten())]
            for value in (estimate, sd):
                assert not np.isclose(told, value, rtol=1e-6, atol=0).any()


def test_the_ledger_counts_all_that_was_told_and_the_estimate_beforehand_is_about_that(tmp_path: Path):
    generous = Guards(numbers_per_unknown=99.0, numbers_per_exposed=999.0, min_cell=1)
    setting = Setting("binomial", 4, 1.0)
    sites, said = fitted(setting, generous, tmp_path)
    for site in sites:
        told = sum(reply.numbers for reply in said[site.name][1:])  # no budget for kinds and levels
        rows = len(draw(setting)[site.name])
        with opened(tmp_path / site.name) as book:
            assert site.guard is not None
            assert site.guard._table is not None
            spent = book.before(site.guard._table.rows, ["y"])["y"]
        assert spent.numbers == pytest.approx(told / (3 * rows))
        facts = {"family": "binomial", "link": "logit", "site": "random", "random": ["Intercept"]}
        usual = MixedModel.from_facts({**facts, "schema": agreed_schema(draw(setting)).to_dict()}).usual_numbers
        assert 0.5 * told < usual < 1.2 * told


def agreed_schema(tables: dict[str, pd.DataFrame]) -> Schema:
    sites = [Site(name, rows) for name, rows in tables.items()]
    text = "y ~ x + z + (1 | site)"
    facts = {"formula": text, "categorical": [], "columns": vars(Columns()), "levels": {}}
    told = {site.name: site.answer(Message("describe", facts)).facts for site in sites}
    return agree(parse(text), Columns(), told, None, binary=True)


def test_a_site_with_few_rows_refuses_before_the_first_number_leaves(tmp_path: Path):
    with pytest.raises(Refusal) as refusal:
        fitted(Setting("binomial", 4, 0.3), Guards(), tmp_path)
    assert refusal.value.rule == "numbers_per_unknown"


def test_sites_with_rows_enough_take_part_under_the_default_rules(tmp_path: Path):
    fitted(Setting("binomial", 4, 0.3, rows=200), Guards(), tmp_path)
    fitted(Setting("gaussian", 4, 0.5, rows=40), Guards(), tmp_path / "linear")


def test_a_site_lets_its_guard_see_all_three_weights_of_a_mixed_message(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Guard, "point", lambda self, *weights: seen.append(weights))
    found, _ = frame()
    ask(Site("north", found, Guard(Guards(), None, False, "north")), "round", np.zeros(4), 0.5)
    weights, scores, swings = seen[-1]
    assert swings is not None
    assert (swings > 0).all()
    assert len(weights) == len(scores) == len(swings) == 5000
