"""What one dishonest site may do: count once with what it said, move q_g so far, and take no part of others with it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import EXACT, Federation, is_train
from flwr.app import Array, Message

from fedual.algorithm import ExampleWeights, Natural
from fedual.errors import FedualError
from fedual.families import Diagonal
from fedual.flower import ledger, wire
from fedual.solvers import Conjugate

pytestmark = pytest.mark.usefixtures("clock")
ALL = ["0", "1", "2"]
WEIGHTED = replace(EXACT, weighting=ExampleWeights(1.0))


@pytest.fixture
def sites(tmp_path) -> Federation:
    return Federation(tmp_path)


def is_action(message, action):
    return wire.config_of(message.content).get("action") == action


def claims(examples, node=101):
    """A site that says so in the handshake, and in every reply."""

    def between(at, message, answer):
        reply = answer()
        if at == node and is_action(message, "hello"):
            reply.content.config_records[wire.CONFIG]["examples"] = examples
        if at == node and is_train(message):
            reply.content.metric_records[wire.METRICS]["num-examples"] = examples
        return reply

    return between


def sends(change, rounds, node=101):
    """A site that sends another λ_k in some rounds: a function of the right one, a NumPy array."""

    def between(at, message, answer):
        reply = answer()
        if at == node and any(is_train(message, round) for round in rounds):
            record = reply.content.array_records[wire.ARRAYS]
            record["lam"] = Array(change(record["lam"].numpy().copy()))
        return reply

    return between


def size(before, after) -> float:
    """KL(q ‖ p) + KL(p ‖ q) of two diagonal Gaussians, from means and precisions."""
    m, s = before[0] / (-2 * before[1]), -2 * before[1]
    m2, s2 = after[0] / (-2 * after[1]), -2 * after[1]
    return float(((s + s2) * (m - m2) ** 2 / 2 + (s2 - s) ** 2 / (2 * s * s2)).sum())


@pytest.mark.parametrize("examples", [1000.0, 1.5, 0.001])
def test_a_reply_of_another_number_of_examples_is_refused_and_named(sites, examples):
    def between(node, message, answer):
        reply = answer()
        if node == 101 and is_train(message, 3):
            reply.content.metric_records[wire.METRICS]["num-examples"] = examples
        return reply

    sites.run(4, between)
    assert sites.counted == [ALL, ALL, ["0", "2"], ALL]
    assert "joined with 1 to train on" in sites.history[2]["left_out"]["1"]
    sites.agrees()


@pytest.mark.parametrize("examples", [1e30, 1e160, 1.7e308])
def test_a_number_of_examples_that_nobody_has_is_turned_away_and_nobody_else_is_blamed(sites, examples, caplog):
    sites.run(3, claims(examples))
    assert sites.counted == [["0", "2"]] * 3
    assert f"it says that it has {examples:g} examples: nobody has that many" in caplog.text
    assert all(not record["left_out"] for record in sites.history)
    sites.agrees()


def test_a_lie_about_examples_in_the_handshake_is_capped_and_shown(tmp_path):
    """Four sites of one example: the smaller half has two, and no site counts for more than three times as much."""
    sites = Federation(tmp_path, num=4, method=WEIGHTED)
    server = sites.run(2, claims(1e9))
    assert server.ledger.counts == {"0": 1.0, "1": 6.0, "2": 1.0, "3": 1.0}
    assert server.ledger.total == 9.0
    assert sites.history[0]["capped"] == {"1": [1e9, 6.0]}
    asked = {
        wire.config_of(message.content)["number"]: wire.config_of(message.content)["method"]
        for message in sites.grid.sent
        if is_train(message, 1)
    }
    assert asked[0] != asked[1]  # its unit is larger, so that its weight is 6


class Heavy(Conjugate):
    """A site that really has so many examples."""

    @property
    def num_examples(self):
        return torch.tensor([1e6], dtype=torch.float64)


def test_a_site_that_is_capped_and_the_server_weigh_it_alike(tmp_path):
    sites = Federation(tmp_path, num=4, method=WEIGHTED)
    sites.grid.apps[101] = sites.node(1, losses=lambda node: Heavy(Diagonal(), sites.c[[1]]))
    sites.run(3)
    assert sites.history[0]["capped"] == {"1": [1e6, 6.0]}
    assert sites.counted == [["0", "1", "2", "3"]] * 3
    total = sum(sites.duals().values())
    np.testing.assert_allclose(sites.ledger.server.eta_sum, total, rtol=1e-10)


def test_a_site_may_say_another_number_when_it_joins_again_and_the_log_shows_it(sites, caplog):
    sites.run(2)
    sites.run(3, claims(2.0))
    assert sites.counted == [ALL] * 3
    assert "client 1 says that it has 2 examples, where it had 1" in caplog.text


def test_a_site_that_breaks_the_arithmetic_is_refused_and_the_others_count(sites, monkeypatch):
    from fedual.flower import updates

    real = updates.influence.sizes

    def sizes(family, lam_g, moves):
        if float(moves.abs().max()) > 1e100:
            raise OverflowError("math range error")
        return real(family, lam_g, moves)

    monkeypatch.setattr(updates.influence, "sizes", sizes)
    sites.run(3, sends(lambda lam: 1e200 * lam, [2]))
    assert sites.counted == [ALL, ["0", "2"], ALL]
    assert "math range error" in sites.history[1]["left_out"]["1"]


@pytest.mark.parametrize("factor", [30.0, 300.0])
def test_a_precise_lie_after_honest_rounds_moves_little_and_the_site_is_named(tmp_path, factor):
    """Rolled means with a precision that is far too large, once, late: it was the whole result."""
    sites = Federation(tmp_path, num=10)
    roll = lambda lam: factor * np.roll(lam, 1, axis=1)
    sites.run(19)
    before = sites.ledger.server.lam_g
    sites.run(20, sends(roll, [20]))
    record = sites.history[-1]
    assert record["cut"].get("1", 1.0) < 0.2 or "too large" in record["left_out"]["1"]
    assert record["cut"].keys() <= {"1"}
    assert size(before.numpy(), sites.ledger.server.lam_g.numpy()) < 4  # P nats


def test_the_limit_cannot_be_raised_step_by_step(tmp_path):
    """A site that triples its precision in each round: q_g's grows by what is usual and a quarter, and no more."""
    sites, grown = Federation(tmp_path, num=10), []

    def between(node, message, answer):
        if node == 101 and is_train(message):
            grown.append(3.0 ** len(grown))
        return sends(lambda lam: grown[-1] * lam, range(1, 41))(node, message, answer)

    sites.run(12, between)
    assert sites.ledger.sizes
    honest = [pairs[0][0] for pairs in sites.ledger.sizes if len(pairs) > 1]
    assert max(honest) < 10  # the sizes of others, with which it is compared, did not follow
    late = sites.history[-3:]
    assert all("1" in record["left_out"] or record["cut"]["1"] < 1e-3 for record in late)


def test_one_of_two_is_bounded_in_the_first_round(tmp_path):
    sites = Federation(tmp_path, num=2)
    sites.run(1, sends(lambda lam: 1e6 * lam, [1]))
    assert sites.counted == [["0"]]
    assert "too large" in sites.history[0]["left_out"]["1"]
    sites.agrees()


@pytest.mark.parametrize("payload", ["full", "bf16"])
def test_a_cut_update_moves_the_dual_by_the_same_part_whatever_fails(tmp_path, payload):
    """The answer is lost, and the message comes twice: Σ η stays the sum of what the sites have."""
    sites = Federation(tmp_path, num=5)
    lost = []

    def between(node, message, answer):
        if node == 101 and is_train(message, 3):
            answer()
        reply = answer()
        if node == 101 and is_train(message, 4) and not lost:
            lost.append(reply)
            return None
        return reply

    sites.c[1] *= 40  # one site whose data say much more than those of others
    sites.grid.apps = {100 + k: sites.node(k) for k in range(5)}
    sites.run(8, between, payload=payload)
    assert any("1" in cut for cut in sites.cuts)
    total = sum(sites.duals().values())
    np.testing.assert_allclose(sites.ledger.server.eta_sum, total, rtol=1e-10, atol=1e-12)


def test_an_honest_site_that_says_much_more_than_others_is_cut_and_not_lost(tmp_path):
    """The fixed point is the pooled posterior all the same."""
    sites = Federation(tmp_path, num=5)
    sites.c[1] *= 40
    sites.grid.apps = {100 + k: sites.node(k) for k in range(5)}
    sites.run(150)
    assert all(not record["left_out"] for record in sites.history)
    assert sites.cuts[0].keys() == {"1"}
    np.testing.assert_allclose(sites.ledger.server.lam_g, sites.pooled(), rtol=1e-6)


def lying_share(factor):
    def between(node, message, answer):
        reply = answer()
        if node == 100 and is_action(message, "share"):
            eta = wire.tensors_of(reply.content)["eta"]
            return Message(wire.pack({"eta": factor * eta}, wire.config_of(reply.content)), reply_to=message)
        return reply

    return between


def test_a_client_is_forgotten_without_anybodys_word(sites):
    sites.run(3)
    before = len(sites.grid.sent)
    sites.run(4, lying_share(-1e6), forget=["1"])
    assert not any(is_action(message, "share") for message in sites.grid.sent[before:])
    sites.agrees([ALL, ALL, ALL, "-1", ["0", "2"]])


def test_a_client_is_forgotten_while_nobody_else_has_answered_yet(sites):
    """The others are not even there."""
    sites.run(3)
    apps = sites.grid.apps
    sites.grid.apps = {102: apps[102]}
    server = sites.server(3, forget=["0"])
    server.start(sites.grid)  # type: ignore[arg-type]
    left = {client: eta for client, eta in sites.duals().items() if client != "0"}
    np.testing.assert_allclose(sites.ledger.server.eta_sum, sum(left.values()), rtol=1e-12)


@pytest.mark.parametrize(("factor", "why"), [(1e6, "too large"), (math.inf, "contains NaN or infinity")])
def test_where_duals_are_not_kept_a_lying_share_is_refused_and_nothing_changes(sites, factor, why):
    sites.run(3, keep_shares=False)
    before = sites.ledger.server.eta_sum
    assert sites.ledger.shares is None
    with pytest.raises(FedualError, match=f"cannot be counted anew with client 0, because .*{why}.*: forget it, too"):
        sites.run(4, lying_share(factor), forget=["1"], keep_shares=False)
    assert torch.equal(sites.ledger.server.eta_sum, before)
    sites.run(4, forget=["1"], keep_shares=False)
    sites.agrees([ALL, ALL, ALL, "-1", ["0", "2"]])


def test_the_shares_that_the_server_keeps_are_those_of_the_sites(tmp_path):
    sites = Federation(tmp_path, num=4, method=replace(WEIGHTED, dual=Natural(0.3)))
    sites.run(5, payload="int8")
    shares = sites.ledger.shares
    assert shares is not None
    for client, eta in sites.duals().items():
        np.testing.assert_allclose(shares[client], eta, rtol=1e-9, atol=1e-12)


def test_shares_that_take_too_much_room_are_kept_for_those_who_ask(sites, monkeypatch):
    each = sites.prior.nbytes
    monkeypatch.setattr(ledger, "MOST_KEPT", 3 * each)
    sites.run(2)
    assert sites.ledger.shares is not None
    monkeypatch.setattr(ledger, "MOST_KEPT", 3 * each - 1)
    sites.run(3, keep_shares=True)
    assert sites.ledger.shares is not None
    sites.run(4)
    assert sites.ledger.shares is None
    sites.agrees()


@pytest.mark.parametrize("robust", ["share", "trimmed", None])
def test_a_site_that_nobody_can_be_compared_with_is_compared_with_the_prior(tmp_path, robust):
    sites = Federation(tmp_path, num=2)
    sites.run(4, participation=0.5, robust=robust)
    assert all(len(clients) == 1 for clients in sites.counted)
