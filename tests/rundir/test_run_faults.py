"""Kills and full disks: whatever happens while a run writes, its folder holds a whole snapshot, old or new."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fedual.backends.client_store import Store, create
from fedual.errors import DataError
from fedual.rundir import RunDirectory, atomic, checkpoint
from fedual.rundir.old_config import CONFIG_VERSION

CONFIG = {"version": CONFIG_VERSION}
RUNS = str(Path(atomic.__file__).parent)


def at(round: int) -> Store:
    """The rows of three clients, all equal to the round."""
    return create({"a": torch.full((3,), float(round)), "b": torch.tensor(round)}, 3)


def advance(run: RunDirectory, round: int) -> None:
    run.append({"round": round})
    run.save(round, {"x": torch.full((4,), float(round)), "y": torch.tensor(round)}, {"round": round}, at(round))


def resume(path: Path) -> int:
    """Go on after a kill: check that all parts of the folder are of one round, and return it."""
    run = RunDirectory.open(path, CONFIG)
    found, store = run.load(), at(0)
    if found is None:
        run.rewind(0)
        assert run.history() == []
        return 0
    run.restore(store)
    rows = store.read(torch.arange(3))
    values = torch.cat([value.flatten().double() for value in (*found.server.values(), *rows.values())])
    assert values.unique().tolist() == [found.round]
    assert found.meta == {"round": found.round}
    run.rewind(found.round)
    assert [record["round"] for record in run.history()] == list(range(1, found.round + 1))
    names = {"config.json", "environment.json", "metrics.jsonl", f"checkpoint-{found.round}"}
    assert {name.name for name in path.iterdir()} == names
    return found.round


def content(path: Path) -> frozenset:
    """Every file and folder below a folder, with its bytes."""
    files = ((file, file.read_bytes() if file.is_file() else None) for file in path.rglob("*"))
    return frozenset((str(file.relative_to(path)), bytes_) for file, bytes_ in files)


def killed(child: Callable[[], None]) -> bool:
    """Run a function in a copy of this process; whether it was killed before its end."""
    pid = os.fork()
    if not pid:
        try:
            child()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def dies_at(count: int) -> Callable:
    """A trace function that kills the process at the `count`-th line of what writes, renames and removes."""
    left = count

    def trace(frame, event, arg):
        nonlocal left
        if not frame.f_code.co_filename.startswith((RUNS, shutil.__file__)):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_kill_at_any_line_leaves_a_whole_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every line that runs from the end of round 2 to the end of round 3 is tried."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a kill loses nothing of what was given to the system
    start = tmp_path / "start"
    run = RunDirectory.create(start, CONFIG)
    advance(run, 1)
    advance(run, 2)
    seen, count, alive = [], 0, False
    rounds: dict[frozenset, int] = {}  # by the content of the folder: most lines leave it as the line before
    while not alive:
        path = tmp_path / "run"
        shutil.copytree(start, path)

        def child(path: Path = path, count: int = count):
            run = RunDirectory.open(path, CONFIG)
            sys.settrace(dies_at(count))
            advance(run, 3)
            sys.settrace(None)

        alive = not killed(child)
        if (left := content(path)) not in rounds:
            rounds[left] = resume(path)
            advance(RunDirectory.open(path, CONFIG), rounds[left] + 1)
            assert resume(path) == rounds[left] + 1
        seen.append(rounds[left])
        shutil.rmtree(path)
        count += 1
    assert set(seen) == {2, 3}
    assert seen == sorted(seen)  # once the new snapshot is there, it stays
    assert seen.count(3) > 10  # removing the old one has many lines, and is one of the moments that matter


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("goal", ["checkpoint-3.tmp", "checkpoint-3.tmp/clients-00001.safetensors", "checkpoint-5"])
def test_a_kill_from_outside_leaves_a_whole_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goal: str):
    """The child saves for ever; the parent kills it as soon as it sees a certain file."""
    monkeypatch.setattr(checkpoint, "SHARD", 1)
    run = RunDirectory.create(tmp_path / "run", CONFIG)
    pid = os.fork()
    if not pid:
        try:
            for number in itertools.count(1):
                advance(run, number)
        finally:
            os._exit(1)
    try:
        while not (run.path / goal).exists() and (checkpoint.newest(run.path) or (0,))[0] < 10:
            os.sched_yield()
    finally:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status)
    assert resume(run.path) >= 2


def test_a_snapshot_is_on_the_disk_before_it_gets_its_name_and_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A kill does not show this, for the system still writes what it was given; a power cut would."""
    run = RunDirectory.create(tmp_path / "run", CONFIG)
    advance(run, 1)
    events = []

    def record(module, name: str, what: Callable[..., str]):
        real = getattr(module, name)

        def call(*arguments, **settings):
            events.append(f"{name} {what(arguments[0])}")
            return real(*arguments, **settings)

        monkeypatch.setattr(module, name, call)

    record(os, "fsync", lambda file: Path(os.readlink(f"/proc/self/fd/{file}")).name)
    record(os, "replace", lambda path: Path(path).name)
    record(shutil, "rmtree", lambda path: Path(path).name)
    advance(run, 2)
    assert events == [
        "fsync metrics.jsonl",
        "fsync server.safetensors",
        "fsync clients-00000.safetensors",
        "fsync meta.json",
        "fsync checkpoint-2.tmp",
        "replace checkpoint-2.tmp",
        "fsync run",
        "rmtree checkpoint-1",
    ]


def failing(real: Callable, count: int, code: int) -> Callable:
    """`real`, but the `count`-th call (from 0) fails."""
    left = count

    def call(*arguments, **settings):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **settings)

    return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
@pytest.mark.parametrize(
    ("module", "name", "count"),
    [
        *((os, "fsync", i) for i in range(5)),  # metrics, server, clients, meta, the new folder
        (os, "replace", 0),
        (safetensors.torch, "save", 0),
        (safetensors.torch, "save", 1),
        (Path, "mkdir", 0),
        *((checkpoint, "write", i) for i in range(3)),  # server, clients, meta
    ],
)
def test_a_full_disk_while_saving_leaves_the_old_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str, count: int, code: int
):
    run = RunDirectory.create(tmp_path / "run", CONFIG)
    advance(run, 1)
    run.append({"round": 2})
    nbytes = 8 + 3 * (3 * 8 + 8)
    complaint = (
        rf"checkpoint-2 cannot be written \({os.strerror(code)}\): it takes {nbytes} bytes; .*"
        r"the last checkpoint \(round 1\) is intact\.$"
    )
    with monkeypatch.context() as patch:
        patch.setattr(module, name, failing(getattr(module, name), count, code))
        with pytest.raises(DataError, match=complaint):
            run.save(2, {"y": torch.tensor(2)}, {"round": 2}, at(2))
    assert sorted(path.name for path in run.path.glob("checkpoint*")) == ["checkpoint-1"]
    assert resume(run.path) == 1
    advance(run, 2)
    assert resume(run.path) == 2


def test_a_disk_that_fails_after_the_new_snapshot_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RunDirectory.create(tmp_path / "run", CONFIG)
    advance(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync, 5, errno.EIO))
        with pytest.raises(DataError, match="is intact"):
            advance(run, 2)
    assert resume(run.path) == 2


def test_the_first_snapshot_has_none_to_fall_back_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RunDirectory.create(tmp_path / "run", CONFIG)
    monkeypatch.setattr(os, "fsync", failing(os.fsync, 0, errno.ENOSPC))
    with pytest.raises(DataError, match="there is no checkpoint yet"):
        run.save(1, {}, {}, at(1))


def test_a_full_disk_while_a_run_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync, 0, errno.ENOSPC))
        with pytest.raises(DataError, match=r"environment\.json cannot be written \(No space left"):
            RunDirectory.create(tmp_path / "run", CONFIG)
    assert not list((tmp_path / "run").iterdir())
    RunDirectory.create(tmp_path / "run", CONFIG)


def test_a_full_disk_while_rewinding_leaves_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RunDirectory.create(tmp_path / "run", CONFIG)
    advance(run, 1)
    run.append({"round": 2})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(os.replace, 0, errno.ENOSPC))
        with pytest.raises(DataError, match=r"metrics\.jsonl cannot be written"):
            run.rewind(1)
    assert [record["round"] for record in run.history()] == [1, 2]
    assert resume(run.path) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_while_appending(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run", CONFIG)
    advance(run, 1)
    (run.path / "metrics.jsonl").unlink()
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    complaint = (
        r"metrics\.jsonl cannot be written \(No space left on device\): it takes 118 bytes; .*round 1\) is intact"
    )
    with pytest.raises(DataError, match=complaint):
        run.append({"round": 2})


REAL = """
import sys, torch
from pathlib import Path
from fedual.errors import DataError
from fedual.rundir import RunDirectory
from fedual.backends.client_store import create

def fails(call):
    try:
        call()
    except DataError as error:
        assert "No space left on device" in str(error), error
        return str(error)
    raise AssertionError("the disk is not full")

disk = Path(sys.argv[1])
run = RunDirectory.create(disk / "run", {"version": 2})
row = lambda value: {"a": torch.full((1024,), float(value))}
small, large = create(row(1), 16), create(row(2), 160)  # 64 kB, 640 kB on a disk of 512 kB
run.append({"round": 1})
run.save(1, row(1), {}, small)
before = sorted(run.path.rglob("*"))

assert "the last checkpoint (round 1) is intact" in fails(lambda: run.save(2, row(2), {}, large))
assert sorted(run.path.rglob("*")) == before

store = create(row(0), 160, folder=disk / "store")  # takes no room yet
rows = large.read(torch.arange(160))
assert "655360 bytes" in fails(lambda: store.write(torch.arange(160), rows))
def fill():
    number = 1
    while True:
        number += 1
        run.append({"round": number, "text": "x" * 1000})
fails(fill)
lines = (run.path / "metrics.jsonl").read_bytes()
assert lines.endswith(b"\\n") and len(run.history()) == lines.count(b"\\n")

del store  # room again
assert run.load().server["a"].eq(1).all()
fresh = create(row(0), 16)
run.restore(fresh)
assert fresh.read(torch.arange(16))["a"].eq(1).all()
run.save(2, row(2), {}, small)
assert run.load().round == 2
print("done")
"""


@pytest.mark.slow
def test_a_file_system_that_is_really_full(tmp_path: Path):
    """In a name space of its own: the mount is gone when the process ends."""
    inside = lambda command, *words: subprocess.run(
        ["unshare", "-Urm", "sh", "-c", f'mount -t tmpfs -o size=512k tmpfs "$0" && {command}', str(tmp_path), *words],
        capture_output=True,
        text=True,
    )
    if shutil.which("unshare") is None or inside("true").returncode:
        pytest.skip("mounting is not allowed here")
    ended = inside('exec "$@"', sys.executable, "-c", REAL, str(tmp_path))
    assert ended.stdout == "done\n", ended.stderr
