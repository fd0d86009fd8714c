from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedual.data.partition import by_group, dirichlet, homogeneous, two_class
from fedual.errors import InputError

Split = Callable[..., list[Tensor]]

seeds = st.integers(0, 2**32)
labelled = st.lists(st.integers(0, 5), min_size=1, max_size=120)
splits = st.one_of(
    st.just(homogeneous),
    st.builds(
        lambda a, b: partial(dirichlet, client_concentration=a, class_concentration=b),
        st.floats(0.01, 100),
        st.floats(0.01, 100),
    ),
)


def parts(labels: list[int], clients: list[Tensor]) -> np.ndarray:
    """How many examples of each class each client has: (K, C)."""
    y = np.asarray(labels)
    return np.array([np.bincount(y[c.numpy()], minlength=y.max() + 1) for c in clients])


@given(labels=labelled, split=splits, seed=seeds, data=st.data())
@settings(max_examples=200)
def test_every_example_is_with_one_client_and_no_client_is_empty(
    labels: list[int], split: Split, seed: int, data: st.DataObject
):
    num_clients = data.draw(st.integers(1, len(labels)))
    clients = split(labels, num_clients, seed)
    assert len(clients) == num_clients
    assert all(len(c) for c in clients)
    assert torch.cat(clients).sort().values.tolist() == list(range(len(labels)))


@given(labels=labelled, split=splits, seed=seeds)
def test_same_seed_same_split(labels: list[int], split: Split, seed: int):
    num_clients = (len(labels) + 1) // 2
    first, second = split(labels, num_clients, seed), split(torch.tensor(labels), num_clients, seed)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("split", [dirichlet, homogeneous, partial(two_class, per_class=10)])
def test_another_seed_is_another_split(split: Split):
    labels = [i % 10 for i in range(1000)]
    assert not all(a.equal(b) for a, b in zip(split(labels, 10, 0), split(labels, 10, 1), strict=True))


@given(num_clients=st.integers(1, 12), extra=st.lists(st.integers(0, 30), min_size=1, max_size=6), seed=seeds)
def test_dirichlet_has_no_part_of_one_where_classes_are_large_enough(num_clients: int, extra: list[int], seed: int):
    labels = [k for k, more in enumerate(extra) for _ in range(3 * num_clients + more)]
    assert not (parts(labels, dirichlet(labels, num_clients, seed)) == 1).any()


def test_dirichlet_rounds_by_largest_remainder():
    """Each part differs from its exact share by less than one, except where the rules for 1 and 0 step in."""
    labels, num_clients = [i % 10 for i in range(60_000)], 10
    rng = np.random.default_rng(7)
    p = rng.dirichlet(np.ones(num_clients))
    weights = p[:, None] * rng.dirichlet(np.full(10, 0.5), size=num_clients)
    exact = 6000 * weights / weights.sum(0)
    counts = parts(labels, dirichlet(labels, num_clients, seed=7))
    large = (exact >= 2) & (exact < exact.max(0))  # not touched by the rule for parts of one
    assert large.sum() > 50
    assert (np.abs(counts - exact)[large] < 1).all()
    for k in range(10):  # who is rounded up has the larger remainders
        up = counts[:, k] > exact[:, k]
        remainder = exact[:, k] % 1
        assert remainder[up & large[:, k]].min(initial=1) >= remainder[~up & large[:, k]].max(initial=0)


def test_dirichlet_shares_a_class_that_nobody_drew():
    clients = dirichlet([0, 1, 2, 3] * 25, 1, seed=0, class_concentration=1e-3)
    assert clients[0].tolist() == list(range(100))


def test_dirichlet_sizes_and_mixtures_follow_the_concentrations():
    labels = [i % 10 for i in range(10_000)]
    equal = dirichlet(labels, 10, 0, client_concentration=1e8, class_concentration=1e8)
    assert np.ptp(parts(labels, equal)) <= 2
    alone = parts(labels, dirichlet(labels, 10, 0, client_concentration=1e8, class_concentration=1e-3))
    assert (alone.max(0) == 1000).mean() >= 0.5  # most classes are with one client


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6), num_clients=st.integers(1, 12), seed=seeds)
@settings(max_examples=200)
def test_homogeneous_clients_differ_by_one_at_most(sizes: list[int], num_clients: int, seed: int):
    labels = [k for k, size in enumerate(sizes) for _ in range(size)]
    assume(len(labels) >= num_clients)
    counts = parts(labels, homogeneous(labels, num_clients, seed))
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp(counts.sum(1)) <= 1


@given(sizes=st.lists(st.integers(7, 60), min_size=2, max_size=8), num_clients=st.integers(1, 40), seed=seeds)
def test_two_class_clients_hold_two_classes(sizes: list[int], num_clients: int, seed: int):
    labels = [k for k, size in enumerate(sizes) for _ in range(size)]
    clients = two_class(labels, num_clients, seed, per_class=7, max_uses=4)
    counts = parts(labels, clients)
    assert len(clients) == num_clients
    assert all(len(c.unique()) == 14 for c in clients)
    assert ((counts == 7).sum(1) == 2).all()


def test_two_class_on_the_scenario_of_the_paper():
    """100 clients, 10 classes of MNIST's sizes: 20 uses each or nearly, and only short classes are used twice."""
    sizes = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    labels = np.repeat(np.arange(10), sizes)
    clients = two_class(labels, 100, seed=62)
    uses = (parts(labels.tolist(), clients) > 0).sum(0)
    assert uses.sum() == 200
    assert uses.min() >= 18
    assert uses.max() <= 21
    times = np.bincount(torch.cat(clients).numpy(), minlength=len(labels))
    for k, (size, used) in enumerate(zip(sizes, uses, strict=True)):
        own = times[labels == k]
        assert (own > 1).any() == (used * 300 > size)
        assert (own > 0).sum() == min(size, used * 300)  # nothing is left out before something is used again


def test_two_class_begins_with_the_least_used_class():
    labels = [0] * 10 + [1] * 10 + [2] * 10
    counts = parts(labels, two_class(labels, 3, seed=0, per_class=2))
    assert counts[0, 0] == 2
    first_two = (counts[:1] > 0).sum(0)
    assert counts[1, first_two.argmin()] == 2


def test_by_group():
    labels = torch.tensor([4, 0, 1, 2, 3, 0, 4])
    clients = by_group(labels, [(0, 1), [2, 3], (4,)])
    assert [c.tolist() for c in clients] == [[1, 2, 5], [3, 4], [0, 6]]


@pytest.mark.parametrize(
    ("groups", "complaint"),
    [
        ([(0, 1)], "label 2 is in none"),
        ([], "label 0 is in none"),
        ([(0, 1), (1, 2)], "label 1 is named twice"),
        ([(0, 1, 1), (2,)], "label 1 is named twice"),
        ([(0, 1), (2,), (3,)], "no example"),
        ([(0, 1, 2), ()], "no example"),
    ],
)
def test_by_group_names_each_label_once(groups: list[tuple[int, ...]], complaint: str):
    with pytest.raises(InputError, match=complaint):
        by_group([0, 1, 2], groups)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: dirichlet([0, 1], 0), "num_clients = 0"),
        (lambda: homogeneous([0, 1], -1), "num_clients = -1"),
        (lambda: dirichlet([0, 1], 3), "there are 2 examples"),
        (lambda: homogeneous([0, 1], 3), "there are 2 examples"),
        (lambda: homogeneous([0, 1], 1.5), "num_clients = 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: dirichlet([0, 1], 1, -1), "seed = -1"),
        (lambda: dirichlet([], 1), "labels have shape"),
        (lambda: dirichlet([[0, 1]], 1), "labels have shape"),
        (lambda: dirichlet([0.0, 1.0], 1), "type float64"),
        (lambda: dirichlet([0, 1], 1, client_concentration=0), "client_concentration = 0"),
        (lambda: dirichlet([0, 1], 1, class_concentration=float("nan")), "class_concentration = nan"),
        (lambda: two_class([0, 0], 1, per_class=1), "at least two classes"),
        (lambda: two_class([0, 0, 1], 1, per_class=2), "smallest class has 1"),
        (lambda: two_class([0, 1], 0, per_class=1), "num_clients = 0"),
        (lambda: two_class([0, 1], 1, per_class=0), "per_class = 0"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], complaint: str):
    with pytest.raises(InputError, match=complaint):
        call()
