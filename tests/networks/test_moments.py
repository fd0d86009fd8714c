"""Moments of a federation's inputs: those of all rows together, and a limit that no training value exceeds."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedual.networks import Clients
from fedual.networks.moments import DEVIATIONS, FEATURES, Moments


def moments(x: torch.Tensor, *sizes: int) -> Moments:
    """Of clients with so many rows each; all rows belong to one client by default."""
    found = Moments.of(Clients(x, torch.zeros(len(x)), torch.arange(len(x)).split(list(sizes) or len(x))))
    assert found is not None
    return found


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("offset", [0.0, 1e9, -1e12])
def test_sums_of_clients_give_the_moments_of_all_rows(offset: float):
    x = offset + normal(321, 4) * torch.tensor([0.1, 1, 10, 100])
    found = moments(x, 1, 20, 300)
    exact = (x - offset).numpy()  # subtraction of the offset is exact
    spacing = np.spacing(abs(offset))
    np.testing.assert_allclose(found.mean.numpy() - offset, exact.mean(0), rtol=1e-12, atol=4 * spacing)
    np.testing.assert_allclose(found.deviation, exact.std(0), rtol=1e-9)


def test_another_split_gives_the_same_and_shared_rows_count_for_each_client():
    x = 1e6 + normal(60, 3)
    one, other = moments(x), moments(x, 7, 3, 50)
    for a, b in zip(one[1:], other[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    shared = Moments.of(Clients(x, torch.zeros(60), [torch.arange(60), torch.arange(10)]))
    assert shared is not None
    torch.testing.assert_close(shared.mean, torch.cat([x, x[:10]]).mean(0))
    assert shared.number == 70


@pytest.mark.parametrize("value", [0.0, 0.1, -1e9 / 3, 1e-30])
def test_constants_have_no_deviation_and_every_other_value_is_far(value: float):
    found = moments(torch.full((1001, 1), value, dtype=torch.float64), 1, 1000)
    assert found.deviation.tolist() == [0]
    values = torch.tensor([[value], [value * (1 + 1e-9)], [value + 1 + abs(value)]], dtype=torch.float64)
    assert found.scores(values)[:, 0].tolist() == [0, 0, np.inf]


VALUES = st.one_of(st.sampled_from([0.0, 1.0]), st.integers(-5, 999).map(float), st.floats(-1e6, 1e6, width=32))


@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 60), st.just(2)), elements=VALUES))
def test_no_value_of_the_training_data_is_beyond_the_limit(x: np.ndarray):
    tensor = torch.from_numpy(x)
    found = moments(tensor)
    assert (found.scores(tensor).abs() <= found.limit).all()


@pytest.mark.parametrize("num", [50, 2000, 40_000])
def test_neither_are_the_rarest_codes(num: int):
    """A code that one example of many has is s √(N − 1) from the mean, the largest distance that there is."""
    x = torch.nn.functional.one_hot(torch.arange(num).clamp(max=3)).float()  # codes 0, 1, 2 once each
    found = moments(x)
    assert (found.scores(x.double()).abs() <= found.limit).all()
    assert (found.scores(100.0 * torch.ones(1, 4).double()).abs() > found.limit).all()


@pytest.mark.parametrize("feature", range(3))
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_shift_of_ten_deviations_is_beyond_the_limit(feature: int, sign: int):
    x = normal(500, 3) * torch.tensor([1e-3, 1, 1e3]) + torch.tensor([0, 1e6, -5])
    found = moments(x, 100, 400)
    shifted = x.clone()
    shifted[:, feature] += sign * 10 * found.deviation[feature]
    far = found.scores(shifted).abs() > found.limit
    assert far[:, feature].all()
    assert far.sum() == 500
    fresh = normal(500, 3, seed=1) * torch.tensor([1e-3, 1, 1e3]) + torch.tensor([0, 1e6, -5])
    assert not (found.scores(fresh).abs() > found.limit).any()


@pytest.mark.parametrize(
    "x", [normal(20, 3, 3), normal(20, FEATURES + 1), (normal(20, 5).abs() * 50).to(torch.uint8)], ids=str
)
def test_pictures_and_wide_inputs_have_one_mean_and_deviation(x: torch.Tensor):
    found = moments(x, 5, 15)
    assert found.number == x.numel()
    torch.testing.assert_close(found.mean, x.double().mean()[None])
    torch.testing.assert_close(found.deviation, x.double().std(correction=0)[None])


def test_json_gives_back_the_same_numbers():
    found = moments(1e5 + normal(30, 3))
    again = Moments.from_dict(json.loads(json.dumps(found.to_dict())), (3,))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, again, strict=True))
    assert found.limit.tolist() == pytest.approx([DEVIATIONS] * 3)
    with pytest.raises(ValueError, match="another shape"):
        Moments.from_dict(found.to_dict(), (4,))


def test_inputs_whose_squares_overflow_have_no_moments():
    x = torch.full((4, 1), 1e200, dtype=torch.float64)
    x[0] = -1e200
    assert Moments.of(Clients(x, torch.zeros(4), [torch.arange(4)])) is None
