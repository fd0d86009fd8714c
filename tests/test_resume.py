"""Runs that are killed, stopped or out of disk space, and resumed: they end bit for bit where they would have ended.

Run as a script, this file is the child process that trains and kills itself.
"""

import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import sealed
import torch
import torch.nn.functional as F
from flat import fit
from problems import normal
from safetensors.torch import load_file
from torch import Tensor, nn

import fedual
from fedual import methods
from fedual import run as run_module
from fedual.errors import DataError, InputError
from fedual.networks import Clients
from fedual.posterior import Posterior
from fedual.run import Run
from fedual.rundir import RunDirectory, atomic, checkpoint, folder

ROUNDS = 12
SETTINGS: dict[str, dict[str, Any]] = {
    "ivon-admm": {},
    "feddyn": {"participation": 0.5},
    "fedadmm": {"chunk": 2},
    "fedivon": {"participation": 0.5},
    "scaffold": {"participation": 0.5},
}
SOURCE = str(Path(fedual.__file__).parent)
FILES = tuple(str(module.__file__) for module in (folder, atomic, checkpoint, shutil))
"""What writes, renames and removes."""
ONES = (torch.ones(5, 3, dtype=torch.float64), torch.arange(5) % 2)


def train(path: Path | None, name: str = "ivon-admm", rounds: int = ROUNDS, **options: Any) -> Run:
    """A small run whose evaluation, schedule and clients' rows all have to survive."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    clients = [(normal((n, 3), n), torch.arange(n) % 2) for n in (5, 3, 6, 4)]
    given = {"model": model, "clients": clients, "method": name, "test": clients[0]}
    given |= {"batch_size": 4, "local_epochs": 1, "samples": 2, "device": "cpu", "seed": 7, "out": path}
    given |= SETTINGS[name] | options
    return fit(given.pop("model"), given.pop("clients"), given.pop("method"), rounds, **given)


def tensors(path: Path) -> dict[str, Tensor]:
    """All that a finished run leaves: the posterior, and the files of its one checkpoint."""
    (checkpoint,) = path.glob("checkpoint-*")
    files = [path / "posterior.safetensors", *sorted(checkpoint.glob("*.safetensors"))]
    return {f"{file.name} {name}": value for file in files for name, value in load_file(file).items()}


def records(path: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the one figure that is not a function of the settings."""
    history = RunDirectory.open(path).history()
    return [{name: value for name, value in record.items() if "seconds" not in name} for record in history]


def same(one: Path, other: Path) -> None:
    """Bit for bit the same result."""
    assert records(one) == records(other)
    own, its = tensors(one), tensors(other)
    assert own.keys() == its.keys()
    assert len(own) >= 4
    for name, value in own.items():
        assert value.dtype == its[name].dtype
        assert torch.equal(value, its[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run that nothing interrupted, made once for each method."""
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            train(made[name], name)
        return made[name]

    return path


class Death:
    """Kills its process at the n-th line of some source files, counted from the end of a round on (−1: at once)."""

    def __init__(self, round: int, lines: int, where: str | tuple[str, ...]):
        self.round, self.left, self.where = round, lines, where
        self.marks: list[int] = []  # what is left before the first, and after every round
        if round < 0:
            sys.settrace(self.trace)

    def callback(self, run: Run, record: Any) -> None:
        self.marks.append(self.left)
        if run.server.round >= self.round:
            sys.settrace(self.trace)

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.where):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                print(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def killed(work: Callable[[], None]) -> bool:
    """Do some work in a process of its own; whether it was killed before its end."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def child(folder: Path, name: str, tick: int) -> None:
    """Kill a run ten times, then let it end: twice while it starts, else within a round, every other time in a file."""
    clock, choice, path = itertools.count(0, tick), random.Random(name), folder / "run"
    # checkpoints are due when this clock says so: after every round if it stands still
    run_module.time = SimpleNamespace(perf_counter=lambda: float(next(clock)))  # type: ignore[assignment]

    def count(where: str | tuple[str, ...]) -> int:
        """How many lines a round has at least."""

        def work() -> None:
            death = Death(0, 10**9, where)
            train(folder / "count", name, 4, callbacks=[death.callback])
            sys.settrace(None)
            (folder / "count" / "marks").write_text(json.dumps(death.marks[1:]))

        assert not killed(work)
        marks = json.loads((folder / "count" / "marks").read_text())
        shutil.rmtree(folder / "count")
        return min(before - after for before, after in itertools.pairwise(marks))

    def go_on(moment: tuple[int, int, Any]) -> Callable[[], None]:
        def work() -> None:
            train(path, name, resume=True, callbacks=[Death(*moment).callback])

        return work

    lines = {where: count(where) for where in (SOURCE, FILES)}
    rounds = sorted(choice.sample(range(ROUNDS), 8))
    moments = [(r, choice.randrange(lines[w]), w) for r, w in zip(rounds, itertools.cycle(lines), strict=False)]
    start = [(-1, choice.randrange(20), FILES) for _ in range(2)]
    for moment in (start[0], *moments[:4], start[1], *moments[4:]):
        assert killed(go_on(moment))
    assert not killed(lambda: train(path, name, resume=True) and None)


@pytest.mark.parametrize(
    ("name", "tick"),
    [
        ("ivon-admm", 0),
        pytest.param("feddyn", 0, marks=pytest.mark.slow),
        pytest.param("fedadmm", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_ten_times_ends_where_it_would_have(tmp_path: Path, whole, name: str, tick: int):
    """The places are lines of fedual picked at random over the whole run: in a client's step, between two files, …"""
    command = [sys.executable, __file__, str(tmp_path), name, str(tick)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) == 10
    same(tmp_path / "run", whole(name))


class TestResume:
    def test_where_there_is_no_run_one_starts(self, tmp_path: Path, whole):
        train(tmp_path / "new", resume=True)
        same(tmp_path / "new", whole("ivon-admm"))

    @pytest.mark.parametrize("client_state", ["memory", "disk"])
    @pytest.mark.parametrize("name", SETTINGS)
    def test_after_a_stop(self, tmp_path: Path, whole, name: str, client_state: str):
        def stop(run: Run, record: Any) -> None:
            run.stop = record is not None and record["round"] in (3, 8)

        for done in (3, 8, ROUNDS):
            assert len(train(tmp_path, name, resume=True, callbacks=[stop], client_state=client_state).history) == done
        same(tmp_path, whole(name))

    def test_on_another_device_with_other_storage_and_progress(self, tmp_path: Path):
        train(tmp_path, rounds=2, device="cpu", client_state="memory", progress=False)
        again = train(tmp_path, rounds=3, device="auto", client_state="disk", progress=None, resume=True)
        assert len(again.history) == 3

    def test_a_description_may_not_use_the_name_of_a_setting(self, tmp_path: Path):
        described = Clients(*ONES, [torch.arange(5)], description={"training": "mine"})
        with pytest.raises(InputError, match=r"The clients' description has 'training', which is a setting of the run"):
            train(tmp_path, clients=described)

    def test_a_cosine_schedule_has_the_rounds_it_was_planned_for(self, tmp_path: Path):
        train(tmp_path, rounds=2, schedule="cosine")
        with pytest.raises(InputError, match="cosine schedule ends in round 2, not 3"):
            train(tmp_path, rounds=3, schedule="cosine", resume=True)

    def test_with_more_rounds_the_posterior_of_fewer_is_gone(self, tmp_path: Path):
        train(tmp_path, rounds=2)
        assert (tmp_path / "posterior.safetensors").exists()

        def interrupt(run: Run, record: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, rounds=4, resume=True, callbacks=[interrupt])
        assert not (tmp_path / "posterior.safetensors").exists()

    def test_with_more_rounds(self, tmp_path: Path, whole):
        train(tmp_path, rounds=5)
        train(tmp_path, resume=True)
        same(tmp_path, whole("ivon-admm"))
        assert RunDirectory.open(tmp_path).config["rounds"] == ROUNDS

    def test_a_finished_run_returns_at_once(self, tmp_path: Path):
        first, calls = train(tmp_path, rounds=3), []
        again = train(tmp_path, rounds=3, resume=True, callbacks=[lambda run, record: calls.append(record)])
        assert calls == [None]
        assert again.history == first.history
        assert torch.equal(again.posterior.lam, first.posterior.lam)

    def test_without_resume_a_run_is_not_overwritten(self, tmp_path: Path):
        train(tmp_path, rounds=2)
        with pytest.raises(InputError, match=r"holds a run of 2 rounds: resume it"):
            train(tmp_path, rounds=2)

    def test_a_run_whose_config_has_no_number_of_examples_goes_on(self, tmp_path: Path):
        first, path = train(tmp_path, rounds=2), tmp_path / "config.json"
        sealed.age(path, {key: value for key, value in sealed.content(path).items() if key != "examples"})
        assert train(tmp_path, rounds=2, resume=True).history == first.history

    @pytest.mark.parametrize(
        ("key", "changed"),
        [
            ("seed", {"seed": 8}),
            ("method.solver.lr", {"method": methods.spec("ivon-admm", lr=0.5)}),
            ("clients", {"clients": [ONES] * 3}),
            ("data", {"clients": [ONES] * 4}),
            ("parameters", {"model": nn.Linear(3, 2)}),
            ("parameters", {"trainable": ["2"]}),
            ("dtype", {"model": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).float()}),
            ("network", {"model": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()}),
            ("test", {"test": ONES}),
            ("test", {"test": None}),
            ("loss", {"loss": lambda f, y: f.logsumexp(-1)}),
            ("training.batch_size", {"batch_size": 5}),
            ("training.participation", {"participation": 0.5}),
            ("execution.chunk", {"chunk": 3}),
            ("rounds", {"rounds": 1}),
        ],
    )
    def test_other_settings_are_refused_by_name(self, tmp_path: Path, key: str, changed: dict[str, Any]):
        train(tmp_path, rounds=2)
        before = tensors(tmp_path)
        with pytest.raises(InputError, match=rf"holds a run with .*\b{key} = .*, not .*: resume with the same"):
            train(tmp_path, **{"rounds": 2, **changed}, resume=True)
        assert all(torch.equal(value, before[name]) for name, value in tensors(tmp_path).items())

    @pytest.mark.parametrize("other", [{"model": nn.Linear(3, 2)}, {"seed": 8}])
    def test_the_checkpoint_of_another_run_is_refused(self, tmp_path: Path, other: dict[str, Any]):
        train(tmp_path / "one", rounds=2)
        train(tmp_path / "other", rounds=2, **other)
        shutil.rmtree(tmp_path / "one" / "checkpoint-2")
        shutil.copytree(tmp_path / "other" / "checkpoint-2", tmp_path / "one" / "checkpoint-2")
        with pytest.raises(DataError, match=r"meta\.json is damaged or misplaced \(it belongs to a run with an"):
            train(tmp_path / "one", rounds=4, resume=True)

    def test_the_checkpoint_of_an_earlier_version_is_refused_for_another_model(self, tmp_path: Path):
        train(tmp_path / "one", rounds=2)
        train(tmp_path / "other", rounds=2, model=nn.Linear(3, 2))
        sealed.age(tmp_path / "one" / "config.json", sealed.content(tmp_path / "one" / "config.json"))
        shutil.rmtree(tmp_path / "one" / "checkpoint-2")
        shutil.copytree(tmp_path / "other" / "checkpoint-2", tmp_path / "one" / "checkpoint-2")
        with pytest.raises(InputError, match=r"checkpoint in .* has at the server .*\[2, 8\].*\[2, 26\]"):
            train(tmp_path / "one", rounds=4, resume=True)


class TestFullDisk:
    @staticmethod
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @pytest.mark.parametrize("files", range(5))  # metrics, server, clients, meta, the new folder
    def test_while_a_checkpoint_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole, files: int):
        real, left = os.fsync, files

        def fsync(file: int) -> None:
            nonlocal left
            left -= 1
            (real if left >= 0 else self.full)(file)

        def fill(run: Run, record: Any) -> None:
            if run.server.round == ROUNDS:  # whose checkpoint is written whatever the clock says
                monkeypatch.setattr(os, "fsync", fsync)

        with pytest.raises(DataError, match=r"checkpoint-12 cannot be written \(No space left on device\).*resume"):
            train(tmp_path, callbacks=[fill])
        monkeypatch.undo()
        snapshot = RunDirectory.open(tmp_path).load()
        assert snapshot is not None
        assert 1 <= snapshot.round < ROUNDS
        train(tmp_path, resume=True)
        same(tmp_path, whole("ivon-admm"))

    def test_while_the_posterior_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole):
        write = atomic.write

        def fill(path: Path, content: bytes, mode: int) -> None:
            (self.full if path.name.startswith("posterior") else write)(path, content, mode)

        with monkeypatch.context() as patch:
            patch.setattr(atomic, "write", fill)
            with pytest.raises(DataError, match=r"posterior\.safetensors cannot be written \(No space left"):
                train(tmp_path)
        assert not (tmp_path / "posterior.safetensors").exists()
        run = train(tmp_path, resume=True)
        same(tmp_path, whole("ivon-admm"))
        loaded = Posterior.load(tmp_path / "posterior.safetensors", run.posterior.module())
        assert torch.equal(loaded.lam, run.posterior.lam)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    # the first call imports a lot: once here, not in every process
    torch.func.vmap(F.cross_entropy)(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long))
    child(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
