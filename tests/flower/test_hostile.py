"""Hostile or damaged replies and messages: refused by name in one sentence, and the round goes on with the others."""

import json
import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from federation import EXACT, GAMMA, Federation, is_train
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedual import parts
from fedual.algorithm import Natural
from fedual.errors import FedualError
from fedual.flower import Policy, wire
from fedual.flower.replies import averaged

pytestmark = pytest.mark.usefixtures("clock")
BAD = 3


@pytest.fixture
def sites(tmp_path) -> Federation:
    return Federation(tmp_path)


def changed(arrays=None, config=None, metrics=None):
    """A client that answers round 3 with something else: functions of what it should have said."""

    def between(node, message, answer):
        reply = answer()
        if node != 101 or not is_train(message, BAD):
            return reply
        content = reply.content
        tensors, said, figures = wire.tensors_of(content), wire.config_of(content), wire.metrics_of(content)
        record = arrays(tensors) if arrays else tensors
        record = record if isinstance(record, ArrayRecord) else wire.arrays(record)
        records = {
            wire.ARRAYS: record,
            wire.CONFIG: ConfigRecord(config(said) if config else said),
            wire.METRICS: MetricRecord(metrics(figures) if metrics else figures),
        }
        return Message(RecordDict(records), reply_to=message)

    return between


def lam(change):
    return {"arrays": lambda sent: {"lam": change(sent["lam"].clone())}}


def poisoned(value, row=0):
    def change(x):
        x[row, 1] = value
        return x

    return lam(change)


raw = lambda data, stype="numpy.ndarray": lambda sent: ArrayRecord({"lam": Array("float64", (2, 4), stype, data)})
header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999, 99), }".ljust(117) + b"\n"
huge = np.lib.format.magic(1, 0) + bytes([len(header), 0]) + header

HOSTILE = {
    "NaN": (poisoned(math.nan), "its lam contains NaN or infinity"),
    "infinity": (poisoned(math.inf), "its lam contains NaN or infinity"),
    "negative precision": (poisoned(0.3, row=1), "outside the domain of Diagonal"),
    "zero precision": (poisoned(0.0, row=1), "outside the domain of Diagonal"),
    "a million times larger": (lam(lambda x: 1e6 * x), "its update is too large"),
    "a million times too sure, and right": (lam(lambda x: x * torch.tensor([[1e6], [1e6]])), "too large"),
    "as large as can be": (lam(lambda x: x.sign() * 1e300), "its update is too large"),
    "another shape": (lam(lambda x: x[:, :2]), r"its lam is torch.float64 \(2, 2\), not torch.float64 \(2, 4\)"),
    "no rows": (lam(lambda x: x[:0]), r"its lam is torch.float64 \(0, 4\)"),
    "a leading axis": (lam(lambda x: x[None]), r"its lam is torch.float64 \(1, 2, 4\)"),
    "another dtype": (lam(lambda x: x.float()), r"its lam is torch.float32 \(2, 4\)"),
    "whole numbers": (lam(lambda x: x.long()), "its lam is torch.int64"),
    "another name": ({"arrays": lambda sent: {"mean": sent["lam"]}}, "it sent no lam"),
    "one more": ({"arrays": lambda sent: sent | {"eta": sent["lam"]}}, "it sent eta, for which nobody asked"),
    "nothing": ({"arrays": lambda sent: {}}, "it sent no lam"),
    "too much": ({"arrays": lambda sent: {"lam": torch.zeros(10_000)}}, "bytes, where at most"),
    "bytes that are no array": ({"arrays": raw(b"\x93NUMPY" + 99 * b"x")}, "its arrays cannot be read"),
    "an archive": ({"arrays": raw(b"PK\x05\x06" + 18 * b"\0")}, "its arrays cannot be read"),
    "a pickle": ({"arrays": raw(b"\x80\x04N.", "pickle")}, "its arrays cannot be read"),
    "a header that asks for more memory than there is": ({"arrays": raw(huge)}, "its arrays cannot be read"),
    "another's id": ({"config": lambda said: said | {"client": "0"}}, "it says that it is client 0"),
    "no id": ({"config": lambda said: {}}, "it says that it is client None"),
    "an old nonce": ({"config": lambda said: said | {"nonce": "a.1.1"}}, "another attempt at a round"),
    "another payload": ({"config": lambda said: said | {"payload": "int8"}}, "its payload is int8, not full"),
    "a made-up payload": ({"config": lambda said: said | {"payload": "x\n" * 999}}, "its payload is x x x"),
    "garbage": ({"config": lambda said: said | {"client": [1.5, 2.5]}}, "it says that it is client"),
    "no number of examples": ({"metrics": lambda sent: {}}, "its number of examples is None"),
    "NaN examples": ({"metrics": lambda sent: {"num-examples": math.nan}}, "its number of examples is nan"),
    "no examples": ({"metrics": lambda sent: {"num-examples": 0}}, "its number of examples is 0"),
    "negative examples": ({"metrics": lambda sent: {"num-examples": -3}}, "its number of examples is -3"),
    "infinite examples": ({"metrics": lambda sent: {"num-examples": math.inf}}, "its number of examples is inf"),
    "a list of examples": ({"metrics": lambda sent: {"num-examples": [1, 2]}}, "its number of examples is"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_reply_is_refused_and_named_and_the_round_goes_on_without_it(sites, what):
    changes, reason = HOSTILE[what]
    sites.run(4, changed(**changes))
    record = sites.history[BAD - 1]
    assert record["clients"] == ["0", "2"]
    assert record["refused"] == 1
    (client, why), = record["left_out"].items()  # fmt: skip
    assert client == "1"
    assert re.search(reason, why)
    assert len(why) <= 600
    assert "\n" not in why
    assert [clients for clients in sites.counted if "1" in clients] == [["0", "1", "2"]] * 3
    sites.agrees()


@pytest.mark.parametrize("part", [-1.0, 7.0, math.nan, [0.5, 0.5], None])
def test_what_is_no_part_of_the_parameters_counts_as_none(sites, part):
    figures = {} if part is None else {"limited": part, "held": part}
    sites.run(4, changed(metrics=lambda sent: {"num-examples": sent["num-examples"], **figures}))
    record = sites.history[BAD - 1]
    assert record["clients"] == ["0", "1", "2"]
    assert (record["limited"], record["held"]) == (0.0, 0.0)
    sites.agrees()


def test_a_reply_without_any_record(sites):
    def between(node, message, answer):
        reply = answer()
        return Message(RecordDict(), reply_to=message) if node == 101 and is_train(message, BAD) else reply

    sites.run(4, between)
    assert sites.history[BAD - 1]["left_out"]["1"] == "it says that it is client None"
    sites.agrees()


def test_an_old_reply_that_is_sent_again(sites):
    old = []

    def between(node, message, answer):
        reply = answer()
        if node == 101 and is_train(message, 1):
            old.append(reply)
        return Message(old[0].content, reply_to=message) if node == 101 and is_train(message, BAD) else reply

    sites.run(5, between)
    assert "another attempt" in sites.history[BAD - 1]["left_out"]["1"]
    sites.agrees()


def test_an_answer_to_a_question_that_was_put_to_another_node_counts_for_nobody(sites):
    """Flower lets nobody answer another's message; if it did, the client's id in the reply would be wrong."""
    questions = {}

    def between(node, message, answer):
        questions[node] = message
        reply = answer()
        if node == 101 and is_train(message, BAD):
            return Message(reply.content, reply_to=questions[100])
        return reply

    sites.run(4, between)
    assert sites.history[BAD - 1]["clients"] == ["0", "2"]
    sites.agrees()


@pytest.mark.parametrize(("num", "bad_round"), [(3, 1), (2, 2)])
def test_too_large_an_update_is_seen_among_three_or_after_a_round(tmp_path, num, bad_round):
    sites = Federation(tmp_path, num=num)

    def between(node, message, answer):
        reply = answer()
        if node == 101 and is_train(message, bad_round):
            record = reply.content.array_records[wire.ARRAYS]
            record["lam"] = Array(1e6 * record["lam"].numpy())
        return reply

    sites.run(4, between)
    assert "1" not in sites.counted[bad_round - 1]
    assert sum("1" in clients for clients in sites.counted) == 3
    sites.agrees()
    limitless = Federation(tmp_path / "limitless", num=num)
    limitless.run(4, between, policy=Policy(largest=None))
    assert all("1" in clients for clients in limitless.counted)


def test_an_update_without_a_size_is_refused_where_there_is_none_to_compare_with(tmp_path):
    """A mean beyond all numbers, from one of two, in the first round."""
    sites = Federation(tmp_path, num=2)

    def between(node, message, answer):
        reply = answer()
        if node == 101 and is_train(message, 1):
            reply.content.array_records[wire.ARRAYS]["lam"] = Array(np.array([[1e200] * 4, [-1e-200] * 4]))
        return reply

    sites.run(3, between)
    assert sites.counted == [["0"], ["0", "1"], ["0", "1"]]
    assert "its size is not finite" in sites.history[0]["left_out"]["1"]
    sites.agrees()


def test_a_server_step_that_leaves_the_domain_stops_the_run_and_keeps_the_last_round(tmp_path):
    """Each η_k is finite, their sum is not."""
    sites = Federation(tmp_path, num=2)
    sites.c[1] = sites.c[0]
    sites.c, sites.prior = sites.c.float(), sites.prior.float()
    gamma = 3e38 / float(sites.c[0].abs().max() / EXACT.rho)
    sites.method = replace(EXACT, dual=Natural(gamma))
    sites.grid.apps = {100 + k: sites.node(k) for k in range(2)}
    with pytest.raises(FedualError, match=r"Round 1 diverged, .*; round 0 is kept in .*: lower lr or damping"):
        sites.run(3)
    assert sites.history == []
    assert torch.equal(sites.ledger.server.lam_g, sites.prior)
    assert not sites.ledger.acks


SHARES = {
    "garbage": r"with client 0, because its dual is torch.float64 \(1, 4\)",
    "nothing": r"without the duals of 0 \(it sent no dual\)",
    "NaN": "with client 0, because its dual contains NaN",
    "huge": r"without the duals of 0 \(it sent \d+ bytes, where at most",
    "another": r"without the duals of 0 \(its reply is to another question\)",
}


@pytest.mark.parametrize("share", SHARES)
def test_a_share_that_is_no_dual_stops_the_count_and_changes_nothing(sites, share):
    sites.run(3)
    before = sites.ledger.server.eta_sum

    def between(node, message, answer):
        reply, said = answer(), wire.config_of(message.content)
        if node != 100 or said.get("action") != "share":
            return reply
        own = wire.config_of(reply.content) | ({"nonce": "x"} if share == "another" else {})
        eta = wire.tensors_of(reply.content)["eta"]
        sent = {
            "garbage": {"eta": eta[:1]}, "nothing": {}, "NaN": {"eta": eta * math.nan},
            "huge": {"eta": torch.zeros(10_000)}, "another": {"eta": eta},
        }[share]  # fmt: skip
        return Message(wire.pack(sent, own), reply_to=message)

    with pytest.raises(FedualError, match=rf"Σ η cannot be counted anew {SHARES[share]}.*: .*forget"):
        sites.run(5, between, forget=["1"], keep_shares=False)
    assert torch.equal(sites.ledger.server.eta_sum, before)
    sites.agrees()


def test_figures_of_clients_are_averaged_by_their_examples_and_garbage_is_left_out():
    sound = [{"num-examples": 1, "nll": 2.0}, {"num-examples": 3, "nll": 6.0}]
    assert averaged(sound) == {"nll": 5.0}
    garbage = [
        {},
        {"num-examples": 0, "nll": 9.0},
        {"num-examples": math.nan, "nll": 9.0},
        {"num-examples": [1], "nll": 1},
    ]
    assert averaged(sound + garbage) == {"nll": 5.0}
    assert averaged([*sound, {"num-examples": 4, "nll": math.inf, "made up": 1.0}]) == {"nll": 5.0}
    assert averaged([]) == averaged([{"num-examples": -1, "nll": 3.0}]) == {}


def method_with(**changes):
    """The method of the round with some parts replaced, as the server would send it."""
    return lambda text: json.dumps({**json.loads(text), **changes})


DAMAGED = {  # what a message of the server is changed to, and what its site says
    "no method": ({"method": None}, r"message cannot be read \(KeyError: 'method'\): run the same version of fedual"),
    "half a method": ({"method": lambda text: text[: len(text) // 2]}, "message cannot be read"),
    "a list as a method": ({"method": "[1]"}, "message cannot be read"),
    "a deep list as a method": ({"method": 100_000 * "["}, r"message cannot be read \(RecursionError"),
    "an unknown part": ({"method": method_with(dual={"type": "os.system"})}, "The part 'os.system' is not known here"),
    "an unknown setting": ({"method": method_with(evil=1)}, "Method has no setting 'evil'"),
    "another version": ({"method": method_with(version=99)}, "have version 99, this fedual reads 1"),
    "a number as a solver": ({"method": method_with(solver=3)}, "a part of the method has another type"),
    "a text as a family": ({"method": method_with(family="Diagonal")}, "a part of the method has another type"),
    "a part without its number": (
        {"method": method_with(dual={"type": "Natural"})},
        "Natural comes without its setting 'gamma'",
    ),
    "a tensor of no type": (
        {"method": method_with(family={"type": "tensor", "dtype": "load", "values": ["x"]})},
        "A tensor cannot be read",
    ),
    "a negative rho": ({"method": method_with(rho=-1.0)}, "rho = -1.0: it must be a positive, finite number"),
    "a text as rho": ({"method": method_with(rho="1")}, "rho = '1': it must be a positive, finite number"),
    "an old server's method": ({"method": "ivon-admm"}, "cannot be read .* run the same version of fedual"),
    "no training": ({"train": None}, "message cannot be read"),
    "training that is no table": ({"train": "7"}, "message cannot be read"),
    "an unknown option": ({"train": '{"seed": 0, "version": 1, "learn": "all"}'}, "has no setting 'learn'"),
    "no number": ({"number": None}, "message cannot be read"),
    "a negative number": ({"number": -1}, "number = -1: it must be a whole number"),
    "a text as the round": ({"round": "three"}, "round = 'three': it must be a whole number"),
    "no nonce": ({"nonce": None}, "message cannot be read"),
    "a nonce that cannot be compared": ({"nonce": lambda nonce: f"{nonce}.x"}, "its nonce is damaged"),
    "an ack of nobody": ({"ack": "made.1.1"}, "no state of round made.1.1, which the server counted"),
    "another payload": ({"payload": "zip"}, "its payload is 'zip'"),
    "no waiting time": ({"wait": "long"}, "message cannot be read"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_message_of_the_server_is_refused_by_its_site_and_changes_nothing(sites, what):
    changes, reason = DAMAGED[what]
    said = []

    def between(node, message, answer):
        if node != 101 or not is_train(message, BAD):
            return answer()
        config = message.content.config_records[wire.CONFIG]
        for key, change in changes.items():
            value = change(config[key]) if callable(change) else change
            if value is None:
                del config[key]
            else:
                config[key] = value
        before = sites.vault("1").read_bytes()
        reply = answer()
        assert not reply.has_error()
        said.append(wire.config_of(reply.content)["refusal"])
        assert sites.vault("1").read_bytes() == before
        return reply

    sites.run(4, between)
    (why,) = said
    assert re.search(reason, why)
    assert "\n" not in why
    assert sites.counted == [["0", "1", "2"]] * 2 + [["0", "2"], ["0", "1", "2"]]
    sites.agrees()


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({}, r"message cannot be read \(KeyError: 'lam_g'\)"),
        ({"lam_g": torch.full((2, 4), math.nan)}, "The server's λ_g is outside the domain of Diagonal"),
        ({"lam_g": torch.ones(3, 4)}, r"The server's λ_g has shape \(3, 4\)"),
        ({"lam_g": torch.ones(2, 4, dtype=torch.int64)}, "The server's λ_g is torch.int64"),
    ],
)
def test_a_damaged_posterior_of_the_server_is_refused_by_its_site(sites, arrays, reason):
    def between(node, message, answer):
        if node == 101 and is_train(message, BAD):
            message.content.array_records[wire.ARRAYS] = wire.arrays(arrays)
        return answer()

    sites.run(4, between)
    assert re.search(reason, sites.history[BAD - 1]["left_out"]["1"])
    assert sites.counted[BAD - 1] == ["0", "2"]
    sites.agrees()


@dataclass(frozen=True)
class Cautious(Natural):
    """A dual that a user wrote."""


def test_a_part_that_a_user_wrote_is_known_to_a_site_once_it_is_registered(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_PARTS", dict(parts._PARTS))
    sites = Federation(tmp_path, method=replace(EXACT, dual=Cautious(GAMMA)))
    with pytest.raises(FedualError, match=r"The part .Cautious. is not known here.*fedual\.parts\.register"):
        sites.run(3)
    parts.register(Cautious)
    sites.run(6)
    assert sites.counted == [[]] * 3 + [["0", "1", "2"]] * 3
    sites.agrees()
