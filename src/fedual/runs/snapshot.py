"""Snapshots of a run: all that is needed to go on, in a folder that is there whole or not at all.

    checkpoint-12/   server.safetensors · clients-00000.safetensors, … (rows of consecutive clients) · meta.json

A snapshot is written as `checkpoint-12.tmp`, synced, renamed, and only then are older ones removed: a kill at any
moment leaves the newest `checkpoint-…` whole. meta.json holds the size and CRC-32 of every other file, so that a
damaged one is refused instead of resumed from.
"""

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.runs.files import sync, write

if TYPE_CHECKING:
    from fedual.simulate.store import Store

SHARD = 1 << 25
"""Bytes of client rows in one file; writing or reading one takes about five times that in memory."""
META = "meta.json"
SERVER = "server.safetensors"


class Snapshot(NamedTuple):
    """The run after `round`, but for the clients' rows, which are restored into a store."""

    round: int
    server: dict[str, Tensor]
    meta: dict[str, Any]


def newest(folder: Path) -> tuple[int, Path] | None:
    """The round and folder of the last snapshot."""
    return max(((int(path.name[11:]), path) for path in _own(folder) if path.suffix != ".tmp"), default=None)


def clean(folder: Path) -> None:
    """Remove what a kill can leave behind: unfinished snapshots, and older ones.

    What cannot be removed stays until the next time: it is never read.
    """
    last = newest(folder)
    for path in _own(folder):
        if last is None or path != last[1]:
            shutil.rmtree(path, ignore_errors=True)


def _own(folder: Path) -> list[Path]:
    """The snapshots in a folder, finished or not, and nothing that a user may have put beside them."""
    return [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+(\.tmp)?", path.name)]


def save(folder: Path, round: int, server: dict[str, Tensor], meta: dict[str, Any], store: "Store") -> None:
    """Write the snapshot of a round and remove the older ones.

    Raises:
        OSError: it could not be written; the older one stays, and no part of the new one.
        InputError: `meta` is not JSON.
    """
    clean(folder)
    temporary = folder / f"checkpoint-{round}.tmp"
    try:
        temporary.mkdir()
        # a copy: two names for one tensor (at the start λ_g is the prior) are refused by safetensors
        tensors = {name: value.detach().cpu().clone() for name, value in server.items()}
        files = {SERVER: _write_tensors(temporary / SERVER, tensors)}
        row_bytes = store.nbytes // store.num_clients
        chunks = torch.arange(store.num_clients).split(max(1, SHARD // max(row_bytes, 1))) if store.names else ()
        for number, clients in enumerate(chunks):
            name = f"clients-{number:05d}.safetensors"
            files[name] = _write_tensors(temporary / name, store.read(clients))
        about = {"round": round, "num_clients": store.num_clients, "rows": _layout(store.initial), "files": files}
        try:
            content = json.dumps({**about, "meta": meta}, indent=1)  # NaN stays NaN here: what was saved comes back
        except TypeError as error:
            raise InputError(f"meta = {meta} cannot be saved ({error}): use only JSON values.") from None
        write(temporary / META, content.encode())
        sync(temporary)
        os.replace(temporary, folder / f"checkpoint-{round}")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(folder)
    clean(folder)


def load(path: Path, like: dict[str, Tensor] | None) -> Snapshot:
    """Read a snapshot, but for the clients' rows.

    Args:
        path: a folder that `newest` found.
        like: what the server's tensors must look like; they come back on these devices (on the CPU if None).

    Raises:
        InputError: the server's tensors have other names, shapes or dtypes.
        DataError: a file is missing, damaged or truncated.
    """
    about = _about(path)
    server = _read_tensors(path / SERVER, about)
    if like is not None:
        if _layout(server) != _layout(like):
            raise InputError(
                f"The checkpoint in {path} has at the server {_words(_layout(server))}, this run "
                f"{_words(_layout(like))}: resume with the model and method it was made with."
            )
        server = {name: server[name].to(value.device) for name, value in like.items()}
    return Snapshot(about["round"], server, about["meta"])


def restore(path: Path, store: "Store") -> None:
    """Write the clients' rows of a snapshot into a store, one file after the other.

    Raises:
        InputError: the store has another number of clients, or rows of other names, shapes or dtypes.
        DataError: a file is missing, damaged or truncated.
    """
    about = _about(path)
    if about["num_clients"] != store.num_clients or about["rows"] != _layout(store.initial):
        raise InputError(
            f"The checkpoint in {path} has {about['num_clients']} clients with {_words(about['rows'])}, this run "
            f"{store.num_clients} with {_words(_layout(store.initial))}: resume with the clients, model and method "
            f"it was made with."
        )
    first = 0
    for name in sorted(about["files"].keys() - {SERVER}):
        rows = _read_tensors(path / name, about)
        last = first + len(next(iter(rows.values())))
        store.write(torch.arange(first, last), rows)
        first = last


def _layout(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{list(value.shape)} {str(value.dtype)[6:]}" for name, value in sorted(tensors.items())}


def _words(layout: dict[str, str]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in layout.items()) or "no tensors"


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    # Imported here because the rest of fedual runs with torch and numpy alone. Not save_file: it hides the OSError
    from safetensors.torch import save

    content = save({name: value.cpu().contiguous() for name, value in tensors.items()})
    write(path, content)
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def _read_tensors(path: Path, about: dict[str, Any]) -> dict[str, Tensor]:
    from safetensors.torch import load

    content, expected = _content(path), about["files"][path.name]
    if len(content) != expected["bytes"]:
        raise DataError(
            f"{path} holds {len(content)} bytes where {expected['bytes']} were written: "
            f"restore the file, or start anew."
        )
    if zlib.crc32(content) != expected["crc32"]:
        raise DataError(f"{path} is damaged (its CRC-32 is not the one written): restore the file, or start anew.")
    return load(content)


def _about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(_content(path / META))
        if {"round", "num_clients", "rows", "files", "meta"} <= about.keys() and SERVER in about["files"]:
            return about
    except (ValueError, AttributeError, TypeError):
        pass
    raise DataError(f"{path / META} is damaged: restore the file, or start anew.")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): restore the file, or start anew.") from error
