"""No bit of a run's folder changes unnoticed, and no file of another run or round takes another one's place."""

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import sealed
import torch
from flat import fit
from problems import normal
from torch import nn

from fedual.errors import DataError, FedualError
from fedual.posterior import Posterior
from fedual.predict import open_run
from fedual.report import run_data
from fedual.run import Folder, Run
from fedual.rundir import RunDirectory, environment, folder
from fedual.rundir.checksum import seal_json, unseal_json

FLIPS = 40  # for each file
NAMES = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "clients.json",
    "calibration.json",
    "test.safetensors",
    "posterior.safetensors",
    "checkpoint-3/meta.json",
    "checkpoint-3/server.safetensors",
    "checkpoint-3/clients-00000.safetensors",
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(path: Path, rounds: int = 3, seed: int = 0, resume: bool = False) -> Run:
    clients = [(normal((n, 3), n), torch.arange(n) % 2) for n in (25, 36, 47)]
    given = {
        "batch_size": 16,
        "local_epochs": 1,
        "samples": 2,
        "device": "cpu",
        "posterior": "calibrated",
        "test": clients[0],
    }
    return fit(model(), clients, "ivon-admm", rounds, seed=seed, out=path, resume=resume, **given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_default_dtype(torch.float64)  # as in every test
    return train(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    assert trained.path is not None
    return replace(trained, path=Path(shutil.copytree(trained.path, tmp_path / "run")))


def use(run: Run) -> None:
    """Read all that predictions, a report and a resumed run depend on."""
    assert run.path is not None
    open_run(run.path, model())
    run_data.read(run.path)
    Folder(run, resume=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_refused_in_every_file(run: Run, name: str):
    assert run.path is not None
    use(run)
    path, random = run.path / name, Random(name)
    content = path.read_bytes()
    last = 8 * len(content) - 8  # the newline that ends a file has no second chance
    for place in [*random.sample(range(8 * len(content)), FLIPS), *range(last, last + 8)]:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(FedualError, match=path.name):
            use(run)
    path.write_bytes(content)
    use(run)


def test_every_file_that_a_run_leaves_is_tried(run: Run):
    assert run.path is not None
    assert {str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file()} == set(NAMES)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"round": 3', b'"round": 4'), (b'"moved": true', b'"moved": false'), (b'"refused": []', b'"refused": [0]')],
)  # fmt: skip
def test_a_changed_checkpoint_is_refused(run: Run, old: bytes, new: bytes):
    assert run.path is not None
    meta = run.path / "checkpoint-3" / "meta.json"
    assert old in meta.read_bytes()
    meta.write_bytes(meta.read_bytes().replace(old, new))
    with pytest.raises(DataError, match=r"meta\.json is damaged or misplaced \(its checksum is wrong\)"):
        Folder(run, resume=True)


def test_a_checkpoint_under_another_number_is_refused(run: Run):
    assert run.path is not None
    (run.path / "checkpoint-3").rename(run.path / "checkpoint-4")
    with pytest.raises(DataError, match=r"misplaced \(it is of round 3\)"):
        Folder(run, resume=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "config.json" and "/" not in name])
def test_the_file_of_another_seed_is_refused(run: Run, tmp_path: Path, name: str):
    assert run.path is not None
    train(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / name, run.path / name)
    with pytest.raises(FedualError, match=rf"{name}.*another config"):
        use(run)


def test_predictions_and_posterior_of_other_rounds_are_refused(run: Run, tmp_path: Path):
    assert run.path is not None
    train(tmp_path / "longer", rounds=4)
    shutil.copy(tmp_path / "longer" / "test.safetensors", run.path)
    with pytest.raises(DataError, match=r"is of round 3, test\.safetensors of round 4: restore them together"):
        open_run(run.path, model())


def test_a_posterior_that_a_user_saved_predicts(run: Run):
    assert run.path is not None
    path = run.path / "posterior.safetensors"
    Posterior.load(path, model()).save(path)
    assert open_run(run.path, model()).samples == 2


def test_a_lost_record_is_refused_before_anything_is_removed(run: Run):
    assert run.path is not None
    path = run.path / "metrics.jsonl"
    first, _, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + third)
    with pytest.raises(DataError, match="should have the records of rounds 1 to 3 and has 1, 3"):
        Folder(run, resume=True)
    assert path.read_bytes() == first + third


def test_a_folder_of_an_earlier_version_is_used_and_resumed(trained: Run, tmp_path: Path):
    path = tmp_path / "older"
    whole = train(tmp_path / "whole", rounds=5)
    train(path)
    for name in ("config.json", "environment.json", "clients.json", "calibration.json", "checkpoint-3/meta.json"):
        sealed.age(path / name, sealed.content(path / name))
    use(replace(trained, path=path))
    assert torch.equal(train(path, rounds=5, resume=True).server.lam_g, whole.server.lam_g)
    assert RunDirectory.open(path).digest is None


@pytest.mark.parametrize("indent", [None, 1, 2])
def test_a_sealed_json_file_is_plain_json_and_no_bit_of_it_can_change(indent: int | None):
    value = {"text": '"sha256": "' + "0" * 64 + '"}', "sha": [1.5, None], "run": "mine"}
    content = seal_json({"a": value}, "r", indent)
    assert unseal_json(content, "r") == {"a": value}
    for place in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(ValueError, match=r"."):
            unseal_json(bytes(damaged), "r")


def test_other_versions_are_told_in_the_log_and_in_the_record(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert run.path is not None
    before = environment()
    now = {**before, "torch": "99.0", "python": "4.0", "threads": 77}
    monkeypatch.setattr(folder, "environment", lambda: now)
    words = f"torch 99.0 (before: {before['torch']})"
    longer = train(run.path, rounds=5, resume=True)
    (message,) = caplog.messages
    assert words in message
    assert f"python 4.0 (before: {before['python']})" in message
    assert "threads" not in message
    told = [record.get("resumed_with") for record in longer.history]
    assert [bool(words) for words in told] == [False, False, False, True, False]
    assert words in str(told[3])
    caplog.clear()
    train(run.path, rounds=6, resume=True)
    assert not caplog.messages
