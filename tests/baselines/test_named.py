"""What all methods for networks have in common: building them by name, and clients that stay away."""

from typing import Any

import pytest
import torch
from federations import begin, resolved  # pyright: ignore[reportMissingImports]
from harness import NUM, networks

from fedual import methods
from fedual.errors import InputError
from fedual.run import ENGINES
from fedual.solvers import IVON, SGD, Laplace


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", methods.NETWORKS)
def test_who_stays_away_keeps_every_bit_of_its_state(name, engine):
    losses = networks()
    method = resolved(name, losses)
    server, store = begin(method, losses.network.initial(), NUM)
    assert bool(store.names) == (name not in ("fedivon", "fedavg", "fedprox"))  # those without client state
    for number, clients in enumerate([[0, 1, 2, 3, 4], [1, 3], [4], [0, 2, 4], [2]]):
        before = store.read(torch.arange(NUM))
        server, _ = ENGINES[engine](method, server, store, losses.at(number), torch.tensor(clients), 2)
        for key, rows in store.read(torch.arange(NUM)).items():
            same = (rows == before[key]).reshape(NUM, -1).all(1)
            assert same.tolist() == [k not in clients for k in range(NUM)], key


@pytest.mark.parametrize("name", methods.NETWORKS)
def test_the_defaults_of_all_settings_change_nothing(name):
    assert methods.build(name, **methods.settings(name)) == methods.build(name)


def test_each_setting_goes_where_it_belongs():
    of_sgd: dict[str, Any] = {"lr": 0.2, "optimiser": "sgd", "momentum": 0.9, "max_norm": 10.0}
    built = methods.build("fedadmm", rho=0.3, server_step=0.5, **of_sgd)
    assert built == methods.fedadmm(0.3, 0.5, SGD(**of_sgd))
    assert methods.build("fedlap-cov", damping=0.5, lr=0.2) == methods.fedlap_cov(damping=0.5, solver=Laplace(lr=0.2))
    assert methods.build("ivon-pvi", tau=0.1, clip=0.5) == methods.ivon_pvi(tau=0.1, solver=IVON(clip=0.5))
    assert methods.build("admm", rho=0.3, lr=0.2) == methods.admm(0.3, solver=SGD(lr=0.2))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("feddin", {}, "'feddin' is no method.*did you mean 'feddyn'"),
        ("newton-admm", {}, "no method that trains networks"),
        ("feddyn", {"momentun": 0.9}, "feddyn has no setting 'momentun': did you mean 'momentum'"),
        ("fedavg", {"rho": 0.1}, "fedavg has no setting 'rho'"),
        ("fedavg", {"solver": SGD()}, "fedavg has no setting 'solver'"),
        ("fedavg", {"lr": "0.1"}, "lr = '0.1'"),
        ("fedavg", {"lr": True}, "lr = True"),
        ("fedavg", {"optimiser": 3}, "optimiser = 3"),
        ("ivon-admm", {"debias": 1}, "debias = 1"),
        ("fedprox", {"rho": -1.0}, "rho = -1.0"),
    ],
)
def test_what_it_does_not_know_is_refused(name, given, message):
    with pytest.raises(InputError, match=message):
        methods.spec(name, **given)
