"""The checksum of state files: SHA-256, inside a safetensors file (its seal) or listed beside it.

content = seal(tensors, {"format": …})       # the metadata entry "sha256" covers all other bytes of the file
if verify(content):
    metadata, tensors = parse(content)       # parsed, never executed
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedual.errors import import_optional

KEY = b'"sha256":"'
"""The seal's key in the header; quotes inside names and values are escaped, so that nothing else looks like it."""
DIGITS = 64  # of a SHA-256 in hexadecimal


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
    start, view = _seal_start(content), memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(b"" if start is None else view[start + DIGITS :])
    return digest.hexdigest()


def parse(content: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a safetensors file; raise `ValueError` if it is none."""
    safetensors = _safetensors()
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None
    return json.loads(content[8 : _header_end(content)]).get("__metadata__", {}), tensors


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
