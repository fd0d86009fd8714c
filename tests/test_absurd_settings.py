"""Settings that no run can mean: each works, or is refused in one sentence before any work starts."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedual
from fedual import memory, models
from fedual.data import partition, user_files
from fedual.errors import InputError
from fedual.networks import Clients, Minibatches, Network
from fedual.settings import Evaluation, Execution, LocalTraining


def federation(sizes: tuple[int, ...] = (20, 30)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, generator=generator), torch.arange(n) % 2) for n in sizes]


def fit(model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)) if model is None else model
    return fedual.fit(model, federation(), "ivon-admm", 1, posterior="point", **options)


def test_batches_hold_all_examples_of_a_client_at_most():
    """A billion examples in a batch are all of a client's, in the time and the memory that these take."""
    runs = [fit(local=LocalTraining(batch_size=size, local_epochs=2)) for size in (10**9, 1024)]
    assert torch.equal(runs[0].posterior.lam, runs[1].posterior.lam)
    data = Clients(torch.zeros(5000, 3), torch.zeros(5000).long(), torch.arange(5000).split([2000, 3000]))
    assert Minibatches(Network(nn.Linear(3, 2)), data, batch_size=10**9).batch_size == 3000
    assert Minibatches(Network(nn.Linear(3, 2)), data, batch_size=500).batch_size == 500


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
@pytest.mark.parametrize("amount", [{"local_steps": 10**9}, {"local_epochs": 10**12}, {"local_steps": 2**62}])
def test_rounds_that_never_end(engine: str, amount: dict[str, int]):
    with pytest.raises(InputError, match=r"take .* for their order alone: lower local_steps or local_epochs"):
        fit(local=LocalTraining(**amount), execution=Execution(engine=engine))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        lambda: LocalTraining(batch_size=2**63),
        lambda: LocalTraining(local_epochs=10**40),
        lambda: Evaluation(samples=2**64),
        lambda: Execution(chunk=2**64),
    ],
)
def test_numbers_beyond_64_bits(settings: Any):
    with pytest.raises(InputError, match="has more than 64 bits"):
        settings()


def test_evaluations_that_never_end():
    with pytest.raises(InputError, match="samples = 1000001: give at most 1000000"):
        Evaluation(samples=10**6 + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_half_precision(dtype: torch.dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(InputError, match=f"The model's parameters are {name}, .*: give model.float"):
        fit(nn.Linear(3, 2).to(dtype))


@pytest.mark.parametrize("settings", [{"hidden": [10**9]}, {"inputs": 10**12}, {"hidden": [10**5] * 20}])
def test_models_that_do_not_fit_into_memory(settings: dict[str, Any]):
    with pytest.raises(InputError, match="which do not fit into memory: make it smaller"):
        models.build("mlp", **settings)


def test_models_of_odd_sizes():
    for settings in ({"hidden": [2**63]}, {"outputs": 2**64}, {"hidden": [1] * 1001}):
        with pytest.raises(InputError) as raised:
            models.build("mlp", **settings)
        assert str(raised.value).isprintable()


def test_measuring_a_model_draws_nothing():
    torch.manual_seed(1)
    one = models.build("resnet20", outputs=10).state_dict()
    torch.manual_seed(1)
    other = models.resnet20(outputs=10).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_must_fit_into_what_is_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available", lambda: 4 * 178_110 * models.COPIES - 1)
    torch.set_default_dtype(torch.float32)
    with pytest.raises(InputError, match="do not fit into memory"):
        models.build("mlp")
    monkeypatch.setattr(memory, "available", lambda: 4 * 178_110 * models.COPIES)
    models.build("mlp")


def test_more_clients_than_examples():
    with pytest.raises(InputError, match="num_clients = 1000000000, but there are 10 examples"):
        partition.two_class(torch.arange(10) % 2, 10**9, per_class=2)


class TestSites:
    def test_absolute_patterns(self, tmp_path: Path):
        (tmp_path / "data").mkdir()
        for site in "ab":
            (tmp_path / "data" / f"{site}.csv").write_text("x,label\n" + "1.5,u\n2.5,v\n" * 8)
        other = tmp_path / "elsewhere"
        other.mkdir()
        data = {"target": "label", "test_fraction": 0.2}
        found = [
            user_files.load(folder, data | {"sites": pattern})
            for folder, pattern in (
                (tmp_path, "data/*.csv"),
                (other, f"{tmp_path}/data/*.csv"),
                (other, "../data/*.csv"),
            )
        ]
        assert [one.sites for one in found] == [["a", "b"]] * 3
        assert all(torch.equal(one.x_train, found[0].x_train) for one in found)

    @pytest.mark.parametrize("pattern", ["", "a**b/*.csv", "\0", "/", "/nowhere/*.csv", f"{os.sep}**x"])
    def test_patterns_that_match_nothing(self, tmp_path: Path, pattern: str):
        with pytest.raises(InputError, match=r"data\.sites = .*: (check the pattern|write one such as)"):
            user_files.load(tmp_path, {"sites": pattern, "target": "y"})

    def test_names_of_files_with_control_characters(self, tmp_path: Path):
        with (tmp_path / "a\x1b[31m.csv").open("w") as file:
            csv.writer(file).writerow(["x"])
        with pytest.raises(Exception, match=r"a\\x1b\[31m\.csv") as raised:
            user_files.load(tmp_path, {"sites": "*.csv", "target": "y"})
        assert str(raised.value).isprintable()


def test_numbers_beyond_single_precision():
    for value, message in (
        (1e300, "number of at most 3.4e.38"),
        (float("inf"), "positive, finite number"),
        (0, "positive"),
    ):
        with pytest.raises(InputError, match=message):
            fedual.methods.build("fedavg", lr=value)
