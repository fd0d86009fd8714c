"""Two runs in one folder: one runs, the other is refused at once, and nothing of the first one changes."""

import errno
import multiprocessing
import os
import signal
import socket
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import compare, fit
from problems import normal
from torch import nn

from fedual.errors import DataError, InputError
from fedual.posterior import Posterior
from fedual.rundir import RunDirectory, locking
from fedual.rundir.locking import LOCK, in_use

TRIES = 100


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))


def train(out: Path | None, seed: int = 0, resume: bool = False, **options: Any) -> Any:
    clients = [(normal((n, 3), n), torch.arange(n) % 2) for n in (5, 6)]
    given = {"batch_size": 4, "local_epochs": 1, "device": "cpu", **options}
    return fit(model(), clients, "ivon-admm", 3, seed=seed, out=out, resume=resume, **given)


def intruders(folder: Path) -> list[Any]:
    """What else may want the folder."""
    clients = [(normal((n, 3), n), torch.arange(n) % 2) for n in (5, 6)]
    label = folder.name.removesuffix("-0")
    return [
        lambda: train(folder),
        lambda: train(folder, seed=1),
        lambda: train(folder, resume=True),
        lambda: compare({label: "ivon-admm"}, model(), clients, rounds=1, test=clients[0], out=folder.parent),
        lambda: in_use(folder).__enter__(),
    ]


def test_a_second_run_in_the_same_folder_is_refused_at_once(tmp_path: Path):
    """In the same process, too: a lock belongs to a run, not to a process."""
    folder, seen = tmp_path / "run-0", []

    def intrude(run: Any, record: Any) -> None:
        if record is None or record["round"] != 2:
            return
        for intruder in intruders(folder):
            with pytest.raises(InputError) as error:
                intruder()
            seen.append(str(error.value))

    whole = train(tmp_path / "alone")
    train(folder, callbacks=[intrude])
    who = f"process {os.getpid()} on {socket.gethostname()}"
    assert seen == [f"{folder} is in use by {who}: let that end, or choose another folder."] * 5
    assert torch.equal(Posterior.load(folder / "posterior.safetensors", model()).lam, whole.posterior.lam)
    assert not (folder / LOCK).exists()
    assert len(train(folder, resume=True).history) == 3


def test_a_run_that_is_refused_or_fails_leaves_neither_a_lock_nor_an_empty_folder(tmp_path: Path):
    with pytest.raises(InputError, match="local_steps"):
        train(tmp_path / "new" / "deep", batch_size=10**6, local_steps=0)
    with pytest.raises(InputError, match="rounds"):
        fit(model(), [], "ivon-admm", 0, out=tmp_path / "new" / "deep")
    assert not list(tmp_path.iterdir())

    def fail(run: Any, record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", callbacks=[fail])
    assert not (tmp_path / "run" / LOCK).exists()
    train(tmp_path / "run", resume=True)


def test_reading_needs_no_lock(tmp_path: Path):
    train(tmp_path)
    with in_use(tmp_path):
        assert len(RunDirectory.open(tmp_path).history()) == 3


def test_two_threads_that_begin_and_end_at_once_never_hold_a_folder_together(tmp_path: Path):
    """Each removes the lock's file, and the folder, when it ends: the next one must not take what was removed."""
    inside, most, held, refusals = 0, 0, [0, 0], set[str]()

    def work(number: int) -> None:
        nonlocal inside, most
        for _ in range(300):
            try:
                with in_use(tmp_path / "a" / "b"):
                    inside += 1
                    most = max(most, inside)
                    held[number] += 1
                    inside -= 1
            except InputError as error:
                refusals.add(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert sum(held) >= 300 / 2
    assert all("is in use by process" in refusal for refusal in refusals)
    assert not list(tmp_path.rglob(LOCK))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_kill_frees_the_folder(tmp_path: Path):
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        with in_use(tmp_path):
            theirs.send("inside")
            signal.pause()
    try:
        assert ours.recv() == "inside"
        with pytest.raises(InputError, match=rf"is in use by process {child} on "), in_use(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600
    with in_use(tmp_path):
        pass


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locking.fcntl, "flock", fail)
    complaint = r"lock cannot be locked \(No locks available\): its file system has no locks \(flock\), choose a folder"
    with pytest.raises(DataError, match=complaint), in_use(tmp_path):
        pass


def runs(folder: Path, seed: int, pipe: Connection) -> None:
    """A process that trains in one folder after another, as it is told."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)

    def stay(run: Any, record: Any) -> None:
        if record is not None and record["round"] == 2:
            pipe.send("inside")
            pipe.recv()

    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        try:
            train(folder / str(number), seed, callbacks=[stay])
            pipe.send("ran")
        except InputError as error:
            pipe.send(str(error))


@pytest.mark.slow
def test_of_two_processes_in_one_folder_one_runs_and_the_other_is_refused(tmp_path: Path):
    """100 tries. Whoever is first stays in its second round until the other has been refused."""
    context, ours = multiprocessing.get_context("spawn"), list[Any]()
    for seed in range(2):
        pipe, theirs = context.Pipe()
        child = context.Process(target=runs, args=(tmp_path, seed, theirs), daemon=True)
        child.start()
        theirs.close()
        assert pipe.recv() == "ready"
        ours.append((pipe, child))
    pipes, winners = [pipe for pipe, _ in ours], [0, 0]
    alone = [train(None, seed).posterior.lam for seed in range(2)]
    for number in range(TRIES):
        for pipe in pipes if number % 2 else pipes[::-1]:
            pipe.send(number)
        heard: dict[int, str] = {}
        while len(heard) < 2:
            heard |= {pipes.index(pipe): pipe.recv() for pipe in wait(pipes)}  # type: ignore[arg-type, attr-defined]
        (winner,) = (seed for seed, said in heard.items() if said == "inside")
        refusal = f"is in use by process {ours[winner][1].pid} on "
        assert refusal in heard[1 - winner]
        pipes[winner].send("go on")
        assert pipes[winner].recv() == "ran"
        winners[winner] += 1
        folder = tmp_path / str(number)
        run = RunDirectory.open(folder)
        assert run.config["seed"] == winner
        assert [record["round"] for record in run.history()] == [1, 2, 3]
        assert torch.equal(Posterior.load(folder / "posterior.safetensors", model()).lam, alone[winner])
    for pipe, child in ours:
        pipe.send(None)
        child.join()
    assert sum(winners) == TRIES
