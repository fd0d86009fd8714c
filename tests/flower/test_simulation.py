"""Flower's simulation engine as a backend."""

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flat import fit
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp
from here import Here

from fedual.errors import InputError
from fedual.flower.simulation import Portable, _examples, _site
from fedual.networks import Clients, Network
from fedual.posterior import Posterior
from fedual.rundir import RunDirectory
from fedual.scenarios import load
from fedual.scenarios.federation import execute, execute_on_flower, materialise

SETS = ("train.rounds=2", "train.local_epochs=1", "train.posterior=point", "split.clients=3")


def scenario(*sets: str):
    return load("digits-heterog-10", sets=[*SETS, *sets])


def test_every_client_finds_its_own_examples(tmp_path: Path):
    from safetensors.torch import save_file

    clients = Clients(torch.arange(12)[:, None], torch.arange(12), [torch.tensor([3, 1]), torch.tensor([0, 11, 4])])
    save_file(_examples(clients), tmp_path / "examples.safetensors")
    for number, part in enumerate(clients.parts):
        x, y = _site(tmp_path / "examples.safetensors", number)
        assert torch.equal(x, clients.x[part])
        assert torch.equal(y, clients.y[part])


def test_weights_are_refused_rather_than_left_out():
    weights = [torch.ones(2), torch.ones(1)]
    clients = Clients(torch.ones(3, 1), torch.zeros(3), [torch.tensor([0, 1]), torch.tensor([2])], weights)
    with pytest.raises(InputError, match="weights"):
        _examples(clients)


def test_an_app_is_made_once_in_a_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Portable, "apps", {})
    made = []

    def make(name: str) -> Any:
        return lambda: made.append(name) or (lambda message, context: (name, message))

    one, two = Portable("one", make("one")), Portable("two", make("two"))
    assert [one(1, None), one(2, None), two(3, None)] == [("one", 1), ("one", 2), ("two", 3)]  # type: ignore[arg-type]
    assert made == ["one", "two"]


def test_what_flower_cannot_do_is_refused_before_anything_starts(tmp_path: Path):
    with pytest.raises(InputError, match="engine = flower has no chunk"):
        execute_on_flower(scenario("train.chunk=2"), 0, tmp_path / "run")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="resume"):
        execute_on_flower(scenario(), 0, tmp_path)


def test_a_network_travels_to_another_process():
    network = Network(torch.nn.Linear(3, 2), ["weight"], scale=16)
    found = pickle.loads(pickle.dumps(network))
    assert torch.equal(found.initial(), network.initial())
    assert (found.names, found.scale) == (("weight",), 16)
    assert torch.equal(found.model.get_parameter("bias"), network.model.get_parameter("bias"))


def test_a_scenario_on_flower_gives_the_answer_of_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock):
    """With a grid of this process in the place of Ray."""

    def run_simulation(server: ServerApp, app: Portable, num: int, backend_config: Any) -> None:
        nodes: dict[int, Any] = {100 + k: (app, {"partition-id": k}) for k in range(num)}
        server(Here(nodes), Context(1, 1, {}, RecordDict(), {}))  # type: ignore[arg-type]

    monkeypatch.setattr("fedual.flower.simulation.find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "flwr.simulation", SimpleNamespace(run_simulation=run_simulation))
    torch.set_default_dtype(torch.float32)  # of the scenario's data
    done = execute_on_flower(scenario(), 0, tmp_path / "run")
    run = execute(scenario(), 0, device="cpu")
    assert done.method == run.method
    assert [record["counted"] for record in done.history] == [3, 3]
    assert done.history[-1]["nll_mc"] == pytest.approx(run.history[-1]["nll_mc"], rel=1e-3)
    found = Posterior.load(tmp_path / "run" / "posterior.safetensors")
    torch.testing.assert_close(found.lam, run.server.lam_g, rtol=1e-4, atol=1e-4)


@pytest.mark.flower
def test_the_simulation_gives_the_answer_of_fit(tmp_path: Path):
    """In a process of its own: Ray leaves files and processes to its end."""
    pytest.importorskip("ray")
    out = tmp_path / "run"
    sets = [part for each in SETS for part in ("--set", each)]
    command = [sys.executable, "-c", "from fedual.cli import main; main()", "run", "digits-heterog-10"]
    done = subprocess.run([*command, *sets, "--engine", "flower", "--out", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    torch.set_default_dtype(torch.float32)  # as in the other process
    model, clients, test = materialise(scenario(), 0)
    settings = {key: value for key, value in scenario().train.items() if key != "rounds"}
    run = fit(model, clients, scenario().spec(), 2, test=test, device="cpu", **settings)
    found = Posterior.load(out / "posterior.safetensors")
    torch.testing.assert_close(found.lam, run.server.lam_g, rtol=1e-4, atol=1e-4)
    assert [record["round"] for record in RunDirectory.open(out).history()] == [1, 2]
