"""What a run's folder keeps for a report."""

from pathlib import Path

import flat
import pytest
import torch

import fedual
from fedual.errors import DataError
from fedual.networks import Clients
from fedual.rundir import artifacts


def sites(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 4, generator=draw), torch.randint(3, (n,), generator=draw)) for n in sizes]


def run(folder: Path, method: str = "ivon-admm", **options) -> fedual.fitting.Run:
    torch.manual_seed(0)
    given = {"rounds": 2, "local_epochs": 1, "seed": 3, "out": folder}
    return flat.fit(torch.nn.Linear(4, 3), sites(20, 7, 30), method, **given, **options)


def test_clients_are_described(tmp_path: Path):
    run(tmp_path)
    kept = artifacts.read_clients(tmp_path)
    assert kept is not None
    x = torch.cat([x for x, _ in sites(20, 7, 30)])
    moments = kept.pop("moments")
    torch.testing.assert_close(moments["mean"], x.mean(0).tolist())
    torch.testing.assert_close(moments["deviation"], x.std(0, correction=0).tolist())
    assert kept == {
        "shape": [4],
        "dtype": "float64",
        "sizes": [20, 7, 30],
        "labels": [[int((y == c).sum()) for c in range(3)] for _, y in sites(20, 7, 30)],
    }


def test_clients_that_share_examples_count_them_each(tmp_path: Path):
    clients = Clients(torch.zeros(4, 2, 2), torch.tensor([0, 0, 1, 3]), [torch.tensor([0, 1, 2]), torch.tensor([2, 3])])
    artifacts.write_clients(tmp_path, clients, True)
    kept = artifacts.read_clients(tmp_path)
    assert kept is not None
    assert (kept["shape"], kept["labels"]) == ([2, 2], [[2, 1, 0, 0], [0, 1, 0, 1]])


@pytest.mark.parametrize("method", ["ivon-admm", "fedavg"])
def test_predictions_for_the_test_set_are_those_of_the_last_round(tmp_path: Path, method: str):
    (test,) = sites(50)
    done = run(tmp_path, method, test=test)
    kept = artifacts.read_test(tmp_path)
    assert kept is not None
    assert torch.equal(kept.labels, test[1])
    hits = (kept.probabilities.argmax(-1) == kept.labels).double().mean()
    nll = -kept.probabilities[torch.arange(50), kept.labels].log().mean()
    suffix = "_mc" if method == "ivon-admm" else ""
    assert float(hits) == pytest.approx(done.history[-1][f"accuracy{suffix}"])
    assert float(nll) == pytest.approx(done.history[-1][f"nll{suffix}"])


def test_the_least_certain_inputs_are_kept_whole(tmp_path: Path):
    (test,) = sites(50)
    run(tmp_path, test=test)
    kept = artifacts.read_test(tmp_path)
    assert kept is not None
    entropy = -(kept.probabilities * kept.probabilities.log()).sum(-1)
    assert torch.equal(kept.shown, entropy.argsort(descending=True)[: artifacts.SHOWN])
    assert torch.equal(kept.inputs, test[0][kept.shown])


def test_a_regression_keeps_its_clients_alone(tmp_path: Path):
    pairs = [(x, x.sum(-1)) for x, _ in sites(20, 10)]
    flat.fit(torch.nn.Linear(4, 1), pairs, rounds=1, loss="mse", test=pairs[0], out=tmp_path)
    kept = artifacts.read_clients(tmp_path)
    assert kept is not None
    assert "labels" not in kept
    assert artifacts.read_test(tmp_path) is None


def test_nothing_is_there_without_a_run(tmp_path: Path):
    assert artifacts.read_clients(tmp_path) is None
    assert artifacts.read_test(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"no such file", b"\xff\xfe"])
def test_damaged_files_are_named(tmp_path: Path, content: bytes):
    for name, read in (("clients.json", artifacts.read_clients), ("test.safetensors", artifacts.read_test)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            read(tmp_path)
