"""What the front door refuses, before any training, in one sentence that names the client or the setting."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fitting import Pairs, mlp, pairs, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedual import methods
from fedual.errors import InputError
from fedual.networks import Clients


def one_bad(k: int, x: Tensor | None = None, y: Tensor | None = None) -> Pairs:
    clients = pairs()
    clients[k] = (clients[k][0] if x is None else x, clients[k][1] if y is None else y)
    return clients


def poisoned(layer: int) -> nn.Module:
    model = mlp()
    model[layer].weight.data[0, 0] = torch.nan  # type: ignore[union-attr, index, operator]
    return model


def words(last: int) -> Pairs:
    """Inputs of an embedding; the second client's last one is `last`."""
    return [(torch.tensor([[0, 1], [2, k * last]]), torch.tensor([0, 1])) for k in range(2)]


X, Y = pairs()[0]
LINES = [(x, x[:, :1]) for x, _ in pairs()]
EMBEDDING = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3))
NAN = torch.full((9, 4), torch.nan, dtype=torch.float64)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no clients": ({"clients": []}, "no clients"),
    "no data": (
        {"clients": one_bad(1, torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))},
        "Client 1 has no examples",
    ),
    "empty dataset": ({"clients": [(X, Y), TensorDataset(X[:0], Y[:0])]}, "Client 1 has no examples"),
    "label": ({"clients": one_bad(2, y=torch.full((12,), 3))}, "Client 2 has the label 3, .* 3 outputs"),
    "negative label": ({"clients": one_bad(2, y=torch.full((12,), -1))}, "Client 2 has the label -1"),
    "test label": ({"test": (X, Y + 3)}, "test set has the label [345]"),
    "float labels": ({"clients": [(x, y.double()) for x, y in pairs()]}, "Client 0 has targets torch.float64"),
    "float test labels": ({"test": (X, Y.double())}, "test set has targets torch.float64"),
    "NaN": ({"clients": one_bad(0, x=NAN)}, r"Client 0's inputs contain NaN .*9 examples"),
    "infinity": ({"clients": one_bad(0, x=NAN.nan_to_num(torch.inf))}, "Client 0's inputs contain NaN or infinity"),
    "NaN targets": ({"clients": [(X, NAN[:, 0])], "loss": "mse"}, "Client 0's targets contain NaN"),
    "shapes": ({"clients": one_bad(3, x=torch.zeros(7, 5).double())}, r"Client 3's inputs are .*\(7, 5\), client 0's"),
    "types": ({"clients": one_bad(3, x=torch.zeros(7, 4).float())}, "Client 3's inputs are torch.float32"),
    "target types": ({"clients": one_bad(3, y=torch.zeros(7).double())}, "Client 3's targets are torch.float64"),
    "lengths": ({"clients": one_bad(3, x=torch.zeros(8, 4).double())}, "Client 3 has 8 inputs, but 7 targets"),
    "not a pair": ({"clients": (X, Y)}, "Client 0 is a Tensor"),
    "uint8": ({"clients": [(x.to(torch.uint8), y) for x, y in pairs()]}, r"uint8: give Network\(model, scale=255\)"),
    "whole numbers": ({"clients": [(x.long(), y) for x, y in pairs()]}, "cannot take client 0's .* give Network"),
    "embedding": ({"model": EMBEDDING, "clients": words(7)}, "cannot take client 1's .*out of range"),
    "embedded test": (
        {"model": EMBEDDING, "clients": words(6), "test": words(-1)[1]},
        "cannot take the test set's .*out of range",
    ),
    "test pair": ({"test": X}, "test set is a Tensor"),
    "test shape": ({"test": (torch.zeros(9, 5).double(), Y)}, r"test set is torch.float64 \(5,\)"),
    "test type": ({"test": (X.float(), Y)}, "test set is torch.float32"),
    "test length": ({"test": (X[1:], Y)}, "test set has 8 inputs and 9 targets"),
    "test NaN": ({"test": (NAN, Y)}, "test inputs contain NaN"),
    "test targets": (
        {"model": mlp(1), "clients": LINES, "loss": "mse", "test": (X, X[:, :2])},
        r"The test set: mse got outputs \(4, 1\) and targets \(4, 2\)",
    ),
    "NaN test targets": (
        {"model": mlp(1), "clients": LINES, "loss": "mse", "test": (X, NAN[:, :1])},
        "test targets contain NaN",
    ),
    "targets": ({"clients": LINES, "loss": "mse"}, r"Client 0: mse got outputs \(4, 3\) and targets \(4, 1\)"),
    "signs": (
        {"model": mlp(1), "clients": [(X, Y[:, None] * 2 - 1)], "loss": "binary_cross_entropy"},
        "Client 0 has the target -1: binary_cross_entropy",
    ),
    "negative counts": (
        {"model": mlp(1), "clients": [(X, -1 - Y)], "loss": "poisson"},
        "Client 0 has the target -[123]",
    ),
    "mean loss": ({"loss": F.cross_entropy}, r"loss returns shape \(\)"),
    "unfit loss": ({"loss": lambda f, y: f @ y}, "loss does not take .*Client 0's targets"),
    "BatchNorm": ({"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))}, "layer 1 is BatchNorm1d.*GroupNorm"),
    "model": ({"model": nn.Linear(5, 3)}, "cannot take the clients' inputs"),
    "no model": ({"model": nn.Linear}, "model = .*Linear.*: give an nn.Module"),
    "NaN model": ({"model": poisoned(2)}, r"parameter 2\.weight contains NaN"),
    "NaN frozen": ({"model": poisoned(0), "trainable": ["2"]}, r"parameter 0\.weight contains NaN"),
    "exact solver": ({"method": methods.admm()}, r"Point\(.* takes no minibatch steps"),
    "a function": ({"method": methods.fedavg}, "method = <function fedavg"),
    "weights for one": ({"clients": [(X, Y, torch.ones(9)), *pairs()[1:]]}, "Client 1 has no weights, but others have"),
    "weights": ({"weights": [torch.ones(n) for n in (9, 5, 12, 6)]}, r"Client 3's weights \(6,\) must be 7"),
    "negative weights": ({"weights": [torch.ones(9), -torch.ones(5), *map(torch.ones, (12, 7))]}, "Client 1's weights"),
    **{
        f"{name} = {value!r}": ({name: value}, f"{name} = {value!r}.*{remedy}")
        for name, values, remedy in (
            ("rounds", (0, -1, 1.5), "at least 1"),
            ("batch_size", (0, -4), "whole number of at least 1"),
            ("local_epochs", (0, -1), "whole number of at least 1"),
            ("local_steps", (0,), "whole number of at least 1"),
            ("participation", (0, 2, -0.5, "half"), "positive, finite number of at most 1"),
            ("evaluate_every", (0,), "at least 1"),
            ("samples", (-1,), "at least 0"),
            ("chunk", (0, -1), "at least 1"),
            ("scale", (0, -1.0), "positive"),
            ("seed", (-1, 0.5), "whole number"),
            ("engine", ("gpu",), "vectorised, sequential"),
            ("noise", ("none",), "shared, shared-fixed, independent"),
            ("order", ("none",), "shared, shared-fixed, independent"),
            ("schedule", ("linear",), "constant, cosine, harmonic"),
            ("client_state", ("ram",), "auto, memory, disk"),
            ("device", ("gpu", "cuda:99"), "try cpu or auto"),
        )
        for value in values
    },
    "unknown method": ({"method": "ivon-adm"}, "'ivon-adm' .*did you mean 'ivon-admm'"),
    "unknown loss": ({"loss": "mes"}, "loss 'mes': did you mean 'mse'"),
    "unknown parameter": ({"trainable": ["head"]}, "trainable names 'head'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_training_in_one_sentence(case: str, tmp_path: Path):
    options, message = REFUSED[case]
    with pytest.raises(InputError, match=message) as caught:
        train(**{"test": None, **options, "out": tmp_path / "run"})
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", "?"))
    assert not (tmp_path / "run").exists()


def test_weights_of_another_number_of_clients_are_refused():
    with pytest.raises(InputError, match="Weights for 1 clients, but there are 2"):
        Clients(X, Y, [torch.arange(4), torch.arange(4, 9)], [torch.ones(4)])


@pytest.mark.parametrize(
    ("times", "options", "words"),
    [
        *((1.0, {}, []), (1000.0, {}, ["RMS of ", "standardise", "scale="]), (1000.0, {"scale": 1.0}, [])),
        *((0.01, {}, ["RMS of 0.0", "standardise", "scale=0.0"]), (0.01, {"scale": 0.01}, [])),
    ],
)
def test_inputs_in_another_unit_are_worth_a_word(caplog, times, options, words):
    train(rounds=2, clients=[(times * x, y) for x, y in pairs()], test=None, **options)
    lines = [record.getMessage() for record in caplog.records if record.name == "fedual"]
    assert len(lines) == bool(words)
    assert all(word in line for line in lines for word in words)
