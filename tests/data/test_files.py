import gzip
import hashlib
from pathlib import Path

import pytest

from fedual.data import formats
from fedual.data.datasets import File, root_folder, verify
from fedual.data.formats import read_plain
from fedual.errors import DataError

CONTENT = b"some content " * 1000
PUBLISHED = File("a", len(CONTENT), f"sha256:{hashlib.sha256(CONTENT).hexdigest()}")


def test_root_is_argument_then_variable_then_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FEDUAL_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert root_folder(tmp_path / "argument") == tmp_path / "argument"
    assert root_folder() == tmp_path / "variable"
    monkeypatch.delenv("FEDUAL_DATA")
    assert root_folder() == tmp_path / "cache" / "fedual"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert root_folder() == tmp_path / ".cache" / "fedual"


@pytest.mark.parametrize("name", ["a", "a.gz"])
@pytest.mark.parametrize(
    "stored",
    [CONTENT, gzip.compress(CONTENT, 1, mtime=0), gzip.compress(CONTENT, 9, mtime=0)],
    ids=["plain", "fast", "small"],
)
def test_gzip_is_known_by_its_content(tmp_path: Path, name: str, stored: bytes):
    path = tmp_path / name
    path.write_bytes(stored)
    assert read_plain(path) == CONTENT
    verify(path, PUBLISHED)


@pytest.mark.parametrize(
    ("stored", "complaint"),
    [
        (gzip.compress(CONTENT, mtime=0)[:-20], "truncated gzip"),
        (gzip.compress(CONTENT, mtime=0)[:12] + b"\xff" * 30, "damaged gzip"),
        (gzip.compress(CONTENT, mtime=0)[:-8] + bytes(8), "damaged gzip"),
        (gzip.compress(CONTENT, mtime=0) + b"more", "damaged gzip"),
    ],
    ids=["cut", "overwritten", "wrong checksum", "trailing bytes"],
)
def test_damaged_gzip_is_refused(tmp_path: Path, stored: bytes, complaint: str):
    path = tmp_path / "a.gz"
    path.write_bytes(stored)
    for read in (read_plain, lambda p: verify(p, PUBLISHED)):
        with pytest.raises(DataError, match=complaint) as raised:
            read(path)
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)


def test_unreadable_file_is_a_data_error(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be read"):
        read_plain(tmp_path)


def test_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formats, "MAX_BYTES", 1000)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(100_000)))
    with pytest.raises(DataError, match="more than 1000 bytes"):
        read_plain(path)


def test_verify_names_what_differs(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(DataError, match=f"holds {len(CONTENT) - 1} bytes"):
        verify(path, PUBLISHED)
    path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(DataError, match="sha256"):
        verify(path, PUBLISHED)
    path.write_bytes(CONTENT)
    verify(path, File("a", None, f"md5:{hashlib.md5(CONTENT).hexdigest()}"))
