"""Around the rounds: evaluation at the server and at the sites, the posterior's file, resuming, and what is refused."""

import json
import re
from typing import Any

import flat
import pytest
import torch
from federation import Federation, nested
from problems import normal, rng
from torch import nn
from torch.testing import assert_close

from fedual import methods
from fedual.algorithm import Method
from fedual.errors import DataError, FedualError, InputError
from fedual.families import Diagonal
from fedual.flower import BayesianADMM, Policy, client_app, run_folder
from fedual.flower.ledger import Ledger
from fedual.methods import MethodSpec
from fedual.metrics import evaluate
from fedual.networks import Network
from fedual.posterior import Posterior, Prediction
from fedual.rundir.old_config import CONFIG_VERSION
from fedual.settings import Evaluation, LocalTraining

pytestmark = pytest.mark.usefixtures("clock")
LOCAL: dict[str, Any] = {"batch_size": 8, "local_epochs": 1, "seed": 1}


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def examples(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal((size, 6), seed), torch.randint(3, (size,), generator=rng(seed + 1))


@pytest.fixture
def sites(tmp_path) -> Federation:
    """Three sites with a network, of 10, 20 and 30 examples, and others to evaluate on."""
    found = Federation(tmp_path)
    app = lambda: client_app(
        model, lambda node: examples(10 * (node["data"] + 1), node["data"]), device="cpu",
        test=lambda node: examples(5 * (node["data"] + 1), 50 + node["data"]),
    )  # fmt: skip
    found.grid.apps = {node: (app(), config) for node, (_, config) in found.grid.apps.items()}
    return found


def network(**changes: Any) -> dict[str, Any]:
    return {"model": model(), "prior": None, "method": "ivon-admm", **LOCAL, **changes}


def test_figures_at_the_server_are_those_of_fit(sites):
    test = examples(40, 7)
    server = sites.run(3, **network(test=test, samples=4))
    clients = [examples(10 * (k + 1), k) for k in range(3)]
    run = flat.fit(model(), clients, "ivon-admm", 3, test=test, samples=4, device="cpu", **LOCAL)
    for ours, theirs in zip(server.history, run.history, strict=True):
        for key in ("accuracy", "nll", "ece", "brier", "accuracy_mc", "nll_mc", "ece_mc"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_figures_at_the_sites_are_weighted_by_their_examples(sites, schedule):
    server = sites.run(2, **network(evaluate_clients=True, samples=2, schedule=schedule))
    found = [
        evaluate(
            Network(model()), Diagonal(), server.ledger.server.lam_g, examples(5 * (k + 1), 50 + k),
            transform=lambda x: x, samples=2,
        )
        for k in range(3)
    ]  # fmt: skip
    for key in ("accuracy", "nll", "ece", "nll_mc"):
        mean = sum(one[key] * (k + 1) for k, one in enumerate(found)) / 6
        assert server.history[-1][f"{key}_clients"] == pytest.approx(mean, rel=1e-9, abs=1e-12)


def test_a_site_that_cannot_evaluate_is_left_out_of_the_figures(sites, caplog):
    app = client_app(model, lambda node: examples(10, 0), test=lambda node: (normal((6, 6), 0), torch.zeros(5)))
    sites.grid.apps[101] = app, sites.grid.apps[101][1]
    server = sites.run(1, **network(evaluate_clients=True))
    assert server.history[0]["counted"] == 3
    assert "accuracy_clients" in server.history[0]
    assert "client 1 did not evaluate: its SuperNode's log shows why (InputError)" in caplog.text
    assert "6 test inputs have 5 labels" in caplog.text  # in the site's own log


def test_the_posterior_is_written_and_predicts(sites):
    server = sites.run(2, **network())
    posterior = Posterior.load(sites.out / "posterior.safetensors", model())
    x = examples(9, 3)[0]
    assert_close(posterior.mean, Diagonal().mean(server.ledger.server.lam_g))
    ours, theirs = (one.predict(x, samples=8) for one in (posterior, server.posterior))
    assert isinstance(ours, Prediction)
    assert isinstance(theirs, Prediction)
    assert_close(ours.probabilities, theirs.probabilities)
    assert_close(ours.probabilities.sum(-1), torch.ones(9))


def test_a_run_that_is_done_needs_no_clients_and_one_with_more_rounds_goes_on(sites):
    whole = sites.run(4, **network()).ledger.server.lam_g
    half = Federation(sites.path / "half")
    half.grid.apps = {
        node: (app, config | {"state-dir": str(half.path / config["client-id"])})
        for node, (app, config) in sites.grid.apps.items()
    }
    half.run(2, **network())
    there, half.grid.apps = half.grid.apps, {}
    assert len(half.run(2, **network()).history) == 2
    half.grid.apps = there
    assert torch.equal(half.run(4, **network()).ledger.server.lam_g, whole)


def test_the_config_has_the_method_as_data_and_every_round_its_temperature(sites):
    server = sites.run(2, **network(method=methods.spec("ivon-admm", rho=0.7), local_epochs=2))
    stored = json.loads((sites.out / "config.json").read_text())
    assert stored["version"] == CONFIG_VERSION
    assert stored["method"] == {"version": 1, "name": "ivon-admm", "settings": {"rho": 0.7}}
    assert MethodSpec.from_dict(stored["method"]) == server.spec
    assert LocalTraining.from_dict(stored["training"]) == server.local
    assert Evaluation.from_dict(stored["evaluation"]) == server.evaluation
    assert server.resolved.rho == 0.7
    assert [record["tau"] for record in server.history] == [server.resolved.tau] * 2
    assert server.posterior.tau == server.resolved.tau == 1 / 20  # the rule of `fedual.defaults` with 60 examples


def test_the_config_of_a_method_of_plain_numbers_has_them(tmp_path):
    sites = Federation(tmp_path)
    sites.run(1)
    stored = json.loads((sites.out / "config.json").read_text())
    assert Method.from_dict(stored["method"]) == sites.method


def test_a_run_of_an_older_fedual_is_refused_with_the_way_out_and_left_as_it_was(tmp_path):
    sites = Federation(tmp_path)
    sites.run(2)
    config = json.loads((sites.out / "config.json").read_text())
    old = {key: value for key, value in config.items() if key != "version"}
    old["method"] = "Method(family=Diagonal(), solver=Exact(), dual=Natural(gamma=2/K/L), rho=20/K)"
    (sites.out / "config.json").write_text(json.dumps(old))
    before = {path.name: path.read_bytes() for path in sites.out.iterdir()}
    with pytest.raises(InputError, match=r"that another fedual started .*: finish it with .*, or choose another exper"):
        sites.run(3)
    assert {path.name: path.read_bytes() for path in sites.out.iterdir()} == before


def test_the_server_evaluates_in_every_nth_round_and_in_the_last(sites):
    server = sites.run(3, **network(test=examples(20, 7), samples=2, evaluate_every=2))
    assert ["accuracy" in record for record in server.history] == [False, True, True]


OTHER = {
    "seed": ({"seed": 2}, "a run with seed = 1, not 2"),
    "method": ({"method": "fedavg"}, r"a run with method\.name = \"ivon-admm\", not \"fedavg\""),
    "settings": (
        {"method": methods.spec("ivon-admm", rho=0.7)},
        r"a run with method\.settings\.rho = nothing, not 0\.7",
    ),
    "payload": ({"payload": "int8"}, 'a run with payload = "full", not "int8"'),
    "participation": ({"participation": 0.5}, r"a run with training\.participation = 1.0, not 0.5"),
    "labels": ({"about": {"labels": "a"}}, r"a run with facts\.labels = nothing"),
}


@pytest.mark.parametrize("what", OTHER)
def test_other_settings_are_refused_when_a_run_goes_on(sites, what):
    sites.run(1, **network())
    change, reason = OTHER[what]
    with pytest.raises(InputError, match=f"holds {reason}"):
        sites.run(2, **network(**change))


def test_a_cosine_schedule_cannot_end_later_than_it_was_meant_to(sites):
    sites.run(2, **network(schedule="cosine"))
    with pytest.raises(InputError, match="schedule_ends = 2, not 4"):
        sites.run(4, **network(schedule="cosine"))


def test_another_prior_is_refused_when_a_run_goes_on(tmp_path):
    sites = Federation(tmp_path)
    sites.run(1)
    sites.prior = 2 * sites.prior
    with pytest.raises(InputError, match="belongs to a run with another prior: choose another experiment"):
        sites.server(2).start(sites.grid)  # type: ignore[arg-type]


def test_two_servers_in_one_folder_are_refused_and_the_first_is_not_disturbed(tmp_path):
    sites = Federation(tmp_path)
    first = sites.server(2)
    with run_folder.opened(sites.out, first.config, first.ledger):
        before = {path.name: path.read_bytes() for path in sites.out.iterdir()}
        with pytest.raises(InputError, match="is in use by process"):
            sites.run(9)
        assert {path.name: path.read_bytes() for path in sites.out.iterdir()} == before
    sites.run(9)
    sites.agrees()


def test_files_that_are_lost_or_damaged_are_not_made_up(tmp_path):
    sites = Federation(tmp_path)
    sites.run(2)
    file = sites.out / "server.safetensors"
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(DataError, match=r"server\.safetensors is missing: restore the file"):
        sites.run(3)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"not the checkpoint of a server .*: restore the file"):
        sites.run(3)
    file.write_bytes(content)
    sites.run(3)
    sites.agrees()


def test_a_record_is_on_the_disk_before_its_round_counts_and_that_before_the_next_message(tmp_path, monkeypatch):
    sites, events = Federation(tmp_path, num=1), []
    save = Ledger.save
    monkeypatch.setattr(run_folder, "sync", lambda path: events.append(path.name))
    monkeypatch.setattr(Ledger, "save", lambda self, path: (save(self, path), events.append(path.name)))

    def between(node, message, answer):
        events.append(message.metadata.message_type)
        return answer()

    sites.run(2, between)
    one = ["train", "metrics.jsonl", "server.safetensors"]
    assert events == ["server.safetensors", "query", *one, *one]


def test_too_few_clients_is_one_sentence(tmp_path, clock):
    sites = Federation(tmp_path, num=1)
    with pytest.raises(FedualError) as caught:
        sites.run(1, min_clients=2)
    assert str(caught.value) == (
        "After 100 s 1 clients are there, 2 are needed: start the missing SuperNodes and submit the run again."
    )
    assert 100 <= clock.now < 101


WRONG = {
    "payload": ({"payload": "int4"}, "payload = 'int4': choose full, bf16, int8."),
    "rounds": ({"rounds": 0}, "rounds = 0: it must be a whole number"),
    "participation": ({"participation": 1.5}, "participation = 1.5: it must be a positive, finite number of at most"),
    "batch_size": ({"batch_size": 0}, "batch_size = 0: it must be a whole number"),
    "samples": ({"samples": -1}, "samples = -1: it must be a whole number"),
    "experiment": ({"experiment": ""}, "experiment = '': give it a name"),
    "schedule": ({"schedule": "linear"}, "schedule = 'linear': choose constant, cosine, harmonic."),
    "method": ({"method": "ivon"}, "'ivon' is no method that trains networks by name"),
    "newton": ({"method": "newton"}, "newton trains networks in fedual.fit only: choose ivon-admm on Flower"),
    "model": ({"prior": torch.zeros(2, 3)}, "BayesianADMM needs a model, or a prior"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_run_is_refused_before_anything_is_written(tmp_path, what):
    change, reason = WRONG[what]
    with pytest.raises(InputError, match=re.escape(reason)):
        BayesianADMM(**nested({"model": model(), "experiment": "e", "out": tmp_path / "out", **change}))
    assert not (tmp_path / "out").exists()


def test_a_solver_without_a_learning_rate_has_no_schedule(tmp_path):
    with pytest.raises(InputError, match="has no learning rate: leave schedule and decay out"):
        Federation(tmp_path).server(2, schedule="cosine")


def test_an_app_needs_a_model_with_data_or_losses():
    wrong: tuple[dict[str, Any], ...] = ({}, {"model": model()}, {"model": model(), "data": min, "losses": min})
    for given in wrong:
        with pytest.raises(InputError, match="client_app needs a model and data, or losses"):
            client_app(**given)


def test_labels_that_the_network_does_not_have_are_refused_by_their_site(sites, caplog):
    bad = client_app(model, lambda node: (normal((5, 6), 0), torch.tensor([0, 1, 2, 3, 0])), device="cpu")
    sites.grid.apps[101] = bad, sites.grid.apps[101][1]
    server = sites.run(1, **network(policy=Policy(min_clients=3)))
    assert server.history[0]["clients"] == ["0", "2"]
    assert server.history[0]["left_out"]["1"] == "its SuperNode's log shows why (InputError)"  # not which label it has
    assert "has the label 3, but the network has 3 outputs" in caplog.text
