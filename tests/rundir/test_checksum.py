"""Checksums of state files, and files that were written before all of them used SHA-256."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from fedual.backends.client_store import create
from fedual.errors import DataError
from fedual.posterior import Posterior, Prediction
from fedual.rundir import RunDirectory, atomic
from fedual.rundir.checksum import KEY, checksum, parse, seal, verify

OLD = Path(__file__).parent / "files_of_version_1"
"""The run of a linear model 3 → 2 on three clients, two rounds, and a vault, as commit cdf2778 wrote them."""
TENSORS = {'"sha256":"': torch.arange(3.0), "sha256": torch.tensor(7)}  # names that look like the seal


def test_a_sealed_file_is_plain_safetensors_and_comes_back():
    content = seal(TENSORS, {"note": '"sha256":"', "sha256": "ignored"})
    assert verify(content)
    assert load(content).keys() == TENSORS.keys()
    metadata, tensors = parse(content)
    assert metadata == {"note": '"sha256":"', "sha256": checksum(content)}
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())


def test_every_changed_byte_breaks_the_seal():
    content = seal(TENSORS, {"note": "x"})
    for place in range(len(content)):
        assert not verify(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
    for other in (b"", content[:-1], content + b"\0", save(TENSORS), KEY + b"0" * 64):
        assert not verify(other)


def test_only_the_header_can_hold_a_seal():
    plain = save({"x": torch.frombuffer(bytearray(KEY + b"0" * 64), dtype=torch.uint8)})
    assert len({checksum(plain), checksum(plain[:-1] + b"1"), checksum(plain[:-30] + b"1" + plain[-29:])}) == 3


@pytest.mark.parametrize("content", [b"", b"no safetensors", save(TENSORS)[:-1]])
def test_what_is_no_safetensors_file_cannot_be_parsed(content: bytes):
    with pytest.raises(ValueError, match=r"."):
        parse(content)


def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD / "run", tmp_path / "run"))


def test_an_old_checkpoint_is_read_and_its_damage_noticed(tmp_path: Path):
    run = RunDirectory.open(old(tmp_path))
    snapshot = run.load()
    assert snapshot is not None
    assert snapshot.round == 2
    shapes = {"eta": (2, 8), "solver.momentum": (8,), "solver.steps": ()}
    store = create({name: torch.zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}, 3)
    run.restore(store)
    rows = store.read(torch.arange(3))
    assert rows["eta"].sum(0).sub(snapshot.server["eta_sum"]).abs().max() < 1e-6 * rows["eta"].abs().max()
    for name in ("server.safetensors", "clients-00000.safetensors"):
        path = run.path / "checkpoint-2" / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DataError, match=f"{name} is damaged"):
            run.load() if name.startswith("server") else run.restore(store)
        path.write_bytes(content)


def test_an_old_posterior_is_read_and_its_damage_noticed(tmp_path: Path):
    path = old(tmp_path) / "posterior.safetensors"
    posterior = Posterior.load(path, torch.nn.Linear(3, 2, dtype=torch.float32))
    prediction = posterior.predict(torch.ones(1, 3), samples=2)
    assert isinstance(prediction, Prediction)
    torch.testing.assert_close(prediction.probabilities.sum(1), torch.ones(1, dtype=torch.float32))
    snapshot = RunDirectory.open(path.parent).load()
    assert snapshot is not None
    assert torch.equal(posterior.lam, snapshot.server["lam_g"])
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="checksum"):
        Posterior.load(path, torch.nn.Linear(3, 2))


def test_an_old_vault_is_read(tmp_path: Path):
    vaults = pytest.importorskip("fedual.flower.vault")
    folder = Path(shutil.copytree(OLD / "vault", tmp_path / "vault"))
    (path,) = folder.iterdir()
    content = path.read_bytes()
    for ack, value in (("a", -0.5), ("b", torch.nan)):
        with vaults.opened(folder, "trial", "site-1") as vault:
            rows = vault.settle(ack)
        assert torch.equal(rows["eta"][0, 1].nan_to_num(9), torch.tensor(value, dtype=torch.float64).nan_to_num(9))
        assert rows["solver.step"] == (7 if ack == "a" else 8)
    assert path.read_bytes() == content
    metadata, tensors = parse(content)
    again = seal(tensors, metadata)  # the entries of the metadata may change places
    assert verify(again)
    assert len(again) == len(content)  # the format has not changed
    found, same = parse(again)
    assert {**found, "sha256": ""} == {**metadata, "sha256": ""}
    assert same.keys() == tensors.keys()
    assert all(torch.equal(same[name].nan_to_num(9), value.nan_to_num(9)) for name, value in tensors.items())


def test_a_file_that_a_kill_left_behind_does_not_lend_its_permissions(tmp_path: Path):
    left = tmp_path / "state.tmp"
    left.write_text("half")
    left.chmod(0o644)
    atomic.store(tmp_path / "state", b"whole", mode=atomic.PRIVATE)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").read_bytes() == b"whole"


def test_a_state_folder_that_others_can_enter_draws_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    atomic.make_private(tmp_path / "new")
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o750)
    assert not caplog.messages
    for _ in range(3):
        atomic.make_private(tmp_path / "open")
    (message,) = caplog.messages
    assert message == f"{tmp_path / 'open'} can be entered by others than its owner: allow only the owner (chmod 700)."
