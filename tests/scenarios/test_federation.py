import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedual import data
from fedual.data import Dataset
from fedual.errors import InputError
from fedual.scenarios import load
from fedual.scenarios.federation import hold_out, materialise, subset

parts_of_some = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True), min_size=1, max_size=6)


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """600 training examples whose only pixel is their number, and test examples whose pixel is above all of them."""
    x, y = torch.arange(600)[:, None], torch.arange(600) % 10
    dataset = Dataset(x, y, 10_000 + x[:50], y[:50], "digits", 10, 16)
    monkeypatch.setattr(data, "load", lambda name, root=None: dataset)
    return dataset


def scenario(*sets: str):
    return load("digits-heterog-10", sets=sets)


def test_a_federation_is_a_function_of_the_seed(numbered: Dataset):
    one, two, other = (materialise(scenario("fraction=0.5"), seed) for seed in (3, 3, 4))
    same = lambda a, b: all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert same(one.clients.parts, two.clients.parts)
    assert not same([torch.cat(list(one.clients.parts)).sort()[0]], [torch.cat(list(other.clients.parts)).sort()[0]])
    assert torch.equal(one.model.initial(), two.model.initial())
    assert not torch.equal(one.model.initial(), other.model.initial())


def test_torch_generator_is_left_alone(numbered: Dataset):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    materialise(scenario(), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_all_training_examples_and_the_test_set(numbered: Dataset):
    federation = materialise(scenario(), 0)
    assert torch.cat(list(federation.clients.parts)).sort()[0].tolist() == list(range(600))
    assert federation.clients.x is numbered.x_train
    assert torch.equal(federation.test[0], numbered.x_test)
    assert torch.equal(federation.test[1], numbered.y_test)
    assert federation.model.scale == 16


@pytest.mark.parametrize("kind", ["dirichlet", "homogeneous", "two-class"])
def test_split_has_the_kind_and_the_clients_asked_for(numbered: Dataset, kind: str):
    more = ["split.per_class=5"] if kind == "two-class" else []
    clients = materialise(scenario(f"split.kind={kind}", "split.clients=4", *more), 1).clients
    counts = np.array([np.bincount(numbered.y_train[part], minlength=10) for part in clients.parts])
    assert len(counts) == 4
    assert {  # what tells the three apart
        "dirichlet": np.ptp(counts, axis=0).max() > 1,
        "homogeneous": np.ptp(counts, axis=0).max() <= 1,
        "two-class": all(sorted(row)[-3:] == [0, 5, 5] for row in counts),
    }[kind]


def test_what_a_split_is_told(numbered: Dataset):
    """Both concentrations → ∞ make a Dirichlet split even."""
    clients = materialise(scenario("client_concentration=1e9", "class_concentration=1e9"), 0).clients
    assert {len(part) for part in clients.parts} == {60}


def test_subset_is_what_the_split_divides(numbered: Dataset):
    federation = materialise(scenario("fraction=0.1"), 7)
    dealt = torch.cat(list(federation.clients.parts)).sort()[0]
    assert torch.equal(dealt, subset(600, 0.1, 7))
    assert len(dealt) == len(dealt.unique()) == 60


def test_subset_is_uniform_over_seeds():
    """Each of 20 examples is in a subset of 5 with probability 1/4: within 5 standard deviations in 2000 draws."""
    draws, size = 2000, 20
    drawn = torch.stack([subset(size, 0.25, seed) for seed in range(draws)])
    assert (drawn.diff(dim=1) > 0).all()
    counts = torch.bincount(drawn.flatten(), minlength=size)
    assert ((counts - draws / 4).abs() < 5 * (draws * 3 / 16) ** 0.5).all()


def test_subset_of_all_is_all_and_of_little_is_one():
    assert subset(5, 1.0, 0).tolist() == [0, 1, 2, 3, 4]
    assert len(subset(5, 0.01, 0)) == 1


@pytest.mark.parametrize("kind", ["split.kind=dirichlet", "split.kind=two-class"])
def test_validation_never_touches_the_test_set_and_is_apart_from_training(numbered: Dataset, kind: str):
    more = ["split.per_class=40"] if "two" in kind else []  # clients then share examples
    asked = scenario(kind, *more)
    whole, tuning = materialise(asked, 2).clients.parts, materialise(asked, 2, validation=0.2)
    held = set(tuning.test[0].flatten().tolist())
    assert max(held) < 600
    assert torch.equal(tuning.test[1], numbered.y_train[tuning.test[0].flatten()])
    for before, after in zip(whole, tuning.clients.parts, strict=True):
        assert set(after.tolist()) == set(before.tolist()) - held
    assert held <= set(torch.cat(list(whole)).tolist())


@given(parts=parts_of_some, validation=st.floats(0.01, 0.99), seed=st.integers(0, 2**32))
def test_hold_out_takes_its_part_of_every_client(parts: list[list[int]], validation: float, seed: int):
    disjoint = [[61 * k + i for i in part] for k, part in enumerate(parts)]
    if max(map(len, parts)) == 1:
        with pytest.raises(InputError, match="nothing to validate on"):
            hold_out([torch.tensor(part) for part in disjoint], validation, seed)
        return
    left, held = hold_out([torch.tensor(part) for part in disjoint], validation, seed)
    for part, kept in zip(disjoint, left, strict=True):
        taken = set(part) - set(kept.tolist())
        assert taken == set(part) & set(held.tolist())
        assert len(kept) >= 1
        if len(part) > 1:
            assert len(taken) >= 1
            assert abs(len(taken) - validation * len(part)) <= 1
    assert held.tolist() == sorted({i for part in disjoint for i in part} - {i for kept in left for i in kept.tolist()})


@given(parts=parts_of_some, seed=st.integers(0, 2**32))
def test_nobody_trains_on_what_another_holds_out(parts: list[list[int]], seed: int):
    try:
        left, held = hold_out([torch.tensor(part) for part in parts], 0.2, seed)
    except InputError as error:
        assert "nothing to validate" in str(error) or "no example" in str(error)  # noqa: PT017
        return
    assert not set(held.tolist()) & {i for part in left for i in part.tolist()}


def test_clients_with_the_same_examples_hold_out_the_same():
    part = torch.arange(100)
    left, held = hold_out([part, part, part], 0.2, 0)
    assert len(held) == 20
    assert all(len(kept) == 80 for kept in left)


def test_a_client_left_without_examples_is_named():
    """Client 1's only example is one of client 0's two: one of ten seeds at least holds it out."""
    refused = []
    for seed in range(10):
        try:
            hold_out([torch.tensor([0, 1]), torch.tensor([1])], 0.5, seed)
        except InputError as error:
            refused.append(str(error))
    assert refused
    assert all("leaves client 1 no example" in message for message in refused)


@pytest.mark.parametrize("validation", [-0.1, 1.0])
def test_validation_outside_its_range_is_refused(numbered: Dataset, validation: float):
    with pytest.raises(InputError, match="it must be at least 0 and below 1"):
        materialise(scenario(), 0, validation=validation)


def test_description_is_json_without_the_rounds_that_may_grow(numbered: Dataset):
    short, long = (materialise(scenario(f"rounds={rounds}", "lr=0.5"), 0).clients.description for rounds in (2, 3))
    assert short == long == json.loads(json.dumps(short))
    assert short is not None
    said = short["scenario"]
    assert said["settings"]["lr"] == 0.5
    assert (said["name"], said["method"], said["validation"]) == ("digits-heterog-10", "ivon-admm", 0.0)
    network = materialise(scenario(), 0).model
    assert network.recipe == {"model": "mlp", "settings": {"inputs": 64, "hidden": [100, 50], "outputs": 10}}


def test_real_digits_go_through_their_network():
    federation = materialise(scenario(), 0)
    x, y = federation.test
    assert federation.model.scale == 16
    outputs = federation.model(federation.model.initial(), federation.model.inputs(x))
    assert outputs.shape == (len(y), 10)
    assert sum(map(len, federation.clients.parts)) + len(y) == 1797
