"""The file of a server's ledger: no bit of it changes unnoticed, nobody else reads it, older ones are read."""

import json
import os
from pathlib import Path
from random import Random

import pytest
import sealed
from federation import Federation
from safetensors.torch import save

from fedual.errors import DataError, FedualError
from fedual.flower.ledger import UNSEALED, Ledger
from fedual.rundir.checksum import parse, seal

pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture
def sites(tmp_path: Path) -> Federation:
    found = Federation(tmp_path)
    found.run(2)
    return found


def path_of(sites: Federation) -> Path:
    return sites.out / "server.safetensors"


def test_a_flipped_bit_is_refused_wherever_it_is(sites: Federation):
    content, random, like = path_of(sites).read_bytes(), Random(0), sites.server(1).ledger.server
    for place in random.sample(range(8 * len(content)), 400):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path_of(sites).write_bytes(damaged)
        with pytest.raises(DataError, match=r"server\.safetensors is .*: restore the file\.$"):
            Ledger.load(path_of(sites), like)
    path_of(sites).write_bytes(content)
    sites.run(3)
    sites.agrees()


def test_a_changed_round_is_refused(sites: Federation):
    content = path_of(sites).read_bytes()
    for old, new in ((rb"\"round\": 2", rb"\"round\": 3"), (rb"\"moved\": true", rb"\"moved\": null")):
        assert old in content
        path_of(sites).write_bytes(content.replace(old, new))
        with pytest.raises(DataError, match="is damaged"):
            sites.run(3)


def test_a_ledger_of_an_earlier_version_is_read_and_sealed(sites: Federation):
    sealed.age(sites.out / "config.json", sealed.content(sites.out / "config.json"))
    metadata, tensors = parse(path_of(sites).read_bytes())
    older = {"format": UNSEALED, "ledger": metadata["ledger"]}
    path_of(sites).write_bytes(save(tensors, older))
    sites.run(3)
    assert sites.counted == [["0", "1", "2"]] * 3
    sites.agrees()
    metadata, _ = parse(path_of(sites).read_bytes())
    assert metadata["format"] != UNSEALED
    assert json.loads(metadata["ledger"])["round"] == 3


def test_an_unsealed_ledger_of_this_version_is_refused(sites: Federation):
    metadata, tensors = parse(path_of(sites).read_bytes())
    del metadata["sha256"]
    path_of(sites).write_bytes(save(tensors, metadata))
    with pytest.raises(DataError, match="restore the file"):
        sites.run(3)


def test_ledger_and_vaults_are_their_owners_alone_in_folders_that_were_there(tmp_path: Path):
    sites = Federation(tmp_path)
    for folder in (sites.out, *(tmp_path / f"site{k}" for k in range(3))):
        folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        sites.run(1)
    finally:
        os.umask(before)
    files = [path_of(sites), *(path for k in range(3) for path in (tmp_path / f"site{k}").iterdir())]
    assert {file.suffix for file in files} == {".safetensors", ".lock", ".pem", ".json"}
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o600"}


@pytest.mark.parametrize(
    "change",
    [
        {"acks": []},
        {"round": "2"},
        {"numbers": {"0": 0, "1": 0, "2": 2}},
        {"acks": {"9": "a.1.1"}},
        {"forgotten": 7},
        {"fold": [1]},
        {"noise": [1e400]},
        {"sums": {"0": {"total": "x"}}},
        {"starts": -1},
        {"moved": None},
    ],
)
def test_other_content_under_a_right_checksum_is_one_sentence(sites: Federation, change: dict[str, object]):
    metadata, tensors = parse(path_of(sites).read_bytes())
    changed = json.loads(metadata["ledger"]) | change
    path_of(sites).write_bytes(seal(tensors, {**metadata, "ledger": json.dumps(changed)}))
    with pytest.raises(FedualError, match=r"^[^\n]{1,400}$"):
        sites.run(3)
