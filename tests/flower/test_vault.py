"""A client's rows are those of the round that the server counted last, whatever fails; otherwise it says so."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from safetensors import safe_open
from safetensors.torch import save_file

from fedual.errors import DataError, InputError
from fedual.flower import vault as module
from fedual.flower.vault import Rows, StateLost, opened
from fedual.runs import files


def rows(value: float) -> Rows:
    return {"eta": torch.full((2, 3), value), "solver.step": torch.tensor(int(value))}


def answer(folder: Path, ack: str | None, nonce: str, value: float) -> float:
    """Handle one message: what the client found (0: nothing), before it keeps `value` for the round `nonce`."""
    with opened(folder, "trial", "site-1") as vault:
        found = vault.settle(ack)
        vault.put(nonce, rows(value))
    return 0.0 if found is None else number(found)


def read(folder: Path, ack: str | None) -> float | None:
    """What a client would go on from."""
    with opened(folder, "trial", "site-1") as vault:
        found = vault.settle(ack)
    return None if found is None else number(found)


def number(found: Rows) -> float:
    """The one value that all rows were made of."""
    assert found.keys() == {"eta", "solver.step"}
    value = found["solver.step"].item()
    assert found["eta"].equal(rows(value)["eta"])
    return value


def file(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


# What happens, as in the table of events: every sequence ends with what the client goes on from.


def test_a_healthy_run_moves_with_every_round(tmp_path: Path):
    assert answer(tmp_path, None, "a", 1) == 0
    assert answer(tmp_path, "a", "b", 2) == 1
    assert answer(tmp_path, "b", "c", 3) == 2
    assert read(tmp_path, "c") == 3


def test_an_answer_that_did_not_count_is_taken_back(tmp_path: Path):
    """The reply came after the time-out, or was refused, or the client function raised after its save."""
    answer(tmp_path, None, "a", 1)
    answer(tmp_path, "a", "late", 2)
    assert answer(tmp_path, "a", "b", 3) == 1
    assert read(tmp_path, "b") == 3
    with pytest.raises(StateLost):
        read(tmp_path, "late")


def test_a_first_answer_that_did_not_count_leaves_nothing(tmp_path: Path):
    answer(tmp_path, None, "late", 1)
    assert answer(tmp_path, None, "a", 2) == 0
    assert read(tmp_path, "a") == 2


def test_a_client_that_raises_before_its_save_keeps_both_copies(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    answer(tmp_path, "a", "b", 2)
    assert read(tmp_path, "b") == 2  # settled, and then nothing was put
    assert read(tmp_path, "a") == 1
    assert answer(tmp_path, "b", "c", 3) == 2


def test_a_server_that_goes_back_to_its_checkpoint_finds_the_committed_rows(tmp_path: Path):
    """It died after the answer to b came and before the checkpoint with it: b never counted."""
    answer(tmp_path, None, "a", 1)
    answer(tmp_path, "a", "b", 2)
    assert answer(tmp_path, "a", "b again", 5) == 1


def test_a_server_that_forgot_or_readmitted_the_client_starts_it_from_zero_and_knows_it_again(tmp_path: Path):
    with opened(tmp_path, "trial", "site-1") as vault:
        secret = vault.secret
    answer(tmp_path, None, "a", 1)
    answer(tmp_path, "a", "b", 2)
    assert answer(tmp_path, None, "c", 3) == 0
    assert read(tmp_path, "c") == 3
    for gone in ("a", "b"):
        with pytest.raises(StateLost):
            read(tmp_path, gone)
    with opened(tmp_path, "trial", "site-1") as vault:
        assert vault.secret == secret


def test_a_message_that_comes_twice_is_answered_twice_alike(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    assert answer(tmp_path, "a", "b", 2) == answer(tmp_path, "a", "b", 2) == 1
    with pytest.raises(InputError, match="Round b was answered with other numbers before"):
        answer(tmp_path, "a", "b", 2.5)
    assert read(tmp_path, "b") == 2


def test_an_old_message_that_comes_again_is_refused_and_harms_nothing(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    answer(tmp_path, "a", "b", 2)
    answer(tmp_path, "b", "c", 3)
    with pytest.raises(StateLost, match=r"counted round a last, and the rounds in .* are: b and c; re-admit"):
        answer(tmp_path, "a", "b", 2)
    assert read(tmp_path, "c") == 3


def test_a_state_file_that_is_gone_is_noticed(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    file(tmp_path).unlink()
    with pytest.raises(StateLost, match=r"counted round a last, and the rounds in .* are: none; re-admit this client"):
        answer(tmp_path, "a", "b", 2)
    assert answer(tmp_path, None, "c", 3) == 0  # re-admitted


def test_the_secret_is_on_the_disk_before_anyone_sees_it_and_is_one_for_each_file(tmp_path: Path):
    seen = set()
    for experiment, client in (("trial", "1"), ("trial", "2"), ("other", "1")):
        with opened(tmp_path, experiment, client) as vault:
            first = vault.secret
        with opened(tmp_path, experiment, client) as vault:
            assert vault.secret == first
        seen.add(first)
    assert len(seen) == 3
    assert all(len(bytes.fromhex(secret)) == 32 for secret in seen)


def test_rows_of_the_caller_and_of_the_vault_share_no_memory(tmp_path: Path):
    """A client may step in place; committed rows that moved with it would be wrong without a sound."""
    answer(tmp_path, None, "a", 1)
    with opened(tmp_path, "trial", "site-1") as vault:
        found = vault.settle("a")
        assert found is not None
        found["eta"] += 10
        found["solver.step"] += 10
        vault.put("b", found)
        found["eta"] += 100
        assert number(vault.settle("a") or {}) == 1
        assert number(vault.settle("b") or {}) == 11
        vault.put("c", rows(12))
    assert read(tmp_path, "b") == 11


def test_put_needs_settle_and_a_round_that_did_not_count(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    with opened(tmp_path, "trial", "site-1") as vault:
        with pytest.raises(InputError, match="Round b is put before settle"):
            vault.put("b", rows(2))
        vault.settle("a")
        with pytest.raises(InputError, match="Round a counted already"):
            vault.put("a", rows(1))
    assert read(tmp_path, "a") == 1


class Protocol(RuleBasedStateMachine):
    """A server that counts or not, a client that dies anywhere, messages that come late, twice, in any order, or never.

    The model has no rows: round `n` adds n to what its start had, so that a value tells which rounds are in it.
    `kept` are the rounds that are on the disk. Only an old message that comes after a newer one makes the client lose
    the round that counted, and then it must say so.
    """

    def __init__(self):
        super().__init__()
        self.home = TemporaryDirectory()
        self.folder = Path(self.home.name)
        self.ack: str | None = None
        self.sent: list[tuple[str | None, str]] = []
        self.value: dict[str | None, float] = {None: 0}
        self.answered: set[str] = set()
        self.kept: set[str] = set()

    def teardown(self):
        self.home.cleanup()

    @rule()
    def send(self):
        """Begin an attempt at a round; the one before is over, counted or not."""
        nonce = f"n{len(self.sent) + 1}"
        self.sent.append((self.ack, nonce))
        self.value[nonce] = self.value[self.ack] + len(self.sent)

    @rule(back=st.integers(0, 3), death=st.sampled_from([None, "before put", "write", "fsync", "rename", "after"]))
    def deliver(self, back: int, death: str | None):
        """The client handles a message, mostly the last one, and dies before, in or after its save."""
        if back >= len(self.sent):
            return
        ack, nonce = self.sent[-1 - back]
        if ack is not None and ack not in self.kept:
            with pytest.raises(StateLost):
                read(self.folder, ack)
            return
        with dying(death):
            assert answer(self.folder, ack, nonce, self.value[nonce]) == self.value[ack]
            self.answered.add(nonce)
        if death in (None, "after"):
            self.kept = {nonce} | ({ack} if ack else set())

    @rule()
    def count(self):
        """The reply to the last message arrives in time."""
        if self.sent and self.sent[-1][1] in self.answered:
            self.ack = self.sent[-1][1]

    @rule()
    def readmit(self):
        self.ack = None

    @invariant()
    def the_rows_are_those_of_the_round_that_counted(self):
        if self.ack is None:
            assert read(self.folder, None) is None
        elif self.ack in self.kept:
            assert read(self.folder, self.ack) == self.value[self.ack]
        else:
            with pytest.raises(StateLost):
                read(self.folder, self.ack)


class Dead(BaseException):
    """The process ends here: nothing catches it."""


@contextmanager
def dying(moment: str | None) -> Iterator[None]:
    """End the client at a moment of its save; like a kill, it leaves the temporary file."""

    def die(*arguments: object):
        raise Dead

    def half(path: Path, content: bytes):
        path.write_bytes(content[: len(content) // 2])
        raise Dead

    where = {
        "before put": patch.object(module.Vault, "put", die),
        "write": patch.object(files, "write", half),
        "fsync": patch.object(os, "fsync", die),
        "rename": patch.object(os, "replace", die),
        "after": patch.object(files, "sync", die),
    }
    if moment is None:
        yield
        return
    with where[moment], patch.object(Path, "unlink", lambda path, missing_ok: None), pytest.raises(Dead):
        yield


Protocol.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestProtocol = Protocol.TestCase


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_kill_at_any_line_leaves_the_rows_that_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every line that runs from opening to closing is tried, with a real kill in a copy of this process."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a kill loses nothing of what was given to the system
    start, folder = tmp_path / "start", tmp_path / "folder"
    answer(start, None, "a", 1)
    answer(start, "a", "b", 2)
    there, count, alive = [], 0, False
    while not alive:
        shutil.copytree(start, folder)
        alive = not killed_at(count, lambda: answer(folder, "b", "c", 3))
        assert read(folder, "b") == 2
        with opened(folder, "trial", "site-1") as vault:
            try:
                there.append(number(vault.settle("c") or {}) == 3)
            except StateLost:
                there.append(False)
        assert answer(folder, "b", "d", 4) == 2
        assert [path.suffix for path in sorted(folder.iterdir())] == [".lock", ".safetensors"]
        shutil.rmtree(folder)
        count += 1
    assert there == sorted(there)  # once the new rows are there, they stay
    assert set(there) == {False, True}
    assert count > 30


def killed_at(count: int, child: Callable[[], object]) -> bool:
    """Run a function in a copy of this process that is killed at the `count`-th line; whether it came so far."""
    sources = (module.__file__, files.__file__)
    left = count

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in sources:
            return None
        left -= event == "line"
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    pid = os.fork()
    if not pid:
        try:
            sys.settrace(trace)
            child()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_new_rows_are_on_the_disk_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A kill does not show this, for the system still writes what it was given; a power cut would."""
    answer(tmp_path, None, "a", 1)
    name, events = file(tmp_path).name, []
    real = os.fsync, os.replace

    def fsync(handle: int):
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        real[0](handle)

    def rename(old: Path, new: Path):
        events.append(f"rename {old.name} {new.name}")
        real[1](old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    answer(tmp_path, "a", "b", 2)
    assert events == [f"fsync {name}.tmp", f"rename {name}.tmp {name}", f"fsync {tmp_path.name}"]


# Disks and files.


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
@pytest.mark.parametrize(("owner", "name"), [(files, "write"), (os, "fsync"), (os, "replace")])
def test_a_disk_that_takes_no_more_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, code: int
):
    answer(tmp_path, None, "a", 1)
    answer(tmp_path, "a", "b", 2)
    before = file(tmp_path).read_bytes()

    def fail(*arguments: object):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        with pytest.raises(DataError, match=rf"safetensors cannot be written \({os.strerror(code)}\): .*intact\.$"):
            answer(tmp_path, "b", "c", 3)
    assert file(tmp_path).read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))
    assert answer(tmp_path, "b", "c", 3) == 2


def test_a_real_limit_on_file_sizes_keeps_what_was_there(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    before = file(tmp_path).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, "trial", "site-1") as vault:
        vault.settle("a")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            with pytest.raises(DataError, match=r"cannot be written \(File too large\)"):
                vault.put("b", {"eta": torch.zeros(2, 10_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert file(tmp_path).read_bytes() == before
        assert not list(tmp_path.glob("*.tmp"))
        vault.put("b", rows(2))  # with room again, the same round
    assert read(tmp_path, "b") == 2


def test_no_room_for_the_first_file_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: object):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", fail)
    with pytest.raises(DataError, match="No space left"), opened(tmp_path, "trial", "site-1"):
        pass
    assert not list(tmp_path.glob("*.safetensors*"))


def test_a_file_that_cannot_be_read_is_not_taken_for_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answer(tmp_path, None, "a", 1)

    def fail(path: Path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        with pytest.raises(DataError, match=r"cannot be read \(Permission denied\)"):
            read(tmp_path, "a")
    assert read(tmp_path, "a") == 1


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be written \(Not a directory\)"):
        read(tmp_path / "file" / "folder", None)


def test_every_damaged_byte_is_noticed(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    answer(tmp_path, "a", "b", 2)
    path = file(tmp_path)
    content = path.read_bytes()
    for position in range(len(content)):
        for flip in (0x01, 0x80, 0xFF) if position % 16 == 0 else (0x01 << position % 8,):
            damaged = bytearray(content)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            with pytest.raises(StateLost, match="is damaged, or no file of fedual's"):
                read(tmp_path, "b")
    path.write_bytes(content)
    assert read(tmp_path, "b") == 2


def test_a_truncated_or_longer_file_is_noticed(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    path = file(tmp_path)
    content = path.read_bytes()
    for other in (*(content[:size] for size in range(0, len(content), 7)), content + b"\0", 2 * content):
        path.write_bytes(other)
        for ack in ("a", None):  # never taken for a client that is new
            with pytest.raises(StateLost, match="is damaged"):
                read(tmp_path, ack)


def test_a_file_of_another_program_is_noticed(tmp_path: Path):
    read(tmp_path, None)
    path = file(tmp_path)
    save_file({"eta": torch.zeros(3)}, path, {"vault": json.dumps({"format": "fedual-vault-1"}), "sha256": "0" * 64})
    with pytest.raises(StateLost, match="no file of fedual's"):
        read(tmp_path, None)


@pytest.mark.parametrize("whose", [("trial", "site-2"), ("other", "site-1")])
def test_a_file_of_another_client_or_experiment_is_noticed(tmp_path: Path, whose: tuple[str, str]):
    with opened(tmp_path / "theirs", *whose) as vault:
        vault.settle(None)
        vault.put("a", rows(1))
    read(tmp_path / "ours", None)
    path = file(tmp_path / "ours")
    shutil.copy(file(tmp_path / "theirs"), path)
    with pytest.raises(StateLost, match=rf"{path.name} is of .*{whose[0]}.*{whose[1]}.*, not of .*trial.*site-1"):
        read(tmp_path / "ours", "a")


def test_a_file_of_another_version_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(module, "FORMAT", "fedual-vault-2")
        answer(tmp_path, None, "a", 1)
    with pytest.raises(StateLost, match=r"fedual-vault-2.*not of.*fedual-vault-1"):
        read(tmp_path, "a")


def test_the_file_is_plain_safetensors(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    answer(tmp_path, "a", "b", 2)
    with safe_open(file(tmp_path), "pt") as content:
        assert set(content.keys()) == {f"{c}.{n}" for c in ("committed", "pending") for n in ("eta", "solver.step")}
        assert content.get_tensor("committed.solver.step") == 1
        assert content.get_tensor("pending.solver.step") == 2
        about = json.loads(content.metadata()["vault"])
    assert about.pop("secret")
    assert about == {
        "format": "fedual-vault-1",
        "experiment": "trial",
        "client": "site-1",
        "committed": "a",
        "pending": "b",
    }


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (2, 3, 4)])
def test_rows_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]):
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(256, (size,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    given = {"x": raw.view(dtype).reshape(shape), "committed.x": torch.tensor(float("nan")), "": torch.tensor(-0.0)}
    with opened(tmp_path, "trial", "site-1") as vault:
        vault.settle(None)
        vault.put("a", given)
    with opened(tmp_path, "trial", "site-1") as vault:
        vault.settle("a")
        vault.put("b", {})
    for ack in ("a", "b"):
        with opened(tmp_path, "trial", "site-1") as vault:
            found = vault.settle(ack)
        assert found is not None
        assert found.keys() == (given.keys() if ack == "a" else set())
        for name, value in found.items():
            assert value.dtype == given[name].dtype
            assert value.shape == given[name].shape
            assert value.flatten().view(torch.uint8).equal(given[name].flatten().view(torch.uint8))


def test_rows_that_share_memory_or_are_transposed_are_kept(tmp_path: Path):
    base = torch.arange(6.0).reshape(2, 3)
    with opened(tmp_path, "trial", "site-1") as vault:
        vault.settle(None)
        vault.put("a", {"x": base, "y": base.T, "z": base[0].requires_grad_()})
    with opened(tmp_path, "trial", "site-1") as vault:
        found = vault.settle("a")
    assert found is not None
    assert found["y"].equal(base.T)
    assert found["z"].equal(base[0])


def test_any_names_have_files_of_their_own(tmp_path: Path):
    """Names that differ in what file systems dislike, in case alone, or in where one name ends."""
    long = 300 * "x"
    pairs = [("a", "b"), ("A", "b"), ("a/b", "c"), ("a", "b/c"), ("a_b", "c"), ("a-b", "c"), ("a", "b-c"), ("..", ".")]
    pairs += [("/", "\\"), ("", "é"), ("a\n", "\0"), ("a", " b"), (long, "1"), (long, "2"), ('"sha256":"', "\ud800")]
    pairs = [(experiment or "ë", client) for experiment, client in pairs]
    for i, pair in enumerate(pairs):
        with opened(tmp_path / "folder", *pair) as vault:
            assert vault.settle(None) is None
            vault.put("a", rows(i))
    for i, pair in enumerate(pairs):
        with opened(tmp_path / "folder", *pair) as vault:
            assert number(vault.settle("a") or {}) == i
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    names = [path.name for path in (tmp_path / "folder").glob("*.safetensors")]
    assert len({name.lower() for name in names}) == len(pairs)
    assert all(len(name) < 120 and name.isascii() and name[0] != "." for name in names)


def test_a_new_folder_is_for_its_owner_alone(tmp_path: Path):
    read(tmp_path / "state" / "fedual", None)
    assert (tmp_path / "state" / "fedual").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("experiment", "client", "wait", "complaint"),
    [
        ("", "a", 1.0, "experiment = ''"),
        ("a", "", 1.0, "client = ''"),
        ("a", 3, 1.0, "client = 3"),
        ("a", "b", -1.0, "wait = -1.0"),
        ("a", "b", float("nan"), "wait = nan"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, experiment: str, client: str, wait: float, complaint: str):
    with pytest.raises(InputError, match=complaint), opened(tmp_path / "folder", experiment, client, wait):
        pass
    assert not list(tmp_path.iterdir())


# Two messages at once.


def test_a_second_message_in_the_same_process_is_kept_out(tmp_path: Path):
    with opened(tmp_path, "trial", "site-1"):
        with (
            pytest.raises(DataError, match=r"\.lock is held by another process or message, and still was after 0 s"),
            opened(tmp_path, "trial", "site-1", wait=0),
        ):
            pass
        with opened(tmp_path, "trial", "site-2", wait=0):  # another client is another lock
            pass
    with opened(tmp_path, "trial", "site-1", wait=0):
        pass


def test_an_error_inside_lets_the_next_one_in(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), opened(tmp_path, "trial", "site-1"):
        raise ZeroDivisionError
    with opened(tmp_path, "trial", "site-1", wait=0):
        pass


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = module.fcntl.flock

    def fail(handle: int, operation: int):
        if operation & module.fcntl.LOCK_EX:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(handle, operation)

    monkeypatch.setattr(module.fcntl, "flock", fail)
    with pytest.raises(DataError, match=r"\.lock cannot be written \(No locks available\)"):
        read(tmp_path, None)


def another_site(folder: Path, pipe: Connection) -> None:
    """What a second process does: it reports every pause while it waits, what it finds, and stays inside."""
    with (
        patch.object(module.time, "sleep", lambda seconds: pipe.send("waits") or pipe.recv()),
        opened(folder, "trial", "site-1") as vault,
    ):
        pipe.send(number(vault.settle("b") or {}))
        pipe.recv()  # for ever: the test kills it


def test_two_processes_exclude_each_other(tmp_path: Path):
    """A second process waits while the first is inside, sees what it wrote, and its death frees the lock."""
    answer(tmp_path, None, "a", 1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=another_site, args=(tmp_path, theirs), daemon=True)
    with opened(tmp_path, "trial", "site-1") as vault:
        child.start()
        theirs.close()
        assert ours.recv() == "waits"
        ours.send("try again")
        assert ours.recv() == "waits"
        vault.settle("a")
        vault.put("b", rows(2))
    ours.send("try again")
    assert ours.recv() == 2
    with pytest.raises(DataError, match="is held by another"), opened(tmp_path, "trial", "site-1", wait=0):
        pass
    child.kill()
    child.join()
    with opened(tmp_path, "trial", "site-1", wait=0) as vault:
        assert number(vault.settle("b") or {}) == 2
    ours.close()
