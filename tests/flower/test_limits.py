"""What a site does for a malicious server: nothing beyond its limits, and no word about itself."""

import json
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation import Federation
from flwr.app import Context, Message, MessageType, RecordDict
from problems import normal
from torch import nn

from fedual import methods
from fedual.errors import DataError, InputError
from fedual.families import Diagonal
from fedual.flower import Limits, client_app, limits, wire
from fedual.flower.identity import signed
from fedual.flower.refusal import without_paths
from fedual.parts import encode
from fedual.settings import LocalTraining
from fedual.solvers import IVON, VON, Conjugate

pytestmark = pytest.mark.usefixtures("clock")
SIZE = 40
METHOD = methods.ivon_admm()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def examples(node: Any, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    return normal((size, 6), 0), torch.arange(size) % 3


class Server:
    """A malicious server at one site: it sends what it likes, and reads what comes back."""

    def __init__(self, path: Path, **app: Any):
        self.path = path
        self.config: dict[str, Any] = {"client-id": "north", "state-dir": str(path / "state")}
        self.app = client_app(**{"model": model, "data": examples, "device": "cpu", **app})
        self.lam_g = Diagonal().natural(torch.zeros(21), 1.0)

    def send(self, kind: str, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> dict[str, Any]:
        """The settings of the answer."""
        message = Message(wire.pack(tensors or {}, config), 7, kind)
        message.metadata.__dict__["_message_id"] = "m"
        reply = self.app(message, Context(1, 7, self.config, RecordDict(), {}))
        assert not reply.has_error()
        said = wire.config_of(reply.content)
        assert str(self.path) not in json.dumps(said)
        return said | {"tensors": set(wire.tensors_of(reply.content))}

    def hello(self, experiment: str) -> dict[str, Any]:
        return self.send(MessageType.QUERY, action="hello", experiment=experiment, nonce="c")

    def train(self, experiment: str = "e", method: Any = None, nonce: str = "made.1.1", **local: Any) -> dict[str, Any]:
        method = method or METHOD
        plain = json.dumps({"seed": 0, **LocalTraining(local_epochs=1, batch_size=8).to_dict(), **local})
        common = {"experiment": experiment, "nonce": nonce, "number": 0, "wait": 5.0, "round": 0, "moved": True}
        content = method if isinstance(method, str) else json.dumps(method.to_dict())
        return self.send(MessageType.TRAIN, {"lam_g": self.lam_g}, **common, method=content, train=plain)

    def evaluate(self, samples: int) -> dict[str, Any]:
        family = json.dumps(encode(Diagonal()))
        return self.send(MessageType.EVALUATE, {"lam_g": self.lam_g}, experiment="e", family=family, samples=samples)

    def calibrate(self, fold: list[int], grid: Any = ((0.0,), (1.0,)), samples: int = 3) -> dict[str, Any]:
        about = {"family": json.dumps(encode(Diagonal())), "tau": 1.0, "grid": json.dumps(grid), "number": 0}
        draws, tensors = json.dumps([0, samples, 0]), {"lam_g": self.lam_g, "prior": self.lam_g}
        own = {"action": "calibrate", "experiment": "e", "nonce": "n", "fold": json.dumps(fold)}
        return self.send(MessageType.QUERY, tensors, **own, **about, draws=draws)

    @property
    def files(self) -> set[str]:
        return {path.suffix for path in self.path.rglob("*") if path.is_file()}


@pytest.fixture
def server(tmp_path) -> Server:
    return Server(tmp_path)


def test_an_honest_round_is_answered(server):
    assert server.train()["tensors"] == {"lam"}
    assert server.evaluate(8).get("refusal") is None
    assert server.calibrate([0, 5])["tensors"] == {"table"}


VON_HUGE = replace(METHOD, solver=IVON(samples=10**6))
ASKED = {
    "local_epochs": {"local_epochs": 10**9},
    "local_steps": {"local_steps": 10**9},
    "visited": {"batch_size": 10**9},
    "batch_size": {"batch_size": 1},
    "examples": {"batch_size": 1, "local_steps": 1},
    "samples": {"method": VON_HUGE},
}


@pytest.mark.parametrize("name", ASKED)
def test_training_beyond_a_limit_is_refused_before_it_starts(server, monkeypatch, name, caplog):
    """Finding 10: 10⁹ epochs, and one example's gradient."""
    allowed = {"batch_size": None} if name == "examples" else {}
    own = Server(server.path, limits=Limits(**allowed))
    monkeypatch.setattr("fedual.flower.site.client_step", lambda *rest: pytest.fail("it trained"))
    why = own.train(**ASKED[name])["refusal"]
    assert why == f"The server asks for more than this site allows (its limit {name}): ask for less."
    assert re.search(r"client north refuses: .*\d+ asked, at (most|least) \d+", caplog.text)
    assert ".safetensors" not in own.files


def test_many_short_epochs_are_too_many_steps(tmp_path):
    server = Server(tmp_path, limits=Limits(local_steps=19))
    assert "limit local_steps" in server.train(local_epochs=4)["refusal"]  # 4 × 5
    assert "refusal" not in server.train(local_epochs=3)


@pytest.mark.parametrize("key", ["points", "samples", "max_steps"])
def test_numbers_within_a_part_of_a_method_are_limited(server, key):
    content = json.dumps({"version": 1, "solver": {"type": "VON", "rule": [{"type": "Rule", key: 10**9}]}})
    assert "its limit" in server.train(method=content)["refusal"]


def test_evaluations_and_calibrations_are_limited(server):
    assert "limit samples" in server.evaluate(10**9)["refusal"]
    assert "limit samples" in server.calibrate([0, 5], samples=10**9)["refusal"]
    assert "limit samples" in server.calibrate([0, 5], grid=([0.0] * 2000, [1.0]))["refusal"]
    assert "limit samples" in server.calibrate([0, 5], grid=([0.0], [1.0] * 2000))["refusal"]


@pytest.mark.parametrize(("visited", "refused"), [(47, True), (48, False)])
def test_a_calibration_visits_the_examples_that_were_left_out(tmp_path, visited, refused):
    """Two widths, three draws, a fifth of 40 examples."""
    said = Server(tmp_path, limits=Limits(visited=visited)).calibrate([0, 5], grid=([0.0, 1.0], [1.0]))
    assert ("limit visited" in said.get("refusal", "")) == refused


def test_no_run_leaves_out_single_examples(server):
    """The difference of two such runs would be one example's."""
    assert "limit folds" in server.calibrate([0, SIZE])["refusal"]


@pytest.mark.parametrize("size", [1, 4])
def test_a_site_with_too_few_examples_says_nothing_about_them(tmp_path, size):
    server = Server(tmp_path, data=lambda node: examples(node, size))
    for said in (server.hello("e"), server.train(), server.evaluate(3)):
        assert said["refusal"].startswith("Its answer would rest on too few examples")
        assert said.keys() & {"examples", "targets"} == set()


def test_a_round_that_takes_too_long_stops_between_steps_and_changes_nothing(tmp_path, monkeypatch):
    server = Server(tmp_path, limits=Limits(seconds=100))
    assert server.train()["tensors"] == {"lam"}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    ticks = iter(range(0, 10**6, 30))
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    said = server.train(nonce="made.1.2", local_steps=50)
    assert said["refusal"].endswith("(its limit seconds): ask for less.")
    assert next(ticks) == 150  # it began at 0, took steps at 30, 60 and 90, and stopped at 120
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == before
    assert before


@pytest.mark.parametrize("solver", [VON(), None])
def test_losses_that_are_not_networks_are_timed_too(solver):
    calls = []

    class Slow:
        def natural_gradient(self, *args):
            calls.append(args)

        def moments(self, *args):
            calls.append(args)

    own = limits.timed(Slow(), 3600.0)
    own.natural_gradient(1)
    own.moments(2)
    assert calls == [(1,), (2,)]
    late = limits.timed(Slow(), 1e-9)
    time.sleep(0)
    with pytest.raises(InputError, match="limit seconds"):
        late.moments(3)
    conjugate = Conjugate(Diagonal(), torch.zeros(1, 2, 3))
    assert type(limits.timed(conjugate, 1.0)) is Conjugate


def test_hellos_of_300_made_up_experiments_leave_the_key_alone(server):
    """Finding 10: they left 600 files."""
    for number in range(300):
        assert signed(server.hello(f"made up {number}")["key"], "", "") is False
    assert sorted(path.suffix for path in server.path.rglob("*") if path.is_file()) == [".lock", ".pem"]


def test_the_number_of_experiments_is_limited(tmp_path, caplog):
    server = Server(tmp_path, limits=Limits(experiments=3))
    said = [server.train(f"made up {number}").get("refusal") for number in range(5)]
    assert said[:3] == [None] * 3
    assert (
        said[3] == said[4] == ("It keeps no further experiment (its limit experiments): its operator removes old ones.")
    )
    assert len([*tmp_path.rglob("*.safetensors")]) == 3
    assert "see `fedual flower remove`" in caplog.text
    assert "refusal" not in server.train("made up 0", nonce="made.1.2")  # those that are there go on


def test_messages_and_rounds_are_counted_across_processes(tmp_path):
    for number in range(5):
        server = Server(tmp_path, limits=Limits(messages=4, rounds=2))  # a new process each time
        said = server.train(nonce=f"made.1.{number}").get("refusal", "")
        assert ("limit rounds" in said) == (number > 1)
    said = [Server(tmp_path, limits=Limits(messages=4, rounds=2)).evaluate(3).get("refusal", "") for _ in range(3)]
    assert ["limit messages" in each for each in said] == [False, False, True]


def test_the_disk_is_limited(tmp_path):
    server = Server(tmp_path, limits=Limits(disk=400))
    assert "limit disk" in server.train()["refusal"]
    assert ".safetensors" not in server.files
    assert "refusal" not in Server(tmp_path, limits=Limits(disk=10**5)).train()


def test_damaged_counts_are_refused_and_the_remedy_is_in_the_sites_log(server, caplog):
    server.train()
    (file,) = server.path.rglob("*.json")
    file.write_text('{"e": 1}')
    assert server.train()["refusal"] == "its SuperNode's log shows why (DataError)"
    assert f"{file} cannot be read (TypeError): remove it" in caplog.text
    with pytest.raises(DataError):
        limits.read_counts(file)


BROKEN = {
    "data": {"data": lambda node: (_ for _ in ()).throw(FileNotFoundError(2, "No such file", "/srv/secret/x.csv"))},
    "data of fedual": {"data": lambda node: (_ for _ in ()).throw(DataError("/srv/secret/x.csv, row 7: 'Jane Doe'"))},
    "model": {"model": lambda: (_ for _ in ()).throw(RuntimeError("/srv/secret/model.py"))},
    "memory": {"data": lambda node: (_ for _ in ()).throw(MemoryError("/srv/secret"))},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_refusal_says_nothing_of_the_sites_files_or_data(tmp_path, what, caplog):
    server = Server(tmp_path, **BROKEN[what])
    for said in (server.hello("e"), server.train(), server.evaluate(3)):
        assert re.fullmatch(r"its SuperNode's log shows why \(\w+\)", said["refusal"])
    assert "/srv/secret" in caplog.text


def test_a_state_folder_that_cannot_be_used_is_not_named(tmp_path):
    server = Server(tmp_path)
    (tmp_path / "state").write_text("")
    for said in (server.hello("e"), server.train()):
        assert said["refusal"] == "its SuperNode's log shows why (DataError)"


def test_paths_are_taken_out_and_formulas_stay():
    assert without_paths("/srv/a b.csv: no; 'C:\\Users\\x' (~/state/k.pem)") == "a file b.csv: no; 'a file' (a file)"
    for text in ("y ~ a / b + I(x/y)", "λ/τ", "docs/how-to/deploy.md", "1/2"):
        assert without_paths(text) == text


@pytest.mark.parametrize("field", [field.name for field in fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, "1", float("nan")])
def test_a_limit_that_is_none_is_refused(field, value):
    with pytest.raises(InputError, match=f"{field} = "):
        Limits(**{field: value})


def test_no_limits_where_nobody_is_to_be_limited(tmp_path):
    server = Server(tmp_path, limits=None)
    assert "refusal" not in server.train(batch_size=1, local_steps=1)
    assert server.files == {".lock", ".safetensors"}


def test_a_federation_goes_on_without_the_site_that_refuses(tmp_path):
    sites = Federation(tmp_path)
    for k in range(3):
        bound = Limits(local_epochs=1) if k == 1 else Limits()
        sites.grid.apps[100 + k] = sites.node(k, losses=None, model=model, data=examples, limits=bound)
    given = {"prior": None, "model": model(), "method": "ivon-admm", "local_epochs": 2, "batch_size": 8}
    server = sites.run(2, **given)
    assert sites.counted == [["0", "2"]] * 2
    assert "its limit local_epochs" in server.history[0]["left_out"]["1"]
