"""A vault's files: full disks, damage, names, locks."""

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vaults import answer, file, number, read, rows

from fedual.errors import DataError, InputError
from fedual.flower import vault as module
from fedual.flower.vault import StateLost, opened
from fedual.rundir import atomic, locking

# Disks and atomic.


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
@pytest.mark.parametrize(("owner", "name"), [(atomic, "write"), (os, "fsync"), (os, "replace")])
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

    monkeypatch.setattr(atomic, "write", fail)
    with pytest.raises(DataError, match="No space left"):
        answer(tmp_path, None, "a", 1)
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
    answer(tmp_path, None, "a", 1)
    path = file(tmp_path)
    save_file({"eta": torch.zeros(3)}, path, {"vault": json.dumps({"format": "fedual-vault-1"}), "sha256": "0" * 64})
    with pytest.raises(StateLost, match="no file of fedual's"):
        read(tmp_path, None)


@pytest.mark.parametrize("whose", [("trial", "site-2"), ("other", "site-1")])
def test_a_file_of_another_client_or_experiment_is_noticed(tmp_path: Path, whose: tuple[str, str]):
    with opened(tmp_path / "theirs", *whose) as vault:
        vault.settle(None)
        vault.put("a", rows(1))
    answer(tmp_path / "ours", None, "a", 1)
    path = file(tmp_path / "ours")
    shutil.copy(file(tmp_path / "theirs"), path)
    with pytest.raises(StateLost, match="belongs to another client or version") as caught:
        read(tmp_path / "ours", "a")
    private = rf"{path.name} belongs to .*{whose[0]}.*{whose[1]}.*, not to .*trial.*site-1"
    assert re.search(private, caught.value.private)


def test_a_file_of_another_version_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(module, "FORMAT", "fedual-vault-2")
        answer(tmp_path, None, "a", 1)
    with pytest.raises(StateLost, match="belongs to another client or version") as caught:
        read(tmp_path, "a")
    assert re.search("fedual-vault-2.*not to.*fedual-vault-1", caught.value.private)


def test_the_file_is_plain_safetensors(tmp_path: Path):
    answer(tmp_path, None, "a", 1)
    answer(tmp_path, "a", "b", 2)
    with safe_open(file(tmp_path), "pt") as content:
        assert set(content.keys()) == {f"{c}.{n}" for c in ("committed", "pending") for n in ("eta", "solver.step")}
        assert content.get_tensor("committed.solver.step") == 1
        assert content.get_tensor("pending.solver.step") == 2
        about = json.loads(content.metadata()["vault"])
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
    real = locking.fcntl.flock

    def fail(handle: int, operation: int):
        if operation & locking.fcntl.LOCK_EX:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(handle, operation)

    monkeypatch.setattr(locking.fcntl, "flock", fail)
    with pytest.raises(
        DataError, match=r"\.lock cannot be locked \(No locks available\): its file system has no locks"
    ):
        read(tmp_path, None)


def another_site(folder: Path, pipe: Connection) -> None:
    """What a second process does: it reports every pause while it waits, what it finds, and stays inside."""
    with (
        patch.object(locking.time, "sleep", lambda seconds: pipe.send("waits") or pipe.recv()),
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
