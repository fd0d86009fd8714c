"""Recorded steps and evaluations on a GPU: what the engine that trains one client after the other computes."""

import pytest
import torch
from flat import fit
from problems import rng
from torch import nn

from fedual import methods
from fedual.run import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
METHODS = {name: name for name in ("fedivon", "fedavg", "scaffold", "fedlap-cov")}
METHODS |= {"ivon-admm": methods.spec("ivon-admm", rho=0.5)}


def examples(size: int, seed: int):
    source = rng(seed)
    return torch.rand(size, 3, 8, 8, generator=source), torch.randint(3, (size,), generator=source)


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, stride=(1, 2), padding=(1, 2)), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False)]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten(), nn.Linear(12, 3))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


def train(model, method: str, **options) -> Run:
    torch.manual_seed(1)
    clients = [examples(size, seed) for seed, size in enumerate([40, 33, 8, 61, 5])]
    settings = {"batch_size": 8, "local_epochs": 2, "test": examples(50, 9), "samples": 4, "precision": "float32"}
    return fit(model(), clients, METHODS[method], 3, device="cuda", **settings, **options)


@pytest.mark.parametrize("noise", ["shared", "independent"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [convolutional, perceptron])
def test_recorded_as_one_by_one(model, method, noise):
    draws = {"noise": noise, "order": noise}
    recorded, again = (train(model, method, compile=True, **draws) for _ in range(2))
    alone = train(model, method, engine="sequential", **draws)
    torch.testing.assert_close(recorded.server.lam_g, alone.server.lam_g, rtol=1e-9, atol=1e-9)
    assert torch.equal(recorded.server.lam_g, again.server.lam_g)
    for one, other in zip(recorded.history, alone.history, strict=True):
        assert one["nll"] == pytest.approx(other["nll"], rel=1e-9)
        assert one.get("nll_mc") == pytest.approx(other.get("nll_mc"), rel=1e-9)
