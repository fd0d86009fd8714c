"""What is said of inputs that are unlike those of training."""

from pathlib import Path

import flat
import pytest
import torch
from torch import Tensor, nn

from fedual.data.user_files import Unseen
from fedual.errors import InputError
from fedual.networks import Clients, Network
from fedual.networks.moments import Moments
from fedual.predict import FinishedRun, open_run, warnings_for
from fedual.strange import SHOWN, Far, Warnings, far_columns


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def far(x: Tensor, train: Tensor, names: list[str | None] | None = None) -> list[Far]:
    moments = Moments.of(Clients(train, torch.zeros(len(train)), [torch.arange(len(train))]))
    assert moments is not None
    return far_columns(x, moments, names, torch.zeros(1), torch.ones(1))


@pytest.fixture
def run(tmp_path: Path) -> FinishedRun:
    model = nn.Linear(30, 2).double()
    x = 3 + normal(200, 30)
    flat.fit(Network(model), [(x[:50], x[:50, 0].long() % 2), (x[50:], x[50:, 0].long() % 2)], rounds=1, out=tmp_path)
    return open_run(tmp_path, model)


def test_a_tensor_is_compared_with_the_data_that_fit_was_given(run: FinishedRun):
    assert warnings_for(3 + normal(2000, 30, seed=1), run).sentences() == []
    x = 3 + normal(40, 30)
    x[16, 4] = 34.0
    x[[3, 9], 7] = torch.tensor([-20.0, -30.0], dtype=x.dtype)
    found = warnings_for(x, run)
    seven, four = found.far
    assert (seven.column, seven.value, seven.inputs.tolist()) == ("x[7]", -30, [9, 3])
    assert (four.column, four.value, four.inputs.tolist()) == ("x[4]", 34, [16])
    assert run.moments is not None
    for one, place in ((seven, 7), (four, 4)):
        assert one.mean == run.moments.mean[place]
        assert one.deviations == (one.value - one.mean) / run.moments.deviation[place]
    assert found.sentences()[0].startswith("Input 10 (and 1 more): x[7] = -30 is ")
    assert found.sentences()[1].startswith("Input 17: x[4] = 34 is ")
    with pytest.raises(InputError, match=r"the shape \(40, 29\): give \(N, 30\)"):
        warnings_for(x[:, 1:], run)
    x[5, 5] = torch.nan
    with pytest.raises(InputError, match="Input 6 contains NaN or infinity"):
        warnings_for(x, run)


def test_wrong_units_everywhere_are_a_few_sentences_and_a_count(run: FinishedRun):
    found = warnings_for(1000 * normal(5000, 30).abs() + 1000, run)
    assert len(found.far) == 30
    assert len(found.far[0].inputs) == 5000
    assert [abs(one.deviations) for one in found.far] == sorted(
        (abs(one.deviations) for one in found.far), reverse=True
    )
    told = found.sentences()
    assert len(told) == SHOWN + 1
    assert told[-1] == "… and 25 more columns with values that are far from training."
    unseen = [Unseen("colour", f"c{i}", [0, i]) for i in range(1, 20)]
    told = Warnings(["a.png", *map(str, range(20))], [], unseen).sentences()
    assert len(told) == SHOWN + 1
    assert told[0].startswith("Input a.png (and 1 more): colour = 'c1' is a category that training never saw")
    assert told[-1] == "… and 14 more that training never saw."


def test_constants_come_last_and_columns_without_a_name_are_not_looked_at():
    train = normal(300, 3)
    train[:, 1] = 0.1
    x = train[:2].clone()
    x[0] = torch.tensor([50.0, 0.2, 50.0])
    dose, same = far(x, train, ["dose", "same", None])
    assert (dose.column, same.column, same.deviations) == ("dose", "same", float("inf"))
    text = Warnings(["1", "2"], [dose, same], []).sentences()[1]
    assert text.startswith("Input 1: same = 0.2, but all of training had 0.1: ")
    assert far(x[1:], train) == []


def test_a_picture_is_named_with_its_farthest_pixel():
    train = normal(50, 3, 4).abs()
    x = train[:3].clone()
    x[1, 2, 1], x[1, 0, 0], x[2, 0, 3] = 255, 200, 90
    (found,) = far(x, train)
    assert (found.column, found.value, found.inputs.tolist()) == ("x[2, 1]", 255, [1, 2])
    assert far(train, train) == []


@pytest.mark.parametrize(("offset", "value"), [(0.0, "1234.5"), (1e9, "1000001234.5")])
def test_numbers_are_said_as_precisely_as_their_column_needs(offset: float, value: str):
    train = offset + normal(400, 1)
    (found,) = far(torch.tensor([[offset + 1234.5]], dtype=torch.float64), train)
    text = Warnings(["1"], [found], []).sentences()[0]
    assert text.startswith(f"Input 1: x[0] = {value} is ")


def test_inputs_that_are_single_numbers():
    (found,) = far(torch.tensor([90.0]).double(), normal(80))
    assert found.column == "x"
