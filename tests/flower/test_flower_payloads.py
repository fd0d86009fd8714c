"""Short payloads end to end: both sides have the same Σ η, and error feedback brings back what rounding takes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import EXACT, Federation, is_train

from fedual.algorithm import Expectation
from fedual.flower import wire

pytestmark = pytest.mark.usefixtures("clock")
DIM = 3000  # three blocks of int8, the last one shorter


class Killed(BaseException):
    """No `except Exception` sees it, as none sees SIGKILL."""


@pytest.fixture
def sites(tmp_path) -> Federation:
    return Federation(tmp_path, dim=DIM)


def same_sum(sites: Federation) -> None:
    server = sites.ledger.server
    np.testing.assert_allclose(server.eta_sum, sum(sites.duals().values()), rtol=1e-11, atol=1e-13)


def error(sites: Federation, found: torch.Tensor) -> float:
    return float((found - sites.pooled()).norm() / sites.pooled().norm())


@pytest.mark.parametrize("payload", ["bf16", "int8"])
def test_the_servers_sum_is_the_clients_after_every_round(sites, payload):
    for rounds in range(1, 6):
        sites.run(rounds, payload=payload)
        same_sum(sites)
    assert sites.counted == [["0", "1", "2"]] * 5


@pytest.mark.slow
def test_rounding_costs_nothing_in_the_end(tmp_path):
    """What is rounded is the change, which vanishes: the pooled posterior is reached as closely as with "full"."""
    found = {kind: Federation(tmp_path / kind, dim=DIM) for kind in ("full", "bf16", "int8")}
    errors = {kind: error(one, one.run(40, payload=kind).ledger.server.lam_g) for kind, one in found.items()}
    assert errors["full"] < 1e-5
    assert max(errors.values()) < 1.1 * errors["full"]
    for one in found.values():
        same_sum(one)


def test_without_error_feedback_a_round_would_cost_more(sites, monkeypatch):
    """The sum of what the clients sent differs from the sum of their changes by one round's rounding, not by all."""
    sent, rounds = [], 12

    def between(node, message, answer):
        reply = answer()
        if node == 101 and is_train(message):
            parts, lam_g = wire.tensors_of(reply.content), wire.tensors_of(message.content)["lam_g"]
            sent.append((parts["codes"].view(torch.bfloat16).double(), lam_g))
        return reply

    sites.run(rounds, between, payload="bf16")
    eta = total = torch.zeros_like(sites.prior)
    for decoded, lam_g in sent:
        total = total + (sites.c[1] - eta) / EXACT.rho - decoded  # what rounding kept back so far
        eta = eta + 0.2 * decoded
        assert lam_g.shape == decoded.shape
    last = sent[-1][0].abs()
    assert (total.abs() <= last * 2**-8 + 1e-12).all()
    assert total.abs().max() > 0


@pytest.mark.parametrize(
    ("payload", "arrays", "bytes"), [("full", 1, 16 * DIM), ("bf16", 1, 4 * DIM), ("int8", 2, 2 * DIM + 4 * 2 * 3)]
)
def test_bytes_of_a_round(sites, payload, arrays, bytes):
    """Of 8 bytes a number, 2 are left with bf16, and 1 with int8 and a scale of 4 bytes for every block of a row."""
    (record,) = sites.run(1, payload=payload).history
    header = 128  # of NumPy's format, for each array
    assert record["bytes_up"] == 3 * (bytes + arrays * header)
    assert record["bytes_down"] == 3 * (8 * 2 * DIM + header)


@pytest.mark.parametrize("payload", ["bf16", "int8"])
def test_a_kill_changes_nothing(tmp_path, sites, payload):
    """The error that is fed back is part of what counted: a round that is tried again rounds the same."""
    calm = Federation(tmp_path / "calm", dim=DIM).run(6, payload=payload)
    for bad in (2, 4):

        def between(node, message, answer, bad=bad):
            reply = answer()
            if node == 102 and is_train(message, bad):
                raise Killed
            return reply

        with pytest.raises(Killed):
            sites.run(6, between, payload=payload)
    sites.run(6, payload=payload)
    assert torch.equal(sites.ledger.server.lam_g, calm.ledger.server.lam_g)
    same_sum(sites)


def test_a_dual_that_the_server_cannot_infer_travels_in_full(tmp_path):
    sites = Federation(tmp_path, dim=40, method=replace(EXACT, dual=Expectation(0.05)))
    sites.run(5, payload="int8")
    same_sum(sites)
    assert sites.counted == [["0", "1", "2"]] * 5


def test_parts_that_are_no_payload_are_refused(sites):
    def between(node, message, answer):
        reply = answer()
        if node == 101 and is_train(message, 2):
            sent = wire.tensors_of(reply.content)
            sent["scales"] = -sent["scales"]
            reply.content.array_records[wire.ARRAYS] = wire.arrays(sent)
        return reply

    sites.run(3, between, payload="int8")
    assert sites.counted == [["0", "1", "2"], ["0", "2"], ["0", "1", "2"]]
    assert "scales are negative" in sites.history[1]["left_out"]["1"]
    same_sum(sites)
