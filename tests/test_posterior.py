import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import Tensor, nn

from fedual.errors import DataError, InputError
from fedual.families import Diagonal, FixedPrecision, Full, Gaussian, Isotropic
from fedual.metrics import evaluate
from fedual.models import build, mlp
from fedual.networks.network import Network
from fedual.posterior import Posterior, Prediction, RegressionPrediction
from fedual.rundir import atomic

SETTINGS = {"inputs": 4, "hidden": [5], "outputs": 3, "activation": "tanh"}
RECIPE = {"model": "mlp", "settings": SETTINGS}
DIM = 43  # 4·5 + 5 + 5·3 + 3


def families() -> list[Gaussian]:
    diagonal = torch.arange(1.0, DIM + 1, dtype=torch.float64)
    matrix = torch.eye(DIM, dtype=torch.float64) * 3 + 0.1
    return [Isotropic(2.5), FixedPrecision(diagonal), FixedPrecision(matrix), Diagonal(), Full()]


def make(family: Gaussian | None = None, precision: float = 2.0, **fields: Any) -> Posterior:
    """A posterior of a small network from `fedual.models`."""
    torch.manual_seed(0)
    about: dict[str, Any] = {"recipe": RECIPE} | {key: fields.pop(key) for key in ("scale", "recipe") if key in fields}
    network, family = Network(build("mlp", **SETTINGS), **about), family or Diagonal()
    known = isinstance(family, Isotropic | FixedPrecision)
    lam = family.natural(2 * network.initial(), None if known else precision)
    return Posterior(network, family, lam, **fields)


def classes(posterior: Posterior, x: Tensor, **settings: Any) -> Prediction:
    prediction = posterior.predict(x, **settings)
    assert isinstance(prediction, Prediction)
    return prediction


def pixels(num: int = 23) -> Tensor:
    return torch.randint(0, 17, (num, 2, 2), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def rewrite(path: Path, **changes: str) -> None:
    """Change the metadata of a file, and leave all else."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({name: t.clone() for name, t in load_file(path).items()}, path, metadata | changes)


def test_mean_precision_and_samples():
    posterior = make(precision=4.0)
    torch.testing.assert_close(posterior.mean, 2 * posterior.network.initial())
    torch.testing.assert_close(posterior.precision, torch.full((DIM,), 4.0))
    theta = posterior.sample(4000, seed=3)
    assert theta.shape == (4000, DIM)
    z = (theta - posterior.mean) * 2  # standard normal
    assert abs(float(z.mean())) < 5 / math.sqrt(z.numel())
    assert abs(float(z.square().mean()) - 1) < 5 * math.sqrt(2 / z.numel())
    assert torch.equal(posterior.sample(7, seed=3), theta[:7])
    assert not torch.equal(posterior.sample(7, seed=4), theta[:7])


@pytest.mark.parametrize("batch_size", [1, 10, 1024])
def test_predict_is_a_monte_carlo_loop(batch_size: int):
    posterior, x = make(scale=16.0), pixels()
    p = np.stack([softmax(posterior.network(t, x / 16.0).numpy(), -1) for t in posterior.sample(9, seed=4)])
    entropy = lambda p: -(p * np.log(p)).sum(-1)
    found = classes(posterior, x, samples=9, seed=4, batch_size=batch_size)
    np.testing.assert_allclose(found.probabilities, p.mean(0))
    np.testing.assert_allclose(found.entropy, entropy(p.mean(0)))
    np.testing.assert_allclose(found.mutual_information, entropy(p.mean(0)) - entropy(p).mean(0), atol=1e-14)
    assert (found.mutual_information > 0).all()


def test_a_point_like_posterior_has_no_mutual_information():
    posterior, x = make(precision=1e30, scale=16.0), pixels()
    found, at_mean = classes(posterior, x), classes(posterior, x, samples=0)
    torch.testing.assert_close(found, at_mean)
    assert found.mutual_information.abs().max() < 1e-12
    assert not at_mean.mutual_information.any()


@pytest.mark.parametrize("family", families()[:3], ids=str)
def test_a_family_of_fixed_precision_predicts_at_the_mean(family: Gaussian):
    posterior, x = make(family), pixels().double()
    wanted = softmax(posterior.network(posterior.mean, x).numpy(), -1)
    np.testing.assert_allclose(classes(posterior, x).probabilities, wanted)
    assert "a point estimate" in repr(posterior)


def test_predict_a_regression():
    posterior = make(loss="mse")
    x = torch.tensor(np.random.default_rng(0).normal(size=(6, 4)))
    f = np.stack([posterior.network(t, x).numpy() for t in posterior.sample(5, seed=1)])
    found = posterior.predict(x, samples=5, seed=1, batch_size=4)
    assert isinstance(found, RegressionPrediction)
    np.testing.assert_allclose(found.mean, f.mean(0))
    np.testing.assert_allclose(found.standard_deviation, f.std(0))
    at_mean = posterior.predict(x, samples=0)
    assert isinstance(at_mean, RegressionPrediction)
    torch.testing.assert_close(at_mean.mean, posterior.network(posterior.mean, x))
    assert not at_mean.standard_deviation.any()


def test_predictions_are_those_that_evaluate_measures():
    posterior, x = make(scale=16.0), pixels()
    y = torch.arange(len(x)) % 3
    metrics = evaluate(
        posterior.network, posterior.family, posterior.lam, (x, y), transform=posterior.transform, samples=5, seed=2
    )
    found = classes(posterior, x, samples=5, seed=2)
    assert metrics["nll_mc"] == pytest.approx(-float(found.probabilities[torch.arange(len(x)), y].log().mean()))


def test_inputs_as_they_are_stored():
    torch.manual_seed(0)
    bytes_ = torch.tensor([[3, 8, 0, 16]], dtype=torch.uint8)
    scaled, plain = make(scale=16.0), make()
    assert scaled.transform(bytes_).equal(torch.tensor([[3 / 16, 0.5, 0.0, 1.0]]))
    assert plain.transform(bytes_.float()).dtype == torch.float64
    embedded = Network(nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)))
    words = torch.tensor([[0, 4], [1, 1]])
    posterior = Posterior(embedded, Diagonal(), Diagonal().natural(embedded.initial()))
    wanted = embedded(posterior.mean, words).softmax(-1)
    torch.testing.assert_close(classes(posterior, words, samples=0).probabilities, wanted)


def test_module_is_a_copy_with_the_parameters():
    posterior, x = make(), torch.rand(3, 4)
    theta = posterior.sample(1)[0]
    torch.testing.assert_close(posterior.module()(x), posterior.network(posterior.mean, x))
    torch.testing.assert_close(posterior.module(theta)(x), posterior.network(theta, x))
    model = posterior.module()
    assert not model.training
    nn.init.zeros_(next(model.parameters()))
    assert not torch.equal(model(x), posterior.module()(x))
    with pytest.raises(InputError, match=r"theta has shape \(2, 43\)"):
        posterior.module(posterior.sample(2))


@pytest.mark.parametrize("family", families(), ids=lambda f: f"{f}{getattr(f, 'matrix', torch.empty(0)).dim()}")
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_loaded_posterior_predicts_the_same_bit_for_bit(tmp_path: Path, family: Gaussian, loss: str):
    posterior, x = make(family, scale=16.0, tau=0.01, loss=loss), pixels()
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = Posterior.load(tmp_path / "posterior.safetensors")
    for before, after in zip(posterior.predict(x), loaded.predict(x), strict=True):
        assert before is not None
        assert after is not None
        assert torch.equal(before, after)
    assert torch.equal(posterior.sample(3), loaded.sample(3))
    assert repr(loaded) == repr(posterior)
    assert (loaded.family, loaded.tau, loaded.loss) == (posterior.family, 0.01, loss)
    assert (loaded.network.scale, loaded.network.recipe) == (16.0, RECIPE)
    assert os.listdir(tmp_path) == ["posterior.safetensors"]


def test_a_single_precision_posterior_stays_so(tmp_path: Path):
    network = Network(build("mlp", **SETTINGS).float(), recipe=RECIPE)
    posterior = Posterior(network, Diagonal(), Diagonal().natural(network.initial(), 3.0))
    posterior.save(tmp_path / "p")
    loaded = Posterior.load(tmp_path / "p")
    assert loaded.mean.dtype == torch.float32
    x = torch.rand(3, 4)
    assert torch.equal(classes(loaded, x).probabilities, classes(posterior, x).probabilities)


class Tied(nn.Module):
    """A frozen layer, a buffer, one buffer that is not stored, and a weight that is used twice."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(3, 3)
        self.encode = nn.Linear(3, 3, bias=False)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("one", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(self.frozen(x) * self.one + self.shift).tanh())


def test_frozen_parameters_buffers_and_tied_weights_travel(tmp_path: Path):
    network = Network(Tied(0), trainable=["encode"])
    posterior = Posterior(network, Diagonal(), Diagonal().natural(network.initial() + 1, 2.0))
    posterior.save(tmp_path / "p")
    other, x = Tied(1), torch.rand(5, 3)
    untouched = {name: value.clone() for name, value in other.state_dict().items()}
    loaded = Posterior.load(tmp_path / "p", model=other)
    assert loaded.network.names == ("encode.weight",)
    assert torch.equal(classes(loaded, x).probabilities, classes(posterior, x).probabilities)
    torch.testing.assert_close(loaded.module()(x), posterior.network(posterior.mean, x))
    assert all(torch.equal(value, untouched[name]) for name, value in other.state_dict().items())


def test_a_model_of_ones_own_has_to_be_given(tmp_path: Path):
    model = mlp(4, (5,), 3)
    network = Network(model, recipe={"note": "mine"})
    Posterior(network, Diagonal(), Diagonal().natural(network.initial())).save(tmp_path / "p")
    with pytest.raises(InputError, match="give it"):
        Posterior.load(tmp_path / "p")
    assert Posterior.load(tmp_path / "p", model=model).network.recipe == {"note": "mine"}


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (lambda: mlp(4, (6,), 3), r"has 1.weight \(6, 4\) of torch.float64, the file 1.weight \(5, 4\)"),
        (lambda: mlp(4, (5, 5), 3), r"has 3.weight \(5, 5\).*, the file 3.weight \(3, 5\)"),
        (lambda: nn.Sequential(nn.Linear(4, 5)), r"has 0.weight \(5, 4\).*, the file 1.weight"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 5)), r"no more parameters, the file 3.weight"),
        (lambda: nn.Sequential(*mlp(4, (5,), 3), nn.Linear(3, 3)), r"has 4.weight \(3, 3\).*, the file no more"),
        (lambda: mlp(4, (5,), 3).float(), "torch.float32, the file 1.weight.*torch.float64"),
    ],
)
def test_another_model_is_refused_with_the_first_difference(tmp_path: Path, model, complaint: str):
    make().save(tmp_path / "p")
    with pytest.raises(InputError, match=complaint):
        Posterior.load(tmp_path / "p", model=model())


def test_damaged_files_are_refused(tmp_path: Path):
    path = tmp_path / "p"
    make().save(path)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    damages = {
        "damaged or not a safetensors file": [
            b"",
            b"not a posterior at all",
            content[:100],
            content[:-1],
            content + b"x",
        ],
        "checksum": [bytes(flipped)],
    }
    for complaint, contents in damages.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(DataError, match=complaint):
                Posterior.load(path)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            Posterior.load(missing)


def test_changed_metadata_is_refused(tmp_path: Path):
    make(tau=0.5).save(tmp_path / "p")
    rewrite(tmp_path / "p", tau=json.dumps(1.0))
    with pytest.raises(DataError, match="checksum"):
        Posterior.load(tmp_path / "p")
    rewrite(tmp_path / "p", format="fedual-posterior-99")
    with pytest.raises(DataError, match="has the format 'fedual-posterior-99'"):
        Posterior.load(tmp_path / "p")


def test_other_safetensors_files_are_refused(tmp_path: Path):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, tmp_path / "p")
    with pytest.raises(DataError, match="has the format None"):
        Posterior.load(tmp_path / "p")


def test_a_stored_posterior_outside_its_domain_is_refused(tmp_path: Path):
    posterior = make()
    posterior.lam[1, 7] = 0.5  # a precision of −1
    posterior.save(tmp_path / "p")
    with pytest.raises(DataError, match=r"outside the domain of Diagonal at 1 of 43"):
        Posterior.load(tmp_path / "p")


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path: Path, monkeypatch):
    path = tmp_path / "p"
    make().save(path)
    before = path.read_bytes()

    def full(path: Path, content: bytes, mode: int) -> None:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write", full)
        with pytest.raises(DataError, match="No space left"):
            make(tau=0.5).save(path)
    assert os.listdir(tmp_path) == ["p"]
    assert path.read_bytes() == before
    make(tau=0.5).save(path)
    assert Posterior.load(path).tau == 0.5
    with pytest.raises(DataError, match="cannot be written"):
        make().save(tmp_path / "no" / "folder")


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch):
    events = []
    synced = lambda handle: events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda old, new: events.append(f"rename {old.name} {new.name}"))
    make().save(tmp_path / "p")
    make().export(tmp_path / "p.pt2", torch.rand(3, 4), samples=0)
    for name in ("p", "p.pt2"):
        assert events[:3] == [f"fsync {name}.tmp", f"rename {name}.tmp {name}", f"fsync {tmp_path.name}"]
        del events[:3]
    assert not events


def test_a_posterior_that_cannot_be_stored_is_refused(tmp_path: Path, monkeypatch):
    for recipe in ({"model": torch.nn}, {"x": math.nan}):
        with pytest.raises(InputError, match=r"recipe = .* cannot be stored as JSON"):
            make(recipe=recipe).save(tmp_path / "p")

    class Mine(Diagonal):
        pass

    with pytest.raises(InputError, match="the family Mine cannot be stored"):
        make(Mine()).save(tmp_path / "p")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InputError, match="safetensors, which is missing"):
        make().save(tmp_path / "p")


def test_the_text_says_that_a_posterior_is_tempered():
    assert repr(make(tau=0.01)) == (
        "Posterior(43 parameters of mlp, Diagonal, tau=0.01, loss=cross_entropy; "
        "q_g is tempered, τ = 0.01; it counts every example 100 times)"
    )
    assert "tempered" not in str(make())
    assert "43 parameters of Sequential" in str(make(recipe=None))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"tau": 0}, "tau = 0"),
        ({"scale": -1.0}, "scale = -1.0"),
        ({"recipe": "mlp"}, "recipe = 'mlp'"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], complaint: str):
    with pytest.raises(InputError, match=complaint):
        make(**fields)


def test_a_lambda_that_does_not_fit_is_refused():
    network = make().network
    for lam, complaint in [
        (Diagonal().natural(torch.zeros(5)), "for a network of 43 parameters"),
        (Diagonal().natural(torch.zeros(2, DIM)), r"shape \(2, 2, 43\)"),
        (Diagonal().natural(torch.zeros(DIM, dtype=torch.float32)), "dtype torch.float32, the network torch.float64"),
        (Isotropic().natural(torch.zeros(DIM)), "Diagonal needs"),
    ]:
        with pytest.raises(InputError, match=complaint):
            Posterior(network, Diagonal(), lam)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"x": torch.ones(0, 4)}, "0 examples"),
        ({"x": torch.ones(2, 4), "samples": -1}, "samples = -1"),
        ({"x": torch.ones(2, 4), "batch_size": 0}, "batch_size = 0"),
        ({"x": torch.ones(2, 4), "seed": 0.5}, "seed = 0.5"),
    ],
)
def test_bad_arguments_of_predict_are_refused(settings: dict[str, Any], complaint: str):
    with pytest.raises(InputError, match=complaint):
        make().predict(**settings)
