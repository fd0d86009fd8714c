"""A client's rows are those of the round that the server counted last, whatever fails; otherwise it says so."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from vaults import answer, file, number, read, rows

from fedual.errors import InputError
from fedual.flower import vault as module
from fedual.flower.vault import StateLost, opened
from fedual.rundir import atomic

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


def test_a_server_that_forgot_or_readmitted_the_client_starts_it_from_zero(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    answer(tmp_path, "a", "b", 2)
    assert answer(tmp_path, None, "c", 3) == 0
    assert read(tmp_path, "c") == 3
    for gone in ("a", "b"):
        with pytest.raises(StateLost):
            read(tmp_path, gone)


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
    with pytest.raises(StateLost, match="no state of round a, which the server counted last: re-admit") as caught:
        answer(tmp_path, "a", "b", 2)
    assert caught.value.private == f"the rounds in {file(tmp_path)} are: b and c"
    assert read(tmp_path, "c") == 3


def test_a_state_file_that_is_gone_is_noticed(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    file(tmp_path).unlink()
    with pytest.raises(StateLost, match="no state of round a, which the server counted last: re-admit") as caught:
        answer(tmp_path, "a", "b", 2)
    assert caught.value.private.endswith("are: none")
    assert answer(tmp_path, None, "c", 3) == 0  # re-admitted


def test_there_is_no_file_before_there_is_something_to_keep(tmp_path: Path):
    assert read(tmp_path, None) is None
    assert not list(tmp_path.glob("*.safetensors"))


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

    def half(path: Path, content: bytes, mode: int):
        path.write_bytes(content[: len(content) // 2])
        raise Dead

    where = {
        "before put": patch.object(module.Vault, "put", die),
        "write": patch.object(atomic, "write", half),
        "fsync": patch.object(os, "fsync", die),
        "rename": patch.object(os, "replace", die),
        "after": patch.object(atomic, "sync", die),
    }
    if moment is None:
        yield
        return
    with where[moment], patch.object(Path, "unlink", lambda path, missing_ok: None), pytest.raises(Dead):
        yield


Protocol.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestProtocol = Protocol.TestCase


@pytest.mark.slow
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
    sources = (module.__file__, atomic.__file__)
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
