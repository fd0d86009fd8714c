"""The seal of state files: the SHA-256 of all other bytes, in the file itself.

content = seal(tensors, {"format": …})       # safetensors: the metadata entry "sha256"
if verify(content):
    metadata, tensors = parse(content)       # parsed, never executed

A file of a run's folder also says to which run it belongs, by the digest of the config (`fedual.rundir.config.digest`):

content = seal(tensors, {"run": digest})     # metadata, tensors = unseal(content, digest)
content = seal_json(value, digest)           # value = unseal_json(content, digest): the last entries "run" and "sha256"

A run that an earlier version began has no digest, and its files may have no seal.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedual.errors import import_optional
from fedual.parsing import loads, reason

KEY = b'"sha256":"'
"""The seal's key in the header; quotes inside names and values are escaped, so that nothing else looks like it."""
DIGITS = 64  # of a SHA-256 in hexadecimal
JSON_SEAL = re.compile(rb'"sha256": "(.{64})"\s*}\s*\Z', re.DOTALL)
END = 120
"""Bytes at the end of a JSON file that have the seal."""


def seal(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file that `verify` can check."""
    content = _safetensors().torch.save(dict(tensors), {**metadata, "sha256": DIGITS * "0"})
    start = content.index(KEY) + len(KEY)
    return b"".join((content[:start], checksum(content).encode(), memoryview(content)[start + DIGITS :]))


def verify(content: bytes) -> bool:
    """True if a file carries a seal and none of its bytes has changed."""
    start = _seal_start(content)
    return start is not None and content[start : start + DIGITS] == checksum(content).encode()


def is_sealed(content: bytes) -> bool:
    """True if a file carries a seal, right or wrong."""
    return _seal_start(content) is not None


def checksum(content: bytes) -> str:
    """The SHA-256 of a file, leaving out the digits of its seal if it has one."""
    start = _seal_start(content)
    return hashlib.sha256(content).hexdigest() if start is None else _digest(content, start)


def parse(content: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a safetensors file; raise `ValueError` if it is none."""
    safetensors = _safetensors()
    try:
        tensors = safetensors.torch.load(content)
    except Exception as error:
        raise ValueError(reason(error)) from None
    return loads(content[8 : _header_end(content)]).get("__metadata__", {}), tensors


def unseal(content: bytes, run: str | None) -> tuple[dict[str, str], dict[str, Tensor]]:
    """`parse` a sealed safetensors file of a run; raise `ValueError` if it is damaged or another run's."""
    metadata, tensors = parse(content)
    _check(is_sealed(content), verify(content), metadata.get("run"), run)
    return metadata, tensors


def seal_json(value: Mapping[str, Any], run: str | None, indent: int | None = None) -> bytes:
    """A JSON object on one line, or indented, that `unseal_json` can check."""
    text = json.dumps({**value, "run": run, "sha256": DIGITS * "0"}, indent=indent) + "\n"
    content = text.encode()
    found = JSON_SEAL.search(content)
    assert found is not None
    return content[: found.start(1)] + _digest(content, found.start(1)).encode() + content[found.end(1) :]


def unseal_json(content: bytes, run: str | None) -> dict[str, Any]:
    """A JSON object of a run, without its seal; raise `ValueError` if it is none, is damaged or another run's."""
    try:
        value = dict(loads(content))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(reason(error)) from None
    found = JSON_SEAL.search(content, max(0, len(content) - END))
    intact = found is not None and _digest(content, found.start(1)).encode() == found[1]
    _check(found is not None, intact, value.get("run"), run)
    if found is not None:
        del value["run"], value["sha256"]
    return value


def _check(sealed: bool, intact: bool, has: Any, run: str | None) -> None:
    if sealed and not intact:
        raise ValueError("its checksum is wrong")
    if run is not None and not sealed:
        raise ValueError("it has no checksum")
    if run is not None and has != run:
        raise ValueError("it belongs to a run with another config")


def _digest(content: bytes, start: int) -> str:
    """The SHA-256 of all bytes but the digits of a seal that starts here."""
    digest, view = hashlib.sha256(memoryview(content)[:start]), memoryview(content)
    digest.update(view[start + DIGITS :])
    return digest.hexdigest()


def _header_end(content: bytes) -> int:
    """The end of the header, whose length is in the first 8 bytes."""
    return 8 + int.from_bytes(content[:8], "little")


def _seal_start(content: bytes) -> int | None:
    place = content.find(KEY, 8, _header_end(content))
    return None if place < 0 else place + len(KEY)


def _safetensors() -> Any:
    """Import safetensors on first use, because the rest of fedual runs with torch and numpy alone."""
    import_optional("A file of tensors", "safetensors", "safetensors")
    import safetensors.torch

    return safetensors
