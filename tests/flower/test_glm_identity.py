"""Who a site of a federated regression is, and that its refusals name none of its files."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from glm_federation import NAMES, Sites, kind

from fedual.errors import FedualError, InputError
from fedual.flower import wire
from fedual.flower.identity import identity
from fedual.glm.flower import FederatedRegression, exchange
from fedual.glm.flower import sites as sites_module


@pytest.fixture(autouse=True)
def _clock(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sites_module, exchange):
        monkeypatch.setattr(module, "time", clock)


def keys(path: Path, *names: str) -> dict[str, str]:
    return {name: identity(path / f"state-{name}", name).public for name in names}


def test_networks_and_regressions_have_one_key(tmp_path: Path):
    Sites(tmp_path).fit()
    (file,) = (tmp_path / "state-south").glob("*.pem")
    before = file.read_bytes()
    assert identity(tmp_path / "state-south", "south").public == keys(tmp_path, "south")["south"]
    assert file.read_bytes() == before


def test_with_a_list_of_keys_nobody_else_takes_part(tmp_path: Path):
    fit = Sites(tmp_path).fit(known=keys(tmp_path, *NAMES))
    assert {site.name for site in fit.sites} == {*NAMES}
    for known, why in (
        (keys(tmp_path, "north", "west"), "south was turned away: it is not on the list of known sites"),
        (keys(tmp_path, "north", "west") | {"south": 64 * "7"}, "south was turned away: another site has this id"),
    ):
        with pytest.raises(FedualError, match=why):
            Sites(tmp_path).fit(known=known)


def test_a_list_that_cannot_be_read_is_refused_at_once(tmp_path: Path):
    config = {"formula": "sick ~ age", "known": str(tmp_path / "known.toml")}
    with pytest.raises(InputError, match=r"known\.toml cannot be read"):
        FederatedRegression.from_config(config)


def test_an_answer_that_was_heard_before_lets_nobody_in(tmp_path: Path):
    heard = dict[int, Any]()

    def between(node: int, message: Message, answer: Any) -> Message:
        reply = answer()
        if kind(message) != "hello":
            return reply
        said = heard.setdefault(node, wire.config_of(reply.content))
        return Message(wire.pack({}, said), reply_to=message)

    grid = Sites(tmp_path, between)
    grid.fit()
    with pytest.raises(FedualError, match="was turned away: it does not show its key"):
        grid.fit()


def test_one_key_or_one_node_under_two_names_is_one_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = identity
    with monkeypatch.context() as patch:
        patch.setattr("fedual.glm.flower.client.identity", lambda folder, name: real(tmp_path / "one", "one"))
        with pytest.raises(FedualError, match="its key is that of client north: each client has a key of its own"):
            Sites(tmp_path).fit()
    grid = Sites(tmp_path)
    grid.keys |= {101: b"one", 102: b"one"}
    with pytest.raises(FedualError, match="its node takes part as client south: one node is one client"):
        grid.fit()


BROKEN = {
    "no csv": ("data-path", lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "rows of other lengths": ("data-path", lambda path: path.write_text("age,sex,sick\n1,2,0,4\n")),
    "guards": ("guards", lambda path: path.write_text("min_rows = [")),
    "a state folder that is a file": ("state-dir", lambda path: path.write_text("")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_refusal_names_no_file_of_the_site(tmp_path: Path, what: str):
    key, harm = BROKEN[what]
    said = list[str]()

    def between(node: int, message: Message, answer: Any) -> Message:
        reply = answer()
        said.append(str(wire.config_of(reply.content).get("refusal", "")))
        return reply

    grid = Sites(tmp_path, between)
    file = tmp_path / "my secret folder.csv"
    grid.apps[101][1][key] = str(file)
    harm(file)
    with pytest.raises(FedualError, match="south"):
        grid.fit()
    assert any(said)
    for text in said:
        assert "secret" not in text
        assert str(tmp_path) not in text
