"""What campaigns have found: each case as small as it gets."""

import csv

import pytest
import torch

from fedual.data import user_files
from fedual.errors import DataError, InputError
from fedual.glm.flower import payload
from fedual.glm.messages import Message
from fedual.glm.site import Site
from fedual.networks import Network


def test_texts_that_differ_in_a_character_that_arrays_drop_are_refused(tmp_path):
    rows = [[1.0, "mild\0"], [2.0, "mild"], [3.0, "none"], [4.0, "none"]] * 3
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["age", "label"], *rows])
    with pytest.raises(DataError, match=r"column 'label', row 1: a value contains a NUL character"):
        user_files.load(tmp_path, {"file": "t.csv", "target": "label", "test_fraction": 0.25})


def test_an_array_of_another_shape_is_seen_where_a_fact_has_its_name():
    reply = lambda *shape: Message("moments", {"spread": 1.0}, {"spread": torch.ones(shape)})
    assert payload.misfits({"a": reply(3), "b": reply(3), "c": reply(3)}) == {}
    found = payload.misfits({"a": reply(3), "b": reply(1, 3), "c": reply(3)})
    assert found == {"b": "its 'spread' is an array of shape (1, 3), where others sent an array of shape (3,)"}


@pytest.mark.parametrize("formula", [7, ["y ~ x"], {"y": "x"}])
def test_a_question_of_another_type_is_refused_by_a_site_of_a_regression(formula):
    site = Site("north", {"y": [0.0, 1.0] * 20, "x": [1.0, 2.0] * 20})
    schema = {"formula": formula, "weights": None, "offset": None, "trials": None}
    with pytest.raises(InputError, match=r"the federation's 'moments' cannot be read"):
        site.answer(Message("moments", {"model": {"schema": schema, "family": "binomial", "link": "logit"}}))


def test_a_scale_may_be_a_large_whole_number():
    network = Network(torch.nn.Linear(1, 2), scale=10**30)
    assert network.inputs(torch.tensor([[1.0]])).item() == pytest.approx(1e-30)
