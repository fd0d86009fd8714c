"""A regression across sites: they give sums of their targets when they join, and train in the federation's unit."""

import json
from pathlib import Path
from typing import Any

import flat
import pytest
import torch
from federation import nested
from flwr.app import Message
from here import Here
from torch import Tensor, nn
from torch.testing import assert_close

from fedual.errors import FedualError
from fedual.flower import BayesianADMM, Policy, client_app, wire
from fedual.networks import Network
from fedual.networks.targets import Targets, effective_parameters, noise_variance
from fedual.posterior import Posterior

pytestmark = pytest.mark.usefixtures("clock")
SIZES, ROUNDS = [9, 14, 6], 3
LOCAL: dict[str, Any] = {"batch_size": 8, "local_epochs": 1, "seed": 3}


def sites() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(n, 3, generator=generator) for n in SIZES]
    return [(a, 300 + 80 * a.sum(-1)) for a in x]


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 1)


def grid(path: Path, network: Any = model, between: Any = None) -> Here:
    data = sites()
    app = lambda: client_app(network, lambda node: data[int(node["partition-id"])], loss="mse", device="cpu")
    return Here({100 + k: (app(), {"partition-id": k, "state-dir": str(path / "state")}) for k in range(3)}, between)


def server(path: Path, rounds: int = ROUNDS, network: Any = None, **policy: Any) -> BayesianADMM:
    about = nested({"policy": Policy(min_clients=3, **policy), "loss": "mse", "test": sites()[0], **LOCAL})
    return BayesianADMM(network or model(), "ivon-admm", rounds, experiment="e", out=path / "out", **about)


def test_it_is_the_run_of_the_simulator(tmp_path: Path):
    run = flat.fit(model(), sites(), "ivon-admm", ROUNDS, loss="mse", test=sites()[0], device="cpu", **LOCAL)
    own = server(tmp_path, evaluate_clients=True)
    own.start(grid(tmp_path))  # type: ignore[arg-type]
    assert_close(own.ledger.server.lam_g, run.server.lam_g, rtol=1e-9, atol=1e-12)
    for key in ("rmse", "r2", "nll"):
        assert own.history[-1][key] == pytest.approx(run.history[-1][key])
    every = torch.cat([x for x, _ in sites()]), torch.cat([y for _, y in sites()])
    f = own.posterior.predict(every[0], samples=0)[0][:, 0]
    squares = [part.square().mean() for part in (f - every[1]).split(SIZES)]
    wanted = sum(n * square.sqrt() for n, square in zip(SIZES, squares, strict=True)) / sum(SIZES)
    assert own.history[-1]["rmse_clients"] == pytest.approx(float(wanted))
    loaded = Posterior.load(tmp_path / "out" / "posterior.safetensors", model())
    assert_close(loaded.noise, run.posterior.noise, rtol=1e-9, atol=0)
    for one, other in zip(loaded.predict(every[0]), run.posterior.predict(every[0]), strict=True):
        assert_close(one, other, rtol=1e-8, atol=1e-8)
    finished = server(tmp_path)
    finished.start(Here({}))  # type: ignore[arg-type]
    assert_close(finished.posterior.noise, run.posterior.noise, rtol=1e-9, atol=0)


def test_a_server_that_starts_again_keeps_the_unit(tmp_path: Path):
    server(tmp_path, 1).start(grid(tmp_path))  # type: ignore[arg-type]
    again = server(tmp_path, 3)
    data = sites()
    more = client_app(model, lambda node: (data[0][0], 1e6 * data[0][1]), loss="mse", device="cpu")
    joined = grid(tmp_path)
    joined.apps[103] = (more, {"partition-id": 3, "state-dir": str(tmp_path / "state")})  # comes too late to count
    again.start(joined)  # type: ignore[arg-type]
    y = torch.cat([y for _, y in data]).double()
    targets = again.posterior.network.targets
    assert targets is not None
    assert float(targets.mean) == pytest.approx(float(y.mean()))
    assert float(targets.sd) == pytest.approx(float(y.std(correction=0)))
    assert len(again.ledger.members) == 4


def test_targets_that_everybody_knows_need_no_sums(tmp_path: Path):
    known = lambda: Network(model(), targets=Targets.of(300.0, 100.0))
    own, asked = server(tmp_path, network=known()), grid(tmp_path, known)
    own.start(asked)  # type: ignore[arg-type]
    run = flat.fit(known(), sites(), "ivon-admm", ROUNDS, loss="mse", device="cpu", **LOCAL)
    assert_close(own.ledger.server.lam_g, run.server.lam_g, rtol=1e-9, atol=1e-12)
    assert not own.ledger.sums
    with pytest.raises(FedualError, match="its targets is None, the server's "):
        server(tmp_path / "other", network=known()).start(grid(tmp_path / "other"))  # type: ignore[arg-type]


BAD = {
    "nothing": None,
    "garbage": "{",
    "a number": "5",
    "a list too few": json.dumps({"weight": 3.0, "total": [1.0], "squares": []}),
    "a negative sum of squares": json.dumps({"weight": 3.0, "total": [1.0], "squares": [-1.0]}),
    "NaN": '{"weight": 3.0, "total": [NaN], "squares": [1.0]}',
    "nobody": json.dumps({"weight": 0.0, "total": [1.0], "squares": [1.0]}),
    "texts": json.dumps({"weight": "a", "total": "b", "squares": "c"}),
}


@pytest.mark.parametrize("what", BAD)
def test_sums_that_cannot_be_are_turned_away(tmp_path: Path, what: str):
    def between(node: int, message: Message, answer: Any) -> Message:
        reply = answer()
        config = wire.config_of(reply.content)
        if node == 101 and "facts" in config:
            return Message(wire.pack({}, config | {"targets": BAD[what]}), reply_to=message)
        return reply

    with pytest.raises(FedualError, match="client 1 was turned away: its sums of targets "):
        server(tmp_path).start(grid(tmp_path, between=between))  # type: ignore[arg-type]


def test_other_numbers_of_outputs_are_turned_away(tmp_path: Path):
    here, (x, y) = grid(tmp_path), sites()[1]
    app = client_app(model, lambda node: (x, torch.stack([y, y], 1)), loss="mse", device="cpu")
    here.apps[101] = (app, here.apps[101][1])
    with pytest.raises(FedualError, match="client 1 was turned away: its targets have 2 outputs, those of others 1"):
        server(tmp_path).start(here)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("squares", "why"),
    [
        (None, "it sent no squared residuals"),
        (torch.ones(2, dtype=torch.float64), "it sent no squared residuals"),
        (torch.tensor([-1.0], dtype=torch.float64), "its squared residuals are negative or not finite"),
        (torch.tensor([torch.inf], dtype=torch.float64), "its squared residuals are negative or not finite"),
    ],
)
def test_residuals_that_cannot_be_are_left_out(tmp_path: Path, squares: Tensor | None, why: str, caplog):
    def between(node: int, message: Message, answer: Any) -> Message:
        reply = answer()
        if node == 101 and wire.config_of(message.content).get("action") == "residuals":
            tensors = {} if squares is None else {"squares": squares}
            return Message(wire.pack(tensors, wire.config_of(reply.content)), reply_to=message)
        return reply

    own = server(tmp_path)
    own.start(grid(tmp_path, between=between))  # type: ignore[arg-type]
    assert f"client 1 does not count in the noise: {why}" in caplog.text
    rest = [sites()[0], sites()[2]]
    q, (x, y) = own.posterior, (torch.cat(parts) for parts in zip(*rest, strict=True))
    assert q.network.targets is not None
    r = (q.predict(x, samples=0)[0][:, 0] - y) / q.network.targets.sd
    parameters = effective_parameters(q.family, q.lam, own.ledger.server.prior, q.tau)
    assert_close(q.noise, noise_variance(r.square().sum()[None], len(y), parameters))
