"""Add to a list of versions the SHA-256 of every file that pip may install, from the indexes that pip is set up with.

    python .ci/hash_lock.py < versions.txt > requirements.lock

The input is what `pip freeze` writes. Files are wheels for CPython 3.11 on any machine, and sources. Folders of wheels
(`find-links`) come first: torch's build for CPUs is there.
"""

import hashlib
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

from pip._internal.models.index import PyPI
from pip._vendor.packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

EXTRAS = {"sqlalchemy": "asyncio", "uvicorn": "standard"}
"""Extras that another package of the list requires: pip 23.2 looks for a hash under this name, too."""
HEAD = """\
# Development lock for Python 3.11: exact versions with the SHA-256 of their files, for `pip install --require-hashes`.
# The Makefile uses the versions alone, as constraints. To renew it: see CONTRIBUTING.md.
"""


class Page(HTMLParser):
    """The links of an index's page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep a link's address."""
        self.links += [value for key, value in attrs if tag == "a" and key == "href" and value]


def setting(name: str) -> list[str]:
    """A setting of pip's, from the environment or its files."""
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    return [*os.environ.get("PIP_" + name.upper().replace("-", "_"), "").split(), *found.split()]


def links(index: str, name: str) -> list[str]:
    """The addresses that an index has of a package; none if it does not have it."""
    page = Page()
    try:
        address = f"{index.rstrip('/')}/{name}/" + "index.html" * index.startswith("file:")
        with urllib.request.urlopen(address) as reply:
            page.feed(reply.read().decode())
    except OSError:
        return []
    return page.links


def hashes(name: str, version: str) -> Iterator[str]:
    """The SHA-256 of the files of a version; of those in a folder alone, if there are any.

    pip prefers a file whose hash an index names to one in a folder, whatever their versions: with both hashes it would
    take the CUDA build of torch, whose libraries the list lacks.
    """
    files = [path for folder in setting("find-links") for path in Path(folder).glob("*.whl")]
    own = [path for path in files if canonicalize_name(path.name.split("-")[0]) == name and fits(path.name, version)]
    for path in own:
        yield hashlib.sha256(path.read_bytes()).hexdigest()
    for index in [] if own else (setting("index-url") or [PyPI.simple_url]) + setting("extra-index-url"):
        for link in links(index, name):
            path, _, fragment = link.partition("#")
            if fragment.startswith("sha256=") and fits(urllib.parse.unquote(path.rsplit("/", 1)[-1]), version):
                yield fragment.removeprefix("sha256=")


def fits(file: str, version: str) -> bool:
    """True if a file is of this version, and not only for other versions of Python."""
    try:
        if not file.endswith(".whl"):
            return str(parse_sdist_filename(file)[1]) == version
        _, found, _, tags = parse_wheel_filename(file)
    except ValueError:
        return False
    good = any(
        tag.interpreter in ("py3", "py311", "cp311")
        or (tag.abi == "abi3" and tag.interpreter.startswith("cp3") and int(tag.interpreter[3:]) <= 11)
        for tag in tags
    )
    return found.public == version and good


def entry(line: str) -> str:
    """A line of the input with its hashes."""
    name, version = line.split(";")[0].strip().split("==")
    found = sorted(set(hashes(canonicalize_name(name), version)))
    if not found:
        raise SystemExit(f"{line}: no index has a hash of it; give one that has.")
    extra = EXTRAS.get(canonicalize_name(name))
    names = [line] if extra is None else [line, line.replace("==", f"[{extra}]==", 1)]
    return "\n".join(" \\\n".join([each, *(f"    --hash=sha256:{one}" for one in found)]) for each in names)


if __name__ == "__main__":
    lines = [line.strip() for line in sys.stdin if line.strip() and not line.startswith("#")]
    with ThreadPoolExecutor(8) as pool:
        print(HEAD + "\n".join(pool.map(entry, lines)))
