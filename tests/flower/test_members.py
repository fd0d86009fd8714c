"""Clients that lose their state, are re-admitted, leave, or join: Σ η stays the sum of what the clients have."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from federation import EXACT, GAMMA, RHO, Federation, is_train
from slow import rest_slow
from torch.testing import assert_close

from fedual.algorithm import Average, Consensus, ControlVariate, Mean, Zero
from fedual.errors import FedualError, InputError
from fedual.families import Isotropic
from fedual.flower import readmission, wire
from fedual.flower.ledger import Ledger
from fedual.methods import fedadmm
from fedual.rundir import RunDirectory
from fedual.solvers import AtServer

pytestmark = pytest.mark.usefixtures("clock")
ALL = ["0", "1", "2"]
CONVERGED = 80
"""Rounds after which λ_g is the pooled posterior to 1e-9."""


class Killed(BaseException):
    """No `except Exception` sees it, as none sees SIGKILL."""


@pytest.fixture
def sites(tmp_path) -> Federation:
    return Federation(tmp_path)


def lose(sites: Federation, how: str, client: str = "1") -> None:
    """Harm the state of a site: remove it with its key or without, damage it, or restore an old backup."""
    if how == "deleted":
        shutil.rmtree(sites.path / f"site{client}")
        return
    file = sites.vault(client)
    if how == "removed":
        file.unlink()
    elif how == "damaged":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        shutil.copy(file.with_suffix(".backup"), file)


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_a_client_that_loses_its_state_is_named_and_left_out_and_the_run_goes_on(sites, how):
    def between(node, message, answer):
        if node == 101 and is_train(message, 3):
            lose(sites, how)
        return answer()

    sites.run(6, between)
    assert sites.counted == [ALL] * 2 + [["0", "2"]] * 4
    assert all("re-admit this client" in record["left_out"]["1"] for record in sites.history[2:])
    lam_g = sites.ledger.server.lam_g
    assert (lam_g - sites.pooled()).norm() > 0  # its old share still counts: nothing is made up
    lose(sites, "deleted")  # with its key nobody knows it any more
    with pytest.raises(FedualError, match=r"After 100 s 2 clients are there, 3 are needed.*client 1 was turned away"):
        sites.run(7, min_clients=3)


@pytest.mark.parametrize("how", rest_slow(["deleted", "removed", "damaged", "restored"], "deleted", "damaged"))
def test_a_client_that_lost_its_state_is_readmitted_and_the_pooled_posterior_reached(sites, how):
    sites.run(2)
    shutil.copy(sites.vault("1"), sites.vault("1").with_suffix(".backup"))
    sites.run(5)
    lose(sites, how)
    if how == "damaged":
        sites.run(6, min_clients=2)  # left out
        sites.vault("1").unlink()  # as the message says
    else:
        sites.run(6)
    sites.run(9, readmit=["1"], min_clients=3)
    assert sites.counted == [ALL] * 5 + [["0", "2"]] + [ALL] * 3
    sites.agrees([*sites.counted[:6], "-1", *sites.counted[6:]])
    sites.run(CONVERGED)
    assert_close(sites.ledger.server.lam_g, sites.pooled(), rtol=1e-9, atol=1e-9)


def test_readmitting_with_all_clients_needed_does_not_wait_for_the_one_that_cannot_come_yet(sites):
    sites.run(2, min_clients=3)
    lose(sites, "deleted")
    sites.run(4, readmit=["1"], min_clients=3)
    assert sites.counted == [ALL] * 4
    sites.agrees([ALL, ALL, "-1", ALL, ALL])


def test_readmitting_a_client_that_has_its_state_does_nothing(sites):
    """The same command is submitted again after every failure: the first re-admission must be the only one."""
    sites.run(2)
    lose(sites, "deleted")
    for rounds in (3, 4, 5):
        sites.run(rounds, readmit=["1"])
    assert sites.counted == [ALL] * 5
    sites.agrees([ALL, ALL, "-1", ALL, ALL, ALL])


def test_a_server_killed_while_it_counts_anew_starts_over(sites, monkeypatch):
    sites.run(2)
    lose(sites, "deleted")
    steps = [(readmission, "_ask"), (Ledger, "recount"), (Ledger, "release"), (Ledger, "save"), (Ledger, "save")]
    for number, (owner, name) in enumerate(steps):
        with monkeypatch.context() as patch:
            real, calls = getattr(owner, name), [0]

            def dying(*args, real=real, calls=calls, last=number == 4, **kwargs):
                calls[0] += 1
                if last and calls[0] < 2:  # when the run is opened; the second one is of the new sum
                    return real(*args, **kwargs)
                real(*args, **kwargs)
                raise Killed

            patch.setattr(owner, name, dying)
            with pytest.raises(Killed):
                sites.run(4, readmit=["1"], min_clients=3)
    sites.run(4, readmit=["1"], min_clients=3)
    sites.agrees([ALL, ALL, "-1", ALL, ALL])


def test_a_client_that_leaves_for_good(sites):
    sites.run(3)
    sites.run(CONVERGED, forget=["1"])
    assert sites.counted == [ALL] * 3 + [["0", "2"]] * (CONVERGED - 3)
    sites.agrees([*sites.counted[:3], "-1", *sites.counted[3:]])
    assert_close(sites.ledger.server.lam_g, sites.pooled(1), rtol=1e-9, atol=1e-9)
    sites.run(CONVERGED + 1, forget=["1"])  # again: nothing to take off
    sites.run(CONVERGED + 2)  # it is remembered that it left
    assert sites.counted[-2:] == [["0", "2"]] * 2


def test_participation_is_a_share_of_the_clients_that_did_not_leave(tmp_path):
    sites = Federation(tmp_path, num=4)
    sites.run(2, participation=0.5)
    sites.run(4, participation=0.5, forget=["1", "2"])
    assert [len(clients) for clients in sites.counted] == [2, 2, 1, 1]


def test_a_client_can_be_forgotten_that_is_not_there(sites):
    sites.run(3)
    del sites.grid.apps[101]
    sites.run(5, forget=["1"])
    sites.agrees([ALL, ALL, ALL, "-1", ["0", "2"], ["0", "2"]])


def test_a_client_that_left_can_be_readmitted(sites):
    sites.run(3)
    sites.run(4, forget=["1"])
    sites.run(6, readmit=["1"])
    assert sites.counted == [ALL] * 3 + [["0", "2"]] + [ALL] * 2
    sites.agrees([ALL, ALL, ALL, "-1", ["0", "2"], ALL, ALL])


def test_everybody_else_must_be_there_to_count_anew(sites):
    sites.run(3)
    node = sites.grid.apps.pop(102)
    with pytest.raises(FedualError, match="After 100 s 2 must be there, or be forgotten, to count Σ η anew"):
        sites.run(5, forget=["1"], keep_shares=False)
    sites.agrees()
    sites.grid.apps[102] = node
    silent = lambda node, message, answer: None if node == 102 and not is_hello(message) else answer()
    with pytest.raises(FedualError, match=r"without the duals of 2 \(no reply in time\): submit the run again"):
        sites.run(5, silent, forget=["1"], keep_shares=False)
    lose(sites, "deleted", "2")
    with pytest.raises(FedualError, match="without 2, whose state is lost: re-admit or forget them, too"):
        sites.run(5, forget=["1"], keep_shares=False)
    sites.run(5, forget=["1", "2"], keep_shares=False)
    assert sites.ledger.acks.keys() == {"0"}


def is_hello(message) -> bool:
    return message.content.config_records["config"].get("action") == "hello"


@pytest.mark.slow
def test_a_site_that_joins_at_round_3(tmp_path):
    sites = Federation(tmp_path, num=4)
    late = sites.grid.apps.pop(103)

    def between(node, message, answer):
        if is_train(message, 2):
            sites.grid.apps[103] = late
        return answer()

    sites.run(CONVERGED, between)
    assert sites.counted == [ALL] * 2 + [[*ALL, "3"]] * (CONVERGED - 2)
    sites.agrees()
    assert_close(sites.ledger.server.lam_g, sites.pooled(), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_site_that_joins_a_federation_that_has_converged_is_not_refused(tmp_path):
    """Others move by nothing then, and a newcomer's update is many times as large."""
    sites = Federation(tmp_path, num=4)
    late = sites.grid.apps.pop(103)
    sites.run(CONVERGED)
    sites.grid.apps[103] = late
    sites.run(CONVERGED + 1)
    assert sites.counted[-1] == [*ALL, "3"]
    sites.agrees()


def test_feddyn_divides_by_the_clients_that_did_not_leave(sites):
    """θ_g = mean θ_k + Σ v_k/(ρK): K without the one that left."""
    sites.method = replace(EXACT, server=Consensus())
    sites.grid.apps = {100 + k: sites.node(k) for k in range(3)}
    sites.run(2)
    before = sites.run(2, forget=["1"]).ledger.server
    after = sites.run(3).ledger.server
    c, lam_g = sites.c[[0, 2]], before.lam_g
    duals = sites.duals()
    eta_after = torch.stack([torch.as_tensor(duals[k]) for k in ("0", "2")])
    # η⁺ = η + γ(λ − λ_g) and λ = λ_g + (c − η)/ρ: both from η⁺
    ratio = GAMMA / RHO
    eta = (eta_after - ratio * c) / (1 - ratio)
    assert_close(eta.sum(0), before.eta_sum)
    lam = lam_g + (c - eta) / RHO
    assert_close(after.lam_g, lam.mean(0) + eta_after.sum(0) / (RHO * 2))


def test_the_mean_of_the_duals_is_that_of_the_clients_that_did_not_leave(sites):
    """SCAFFOLD's −c, which clients are sent; here η_k is −∇_μ E[ℓ_k] = c_k of the conjugate loss."""
    sites.method = replace(EXACT, solver=AtServer(), dual=ControlVariate(), server=Mean())
    sites.grid.apps = {100 + k: sites.node(k) for k in range(3)}
    asked = lambda: [wire.tensors_of(message.content)["eta_mean"] for message in sites.grid.sent if is_train(message)]
    sites.run(2)
    assert not asked()[0].any()
    assert_close(asked()[-1], sites.c.mean(0))
    sites.run(3, forget=["1"])
    assert_close(asked()[-1], sites.c[[0, 2]].mean(0))


def test_a_method_without_a_dual_has_nothing_to_count(sites):
    sites.method = replace(EXACT, dual=Zero(), server=Average())
    sites.grid.apps = {100 + k: sites.node(k) for k in range(3)}
    sites.run(1)
    del sites.grid.apps[102]
    lose(sites, "deleted")
    sites.run(2)
    sites.run(3, readmit=["1"])
    sites.run(4, forget=["1"])
    assert sites.counted == [ALL, ["0"], ["0", "1"], ["0"]]


def test_impossible_wishes_are_refused(tmp_path):
    sites = Federation(tmp_path)
    with pytest.raises(InputError, match="1 cannot be re-admitted and forgotten at once"):
        sites.server(1, readmit=["1"], forget=["1", "2"])
    with pytest.raises(InputError, match="adds up changes, from which one client's part cannot be removed"):
        sites.server(1, method=fedadmm(), prior=Isotropic().natural(torch.zeros(3)), forget=["1"])


FAULTS = ("none", "none", "lost", "twice", "late", "kill server", "gone")


@pytest.mark.parametrize("seed", rest_slow(range(8), 0, 1))
def test_random_faults_in_every_round(tmp_path, monkeypatch, seed):
    """20 rounds, any fault at any client and the server: nothing is counted twice, and nothing by half."""
    sites, random = Federation(tmp_path, num=4), Random(seed)
    away: dict[int, Any] = {}
    late: list[Callable[[], Any]] = []

    def between(node, message, answer):
        if not is_train(message):
            return answer()
        for other in [other for other in away if random.random() < 0.5]:
            sites.grid.apps[other] = away.pop(other)
        for older in [one for one in late if random.random() < 0.5]:
            late.remove(older)
            older()
        fault = random.choice(FAULTS)
        if fault == "kill server":
            if random.random() < 0.5:
                answer()
            raise Killed
        if fault == "late":
            late.append(answer)
            return None
        if fault == "gone":
            away[node] = sites.grid.apps.pop(node)
            return None
        if fault == "twice":
            answer()
        reply = answer()
        return None if fault == "lost" else reply

    def mortal(real, *args):
        if random.random() < 0.1:
            raise Killed
        found = real(*args)
        if random.random() < 0.1:
            raise Killed
        return found

    with monkeypatch.context() as patch:
        save, append = Ledger.save, RunDirectory.append
        patch.setattr(Ledger, "save", lambda self, path: mortal(save, self, path))
        patch.setattr(RunDirectory, "append", lambda self, record: mortal(append, self, record))
        for _ in range(300):
            try:
                sites.run(20, between)
                break
            except (Killed, FedualError):
                sites.grid.apps |= away
                away.clear()
    assert len(sites.history) == 20
    assert sum(len(clients) for clients in sites.counted) > 10
    sites.agrees()
