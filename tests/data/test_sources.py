"""Sources with the outside world replaced: addresses answer from memory, clients are small scripts on PATH."""

import email.message
import io
import os
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fedual.data import fetch
from fedual.data.fetch import FAILURES, addresses, apt, archive, npm
from fedual.errors import DataError


def silent(what: str, done: int, total: int | None) -> None:
    pass


def tar_bytes(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


class Web:
    """Stands in for `urllib.request.urlopen`."""

    def __init__(self, pages: dict[str, bytes]):
        self.pages = pages
        self.length: int | None = None  # announced instead of the true one

    def __call__(self, request: urllib.request.Request, timeout: float):
        assert 0 < timeout <= 30
        if request.full_url not in self.pages:
            raise urllib.error.URLError(OSError(-2, "Name or service not known"))
        response = io.BytesIO(self.pages[request.full_url])
        response.headers = email.message.Message()  # pyright: ignore[reportAttributeAccessIssue]
        length = len(response.getvalue()) if self.length is None else self.length
        response.headers["Content-Length"] = str(length)  # pyright: ignore[reportAttributeAccessIssue]
        return response


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    web = Web({"https://x/a": b"content of a", "https://x/b": b"content of b"})
    monkeypatch.setattr(urllib.request, "urlopen", web)
    return web


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a Python script on an otherwise empty PATH under the name of a client."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, code: str) -> None:
        path = folder / name
        path.write_text(f"#!{sys.executable}\nimport os, sys\n{code}\n")
        os.chmod(path, 0o755)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


def test_addresses_deliver_files_and_report_bytes(web: Web, folder: Path):
    seen = []
    addresses("https://x/", ["a", "b"]).fetch(folder, lambda *event: seen.append(event))
    assert (folder / "b").read_bytes() == b"content of b"
    assert seen == [("a", 0, 12), ("a", 12, 12), ("b", 0, 12), ("b", 12, 12)]


def test_missing_address_fails(web: Web, folder: Path):
    with pytest.raises(FAILURES, match="Name or service not known"):
        addresses("https://x/", ["c"]).fetch(folder, silent)


def test_short_answer_fails(web: Web, folder: Path):
    web.length = 20
    with pytest.raises(DataError, match="after 12 of 20 bytes"):
        addresses("https://x/", ["a"]).fetch(folder, silent)


def test_endless_answer_fails(web: Web, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 10)
    with pytest.raises(DataError, match="more than 10 bytes"):
        addresses("https://x/", ["a"]).fetch(folder, silent)


def test_archive_gives_its_named_members_only(web: Web, folder: Path):
    web.pages["https://x/t"] = tar_bytes({"d/a.bin": b"A", "d/b.bin": b"B", "../evil": b"E", "/d/a.bin": b"no"})
    archive("https://x/t", ["d/a.bin"]).fetch(folder, silent)
    assert (folder / "a.bin").read_bytes() == b"A"
    assert not (folder / "b.bin").exists()
    assert not (folder.parent / "evil").exists()


def test_link_in_an_archive_is_not_followed(web: Web, folder: Path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("d/a.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    web.pages["https://x/t"] = buffer.getvalue()
    with pytest.raises(DataError, match=r"the archive has no d/a\.bin"):
        archive("https://x/t", ["d/a.bin"]).fetch(folder, silent)


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"not a tar", lambda b: b""])
def test_damaged_archive_fails(web: Web, folder: Path, damage):
    web.pages["https://x/t"] = damage(tar_bytes({"d/a.bin": os.urandom(5000)}))
    with pytest.raises(FAILURES):
        archive("https://x/t", ["d/a.bin"]).fetch(folder, silent)


def test_npm_packs_by_name_and_converts(client, folder: Path, tmp_path: Path):
    (tmp_path / "package.tgz").write_bytes(tar_bytes({"package/data/a": b"A"}))
    client(
        "npm",
        f"assert sys.argv[1:] == ['pack', '--ignore-scripts', 'p@1'], sys.argv\n"
        f"open('p-1.tgz', 'wb').write(open({str(tmp_path / 'package.tgz')!r}, 'rb').read())",
    )
    converted = []
    npm("p@1", ["package/data/a"], convert=converted.append).fetch(folder, silent)
    assert (folder / "a").read_bytes() == b"A"
    assert converted == [folder]


@pytest.mark.parametrize("relative", [False, True])
def test_apt_downloads_and_unpacks(client, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative):
    if relative:
        monkeypatch.chdir(folder.parent)
        folder = Path(folder.name)
    (tmp_path / "data.tar").write_bytes(tar_bytes({"./usr/a.gz": b"A"}, "w"))
    client("apt-get", "assert sys.argv[1:] == ['download', 'p'], sys.argv\nopen('p_1_all.deb', 'wb').write(b'deb')")
    client(
        "dpkg-deb",
        f"assert sys.argv[1] == '--fsys-tarfile' and open(sys.argv[2], 'rb').read() == b'deb'\n"
        f"sys.stdout.buffer.write(open({str(tmp_path / 'data.tar')!r}, 'rb').read())",
    )
    apt("p", ["usr/a.gz"]).fetch(folder, silent)
    assert (folder / "a.gz").read_bytes() == b"A"


def test_absent_client_is_named(client, folder: Path):
    with pytest.raises(DataError, match="npm is not installed"):
        npm("p", ["a"]).fetch(folder, silent)
    with pytest.raises(DataError, match="apt-get is not installed"):
        apt("p", ["a"]).fetch(folder, silent)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("sys.exit('first\\nE: Unable to locate package p\\nlast')", "E: Unable to locate package p"),
        ("sys.exit('first\\nlast')", "last"),
        ("sys.exit(3)", "exit code 3"),
        ("", "left no package"),
    ],
)
def test_failing_client_gives_its_own_reason(client, folder: Path, code: str, complaint: str):
    client("apt-get", code)
    with pytest.raises(DataError, match=complaint):
        apt("p", ["a"]).fetch(folder, silent)


def test_slow_client_is_stopped(client, folder: Path, monkeypatch: pytest.MonkeyPatch):
    def endless(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    client("apt-get", "")
    monkeypatch.setattr(subprocess, "run", endless)
    with pytest.raises(DataError, match=f"no end after {fetch.PATIENCE} s"):
        apt("p", ["a"]).fetch(folder, silent)
