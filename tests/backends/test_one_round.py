"""One implementation of the three lines: `step`, both backends, and clients one by one as Flower has them, agree."""

from typing import Any

import torch
import torch.nn.functional as F
from federations import begin
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import normal
from torch import Tensor, nn

from fedual import methods
from fedual.algorithm import (
    Info,
    Method,
    ServerState,
    Totals,
    client_init,
    client_step,
    init,
    server_init,
    server_step,
    step,
    total,
)
from fedual.defaults import Federation, resolve
from fedual.networks import Clients, Draws, Minibatches, Network
from fedual.run import ENGINES

SIZES = [4, 1, 7, 2]
Rows = dict[str, Tensor]
Result = tuple[ServerState, Rows, list[Info]]


def squared_error(f: Tensor, y: Tensor) -> Tensor:
    """A linear problem, and NaN for targets above 100: a client that has one is refused."""
    return (torch.where(y > 100, torch.nan, 1.0) * F.mse_loss(f, y, reduction="none")).sum(-1)


def linear(bad: int | None) -> Minibatches:
    """Linear regression on four unequal clients, of whom one may be refused."""
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(normal((1, 3), 1))
        model.bias.zero_()
    pairs = [(normal((n, 3), n), normal((n, 1), 10 + n)) for n in SIZES]
    if bad is not None:
        pairs[bad][1][0] = 1000.0
    return Minibatches(Network(model), Clients.from_pairs(pairs), squared_error, Draws(3), batch_size=3, local_epochs=2)


@st.composite
def federations(draw: st.DrawFn) -> tuple[Method, list[Tensor], int | None]:
    """A method with some of its settings, who takes part in each of three rounds, and who is refused."""
    name = draw(st.sampled_from(methods.NETWORKS))
    of_ivon: dict[str, st.SearchStrategy[Any]] = {
        "momentum": st.sampled_from([0.0, 0.4]),
        "unit": st.sampled_from([0.0, 2.5]),
        "hold": st.sampled_from([0.0, 0.25]),
        "samples": st.integers(1, 2),
        "lr": st.just(0.05),
    }
    known = methods.settings(name)
    optional = {key: value for key, value in of_ivon.items() if key in known and name.startswith("ivon")}
    chosen = draw(st.fixed_dictionaries({}, optional=optional))
    plan = draw(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=3, max_size=3))
    method = resolve(methods.spec(name, **chosen), Federation(len(SIZES), sum(SIZES)))
    return method, [torch.tensor(sorted(clients)) for clients in plan], draw(st.none() | st.integers(0, 3))


def by_step(method: Method, losses: Minibatches, plan: list[Tensor]) -> Result:
    prior = server_init(method, losses.network.initial()).prior
    state, infos = init(method, prior, len(SIZES), losses.network.initial()), []
    for number, active in enumerate(plan):
        state, info = step(method, state, losses.at(number), active)
        infos.append(info)
    return state.server, state.clients.rows(), infos


def one_by_one(method: Method, losses: Minibatches, plan: list[Tensor]) -> Result:
    """Each client keeps what `client_init` says, and the server infers what need not be sent."""
    server, infos = server_init(method, losses.network.initial()), []
    clients = [client_init(method, server.lam_g) for _ in SIZES]
    for number, active in enumerate(plan):
        sums, broadcast = Totals.none(len(SIZES)), server.broadcast(method.dual, len(SIZES))
        for client in active.tolist():
            mine = losses.at(number)[[client]]
            upload, clients[client] = client_step(method, broadcast, clients[client], mine)
            if method.dual.uploads == 1:
                upload = upload._replace(eta_change=None)
            sums = sums.plus(total(method, broadcast, upload, torch.tensor([client]), len(SIZES)))
        server, info = server_step(method, server, sums)
        infos.append(info)
    rows = [client.rows() for client in clients]
    return server, {key: torch.cat([row[key] for row in rows]) for key in rows[0]}, infos


def by_backend(engine: str, method: Method, losses: Minibatches, plan: list[Tensor]) -> Result:
    server, store = begin(method, losses.network.initial(), len(SIZES))
    infos = []
    for number, active in enumerate(plan):
        server, info = ENGINES[engine](method, server, store, losses.at(number), active, 2)
        infos.append(info)
    return server, store.read(torch.arange(len(SIZES))), infos


@settings(max_examples=15)
@given(federations())
def test_step_backends_and_single_clients_agree(federation):
    method, plan, bad = federation
    losses = linear(bad)
    server, rows, infos = by_step(method, losses, plan)
    others = [one_by_one(method, losses, plan), *(by_backend(engine, method, losses, plan) for engine in ENGINES)]
    for other, its, found in others:
        near = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        assert (other.round, other.moved) == (server.round, server.moved) == (3, any(i.counted.any() for i in infos))
        assert other.tensors().keys() == server.tensors().keys()
        for name, value in server.tensors().items():
            near(other.tensors()[name], value)
        assert set(its) <= set(rows)
        for name, value in its.items():
            near(value, rows[name])
        for info, expected, active in zip(found, infos, plan, strict=True):
            assert torch.equal(info.counted, expected.counted)
            assert torch.equal(info.refused, expected.refused)
            assert info.refused.tolist() == [k == bad and k in active for k in range(len(SIZES))]
            near(torch.tensor([*info[2:5], *info.guards]), torch.tensor([*expected[2:5], *expected.guards]))
