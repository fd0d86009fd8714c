"""`fedual flower`: a site's key and its experiments, for the site's operator."""

import json
from pathlib import Path

import pytest
import torch
from command import fedual

from fedual.flower import Limits
from fedual.flower.identity import identity, known_keys
from fedual.flower.limits import count, counts_file, read_counts
from fedual.flower.vault import opened


@pytest.mark.parametrize("client", ["north", "north west", "7", 'a"b', "Zürich 😀"])
def test_the_key_is_a_line_for_the_servers_list(tmp_path: Path, client: str):
    done = fedual(tmp_path, "flower", "key", client, "--state-dir", "state")
    (tmp_path / "known.toml").write_text(done.out)
    public = identity(tmp_path / "state", client).public
    assert known_keys(tmp_path / "known.toml") == {client: public}
    again = fedual(tmp_path, "flower", "key", client, "--state-dir", "state", "--json")
    assert json.loads(again.out) == {"client": client, "key": public}


def test_experiments_are_listed_and_removed(tmp_path: Path):
    state = tmp_path / "state"
    for experiment in ("old", "new", "new"):
        count(state, "north", experiment, Limits(), is_round=experiment == "new")
    for client in ("north", "south"):
        with opened(state, "old", client) as vault:
            vault.settle(None)
            vault.put("a.1.1", {"eta": torch.ones(3)})
    options = ("--state-dir", str(state))
    assert fedual(tmp_path, "flower", "experiments", "north", *options).out.splitlines() == [
        "old  1 messages, 0 rounds",
        "new  2 messages, 2 rounds",
    ]
    done = fedual(tmp_path, "flower", "remove", "north", "odl", *options)
    assert done.code == 2
    assert "No experiment 'odl' asked 'north'" in done.err
    assert "did you mean 'old'?" in done.err
    assert fedual(tmp_path, "flower", "remove", "north", "old", *options).out == "removed 'old'\n"
    assert read_counts(counts_file(state, "north")) == {"new": (2, 2)}
    assert [file.name.startswith("old_south") for file in state.glob("*.safetensors")] == [
        True
    ]  # another client's stays
    shown = json.loads(fedual(tmp_path, "flower", "experiments", "north", "--json", *options).out)
    assert shown == {"experiments": [{"experiment": "new", "messages": 2, "rounds": 2}]}


def test_a_state_is_set_aside(tmp_path: Path):
    state = tmp_path / "state"
    options = "north", "trial", "--state-dir", str(state)
    assert "has no state of 'north' in 'trial'" in fedual(tmp_path, "flower", "set-aside", *options).err
    with opened(state, "trial", "north") as vault:
        vault.settle(None)
        vault.put("a.1.1", {"eta": torch.ones(3)})
    (path,) = state.glob("*.safetensors")
    content = path.read_bytes()
    done = fedual(tmp_path, "flower", "set-aside", *options)
    assert done.out.startswith("'trial' is kept in ")
    assert Path(done.out.removeprefix("'trial' is kept in ").strip()).read_bytes() == content
    assert not path.exists()
    assert fedual(tmp_path, "flower", "set-aside", *options).code == 2
