"""Whoever fails, and whenever: the server ends with exactly the posterior of what it says that it counted."""

import errno
import os

import pytest
from federation import Federation, is_train
from flwr.app import Error, Message

from fedual.errors import FedualError
from fedual.flower import roster, site
from fedual.flower.ledger import Ledger
from fedual.flower.vault import Vault
from fedual.rundir import RunDirectory, atomic

pytestmark = pytest.mark.usefixtures("clock")
ROUNDS = 6
BAD = 3  # the round in which something happens, to client 1


class Killed(BaseException):
    """No `except Exception` sees it, as none sees SIGKILL."""


@pytest.fixture
def sites(tmp_path) -> Federation:
    return Federation(tmp_path)


def left_out(sites: Federation, round: int) -> dict[str, str]:
    return sites.history[round - 1]["left_out"]


def everybody_but(bad: int = BAD) -> list[list[str]]:
    return [["0", "2"] if round == bad else ["0", "1", "2"] for round in range(1, ROUNDS + 1)]


def test_without_faults_every_client_counts_in_every_round(sites):
    sites.run(ROUNDS)
    assert sites.counted == [["0", "1", "2"]] * ROUNDS
    sites.agrees()


def test_a_reply_that_is_lost(sites):
    def between(node, message, answer):
        reply = answer()
        return None if node == 101 and is_train(message, BAD) else reply

    sites.run(ROUNDS, between)
    assert sites.counted == everybody_but()
    assert left_out(sites, BAD) == {"1": "no reply in time"}
    sites.agrees()


def test_an_error_that_flower_reports_in_the_place_of_a_dead_node_is_its_clients(sites):
    def between(node, message, answer):
        if node != 101 or not is_train(message, BAD):
            return answer()
        reply = Message(Error(3, "Node Unavailable"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1  # the SuperLink's
        return reply

    sites.run(ROUNDS, between)
    assert left_out(sites, BAD) == {"1": "its app failed (Node Unavailable)"}
    sites.agrees()


def test_a_reply_after_the_time_out_is_delivered_in_a_later_round(sites):
    late = []

    def between(node, message, answer):
        if node == 101 and is_train(message, BAD):
            late.append(answer())
            return None
        if node == 101 and is_train(message, BAD + 1):
            answer()
            late[0].metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id  # the worst that can be
            return late[0]
        return answer()

    sites.run(ROUNDS, between)
    assert "another attempt" in left_out(sites, BAD + 1)["1"]
    assert sites.counted[BAD - 1 : BAD + 1] == [["0", "2"], ["0", "2"]]
    sites.agrees()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_client_that_raises_before_or_after_its_save(sites, monkeypatch, moment):
    put, bad = Vault.put, []

    def failing(vault, nonce, rows):
        if moment == "after":
            put(vault, nonce, rows)
        if bad:
            raise RuntimeError("out of luck")
        put(vault, nonce, rows)

    def between(node, message, answer):
        bad[:] = [node] * (node == 101 and is_train(message, BAD))
        return answer()

    monkeypatch.setattr(Vault, "put", failing)
    sites.run(ROUNDS, between)
    assert sites.counted == everybody_but()
    assert left_out(sites, BAD)["1"] == "its SuperNode's log shows why (RuntimeError)"
    sites.agrees()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_client_that_is_killed_while_it_saves(sites, monkeypatch, moment):
    replace, bad = os.replace, []

    def dying(source, target):
        if bad and moment == "before":
            raise Killed
        replace(source, target)
        if bad:
            raise Killed

    def between(node, message, answer):
        bad[:] = [node] * (node == 101 and is_train(message, BAD))
        try:
            return answer()
        except Killed:
            return None
        finally:
            bad.clear()

    monkeypatch.setattr(os, "replace", dying)
    sites.run(ROUNDS, between)
    assert sites.counted == everybody_but()
    sites.agrees()


def test_a_full_disk_at_a_client(sites, monkeypatch, caplog):
    write, bad = atomic.write, []

    def full(path, content, mode):
        if bad:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content, mode)

    def between(node, message, answer):
        bad[:] = [node] * (node == 101 and is_train(message, BAD))
        try:
            return answer()
        finally:
            bad.clear()

    monkeypatch.setattr(atomic, "write", full)
    sites.run(ROUNDS, between)
    assert sites.counted == everybody_but()
    assert left_out(sites, BAD)["1"] == "its SuperNode's log shows why (DataError)"
    assert "No space left on device" in caplog.text
    sites.agrees()


def test_a_message_that_is_delivered_twice(sites):
    def between(node, message, answer):
        answer()
        return answer()

    sites.run(ROUNDS, between)
    assert sites.counted == [["0", "1", "2"]] * ROUNDS
    sites.agrees()


def test_an_older_message_that_comes_after_a_newer_one_does_no_harm(sites):
    """It was answered late, or by a second process at once: its state must not take the place of one that counted."""
    older = []

    def between(node, message, answer):
        if node == 101 and is_train(message, BAD):
            older.append(answer)
            return None
        reply = answer()
        if node == 101 and is_train(message, BAD + 1):
            assert "later message" in str(older[0]().content)
        return reply

    sites.run(ROUNDS, between)
    assert sites.counted == everybody_but()
    sites.agrees()


def test_an_older_message_of_a_server_that_was_killed_does_no_harm(sites):
    """Its round is the same, its attempt is another."""
    older = []

    def killed(node, message, answer):
        if node == 101 and is_train(message, BAD):
            older.append(answer)
            raise Killed
        return answer()

    with pytest.raises(Killed):
        sites.run(ROUNDS, killed)

    def between(node, message, answer):
        reply = answer()
        if node == 101 and is_train(message, BAD):
            assert "later message" in str(older[0]().content)
        return reply

    sites.run(ROUNDS, between)
    assert sites.counted == [["0", "1", "2"]] * ROUNDS
    sites.agrees()


def test_a_node_that_vanishes_between_the_handshake_and_the_message(sites, monkeypatch):
    gather = roster.Roster.gather

    def vanishing(self, grid, ledger, wanted=None):
        grid.apps.setdefault(101, sites.node(1))
        gather(self, grid, ledger, wanted)
        if ledger.server.round == BAD - 1:
            del grid.apps[101]

    monkeypatch.setattr(roster.Roster, "gather", vanishing)
    sites.run(ROUNDS)
    assert sites.counted == everybody_but()
    sites.agrees()


SERVER = [
    (sites_of, name, moment)
    for sites_of, names in ((roster.Grid, ("push_messages", "pull_messages")), (Ledger, ("save", "close")))
    for name in names
    for moment in ("before", "after")
] + [(RunDirectory, "append", moment) for moment in ("before", "after")]


@pytest.mark.parametrize(("owner", "name", "moment"), SERVER, ids=[f"{m} {n}" for _, n, m in SERVER])
def test_a_server_killed_at_any_call_goes_on_where_it_was(sites, monkeypatch, owner, name, moment):
    """Several kills in a row: at the third call, at the second of the next server, at its third, …"""
    owner = type(sites.grid) if owner is roster.Grid else owner
    real, left = getattr(owner, name), [0]

    def dying(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and moment == "before":
            raise Killed
        found = real(*args, **kwargs)
        if left[0] == 0:
            raise Killed
        return found

    monkeypatch.setattr(owner, name, dying)
    kills = 0
    for calls in (3, 2, 3, 1, 4):
        left[0] = calls
        try:
            sites.run(ROUNDS)
        except Killed:
            kills += 1
    left[0] = 0
    sites.run(ROUNDS)
    assert kills >= 2
    assert sites.counted == [["0", "1", "2"]] * ROUNDS
    assert [record["round"] for record in sites.history] == [*range(1, ROUNDS + 1)]
    sites.agrees()


def test_a_client_that_is_slow_does_not_stop_the_others(sites, clock):
    """It is cut off after `grace` seconds when enough have answered, and named."""

    def between(node, message, answer):
        reply = answer()
        return None if node == 101 and is_train(message) else reply

    policy = roster.Policy(min_clients=3, timeout=1e6, enough=0.6, grace=5)
    sites.run(2, between, policy=policy)
    assert sites.counted == [["0", "2"]] * 2
    assert clock.now < 20
    sites.agrees()


def test_a_run_in_which_nobody_counts_any_more_stops_and_goes_on_later(sites):
    broken = lambda node, message, answer: None if is_train(message) else answer()
    sites.run(2)
    with pytest.raises(FedualError, match=r"No client counted in the last 3 rounds .*no reply in time"):
        sites.run(9, broken)
    sites.run(9)
    assert sites.counted == [["0", "1", "2"]] * 2 + [[]] * 3 + [["0", "1", "2"]] * 4
    sites.agrees()


def test_messages_are_told_apart_by_age():
    assert site.overtaken("a.1.2", "a.1.3")
    assert site.overtaken("a.1.10", "a.2.9")
    assert not site.overtaken("a.2.9", "a.1.10")
    assert not site.overtaken("a.1.2", "a.1.2")
    assert not site.overtaken("b.1.2", "a.1.3")
