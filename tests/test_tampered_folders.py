"""Run folders with other content of valid syntax: `report`, `predict` and resuming say which file in one sentence."""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flat
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from fedual import report
from fedual.errors import LONGEST, DataError, FedualError
from fedual.networks import Clients, Network
from fedual.predict import choose_threshold, open_run, read_inputs, warnings_for
from fedual.rundir import checksum

RECIPE = {"model": "mlp", "settings": {"inputs": 3, "hidden": [4], "outputs": 2}}
INPUTS = {"columns": ["a", "b"], "categories": {"b": ["u", "v"]}, "standardised": {"a": [1.0, 2.0]}}
ODD: list[Any] = [3, -1, 0, 2**62, 10**30, 1e308, 5e-324, "x", "\x1b[31m", "", None, True, [], [[]], {}, {"a": 1}]
ODD += [float("nan"), float("inf"), json.loads("[" * 200 + "]" * 200)]


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def trained(out: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    x, y = examples()
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    description = {"inputs": INPUTS, "classes": ["no", "yes"], "sites": ["north", "south"]}
    clients = Clients(x[:60], y[:60], torch.arange(60).split([20, 40]), description=description)
    options = {"rounds": 1, "local_epochs": 1, "samples": 4, "test": (x[60:], y[60:]), **options}
    return flat.fit(Network(model, recipe=RECIPE), clients, out=out, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as earlier versions left it, without seals, of which anything can be changed."""
    torch.set_default_dtype(torch.float64)
    folder = tmp_path_factory.mktemp("run") / "run"
    trained(folder)
    for path in [*folder.glob("*.json*"), *folder.glob("checkpoint-*/*.json")]:
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        values = [{key: v for key, v in json.loads(line).items() if key not in ("run", "sha256")} for line in lines]
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
    (folder / "test.safetensors").write_bytes(save(load((folder / "test.safetensors").read_bytes())))
    (folder / "x.csv").write_text("a,b\n1,u\n2.5,w\n")
    return folder


def reported(folder: Path) -> None:
    report.write([folder], folder / "page.html")


def predicted(folder: Path) -> None:
    run = open_run(folder)
    inputs = read_inputs(folder / "x.csv", run)
    warnings_for(inputs, run).sentences()
    found = run.posterior.predict(inputs.x.to(run.posterior.network.dtype), run.samples, run.seed)
    choose_threshold(found.entropy, run.test, 0.9)  # type: ignore[union-attr]


def resumed(folder: Path) -> None:
    trained(folder, rounds=2, resume=True)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a JSON value."""
    yield place
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*place, key))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    value = copy.deepcopy(value)
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    if new is KeyError:
        del inner[place[-1]]
    else:
        inner[place[-1]] = new
    return value


def copied(whole: Path, tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    return Path(shutil.copytree(whole, tmp_path / "run"))


def said(use: Callable[[Path], None], folder: Path) -> str:
    """The sentence with which a folder is refused; empty if it is used."""
    try:
        use(folder)
    except FedualError as error:
        told = str(error)
    else:
        told = ""
    assert told.isprintable()
    assert len(told) <= LONGEST
    return told


@pytest.mark.parametrize("use", [reported, predicted, resumed])
def test_the_folder_is_used_as_it_is(whole: Path, tmp_path: Path, use: Callable[[Path], None]):
    assert said(use, copied(whole, tmp_path)) == ""


@pytest.mark.parametrize("use", [reported, predicted])
@pytest.mark.parametrize(
    "name", ["config.json", "clients.json", "metrics.jsonl", "environment.json", "calibration.json"]
)
def test_any_value_in_place_of_another(whole: Path, tmp_path: Path, use: Callable[[Path], None], name: str):
    """A seeded slice; `tests/adversary` tries thousands."""
    folder, rng = copied(whole, tmp_path), random.Random(name + use.__name__)
    if not (folder / name).exists():
        (folder / name).write_text(
            '{"tau": 1.0, "temperature": 1.0, "examples": 5, "clients": 2, "nll": 1.0, "nll_mean": 1.0, "missing": []}'
        )
    value = json.loads((folder / name).read_text().splitlines()[0])
    everywhere = list(places(value))
    for _ in range(16):
        (folder / name).write_text(json.dumps(changed(value, rng.choice(everywhere), rng.choice(ODD))) + "\n")
        said(use, folder)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoint-1/meta.json"])
def test_resuming_with_any_value_in_place_of_another(whole: Path, tmp_path: Path, name: str):
    rng = random.Random(name)
    value = json.loads((whole / name).read_text().splitlines()[0])
    everywhere = list(places(value))
    for _ in range(6):
        folder = copied(whole, tmp_path)
        (folder / name).write_text(json.dumps(changed(value, rng.choice(everywhere), rng.choice(ODD))) + "\n")
        said(resumed, folder)


@pytest.mark.parametrize(
    ("use", "name", "place", "new", "message"),
    [
        (reported, "clients.json", ("sizes",), [], "clients.json has no sizes"),
        (reported, "clients.json", ("sizes", 0), "many", "other content than fedual writes, sizes[0] ="),
        (reported, "clients.json", ("labels", 0), [1], "clients.json has no sizes, or other labels"),
        (reported, "metrics.jsonl", ("round",), 1e999, "Line 1 of"),
        (reported, "metrics.jsonl", ("round",), KeyError, "round is missing"),
        (reported, "metrics.jsonl", ("seconds",), "x", "seconds = 'x' is not a finite number"),
        (reported, "environment.json", ("device",), [1], "environment.json has other content"),
        (reported, "config.json", ("evaluation",), 3, "config.json has other content"),
        (predicted, "config.json", ("inputs", "columns"), 3, "inputs.columns = 3 is not a list"),
        (predicted, "config.json", ("inputs", "columns"), [], "config.json has inputs that cannot be encoded"),
        (predicted, "config.json", ("inputs", "categories"), KeyError, "inputs.categories is missing"),
        (predicted, "config.json", ("inputs", "standardised", "a"), [0.0, 0.0], "a scale of 0"),
        (predicted, "config.json", ("seed",), "x", "seed = 'x'"),
        (predicted, "config.json", ("evaluation", "samples"), 10**12, "evaluation.samples = 1000000000000"),
        (predicted, "clients.json", ("shape",), [-1], "shape[0] = -1"),
        (predicted, "clients.json", ("moments", "mean"), [[0.0]], "moments.mean"),
        (resumed, "config.json", ("execution", "chunk"), -3, "execution.chunk = -3"),
        (resumed, "config.json", ("method",), "odd", "run"),
        (resumed, "config.json", ("method", "solver", "lr"), [[1]], "run"),
        (resumed, "checkpoint-1/meta.json", ("meta", "moved"), "x", "moved = 'x'"),
        (resumed, "checkpoint-1/meta.json", ("meta", "refused"), 3, "refused = 3"),
        (resumed, "checkpoint-1/meta.json", ("files", "server.safetensors"), {}, "bytes is missing"),
        (resumed, "checkpoint-1/meta.json", ("files", "../x"), {"bytes": 1}, "'../x', which is no file"),
        (resumed, "checkpoint-1/meta.json", ("rows",), [], "rows = [] is not a table"),
    ],
)  # fmt: skip
def test_the_file_is_named(whole: Path, tmp_path: Path, use: Any, name: str, place: Any, new: Any, message: str):
    folder = copied(whole, tmp_path)
    value = json.loads((folder / name).read_text().splitlines()[0])
    (folder / name).write_text(json.dumps(changed(value, place, new)) + "\n")
    assert message in said(use, folder)


@pytest.mark.parametrize("use", [reported, predicted])
@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("labels", torch.full((30,), 2)),
        ("labels", torch.zeros(29, dtype=torch.int64)),
        ("labels", torch.zeros(30)),
        ("probabilities", torch.full((30, 2), torch.nan)),
        ("probabilities", torch.zeros(30)),
        ("entropy", torch.zeros(3)),
        ("shown", torch.tensor([31] * 24)),
        ("shown", torch.tensor([-31] * 24)),
        ("inputs", torch.zeros(3)),
        ("mutual_information", None),
    ],
)
def test_evidence_of_other_shapes(whole: Path, tmp_path: Path, use: Any, name: str, new: torch.Tensor | None):
    folder = copied(whole, tmp_path)
    tensors = load((folder / "test.safetensors").read_bytes())
    tensors = {key: value for key, value in (tensors | {name: new}).items() if value is not None}
    (folder / "test.safetensors").write_bytes(save(tensors))
    assert "test.safetensors has" in said(use, folder)


def test_deep_json_is_damage(whole: Path, tmp_path: Path):
    for name in ("config.json", "clients.json", "metrics.jsonl"):
        for content in ("[" * 100_000, '{"a":' * 300 + "1" + "}" * 300, "1" * 5000, '{"a": "\\ud800"}'):
            folder = copied(whole, tmp_path)
            (folder / name).write_text(content + "\n")
            for use in (reported, predicted):
                with pytest.raises(DataError) as raised:
                    use(folder)
                assert name in str(raised.value)


def test_a_posterior_of_another_network_is_refused_with_the_inputs(whole: Path, tmp_path: Path):
    folder = copied(whole, tmp_path)
    clients = json.loads((folder / "clients.json").read_text())
    del clients["moments"]
    (folder / "clients.json").write_text(json.dumps(clients | {"shape": [7]}))
    assert "run" in said(predicted, folder)


def test_safetensors_headers_that_make_no_sense():
    for header in (b"[" * 5000, b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}', b"\xff"):
        with pytest.raises(ValueError, match=r"."):
            checksum.parse(len(header).to_bytes(8, "little") + header)
