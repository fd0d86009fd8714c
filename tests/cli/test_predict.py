"""`fedual predict`: the posterior's own answer for inputs from files, and a refusal in one sentence of all others."""

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import flat
import numpy as np
import pytest
import sealed
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import fedual
from fedual.cli import build
from fedual.cli.predict import _number_cells
from fedual.errors import DataError, FedualError, InputError
from fedual.networks import Clients, Network
from fedual.posterior import Posterior, Prediction, RegressionPrediction
from fedual.scenarios.federation import execute
from fedual.scenarios.scenario import load

SETTINGS = {"inputs": 4, "hidden": [5], "outputs": 3}
MODEL = {"model": "mlp", "settings": SETTINGS}


def pixels(num: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 17, (num, *shape), generator=torch.Generator().manual_seed(num), dtype=torch.uint8)


def train(folder: Path, x: torch.Tensor, model: nn.Module | None = None, **given: Any) -> Path:
    """A run of one round, whose inputs are like x and whose classes are numbers of bright pixels."""
    torch.manual_seed(0)
    model = model or fedual.models.build("mlp", **SETTINGS)
    y = x.flatten(1)[:, :2].gt(8).sum(1)
    network = Network(model, scale=given.pop("scale", None), recipe=given.pop("recipe", MODEL))
    clients = Clients(x[:50], y[:50], torch.arange(50).split([20, 30]), description=given.pop("description", None))
    given = {"rounds": 1, "local_epochs": 2, "samples": 6, "seed": 5} | given
    flat.fit(network, clients, out=folder, test=(x[50:], y[50:]), **given)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Its inputs are 2 × 2 pixels from 0 to 16."""
    return train(tmp_path / "run", pixels(90, 2, 2), scale=16.0)


def output(*arguments: object) -> str:
    done = CliRunner().invoke(build(), ["predict", *map(str, arguments)])
    if done.exception:
        raise done.exception
    return done.output


def answer(*arguments: object) -> dict[str, Any]:
    return json.loads(output(*arguments, "--json"))


def column(found: dict[str, Any], name: str) -> list[Any]:
    return [row[name] for row in found["predictions"]]


def wanted(run: Path, x: torch.Tensor, seed: int, samples: int = 6) -> Prediction:
    found = Posterior.load(run / "posterior.safetensors").predict(x, samples, seed)
    assert isinstance(found, Prediction)
    return found


SEED = fedual.networks.Draws(5).evaluation(1)
"""Of the draws with which the test set was predicted."""


def test_the_answer_is_that_of_the_posterior(run: Path, tmp_path: Path):
    x = pixels(30, 2, 2)
    np.save(tmp_path / "x.npy", x.numpy())
    found, told = answer(run, tmp_path / "x.npy"), wanted(run, x, SEED)
    assert (found["inputs"], found["samples"]) == (30, 6)
    assert column(found, "input") == [str(number) for number in range(1, 31)]
    assert column(found, "class") == told.probabilities.argmax(1).tolist()
    p = [[row[str(place)] for place in range(3)] for row in column(found, "probabilities")]
    np.testing.assert_allclose(p, told.probabilities)
    np.testing.assert_allclose(column(found, "probability"), np.max(p, 1))
    np.testing.assert_allclose(column(found, "entropy"), -(np.array(p) * np.log(p)).sum(1))
    np.testing.assert_allclose(column(found, "mutual_information"), told.mutual_information, atol=1e-15)
    few = answer(run, tmp_path / "x.npy", "--samples", 2, "--batch-size", 7, "--device", "cpu")
    np.testing.assert_allclose(column(few, "entropy"), wanted(run, x, SEED, samples=2).entropy)


def test_every_kind_of_file_gives_the_same(run: Path, tmp_path: Path):
    x = pixels(8, 2, 2).numpy()
    flat, lines = x.reshape(8, 4), [",".join(map(str, row)) for row in x.reshape(8, 4)]
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "flat.npy", flat.astype(np.float32))
    np.savez(tmp_path / "named.npz", x=x, y=np.zeros(8))
    np.savez(tmp_path / "only.npz", pictures=x.astype(np.int64))
    (tmp_path / "plain.csv").write_text("\n".join(lines))
    (tmp_path / "header.csv").write_text("\n".join(["a,b,c,d", *lines]) + "\n", encoding="utf-8-sig")
    (tmp_path / "dotted.csv").write_text("\n".join(line.replace(",", ".0,") for line in lines))
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, picture in enumerate(x):
        Image.fromarray(picture).save(folder / f"{9 - number}.png")  # sorted by name, they come last first
    (folder / "notes.txt").write_text("not a picture")
    entropy = column(answer(run, tmp_path / "x.npy"), "entropy")
    for name in ("flat.npy", "named.npz", "only.npz", "plain.csv", "header.csv", "dotted.csv"):
        assert column(answer(run, tmp_path / name), "entropy") == entropy, name
    pictures = answer(run, folder)
    assert column(pictures, "input") == [f"{number}.png" for number in range(2, 10)]
    np.testing.assert_allclose(column(pictures, "entropy"), entropy[::-1])
    for one in (x[0], flat[0]):
        np.save(tmp_path / "one.npy", one)
        np.testing.assert_allclose(column(answer(run, tmp_path / "one.npy"), "entropy"), entropy[:1])


@pytest.mark.parametrize("coverage", [0.05, 0.5, 0.9, 1.0])
def test_on_the_test_set_as_many_are_sure_as_the_coverage_says(run: Path, tmp_path: Path, coverage: float):
    x = pixels(90, 2, 2)[50:]
    np.save(tmp_path / "test.npy", x.numpy())
    found = answer(run, tmp_path / "test.npy", "--coverage", coverage)
    told = wanted(run, x, SEED)
    entropy = told.entropy.numpy()
    threshold = np.quantile(entropy, coverage, method="inverted_cdf")
    assert found["unsure"]["threshold"] == pytest.approx(threshold)
    assert sum(column(found, "unsure")) == 40 - round(40 * coverage)
    right = (told.probabilities.argmax(1) == x.flatten(1)[:, :2].gt(8).sum(1)).numpy()
    assert found["unsure"]["accuracy"] == pytest.approx(right.mean())
    assert found["unsure"]["accuracy_sure"] == pytest.approx(right[entropy <= threshold].mean())
    text = output(run, tmp_path / "test.npy", "--coverage", coverage)
    assert f"40 inputs, {40 - round(40 * coverage)} unsure" in text
    assert f"the {coverage:.0%} quantile on the 40 test examples, of which {right.mean():.1%} are right" in text


def test_without_a_test_set_the_inputs_are_compared_with_each_other_and_it_says_so(run: Path, tmp_path: Path):
    np.save(tmp_path / "x.npy", pixels(10, 2, 2).numpy())
    found = answer(run / "posterior.safetensors", tmp_path / "x.npy", "--coverage", 0.7)  # the file knows of none
    assert (found["unsure"]["examples"], found["samples"]) == (0, 32)
    assert sum(column(found, "unsure")) == 3
    assert found["unsure"]["threshold"] == sorted(column(found, "entropy"))[6]
    (run / "test.safetensors").unlink()
    assert "of these inputs themselves, since the run kept no test set" in output(run, tmp_path / "x.npy")


def test_a_file_of_all_rows_and_a_table_of_the_first(run: Path, tmp_path: Path):
    np.save(tmp_path / "x.npy", pixels(25, 2, 2).numpy())
    lines = output(run, tmp_path / "x.npy", "--out", tmp_path / "all.csv").splitlines()
    assert lines[0].split() == ["input", "class", "probability", "entropy", "mutual", "information", "unsure"]
    assert [line.split()[0] for line in lines[1:21]] == [str(number) for number in range(1, 21)]
    assert lines[21] == f"… and 5 more: {tmp_path / 'all.csv'} has all."
    found = answer(run, tmp_path / "x.npy")["predictions"]
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 25
    for row, own in zip(rows, found, strict=True):
        assert (row["input"], int(row["class"]), bool(int(row["unsure"]))) == (
            own["input"],
            own["class"],
            own["unsure"],
        )
        assert [float(row[f"p_{place}"]) for place in range(3)] == list(own["probabilities"].values())
    with pytest.raises(DataError, match="cannot be written"):
        output(run, tmp_path / "x.npy", "--out", tmp_path / "no" / "all.csv")


def test_it_says_that_a_posterior_is_tempered_and_that_pixels_are_too_bright(run: Path, tmp_path: Path):
    np.save(tmp_path / "x.npy", np.full((1, 2, 2), 255, np.uint8))
    scale, far = answer(run, tmp_path / "x.npy")["warnings"]
    assert scale == "Inputs go up to 255, but the run divides them by 16: check how they were stored."
    assert far.startswith("Input 1: x[0, 0] = 255 is ")
    assert output(run, tmp_path / "x.npy").splitlines()[-2:] == [scale, far]
    np.save(tmp_path / "x.npy", np.full((1, 2, 2), 16, np.uint8))
    tempered, plain = (fedual.methods.ivon_admm(tau=tau) for tau in (0.25, 1.0))
    methods = (
        (tempered, ["q_g is tempered, τ = 0.25; it counts every example 4 times."]),
        (plain, []),
        ("fedavg", ["The method learns a point: predictions are those at the mean, without mutual information."]),
    )
    for number, (method, notes) in enumerate(methods):
        other = train(tmp_path / f"run {number}", pixels(90, 2, 2), scale=16.0, method=method)
        lines = output(other, tmp_path / "x.npy").splitlines()
        assert lines[3:] == notes  # a header, a row, and what unsure means


def test_a_regression_has_means_with_standard_deviations(tmp_path: Path):
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    sites = [(x[:10], x[:10] @ torch.eye(2)), (x[10:], x[10:] @ torch.eye(2))]
    model = {"model": "mlp", "settings": {"inputs": 2, "hidden": [3], "outputs": 2}}
    network = Network(fedual.models.build("mlp", **model["settings"]), recipe=model)
    flat.fit(network, sites, rounds=1, local_epochs=1, loss="mse", out=tmp_path / "run", samples=4)
    np.save(tmp_path / "x.npy", x[:3].numpy())
    found = answer(tmp_path / "run", tmp_path / "x.npy", "--out", tmp_path / "y.csv")
    told = Posterior.load(tmp_path / "run" / "posterior.safetensors").predict(
        x[:3], 4, fedual.networks.Draws(0).evaluation(1)
    )
    assert isinstance(told, RegressionPrediction)
    np.testing.assert_allclose(column(found, "mean"), told.mean)
    np.testing.assert_allclose(column(found, "standard_deviation"), told.standard_deviation)
    assert "unsure" not in found
    assert (tmp_path / "y.csv").read_text().splitlines()[0] == (
        "input,mean_0,mean_1,standard_deviation_0,standard_deviation_1,observation_sd_0,observation_sd_1"
    )
    text = output(tmp_path / "run", tmp_path / "x.npy")
    assert f"{told.mean[0, 0]:.4g} ± {told.standard_deviation[0, 0]:.2g}" in text
    assert told.observation_sd is not None
    assert f"{told.observation_sd[0, 0]:.2g}, {told.observation_sd[0, 1]:.2g}" in text
    assert "unsure" not in text


@pytest.mark.parametrize(
    ("mean", "sd", "shown"),
    [(1e6 + 0.37, 1.0, "1000000.4"), (152.13, 54.0, "152.1"), (0.0, 0.5, "0"), (-0.01234567, 3e-4, "-0.01235")],
)
def test_a_mean_is_shown_to_the_second_digit_of_an_observations_sd(mean: float, sd: float, shown: str):
    row = {"input": "1", "mean": [mean], "standard_deviation": [0.25], "observation_sd": [sd]}
    assert _number_cells(row)[1:] == (f"{shown} ± 0.25", f"{sd:.2g}")


@pytest.mark.parametrize("shape", [(3, 2, 3), (1, 2, 3)])
def test_pictures_take_the_channels_of_the_training_data(tmp_path: Path, shape: tuple[int, int, int]):
    size = shape[0] * 6
    model = {"model": "mlp", "settings": {**SETTINGS, "inputs": size}}
    network = fedual.models.build("mlp", **model["settings"])
    run = train(tmp_path / "run", pixels(90, *shape), network, recipe=model, scale=255.0)
    x = pixels(1, *shape).numpy()
    colours = np.broadcast_to(x[0], (3, 2, 3)).transpose(1, 2, 0)  # grey ones where there is one channel
    Image.fromarray(np.ascontiguousarray(colours)).save(tmp_path / "rgb[b].png")
    opaque = np.full((2, 3, 1), 255, np.uint8)
    Image.fromarray(np.concatenate([colours, opaque], 2)).save(tmp_path / "rgba.png")
    Image.fromarray(np.ascontiguousarray(colours)).quantize(16).save(tmp_path / "palette.png")
    np.save(tmp_path / "x.npy", x)
    wanted = column(answer(run, tmp_path / "x.npy"), "probabilities")
    for name in ("rgb[b].png", "rgba.png", "palette.png"):
        assert column(answer(run, tmp_path / name), "probabilities") == wanted
    assert "rgb[b].png" in output(run, tmp_path / "rgb[b].png")


def test_inputs_of_a_type_of_whole_or_real_numbers(tmp_path: Path):
    words = torch.arange(180).reshape(90, 2) % 5
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3))
    run = train(tmp_path / "words", words, model, recipe=None)
    (tmp_path / "model.py").write_text(
        "from torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3)).double()\n"
    )
    (tmp_path / "x.csv").write_text("first,second\n0,4\n3,3\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = answer(run, "x.csv", "--model", "model:build")
    told = Posterior.load(run / "posterior.safetensors", model).predict(torch.tensor([[0, 4], [3, 3]]), 6, SEED)
    np.testing.assert_allclose(column(found, "entropy"), told[1])
    real = train(tmp_path / "real", pixels(90, 4).double())
    np.save(tmp_path / "whole.npy", np.arange(8, dtype=np.int16).reshape(2, 4))
    told = wanted(real, torch.arange(8.0).reshape(2, 4), SEED)
    np.testing.assert_allclose(column(answer(real, tmp_path / "whole.npy"), "entropy"), told.entropy)
    Image.fromarray(np.zeros((2, 2), np.uint8)).save(tmp_path / "x.png")
    with pytest.raises(InputError, match="pixels from 0 to 255, but the run's inputs are float64"):
        output(real, tmp_path / "x.png")


def test_tables_are_encoded_as_in_training_and_classes_have_their_names(tmp_path: Path):
    columns = {
        "columns": ["colour", "weight"],
        "categories": {"colour": ["blue", "green", "red"]},
        "standardised": {"weight": [10.0, 2.0]},
    }
    description = {"inputs": columns, "classes": ["no", "perhaps", "yes"]}
    run = train(tmp_path / "run", pixels(90, 4).double(), description=description)
    (tmp_path / "x.csv").write_text("weight,name,colour\n14,a,red\n9,b,blue\n")
    found = answer(run, tmp_path / "x.csv", "--out", tmp_path / "y.csv")
    told = wanted(run, torch.tensor([[0.0, 0, 1, 2], [1, 0, 0, -0.5]]), SEED)
    np.testing.assert_allclose(column(found, "entropy"), told.entropy, rtol=1e-6)
    assert column(found, "class") == [description["classes"][best] for best in told.probabilities.argmax(1).tolist()]
    assert "p_no,p_perhaps,p_yes" in (tmp_path / "y.csv").read_text()
    np.save(tmp_path / "x.npy", np.zeros((1, 4)))
    with pytest.raises(InputError, match=r"from a table: give a \.csv or \.parquet with the same columns"):
        output(run, tmp_path / "x.npy")


class Own(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_model_of_ones_own_is_named_by_the_user_and_never_by_the_file(tmp_path: Path, monkeypatch):
    recipe = {"model": "mine:make", "settings": {"hidden": 6}}
    run = train(tmp_path / "run", pixels(90, 2, 2), Own(6), recipe=recipe, scale=16.0)
    x = pixels(3, 2, 2)
    np.save(tmp_path / "x.npy", x.numpy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import pathlib\nfrom test_predict import Own\npathlib.Path('imported').touch()\n"
        "def make(hidden): return Own(hidden).double()\n"
        "def other(hidden): return 3\n"
    )
    with pytest.raises(InputError, match=r"does not have, 'mine:make': give it, .* or --model module:function"):
        output(run, "x.npy")
    assert not (tmp_path / "imported").exists()
    found = answer(run, "x.npy", "--model", "mine:make")
    told = Posterior.load(run / "posterior.safetensors", Own(6)).predict(x, 6, SEED)
    np.testing.assert_allclose(column(found, "entropy"), told[1])
    for given, complaint in (
        ("mine", "The model 'mine': write module:function"),
        ("nothing:make", "The model 'nothing:make': there is no nothing.py"),
        ("mine:mak", "has no function 'mak'"),
        ("mine:other", "returns a int"),
    ):
        with pytest.raises(InputError, match=complaint):
            output(run, "x.npy", "--model", given)


def warned(*arguments: object) -> list[str]:
    return answer(*arguments)["warnings"]


def test_a_model_with_other_layers_of_the_same_shapes_is_noticed(tmp_path: Path, monkeypatch):
    recipe = {"model": "mine:make", "settings": {"hidden": 6}}
    run = train(tmp_path / "run", pixels(90, 2, 2), Own(6), recipe=recipe, scale=16.0)
    np.save(tmp_path / "x.npy", pixels(3, 2, 2).numpy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom test_predict import Own\n"
        "def make(hidden): return Own(hidden).double()\n"
        "def relu(hidden):\n    own = make(hidden)\n    own.layers[2] = nn.ReLU()\n    return own\n"
    )
    assert warned(run, "x.npy", "--model", "mine:make") == []
    (told,) = warned(run, "x.npy", "--model", "mine:relu")
    assert told.startswith("The model has another class or other layers than the one that was trained (Own ")
    assert told in output(run, "x.npy", "--model", "mine:relu")
    (run / "config.json").unlink()  # a posterior without a run knows of no other model
    assert warned(run, "x.npy", "--model", "mine:relu") == []


def patients(folder: Path, standardise: bool) -> Path:
    """A run on three sites' tables: age, a constant, a category, a code that is almost always 0."""
    rng = np.random.default_rng(0)
    lines = [f"{50 + 10 * rng.standard_normal()},7,{'red' if i % 3 else 'blue'},{i == 1:d},{i % 2}" for i in range(200)]
    for name, rows in (("a", lines[:20]), ("b", lines[20:130]), ("c", lines[130:]), ("test", lines[::9])):
        (folder / f"{name}.csv").write_text("\n".join(["age,same,colour,code,sick", *rows]))
    (folder / "scenario.toml").write_text(
        f"""title = "t"
[data]
sites = ["a.csv", "b.csv", "c.csv"]
target = "sick"
test = "test.csv"
standardise = {str(standardise).lower()}
[split]
kind = "sites"
[model]
name = "mlp"
inputs = 5
hidden = [3]
outputs = 2
[train]
rounds = 1
local_epochs = 1
"""
    )
    execute(load(folder / "scenario.toml"), 0, out=folder / "run")
    return folder / "run"


@pytest.mark.parametrize("standardise", [False, True])
def test_values_far_from_training_and_new_categories_are_named(tmp_path: Path, standardise: bool):
    run = patients(tmp_path, standardise)
    for name in ("a", "b", "c", "test"):  # the rare code, too
        assert warned(run, tmp_path / f"{name}.csv") == []
    rows = ["age,same,colour,code", "50,7,red,0", "940,7,pink,1", "48,7.5,red,0", "60,7,pink,0", "-300,7,grey,900"]
    (tmp_path / "x.csv").write_text("\n".join(rows))
    told = warned(run, tmp_path / "x.csv")
    beginnings = (
        "Input 5: code = 900 is 12",
        "Input 2 (and 1 more): age = 940 is ",
        "Input 3: same = 7.5, but all of training had 7: ",
        "Input 5: colour = 'grey' is a category that training never saw, and counts as none",
        "Input 2 (and 1 more): colour = 'pink' is a category",
    )
    assert len(told) == len(beginnings)
    for text, beginning in zip(told, beginnings, strict=True):
        assert text.startswith(beginning)
    files = [tmp_path / f"{name}.csv" for name in "abc"]
    age = np.concatenate([np.loadtxt(file, delimiter=",", skiprows=1, usecols=0) for file in files])
    assert f"{(940 - age.mean()) / age.std():.0f} sd above the training mean {age.mean():.3g}: " in told[1]
    lines = output(run, tmp_path / "x.csv").splitlines()
    assert lines[-len(told) :] == told
    (tmp_path / "x.csv").write_text("age,same,colour,code\n50,7,3,0\n")
    with pytest.raises(DataError, match="column 'colour', row 1: '3' is a number, but training had texts"):
        output(run, tmp_path / "x.csv")


def test_a_run_without_moments_says_nothing_and_damaged_moments_are_refused(tmp_path: Path):
    run = train(tmp_path / "run", pixels(90, 4).double())
    x = pixels(3, 4).double().numpy()
    x[1, 2] = -1e4
    np.save(tmp_path / "x.npy", x)
    (told,) = warned(run, tmp_path / "x.npy")
    assert told.startswith("Input 2: x[2] = -10000 is ")
    assert "sd below the training mean" in told
    stored = sealed.content(run / "clients.json")
    for moments in ({**stored["moments"], "mean": [0.0] * 3}, {"mean": [0.0]}, "none", [1]):
        sealed.reseal(run / "clients.json", {**stored, "moments": moments})
        with pytest.raises(DataError, match=r"clients\.json (has|says no) .*moments"):
            output(run, tmp_path / "x.npy")
    del stored["moments"]
    sealed.reseal(run / "clients.json", stored)
    assert warned(run, tmp_path / "x.npy") == []


def test_word_numbers_have_no_moments(tmp_path: Path):
    words = torch.arange(180).reshape(90, 2) % 5
    run = train(tmp_path / "words", words, nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3)))
    assert "moments" not in json.loads((run / "clients.json").read_text())


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


def refused(tmp_path: Path) -> dict[str, str]:
    """Files that must not be predicted for, each with what is said of it."""
    x = pixels(3, 2, 2).numpy()
    arrays = {
        "scaled.npy": (x / 32, r"holds 0\.\d+: the run's inputs are uint8, whole numbers from 0 to 255"),
        "negative.npy": (x.astype(int) - 20, "holds -"),
        "large.npy": (x.astype(int) + 300, "holds 3"),
        "shape.npy": (x.reshape(3, 1, 2, 2), r"the shape \(3, 1, 2, 2\).* are \(2, 2\), so give \(N, 2, 2\) or 4"),
        "wide.npy": (np.zeros((3, 5), int), "4 numbers a row"),
        "nan.npy": (np.array([[0, 1, 2, 3], [0, 1, np.nan, 3]]), "row 2 holds NaN"),
        "text.npy": (np.array([["a"] * 4]), "real numbers"),
        "number.npy": (np.array(3), "give arrays? of"),
        "none.npy": (np.zeros((0, 2, 2), np.uint8), "no inputs"),
    }
    for name, (array, _) in arrays.items():
        np.save(tmp_path / name, array)
    np.savez(tmp_path / "two.npz", a=x, b=x)
    np.savez(tmp_path / "nothing.npz")
    texts = {
        "ragged.csv": ("1,2,3,4\n1,2,3\n", "line 2 has 3 cells, those before 4"),
        "word.csv": ("a,b,c,d\n1,2,3,4\n1,2,three,4\n", "line 3: .*three"),
        "labelled.csv": ("1,2,3,4,0\n", "4 numbers a row"),
        "empty.csv": ("", "no inputs"),
        "header.csv": ("a,b,c,d\n", "no inputs"),
        "damaged.npy": ("not an array", "damaged"),
        "damaged.npz": ("not an archive", "damaged"),
        "damaged.png": ("not a picture", "damaged or no PNG"),
        "x.txt": ("1,2,3,4", "give .npy, .npz, .csv, .parquet, .png, or a folder"),
        "x.parquet": ("", "not trained on a table"),
    }
    for name, (text, _) in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pickled.npy").write_bytes(np.lib.format.magic(1, 0) + pickle.dumps(Malicious()))
    np.save(tmp_path / "objects.npy", np.array([Malicious()]), allow_pickle=True)
    Image.fromarray(np.zeros((2, 3), np.uint8)).save(tmp_path / "size.png")
    Image.fromarray(np.zeros((2, 2), np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "folder").mkdir()
    return {name: complaint for name, (_, complaint) in (arrays | texts).items()} | {
        "two.npz": "holds a, b: name the array of inputs x",
        "nothing.npz": "holds nothing",
        "pickled.npy": "damaged",
        "objects.npy": "is object",
        "size.png": "3 × 2 pixels, the run's inputs 2 × 2: resize",
        "deep.png": "more than eight bits",
        "folder": r"holds no \.png",
        "missing.npy": "is not there",
    }


def test_bad_inputs_are_refused_in_one_sentence(run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, complaint in refused(tmp_path).items():
        with pytest.raises(FedualError, match=complaint) as caught:
            output(run, tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "unpickled").exists()


def test_bad_arguments_and_runs_are_refused(run: Path, tmp_path: Path):
    np.save(tmp_path / "x.npy", pixels(3, 2, 2).numpy())
    np.save(tmp_path / "wide.npy", np.zeros((3, 7)))
    np.save(tmp_path / "wrong.npy", np.zeros((3, 2, 3), np.uint8))
    Image.fromarray(np.zeros((2, 2), np.uint8)).save(tmp_path / "x.png")
    (tmp_path / "empty").mkdir()
    posterior = run / "posterior.safetensors"
    for arguments, complaint in (
        ((run, "x.npy", "--coverage", 0), "coverage = 0"),
        ((run, "x.npy", "--coverage", 1.5), "coverage = 1.5"),
        ((run, "x.npy", "--samples", -1), "samples = -1"),
        ((run, "x.npy", "--batch-size", 0), "batch_size = 0"),
        ((run, "x.npy", "--device", "cuda:9"), "cuda:9"),
        ((tmp_path / "none", "x.npy"), "none is not there: give the folder of a run"),
        ((tmp_path / "empty", "x.npy"), "has no posterior.safetensors"),
        ((tmp_path / "x.npy", "x.npy"), "damaged or not a safetensors file"),
        ((posterior, "wide.npy"), r"cannot take inputs \(7,\) of torch.float64"),
        ((posterior, "x.png"), "does not say what its inputs are"),
    ):
        with pytest.raises(FedualError, match=complaint):
            output(arguments[0], tmp_path / str(arguments[1]), *arguments[2:])
    sealed.reseal(run / "clients.json", {"shape": [2, 2], "dtype": "nn"})
    with pytest.raises(DataError, match=r"clients\.json has other content than fedual writes"):
        output(run, tmp_path / "x.npy")
