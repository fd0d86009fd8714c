"""The file of a posterior, in its present form and the first one."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedual.errors import DataError
from fedual.forms import require
from fedual.parsing import loads, parsing, read_bytes, reason
from fedual.rundir.checksum import parse, verify

FORMAT, FORMAT_1 = "fedual-posterior-2", "fedual-posterior-1"
LONGEST_HEADER = 100_000_000
"""Bytes of the longest header that safetensors itself reads."""


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says about a posterior, and its tensors."""
    with parsing(path, "is damaged or not a safetensors file", "save it again"):
        content = read_bytes(path)
        about, tensors = parse(content)
    form, digest, _ = about.pop("format", None), about.pop("sha256", None), about.pop("run", None)
    if form not in (FORMAT, FORMAT_1):
        raise DataError(f"{path} has the format {form!r}, not {FORMAT!r}: give a file that this version can read.")
    if not (verify(content) if form == FORMAT else digest == _digest_1(tensors, about)):
        raise DataError(f"{path} is damaged (its checksum is wrong): save it again.")
    with parsing(path, "has metadata that are no JSON", "save it again"):
        return {name: loads(value) for name, value in about.items()}, tensors


def header(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, without its tensors."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            about = loads(file.read(min(length, LONGEST_HEADER))).get("__metadata__", {})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged or not a safetensors file ({reason(error)}): save it again.") from None
    require(path, about, {...: str}, "save it again")
    return about


def _digest_1(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    """The checksum of `FORMAT_1`, which covers the content rather than the bytes of the file."""
    digest = hashlib.sha256(json.dumps(sorted(about.items())).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
