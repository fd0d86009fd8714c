"""Who a site is: its key, which nobody else can show, and one client for each key and each node."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from federation import Federation
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from test_members import is_hello

from fedual.errors import DataError, FedualError, InputError
from fedual.flower import Policy, client, wire
from fedual.flower.identity import Identity, identity, signed
from fedual.flower.ledger import Ledger

pytestmark = pytest.mark.usefixtures("clock")
ALL = ["0", "1", "2"]
KEY = Identity(Ed25519PrivateKey.generate())


@pytest.fixture
def sites(tmp_path) -> Federation:
    return Federation(tmp_path)


def keys(sites: Federation, *clients: str) -> dict[str, str]:
    return {each: identity(sites.path / f"site{each}", each).public for each in clients}


texts = st.text(max_size=5)
facts = st.tuples(texts, texts, texts, st.integers(0, 2**64))


@given(facts, facts, texts, texts)
def test_a_signature_is_good_for_one_purpose_and_the_same_facts_alone(some, others, purpose, other):
    signature = KEY.sign(purpose, *some)
    assert signed(KEY.public, signature, purpose, *some)
    assert signed(KEY.public, signature, other, *others) == ((purpose, some) == (other, others))


def test_the_key_is_made_once_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        first = identity(tmp_path / "state", "north")
    finally:
        os.umask(before)
    (file,) = (tmp_path / "state").glob("*.pem")
    assert file.stat().st_mode & 0o777 == 0o600
    assert identity(tmp_path / "state", "north").public == first.public
    assert identity(tmp_path / "state", "south").public != first.public


@pytest.mark.parametrize("content", [b"", b"\0\1", b"-----BEGIN PRIVATE KEY-----\nMC4C\n-----END PRIVATE KEY-----\n"])
def test_a_damaged_key_is_refused_and_stays(tmp_path, content):
    identity(tmp_path, "north")
    (file,) = tmp_path.glob("*.pem")
    file.write_bytes(content)
    with pytest.raises(DataError, match="is not the key of a site: put it back from a backup, or remove it"):
        identity(tmp_path, "north")
    assert file.read_bytes() == content


def test_what_a_site_said_before_lets_nobody_else_in(sites):
    """Finding 9: the ledger held the digest that a site presents, and an answer could be shown again."""
    answers = []

    def listening(node, message, answer):
        reply = answer()
        if node == 101 and is_hello(message):
            answers.append(wire.config_of(reply.content))
        return reply

    sites.run(2, listening)
    sites.grid.apps = {100: sites.node(0), 99: sites.node(1)}
    again = lambda node, message, answer: (
        Message(wire.pack({}, answers[0]), reply_to=message) if node == 99 and is_hello(message) else answer()
    )
    with pytest.raises(FedualError, match="client 1 was turned away: it does not show its key"):
        sites.run(4, again, min_clients=2)
    assert sites.counted == [ALL] * 2


def test_a_server_with_anothers_ledger_cannot_pose_as_a_site(sites):
    sites.run(1)
    kept = (sites.out / "server.safetensors").read_bytes()
    for k in ALL:
        for file in (sites.path / f"site{k}").glob("*.pem"):
            secret = file.read_text().splitlines()[1].encode()
            assert secret not in kept
            assert identity(file.parent, k).public.encode() in kept


def test_a_stranger_who_always_answers_first_does_not_keep_the_owner_out(sites, clock):
    app, config = sites.node(1)
    sites.run(1)
    thief = app, config | {"state-dir": str(sites.path / "thief")}
    sites.grid.apps = {99: thief, **sites.grid.apps}
    sites.run(4, min_clients=3)
    assert sites.counted == [ALL] * 4
    sites.agrees()


def test_one_node_under_eight_names_is_one_client(sites, monkeypatch, caplog):
    """Finding 9: each name that it once had left a share in Σ η for ever."""
    app, config = sites.grid.apps.pop(102)

    real, looks, names = sites.grid.get_node_ids, itertools.count(), itertools.count()

    def comes_and_goes():
        return [node for node in real() if node != 102 or next(looks) % 2]

    def between(node, message, answer):
        name = f"x{next(names)}"
        if is_hello(message) and node == 102:
            changed = config | {"client-id": name, "state-dir": str(sites.path / name)}
            sites.grid.apps[102] = app, changed  # for the next time
        return answer()

    sites.grid.apps[102] = app, config | {"client-id": "x", "state-dir": str(sites.path / "x")}
    monkeypatch.setattr(sites.grid, "get_node_ids", comes_and_goes)
    sites.run(20, between)
    assert list(sites.ledger.numbers) == ["0", "1", "x"]
    assert "its node takes part as client x: one node is one client" in caplog.text


def test_one_key_under_eight_names_is_one_client(sites, monkeypatch, caplog):
    real = identity
    monkeypatch.setattr(client, "identity", lambda folder, name: real(sites.path / "shared", name[0]))
    for k in range(8):
        app, config = sites.node(1)
        sites.grid.apps[200 + k] = app, config | {"client-id": f"x{k}", "state-dir": str(sites.path / f"x{k}")}
    sites.run(3)
    assert list(sites.ledger.numbers) == [*ALL, "x0"]
    assert "client x7 was turned away: its key is that of client x0" in caplog.text
    assert sites.counted == [[*ALL, "x0"]] * 3


def test_eight_nodes_of_one_flower_key_are_one_client(sites, caplog):
    for k in range(8):
        app, config = sites.node(1)
        sites.grid.apps[200 + k] = app, config | {"client-id": f"x{k}", "state-dir": str(sites.path / f"x{k}")}
        sites.grid.keys[200 + k] = b"one"
    sites.run(2)
    assert list(sites.ledger.numbers) == [*ALL, "x0"]
    assert "client x7 was turned away: its node takes part as client x0" in caplog.text


def test_who_was_forgotten_does_not_come_back_under_another_name(sites, caplog):
    sites.run(2)
    sites.run(3, forget=["1"])
    app, config = sites.node(1)
    sites.grid.apps[101] = app, config | {"client-id": "new", "state-dir": str(sites.path / "new")}
    sites.run(4)
    assert "client new was turned away: its node takes part as client 1" in caplog.text
    assert list(sites.ledger.numbers) == ALL


def test_a_site_moves_to_another_machine_with_its_state_folder(sites):
    sites.run(2)
    app, config = sites.grid.apps.pop(101)
    shutil.move(sites.path / "site1", sites.path / "elsewhere")
    sites.grid.apps[301] = app, config | {"state-dir": str(sites.path / "elsewhere")}
    sites.run(4, min_clients=3)
    assert sites.counted == [ALL] * 4
    shutil.move(sites.path / "elsewhere", sites.path / "site1")
    sites.agrees()


def test_a_site_that_lost_its_key_alone_is_readmitted(sites):
    sites.run(2)
    (file,) = (sites.path / "site1").glob("*.pem")
    file.unlink()
    sites.run(3)
    assert sites.counted[-1] == ["0", "2"]
    sites.run(5, readmit=["1"], min_clients=3)
    assert sites.counted[3:] == [ALL] * 2
    sites.agrees([*sites.counted[:3], "-1", *sites.counted[3:]])


def test_with_a_list_of_keys_strangers_and_impostors_stay_out(sites, caplog):
    known = keys(sites, "0", "1") | {"2": KEY.public}
    sites.grid.apps[103] = sites.grid.apps[100][0], {**sites.grid.apps[100][1], "client-id": "9"}
    sites.run(2, known=known)
    assert sites.counted == [["0", "1"]] * 2
    assert "client 2 was turned away: another site has this id" in caplog.text
    assert "client 9 was turned away: it is not on the list of known clients" in caplog.text
    sites.agrees()


def test_the_operator_gives_a_client_another_key(sites):
    sites.run(2)
    (file,) = (sites.path / "site1").glob("*.pem")
    file.unlink()
    sites.run(4, known=keys(sites, *ALL), min_clients=3)
    assert sites.counted == [ALL] * 4
    sites.run(6, min_clients=3)  # it is bound to the new one
    sites.agrees()


def test_a_ledger_of_an_earlier_fedual_has_no_keys_and_takes_them_from_the_operator(sites, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        real = Ledger.save
        patch.setattr(Ledger, "save", lambda self, path: (self.badges.clear(), real(self, path)))
        sites.run(2)
    with pytest.raises(FedualError, match=r"client 0 .*without its key: give it once, in Policy\(known=…\)"):
        sites.run(3)
    sites.run(3, known=keys(sites, *ALL))
    sites.run(4)
    assert sites.counted == [ALL] * 4
    sites.agrees()


def test_known_keys_come_from_a_mapping_or_a_file(tmp_path):
    file = tmp_path / "known.toml"
    file.write_text(f'north = "{KEY.public}"\n')
    assert Policy(known=file).known == Policy(known={"north": KEY.public}).known == {"north": KEY.public}


BAD = {
    "no file": (None, "known.toml cannot be read .FileNotFoundError"),
    "no TOML": ("north", "known.toml cannot be read .TOMLDecodeError"),
    "no key": ('north = "abc"', "the key of 'north' is 'abc': give what `fedual flower key` prints"),
    "a number": ("north = 1", "the key of 'north' is '1'"),
    "twins": (f'north = "{KEY.public}"\nsouth = "{KEY.public}"', "'north' and 'south' have the same key"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_list_of_keys_that_cannot_be_used_is_refused(tmp_path: Path, what):
    content, why = BAD[what]
    if content is not None:
        (tmp_path / "known.toml").write_text(content)
    with pytest.raises(InputError, match=why):
        Policy(known=str(tmp_path / "known.toml"))


def test_the_ledger_keeps_the_badges(sites):
    sites.run(1)
    content = (sites.out / "server.safetensors").read_bytes()
    assert json.dumps(keys(sites, "0")["0"])[1:-1].encode() in content
    assert sites.ledger.badges.keys() == set(ALL)
