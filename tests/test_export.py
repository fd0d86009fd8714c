"""What leaves fedual: a plain state_dict, and a program that torch runs alone."""

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_posterior import DIM, Tied, make, pixels
from torch import Tensor, nn

from fedual.errors import DataError, InputError
from fedual.families import Diagonal, Isotropic
from fedual.networks.network import Network
from fedual.posterior import Posterior, Prediction, RegressionPrediction

ALONE = """
import sys
sys.modules["fedual"] = None
try:
    import fedual
except ImportError:
    pass
else:
    sys.exit("fedual can be imported")
import torch
from safetensors.torch import load_file, save_file
program = torch.export.load(sys.argv[1]).module()
for batch, x in load_file(sys.argv[2]).items():
    save_file({"probabilities": program(x)}, sys.argv[2] + batch)
assert not any(name.startswith("fedual.") for name in sys.modules)
"""


def alone(program: Path, *batches: Tensor) -> list[Tensor]:
    """What a program answers in a process that has no fedual."""
    file = program.with_suffix(".x")
    save_file({str(number): x.clone() for number, x in enumerate(batches)}, file)
    command = [sys.executable, "-W", "error", "-c", ALONE, str(program), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=program.parent)
    assert done.returncode == 0, done.stderr
    return [load_file(f"{file}{number}")["probabilities"] for number in range(len(batches))]


def run(program: Path, x: Tensor) -> Tensor:
    return torch.export.load(program).module()(x)


@pytest.mark.slow
def test_a_classifier_runs_without_fedual_on_any_number_of_inputs(tmp_path: Path):
    posterior, x = make(scale=16.0), pixels(23)
    posterior.export(tmp_path / "p.pt2", x[:5], samples=7, seed=3)
    for size, found in zip((1, 23), alone(tmp_path / "p.pt2", x[:1], x), strict=True):
        wanted = posterior.predict(x[:size], samples=7, seed=3)
        assert isinstance(wanted, Prediction)
        torch.testing.assert_close(found, wanted.probabilities, atol=1e-6, rtol=0)
    assert [path.name for path in tmp_path.glob("*.pt2*")] == ["p.pt2"]


def test_a_regression_returns_mean_and_standard_deviation(tmp_path: Path):
    posterior = make(loss="mse")
    x = torch.tensor(np.random.default_rng(0).normal(size=(6, 4)))
    posterior.export(tmp_path / "p.pt2", x[:2], samples=5, seed=1)
    mean, deviation, _ = run(tmp_path / "p.pt2", x)
    wanted = posterior.predict(x, samples=5, seed=1)
    assert isinstance(wanted, RegressionPrediction)
    torch.testing.assert_close(mean, wanted.mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(deviation, wanted.standard_deviation, atol=1e-6, rtol=0)


class Sums(nn.Module):
    """A regression whose outputs have no axis of their own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x.mul_(2) * self.weight).sum(-1)  # writes into its inputs


def test_outputs_without_an_axis_and_a_model_that_writes_into_its_inputs(tmp_path: Path):
    network = Network(Sums())
    posterior = Posterior(network, Diagonal(), Diagonal().natural(network.initial(), 4.0), loss="mse")
    x = torch.eye(3)
    posterior.export(tmp_path / "p.pt2", x, samples=6)
    mean, deviation, _ = run(tmp_path / "p.pt2", x)
    theta = posterior.sample(6)  # the inputs are unit vectors: f is 2θ
    torch.testing.assert_close(mean, 2 * theta.mean(0)[:, None])
    torch.testing.assert_close(deviation, 2 * theta.std(0, correction=0)[:, None])
    assert x.equal(torch.eye(3))


@pytest.mark.parametrize("samples", [0, 4])
def test_a_point_is_exported_once(tmp_path: Path, samples: int):
    posterior, x = make(Isotropic(2.5) if samples else Diagonal()), torch.rand(3, 4)
    posterior.export(tmp_path / "p.pt2", x, samples=samples)
    wanted = posterior.network(posterior.mean, x).softmax(-1)
    torch.testing.assert_close(run(tmp_path / "p.pt2", x), wanted)
    assert torch.export.load(tmp_path / "p.pt2").state_dict["thetas"].shape == (1, DIM)


def test_the_file_holds_a_number_for_each_parameter_of_each_draw_and_none_of_the_inputs(tmp_path: Path):
    network = Network(Tied(0), trainable=["encode"])
    posterior = Posterior(network, Diagonal(), Diagonal().natural(network.initial() + 1, 2.0))
    x = torch.full((2, 3), 0.1234567891234567)
    posterior.export(tmp_path / "p.pt2", x, samples=5)
    program = torch.export.load(tmp_path / "p.pt2")
    frozen = 3 * 3 + 3 + 3  # a layer and a buffer
    assert sum(value.numel() for value in program.state_dict.values()) == 5 * 9 + frozen
    torch.testing.assert_close(program.module()(x), posterior.predict(x, samples=5)[0])
    with zipfile.ZipFile(tmp_path / "p.pt2") as file:
        kept = b"".join(file.read(name) for name in file.namelist())
    number = x[0, :1].numpy().tobytes()
    assert posterior.sample(1)[0, :1].numpy().tobytes() in kept
    assert number not in kept


def test_a_program_that_cannot_be_made_or_written_is_refused(tmp_path: Path):
    x = torch.rand(3, 4)
    with pytest.raises(InputError, match=r"ends in \.pt2"):
        make().export(tmp_path / "p.onnx", x)
    with pytest.raises(InputError, match=r"cannot follow the model with inputs \(3, 5\) of torch.float64"):
        make().export(tmp_path / "p.pt2", torch.rand(3, 5))
    with pytest.raises(InputError, match="samples = -1"):
        make().export(tmp_path / "p.pt2", x, samples=-1)
    with pytest.raises(DataError, match="cannot be written"):
        make().export(tmp_path / "no" / "p.pt2", x)
    assert not list(tmp_path.iterdir())


def test_state_dict_loads_strictly_into_the_users_model():
    network = Network(Tied(0), trainable=["encode"])
    posterior = Posterior(network, Diagonal(), Diagonal().natural(network.initial() + 1, 2.0))
    model, x = Tied(1), torch.rand(5, 3)
    state = posterior.state_dict()
    model.load_state_dict(state, strict=True)
    torch.testing.assert_close(model(x), posterior.network(posterior.mean, x))
    assert model.frozen.weight.equal(Tied(0).frozen.weight)
    state["frozen.weight"].zero_()  # a copy
    torch.testing.assert_close(model(x), posterior.network(posterior.mean, x))
