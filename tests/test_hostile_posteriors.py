"""Posteriors with a right checksum and hostile content: the seal is no signature, and sizes come before networks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedual import models
from fedual import posterior as module
from fedual.errors import LONGEST, FedualError, InputError
from fedual.families import Diagonal
from fedual.forms import ANY, Number, Row, Whole, misfit
from fedual.metrics import regression_predictive
from fedual.networks import Network
from fedual.networks.targets import Targets
from fedual.posterior import Posterior
from fedual.rundir.checksum import parse, seal

RECIPE = {"model": "mlp", "settings": {"inputs": 2, "hidden": [3], "outputs": 2}}
CALIBRATION = {"tau": 1.0, "temperature": 1.0, "examples": 5, "clients": 2, "nll": 0.5, "nll_mean": 0.6, "missing": []}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    network, family = Network(models.build("mlp", **RECIPE["settings"]), recipe=RECIPE), Diagonal()
    lam = family.natural(network.initial(), torch.ones(network.dim))
    Posterior(network, family, lam).save(tmp_path / "q.safetensors")
    return tmp_path / "q.safetensors"


def change(path: Path, about: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None) -> None:
    """Change metadata (texts as they are, other values as JSON) and tensors of a file, and seal it again."""
    metadata, stored = parse(path.read_bytes())
    del metadata["sha256"]
    for key, value in (about or {}).items():
        metadata[key] = value if isinstance(value, str) else json.dumps(value)
    stored |= {name: value for name, value in (tensors or {}).items() if value is not None}
    for name in [name for name, value in (tensors or {}).items() if value is None]:
        del stored[name]
    path.write_bytes(seal(stored, metadata))


def refused(path: Path) -> str:
    with pytest.raises(FedualError) as raised:
        Posterior.load(path)
    message = str(raised.value)
    assert path.name in message
    assert message.isprintable()
    assert len(message) <= LONGEST
    return message


def layout(*shapes: tuple[int, ...]) -> list[Any]:
    names = [f"{layer}.{kind}" for layer in (1, 3, 5) for kind in ("weight", "bias")]
    return [[name, list(shape), "torch.float64", True] for name, shape in zip(names, shapes, strict=False)]


def test_the_network_is_measured_before_it_is_made(path: Path, monkeypatch: pytest.MonkeyPatch):
    """A network of 4 TB is never allocated, whatever the file says about itself."""
    devices, build = list[str](), models.build

    def watched(name: str, **settings: Any) -> torch.nn.Module:
        model = build(name, **settings)
        devices.append(next(model.parameters()).device.type)
        return model

    monkeypatch.setattr(module, "build", watched)
    for hidden, message in (([100, 100], "The model is not that of"), ([10**6, 10**6], "The model mlp")):
        change(path, {"config": {"model": "mlp", "settings": {"inputs": 2, "hidden": hidden, "outputs": 2}}})
        assert message in refused(path)
        assert devices == ["meta"]
    change(path, {"parameters": layout((10**6, 2), (10**6,), (10**6, 10**6), (10**6,), (2, 10**6), (2,))})
    assert "names 1000006000002 trained parameters and holds 17" in refused(path)
    assert devices == ["meta"]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"tau": "[" * 100_000}, "no JSON"),
        ({"tau": "[" * 70 + "]" * 70}, "levels deep"),
        ({"tau": "1" * 5000}, "digits"),
        ({"tau": "NaN"}, "tau = nan is not a finite number"),
        ({"tau": 0}, "tau = 0 is not a finite number above 0"),
        ({"tau": True}, "tau = True"),
        ({"tau": [1]}, "tau = [1]"),
        ({"scale": "-1"}, "scale = -1"),
        ({"loss": 3}, "loss = 3 is not a text"),
        ({"family": '"Delta"'}, "it has no Delta"),
        ({"family": {}}, "family = {} is not a text"),
        ({"arguments": {"delta": 1.0}}, "unexpected keyword argument"),
        ({"arguments": {"delta": "x"}}, "arguments.delta = 'x'"),
        ({"config": [1]}, "is not a table"),
        ({"config": {"model": "mlp", "settings": {"inputs": -1}}}, "inputs = -1"),
        ({"config": {"model": "mlp", "settings": {"inputs": 2**63}}}, "q.safetensors"),
        ({"config": {"model": "mlp", "settings": {"hidden": "abc"}}}, "hidden = 'abc'"),
        ({"config": {"model": "mlp", "settings": {"odd\x1b[31m": 1}}}, "no setting 'odd\\x1b[31m'"),
        ({"config": {"model": "\x1b[31m"}}, "'\\x1b[31m'"),
        ({"parameters": [["1.weight", [3, 2], "torch.float64"]]}, "parameters[0]"),
        ({"parameters": [["1.weight", [3, -2], "torch.float64", True]]}, "parameters[0][1][1] = -2"),
        ({"parameters": layout((3, 2), (3,), (2, 3), (2,))[:3]}, "names 15 trained parameters and holds 17"),
        ({"parameters": [*layout((3, 2), (3,), (2, 3), (2,)), ["x", [1], "torch.float64", False]]}, "names 'x'"),
        ({"noise": [1.0, -1.0]}, "noise[1] = -1.0"),
        ({"noise": []}, "noise of 0"),
        ({"noise": [1.0], "targets": {"mean": [1.0, 2.0], "sd": [1.0, 2.0]}}, "noise of 1, targets.mean of 2"),
        ({"targets": {"mean": [0.0]}}, "targets.sd is missing"),
        ({"targets": {"mean": [0.0], "sd": [0.0]}}, "targets.sd"),
        ({"targets": {"mean": [[0.0]], "sd": [1.0]}}, "targets"),
        ({"calibration": CALIBRATION | {"temperature": 0}}, "calibration.temperature = 0"),
        ({"calibration": CALIBRATION | {"missing": None}}, "calibration.missing"),
        ({"calibration": CALIBRATION | {"examples": "many"}}, "calibration.examples"),
        ({"calibration": CALIBRATION | {"more": 1}}, "unexpected keyword argument"),
        ({"noise_in_q": "1"}, "noise_in_q = 1 is not true or false"),
    ],
)  # fmt: skip
def test_hostile_metadata(path: Path, about: dict[str, Any], message: str):
    change(path, about)
    assert message in refused(path)


@pytest.mark.parametrize(
    "lam",
    [
        None,
        torch.zeros(17),
        torch.zeros(1, 17),
        torch.zeros(2, 16),
        torch.zeros(2, 17),
        torch.zeros(2, 17, dtype=torch.float16),
        torch.zeros(2, 17, dtype=torch.int64),
        torch.zeros(2, 17, dtype=torch.bool),
        torch.full((2, 17), math.nan),
        torch.full((2, 17), math.inf),
    ],
)
def test_hostile_tensors(path: Path, lam: Tensor | None):
    change(path, tensors={"lam": lam})
    refused(path)


def test_every_key_is_needed_or_has_a_default(path: Path):
    content = path.read_bytes()
    for key in parse(content)[0].keys() - {"sha256", "format", "targets", "noise", "noise_in_q", "calibration"}:
        metadata, tensors = parse(content)
        del metadata["sha256"], metadata[key]
        path.write_bytes(seal(tensors, metadata))
        assert f"{key} is missing" in refused(path)


def test_noise_of_other_outputs_is_refused_where_it_is_used():
    f = torch.zeros(3, 5, 2)
    with pytest.raises(InputError, match="The noise is of 3 outputs, the network has 2"):
        regression_predictive(f, None, torch.ones(3), "mse")
    with pytest.raises(InputError, match="The targets is of 4 outputs, the network has 2"):
        regression_predictive(f, Targets.of([0.0] * 4, [1.0] * 4), None, "mse")


def test_forms():
    form = {"a": (None, Number(0.0)), "b?": [Whole()], "c?": {...: str}, "d?": Row(str, ANY), "e?": ("x", "y")}
    good = {"a": None, "b": [0, 1], "c": {"k": "v"}, "d": ["s", [1]], "e": "y", "other": 1}
    assert misfit(good, form) is None
    bad = {
        "a is missing": {}, "a = -1": {"a": -1}, "a = inf": {"a": math.inf}, "b[1] = 1.5": {"a": 1, "b": [0, 1.5]},
        "c.k = 1": {"a": 1, "c": {"k": 1}}, "d = ['s']": {"a": 1, "d": ["s"]}, "e = 'z'": {"a": 1, "e": "z"},
        "b = 3": {"a": 1, "b": 3}, "all of it = 3": 3, "a = 1000": {"a": 10**400}, "b[0] = True": {"a": 0, "b": [True]},
    }  # fmt: skip
    for message, value in bad.items():
        assert (found := misfit(value, form)) is not None
        assert found.startswith(message)
        assert len(found) < 200
