"""The file in which a site keeps what it told: durable before a reply leaves, private, and never silently lost."""

from pathlib import Path

import numpy as np
import pytest
from guarded import design, guard, names, table, variables
from hypothesis import given
from hypothesis import strategies as st

from fedual.errors import DataError
from fedual.glm.guards import Refusal
from fedual.glm.ledger import Book, Told, opened
from fedual.rundir import atomic

MADE = design(*table(40, 3))


def told(folder: Path, reply: str, numbers: int = 1) -> None:
    one = guard(folder)
    one.table(MADE, names(MADE.x.numpy()), variables(MADE.x.numpy()))
    one.charge(reply, numbers)


def rows(book: Book, *members: int) -> np.ndarray:
    return book.hashed(np.array(members, np.uint64))


def test_the_file_is_private(tmp_path: Path):
    (tmp_path / "ledger.tmp").touch(0o644)  # left by a process that died
    told(tmp_path, "first")
    told(tmp_path, "second")
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "ledger": 0o600,
        "ledger.lock": 0o600,
    }
    assert (tmp_path / "new").exists() is False
    told(tmp_path / "new" / "folder", "first")
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


def test_a_reply_is_on_disk_before_charge_returns_and_not_at_all_if_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told(tmp_path, "first")
    before = (tmp_path / "ledger").read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(atomic.os, "replace", fail)
        with pytest.raises(Refusal, match="its ledger cannot be used") as refusal:
            told(tmp_path, "second")
        assert "No space left" in refusal.value.private
        assert str(tmp_path) not in str(refusal.value)
    assert (tmp_path / "ledger").read_bytes() == before
    with opened(tmp_path / "ledger") as book:
        assert book.replies == {"first"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "strange", "folder", "lost"])
def test_a_damaged_or_lost_ledger_refuses_everything(tmp_path: Path, damage: str):
    told(tmp_path, "first")
    path = tmp_path / "ledger"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = {"cut": content[:-1], "flipped": content, "empty": b"", "strange": b'{"json": true}'}.get(damage)
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    elif damage == "folder":
        path.mkdir()
    for _ in range(2):
        with pytest.raises(Refusal) as refusal:
            told(tmp_path, "first")
        assert refusal.value.rule == "ledger"
        assert str(path) in refusal.value.private
        with pytest.raises(Refusal, match="rule ledger"):
            guard(tmp_path).charge("description", 1)
    if damage == "lost":  # as its operator may decide
        (tmp_path / "ledger.lock").unlink()
        told(tmp_path, "first")


def test_the_file_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedual.glm.ledger.FORMAT", "fedual-glm-ledger-2")
    told(tmp_path, "first")
    monkeypatch.undo()
    with pytest.raises(DataError, match="its format is fedual-glm-ledger-2"), opened(tmp_path / "ledger"):
        pass


def test_the_file_holds_nothing_of_the_rows(tmp_path: Path):
    """Equal tables have other hashes at other sites, and equal rows have different ones."""
    digests = np.array([7, 7, 7, 8], np.uint64)
    first, second = Book(), Book()
    assert len(first.hashed(digests)) == 4
    assert not set(first.hashed(digests)) & (set(second.hashed(digests)) | {7, 8})
    assert (first.hashed(digests[::-1]) == first.hashed(digests)).all()


def test_a_hundred_thousand_rows_take_eight_bytes_each_and_a_bit_for_every_set(tmp_path: Path):
    book = Book()
    everything = book.hashed(np.arange(100_000, dtype=np.uint64))
    book.charge(everything, {"y": Told(0.1, 0.1)})
    book.charge(everything[1000:], {"y": Told(0.1, 0.1)})
    assert len(book.to_bytes()) < 100_000 * (8 + 2 / 8) + 2000
    again = Book.from_bytes(book.to_bytes())
    assert (again.salt, again.spent) == (book.salt, book.spent)
    assert (again.rows == book.rows).all()
    assert (again.sets == book.sets).all()
    assert again.before(everything, ["y"]) == {"y": pytest.approx(Told(0.199, 0.199))}


def test_what_was_told_is_averaged_over_the_rows_that_ask():
    book = Book()
    book.charge(rows(book, *range(10)), {"x": Told(0.2, 0.4), "y": Told(0.2, 0.4)})
    book.charge(rows(book, *range(5, 20)), {"y": Told(0.3, 0.6)})
    found = book.before(rows(book, *range(20)), ["x", "y", "z"])
    assert found["x"] == pytest.approx((0.1, 0.2))
    assert found["y"] == pytest.approx((0.1 + 0.75 * 0.3, 0.2 + 0.75 * 0.6))
    assert found["z"] == (0, 0)
    assert book.before(rows(book, *range(5, 10)), ["y"])["y"] == pytest.approx((0.5, 1.0))


def exposes(sets: list[set[int]], least: int, universe: int = 8) -> bool:
    """Whether a combination of the sets' sums is one over fewer than `least` rows: by trying all groups of rows."""
    matrix = np.array([[row in each for each in sets] for row in range(universe)], float)
    whole = np.linalg.matrix_rank(matrix)
    groups = [[bool(number >> row & 1) for row in range(universe)] for number in range(1, 2**universe)]
    return any(np.linalg.matrix_rank(matrix[~np.array(group)]) < whole for group in groups if sum(group) < least)


@given(st.lists(st.sets(st.integers(0, 7), min_size=3), min_size=1, max_size=5), st.integers(2, 4))
def test_differences_are_found_as_by_trying_all_groups_of_rows(sets: list[set[int]], least: int):
    book = Book()
    for each in sets[:-1]:
        book.charge(rows(book, *each), {"y": Told(0, 0)})
    if sets[-1] in sets[:-1]:
        assert book.difference(rows(book, *sets[-1]), least) is None
    else:
        assert (book.difference(rows(book, *sets[-1]), least) is not None) == exposes(sets, least)


def test_too_many_small_groups_count_as_exposed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedual.glm.ledger.MOST_GROUPS", 0)
    book = Book()
    book.charge(rows(book, *range(20)), {"y": Told(0, 0)})
    assert book.difference(rows(book, *range(10)), 5) is None
    assert book.difference(rows(book, *range(16, 40)), 5) == 4  # 16 … 19 are in both


def test_only_one_message_at_a_time_has_it_open(tmp_path: Path):
    """tests/flower/test_vault_files.py tries the lock with two processes."""
    path = tmp_path / "ledger"
    with opened(path), pytest.raises(DataError, match="is held by another process"), opened(path, wait=0):
        pass
    with opened(path, wait=0):
        pass


def charged(book: Book) -> float:
    book.charge(rows(book, *range(10)), {"y": Told(1, 1)})
    return book.spent[0]["y"].numbers


def test_a_block_that_fails_changes_nothing(tmp_path: Path):
    path = tmp_path / "ledger"
    with opened(path):
        pass
    with pytest.raises(ZeroDivisionError), opened(path) as book:
        book.refusals.add(str(charged(book) / 0))
    with opened(path, wait=0) as book:
        assert not book.spent


def test_a_fit_that_came_between_is_seen_when_the_reply_is_charged(tmp_path: Path):
    """Both fits were checked before either was charged."""
    x, y = table(40, 3)
    first, second = guard(tmp_path), guard(tmp_path)
    first.table(design(x, y), names(x), variables(x))
    second.table(design(x[1:], y[1:], np.arange(1, 40)), names(x), variables(x))
    first.charge("first", 1)
    with pytest.raises(Refusal, match="min_difference"):
        second.charge("second", 1)
    first.charge("again", 1)


def test_rows_that_were_added_are_a_difference_too(tmp_path: Path):
    x, y = table(60, 3)
    for size in (40, 45, 60):
        one = guard(tmp_path)
        one.table(design(x[:size], y[:size]), names(x), variables(x))
        one.charge(f"with {size}", 1)
    for size in (44, 59):
        with pytest.raises(Refusal) as refusal:
            guard(tmp_path).table(design(x[:size], y[:size]), names(x), variables(x))
        assert refusal.value.rule == "min_difference"
        assert "1 rows" in refusal.value.private
        assert "1" not in str(refusal.value)
