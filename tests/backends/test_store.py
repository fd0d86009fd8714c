import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedual.backends.client_store import Disk, Memory, Rows, Store, create
from fedual.errors import DataError, InputError

INITIAL = {
    "lam": torch.tensor([[0.5, -0.0, 1e-300], [2.0, float("inf"), float("nan")]], dtype=torch.float64),
    "momentum": torch.arange(4, dtype=torch.float32),
    "half": torch.tensor([[1.5], [-2.5]], dtype=torch.bfloat16),
    "steps": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(2, 0),
}


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Rows, int], Store]:
    folder = None if request.param == "memory" else tmp_path / "store"
    return lambda initial, num_clients: create(initial, num_clients, folder=folder)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit: NaN equals itself, 0 is not -0."""
    flat = lambda x: x.contiguous().flatten().view(torch.uint8)
    return a.dtype == b.dtype and a.shape == b.shape and flat(a).equal(flat(b))


def random_rows(count: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda value: torch.randint(-99, 99, (count, *value.shape), generator=generator).to(value.dtype)
    return {name: draw(value) for name, value in INITIAL.items()}


@pytest.mark.parametrize("kind", ["memory", "disk"])
@given(
    num_clients=st.integers(1, 6),
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 2**31), st.lists(st.integers(0, 5), max_size=8))),
)
def test_any_reads_and_writes_agree_with_a_dict(
    kind: str,
    tmp_path_factory: pytest.TempPathFactory,
    num_clients: int,
    actions: list[tuple[bool, int, list[int]]],
):
    store = create(INITIAL, num_clients, folder=None if kind == "memory" else tmp_path_factory.getbasetemp() / "store")
    oracle = {(name, k): value for name, value in INITIAL.items() for k in range(num_clients)}
    for writes, seed, some in [*actions, (False, 0, list(range(num_clients)))]:
        clients = [k for k in some if k < num_clients]
        if writes:
            clients = list(dict.fromkeys(clients))
            rows = random_rows(len(clients), seed)
            store.write(torch.tensor(clients, dtype=torch.int64), rows)
            oracle |= {(name, k): rows[name][i].clone() for name in rows for i, k in enumerate(clients)}
        else:
            rows = store.read(torch.tensor(clients, dtype=torch.int64))
            assert rows.keys() == INITIAL.keys()
            for name, value in INITIAL.items():
                assert rows[name].shape == (len(clients), *value.shape)
                assert all(same(row, oracle[name, k]) for row, k in zip(rows[name], clients, strict=True))
        for value in rows.values():  # neither what was read nor what was written is tied to the store
            value.fill_(99)


def test_what_a_store_says_of_itself(make: Callable[[Rows, int], Store]):
    store = make(INITIAL, 5)
    assert store.num_clients == 5
    assert store.names == ("lam", "momentum", "half", "steps", "empty")
    assert store.nbytes == 5 * (6 * 8 + 4 * 4 + 2 * 2 + 8)


def test_the_initial_row_is_copied(make: Callable[[Rows, int], Store]):
    initial = {"a": torch.zeros(2)}
    store = make(initial, 2)
    initial["a"].fill_(1)
    assert store.read(torch.arange(2))["a"].eq(0).all()


def test_a_store_without_names(make: Callable[[Rows, int], Store]):
    store = make({}, 3)
    store.write(torch.tensor([1]), {})
    assert store.read(torch.tensor([2])) == {}
    assert store.nbytes == 0


def test_rows_that_are_not_contiguous_or_need_gradients(make: Callable[[Rows, int], Store]):
    store = make({"a": torch.zeros(2, 3)}, 2)
    value = torch.arange(12.0, requires_grad=True).reshape(2, 3, 2).transpose(1, 2)
    store.write(torch.tensor([1, 0]), {"a": value})
    found = store.read(torch.tensor([1, 0]))["a"]
    assert found.equal(value)
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("clients", "changes", "complaint"),
    [
        ([0, 2], {}, "0 … 1"),
        ([-1, 0], {}, "0 … 1"),
        ([1, 1], {}, "at most once"),
        ([0.0, 1.0], {}, "torch.int64"),
        ([[0, 1]], {}, "torch.int64"),
        ([True, False], {}, "torch.int64"),
        ([0, 1], {"a": torch.zeros(2, 3, dtype=torch.float32)}, "a is torch.float32"),
        ([0, 1], {"a": torch.zeros(2, 4, dtype=torch.float64)}, r"takes torch.float64 \(2, 3\)"),
        ([0, 1], {"a": torch.zeros(3, dtype=torch.float64)}, r"takes torch.float64 \(2, 3\)"),
        ([0, 1], {"a": torch.zeros(1, 3, dtype=torch.float64)}, r"takes torch.float64 \(2, 3\)"),
        ([0, 1], {"b": torch.zeros(2)}, r"rows hold \['a', 'b'\]"),
        ([0, 1], {"a": None}, r"rows hold \[\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    make: Callable[[Rows, int], Store], clients: list, changes: dict, complaint: str
):
    store = make({"a": torch.zeros(3)}, 2)
    rows = {name: value for name, value in {"a": torch.ones(2, 3), **changes}.items() if value is not None}
    with pytest.raises(InputError, match=complaint):
        store.write(torch.tensor(clients), rows)
    assert store.read(torch.arange(2))["a"].eq(0).all()


def test_a_client_that_is_not_there_cannot_be_read(make: Callable[[Rows, int], Store]):
    with pytest.raises(InputError, match="0 … 1"):
        make({"a": torch.zeros(3)}, 2).read(torch.tensor([2]))


@pytest.mark.parametrize("num_clients", [0, -1, 2.0])
def test_a_store_needs_clients(make: Callable[[Rows, int], Store], num_clients: int):
    with pytest.raises(InputError, match="at least one client"):
        make({}, num_clients)


def test_a_disk_store_takes_space_only_for_what_is_written_and_leaves_no_file(tmp_path: Path):
    store = create({"a": torch.ones(1000)}, 1_000_000, folder=tmp_path / "new" / "store")
    assert isinstance(store, Disk)
    assert isinstance(create({}, 1), Memory)
    file = store._files["a"]
    assert os.fstat(file).st_blocks == 0
    store.write(torch.tensor([999_999]), {"a": torch.full((1, 1000), 2.0)})
    assert os.fstat(file).st_size == store.nbytes == 8_000_000_000
    assert os.fstat(file).st_blocks * 512 < 100_000
    found = store.read(torch.tensor([999_999, 999_998, 0]))["a"]
    assert found[:, 0].tolist() == [2.0, 1.0, 1.0]
    assert not any((tmp_path / "new" / "store").iterdir())
    del store
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_row_may_move_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The system may read or write less than it was asked for."""
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda file, parts, place: read(file, [parts[0][:5]], place))
    monkeypatch.setattr(os, "pwritev", lambda file, parts, place: write(file, [parts[0][:7]], place))
    store = create(INITIAL, 3, folder=tmp_path)
    rows = random_rows(2, seed=0)
    store.write(torch.tensor([2, 0]), rows)
    found = store.read(torch.tensor([2, 0]))
    assert all(same(found[name], rows[name]) for name in INITIAL)


def fails(code: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    store = create({"a": torch.zeros(4)}, 3, folder=tmp_path)
    monkeypatch.setattr(os, "pwritev", fails(code))
    complaint = rf"a of client 1 cannot be written in .*{os.strerror(code)}.* 96 bytes"
    with pytest.raises(DataError, match=complaint):
        store.write(torch.tensor([1]), {"a": torch.ones(1, 4)})
    assert store.read(torch.tensor([1]))["a"].eq(0).all()


def test_a_disk_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = create({"a": torch.zeros(4)}, 3, folder=tmp_path)
    store.write(torch.tensor([1]), {"a": torch.ones(1, 4)})
    monkeypatch.setattr(os, "preadv", fails(errno.EIO))
    with pytest.raises(DataError, match="client 1 cannot be read"):
        store.read(torch.tensor([1]))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(DataError, match="client 1 is cut off"):
        store.read(torch.tensor([1]))


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="choose another"):
        create({"a": torch.zeros(4)}, 3, folder=tmp_path / "file")
