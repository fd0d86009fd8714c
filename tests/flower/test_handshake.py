"""Before a site takes part: it must agree with the server on everything, and be who it was before."""

import json
import math

import pytest
import torch
from federation import Federation, is_train
from flwr.app import Message
from torch import nn

from fedual.errors import FedualError, InputError
from fedual.flower import Policy, client_app, wire
from fedual.networks import Network

pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture
def sites(tmp_path) -> Federation:
    return Federation(tmp_path)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def frozen(value: float) -> nn.Module:
    model = small()
    weight = model[0].requires_grad_(False).get_parameter("weight")
    weight[0, 0] = value
    return model


DATA = {"data": lambda node: (torch.zeros(5, 3), torch.zeros(5, dtype=torch.long))}
ends_in = lambda last: lambda: nn.Sequential(nn.Linear(3, 2), last)
OTHERS = {  # what a site has, what the server has: a model, and settings
    "layout": (lambda: nn.Linear(3, 2), {}, small, {}, "its model is .*, the server's "),
    "activation": (ends_in(nn.ReLU()), {}, ends_in(nn.Tanh()), {}, "its model is "),
    "dtype": (lambda: small().float(), {}, small, {}, "its model is "),
    "frozen weights": (lambda: frozen(1.0), {}, lambda: frozen(2.0), {}, "its model is "),
    "labels": (small, {"about": {"labels": "a,b"}}, small, {"about": {"labels": "b,a"}}, "its labels is a,b"),
    "unsaid labels": (small, {}, small, {"about": {"labels": "b,a"}}, "its labels is None, the server's b,a"),
    "scale": (lambda: Network(small(), scale=255.0), {}, small, {}, "its scale is 255.0, the server's None"),
    "loss": (small, {"loss": "mse"}, small, {}, "its loss is mse, the server's cross_entropy"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_a_site_that_differs_is_turned_away_by_name(tmp_path, what):
    theirs, own, ours, settings, reason = OTHERS[what]
    sites = Federation(tmp_path, num=1)
    sites.grid.apps[100] = client_app(theirs, **DATA, **own), sites.grid.apps[100][1]
    with pytest.raises(FedualError, match=f"client 0 was turned away: {reason}.*submit the run again"):
        sites.run(1, prior=None, model=ours(), method="fedavg", **settings)


def test_a_site_with_another_version_of_fedual_is_turned_away(sites, monkeypatch):
    monkeypatch.setattr("fedual.flower.facts.__version__", "0.0.1")
    server = sites.server(1)
    monkeypatch.setattr("fedual.flower.facts.__version__", "0.0.2")
    with pytest.raises(FedualError, match=r"its fedual is 0\.0\.2, the server's 0\.0\.1"):
        server.start(sites.grid)  # type: ignore[arg-type]


def test_somebody_elses_id_is_refused_and_its_owner_goes_on(sites):
    """Whoever comes with an id that was here before must have its key."""
    sites.run(2)
    app, config = sites.node(1)
    sites.grid.apps = {100: sites.node(0), 99: (app, config | {"state-dir": str(sites.path / "thief")})}
    with pytest.raises(FedualError, match="client 1 was turned away: another site has this id, or it lost its state"):
        sites.run(4, min_clients=2)
    sites.grid.apps |= {101: (app, config), 102: sites.node(2)}
    sites.run(4, min_clients=2)  # the thief answers first
    assert sum("1" in clients for clients in sites.counted) >= 2
    sites.agrees()


GREETINGS = {
    "no facts": ({"facts": None}, "it does not say what it runs"),
    "garbage": ({"facts": "{"}, "it does not say what it runs"),
    "a number": ({"facts": "5"}, "it does not say what it runs"),
    "pairs": ({"facts": "[[1, 2]]"}, "it does not say what it runs"),
    "a deep list": ({"facts": 100_000 * "["}, "it does not say what it runs"),
    "long facts": ({"facts": json.dumps({"fedual": 10_000 * "x"})}, "its fedual is xxx"),
    "no key": ({"key": None}, "it does not show its key"),
    "a strange key": ({"key": 64 * "0"}, "it does not show its key"),
    "no signature": ({"signature": None}, "it does not show its key"),
    "another signature": ({"signature": 128 * "0"}, "it does not show its key"),
    "another client": ({"client": "9"}, "it does not show its key"),
    "no id": ({"client": None}, "a client's id is a text"),
    "a number as id": ({"client": 1}, "a client's id is a text"),
    "a long number": ({"client": 5000 * "9"}, "a client's id is a text"),
    "lines": ({"client": "1\nWARNING: all is well"}, "a client's id is a text"),
    "a long refusal": ({"refusal": 10_000 * "no\n"}, "no no no"),
}


@pytest.mark.parametrize("what", GREETINGS)
def test_a_site_that_greets_with_garbage_is_turned_away_and_the_others_go_on(sites, what, caplog):
    change, reason = GREETINGS[what]

    def between(node, message, answer):
        reply = answer()
        if node == 101 and not is_train(message):
            config = {**wire.config_of(reply.content), **change}
            return Message(wire.pack({}, config), reply_to=message)
        return reply

    sites.run(2, between)
    assert sites.counted == [["0", "2"]] * 2
    assert reason in caplog.text
    assert all(len(line) < 1000 for line in caplog.text.splitlines())
    sites.agrees()


def test_a_site_whose_app_fails_at_the_handshake_is_named_and_asked_again(sites, clock, caplog):
    app, config = sites.grid.apps[101]
    sites.grid.apps[101] = app, {key: value for key, value in config.items() if key != "client-id"}

    def between(node, message, answer):
        clock.now += 5
        if is_train(message, 2):
            sites.grid.apps[101] = app, config  # repaired
        return answer()

    sites.run(6, between)
    assert "client at node 101 was turned away: This SuperNode has no name" in caplog.text
    assert sites.counted[0] == ["0", "2"]
    assert sites.counted[-1] == ["0", "2", "1"]  # by their numbers: it came last
    sites.agrees()


def test_a_node_that_never_answers_the_handshake_holds_up_one_round_for_grace_seconds(sites, clock):
    silent = lambda node, message, answer: None if node == 101 else answer()
    sites.run(6, silent)
    assert sites.counted == [["0", "2"]] * 6
    assert 10 <= clock.now < 20
    sites.agrees()


def test_a_node_that_returns_under_another_id_while_flower_still_lists_the_old_one(sites, clock):
    def between(node, message, answer):
        clock.now += 5
        if is_train(message, 3):
            sites.grid.apps[201] = sites.node(1)  # as a SuperNode without a key returns
        if is_train(message, 4):
            sites.grid.apps.pop(101, None)
        return None if node == 101 and is_train(message) and 201 in sites.grid.apps else answer()

    sites.run(8, between)
    counted = ["1" in clients for clients in sites.counted]
    assert counted[:2] == [True] * (2)
    assert counted[-1]
    sites.agrees()


def test_clients_are_numbered_by_their_ids_not_by_who_answered_first(tmp_path):
    """Their draws depend on it: site 10 comes after site 9."""
    sites = Federation(tmp_path, num=11)
    sites.grid.apps = dict(reversed(sites.grid.apps.items()))
    sites.run(1)
    assert sites.ledger.numbers == {str(k): k for k in range(11)}


def test_of_two_nodes_with_one_id_the_first_takes_part(sites, caplog):
    sites.grid.apps[201] = sites.node(1)
    sites.run(2)
    assert "client 1 was turned away: another node has this id now" in caplog.text
    asked = [message.metadata.dst_node_id for message in sites.grid.sent if is_train(message)]
    assert asked == [100, 101, 102] * 2
    sites.agrees()


def test_a_site_whose_answer_to_the_handshake_was_lost_is_asked_again(sites, clock):
    lost = []

    def between(node, message, answer):
        clock.now += 20 * is_train(message)
        if node == 101 and not lost:
            lost.append(answer())
            return None
        return answer()

    sites.run(6, between)
    assert sites.counted[0] == ["0", "2"]
    assert "1" in sites.counted[-1]
    sites.agrees()


def test_a_policy_that_cannot_be_kept_is_refused():
    for bad in (
        {"min_clients": 0},
        {"enough": 0},
        {"enough": 1.5},
        {"wait": -1},
        {"timeout": math.nan},
        {"largest": 0},
    ):
        with pytest.raises(InputError, match=f"{next(iter(bad))} = "):
            Policy(**bad)  # type: ignore[arg-type]
