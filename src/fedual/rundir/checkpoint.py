"""Snapshots: all that a run needs to be resumed, in a folder that exists whole or not at all.

    checkpoint-12/   server.safetensors · clients-00000.safetensors, … (rows of consecutive clients) · meta.json

A snapshot is written as `checkpoint-12.tmp`, synced and renamed, and only then are older snapshots removed: after a
kill at any moment the newest `checkpoint-…` is whole. meta.json is sealed and lists the size and SHA-256 of every other
file, so that a damaged file, and one of another run, is refused.
"""

import re
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.forms import require
from fedual.parsing import parsing, reason
from fedual.rundir.atomic import replacing, sync, write
from fedual.rundir.checksum import checksum, parse, seal_json, unseal_json
from fedual.stored import SNAPSHOT

if TYPE_CHECKING:
    from fedual.backends.client_store import Store

SHARD = 1 << 25
"""Bytes of client rows in one file; writing or reading a file takes about five times as much memory."""
META = "meta.json"
SERVER = "server.safetensors"
REMEDY = "restore the file, or start anew"


class Snapshot(NamedTuple):
    """The run after `round`, without the clients' rows, which are restored into a store."""

    round: int
    server: dict[str, Tensor]
    meta: dict[str, Any]


def newest(folder: Path) -> tuple[int, Path] | None:
    """The round and folder of the last snapshot."""
    finished = [path for path in _snapshots(folder) if path.suffix != ".tmp"]
    return max(((int(path.name.removeprefix("checkpoint-")), path) for path in finished), default=None)


def clean(folder: Path) -> None:
    """Remove unfinished and older snapshots, which a kill can leave behind; none of them is ever read."""
    last = newest(folder)
    for path in _snapshots(folder):
        if last is None or path != last[1]:
            shutil.rmtree(path, ignore_errors=True)


def _snapshots(folder: Path) -> list[Path]:
    """The snapshots in a folder, finished or not; files of the user with similar names are left out."""
    return [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+(\.tmp)?", path.name)]


def save(
    folder: Path, run: str | None, round: int, server: dict[str, Tensor], meta: dict[str, Any], store: "Store"
) -> None:
    """Write the snapshot of a round, then remove the older ones; see `RunDirectory.save`."""
    clean(folder)
    with replacing(folder / f"checkpoint-{round}") as temporary:
        temporary.mkdir()
        # safetensors refuses two names for one tensor, and at the start λ_g is the prior: hence the copies
        tensors = {name: value.detach().cpu().clone() for name, value in server.items()}
        files = {SERVER: _write_tensors(temporary / SERVER, tensors)}
        row_bytes = store.nbytes // store.num_clients
        shards = torch.arange(store.num_clients).split(max(1, SHARD // max(row_bytes, 1))) if store.names else ()
        for number, clients in enumerate(shards):
            name = f"clients-{number:05d}.safetensors"
            files[name] = _write_tensors(temporary / name, store.read(clients))
        index = {"round": round, "num_clients": store.num_clients, "rows": _layout(store.initial), "files": files}
        try:
            content = seal_json({**index, "meta": meta}, run, indent=1)  # Python reads back the NaN that it writes
        except TypeError as error:
            raise InputError(f"meta = {meta} cannot be saved ({error}): use only JSON values.") from None
        write(temporary / META, content)
        sync(temporary)
    clean(folder)


def load(path: Path, run: str | None, like: dict[str, Tensor] | None) -> Snapshot:
    """Read a snapshot without the clients' rows; see `RunDirectory.load`."""
    index = _read_index(path, run)
    server = _read_tensors(path / SERVER, index)
    if like is not None:
        if (stored := _layout(server)) != (now := _layout(like)):
            differ = f"The checkpoint in {path} has at the server {_words(stored)}, this run {_words(now)}"
            raise InputError(f"{differ}: resume with the model and method it was made with.")
        server = {name: server[name].to(value.device) for name, value in like.items()}
    return Snapshot(index["round"], server, index["meta"])


def restore(path: Path, run: str | None, store: "Store") -> None:
    """Copy the clients' rows of a snapshot into a store, one file after another; see `RunDirectory.restore`."""
    index = _read_index(path, run)
    stored, now = (index["num_clients"], index["rows"]), (store.num_clients, _layout(store.initial))
    if stored != now:
        has, needs = f"{stored[0]} clients with {_words(stored[1])}", f"{now[0]} with {_words(now[1])}"
        remedy = "resume with the clients, model and method it was made with"
        raise InputError(f"The checkpoint in {path} has {has}, this run {needs}: {remedy}.")
    first = 0
    for name in sorted(index["files"].keys() - {SERVER}):
        rows = _read_tensors(path / name, index)
        last = first + len(next(iter(rows.values())))
        store.write(torch.arange(first, last), rows)
        first = last


def _layout(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{list(value.shape)} {str(value.dtype)[6:]}" for name, value in sorted(tensors.items())}


def _words(layout: dict[str, str]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in layout.items()) or "no tensors"


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, int | str]:
    from safetensors.torch import save  # not `save_file`, which hides the OSError

    content = save({name: value.cpu().contiguous() for name, value in tensors.items()})
    write(path, content)
    return {"bytes": len(content), "sha256": checksum(content)}


def _read_tensors(path: Path, index: dict[str, Any]) -> dict[str, Tensor]:
    content, listed = _read(path), index["files"][path.name]
    if len(content) != listed["bytes"]:
        raise DataError(f"{path} holds {len(content)} bytes where {listed['bytes']} were written: {REMEDY}.")
    # checkpoints used to list a CRC-32
    intact = checksum(content) == listed["sha256"] if "sha256" in listed else zlib.crc32(content) == listed.get("crc32")
    if not intact:
        raise DataError(f"{path} is damaged (its checksum is not the one written): {REMEDY}.")
    with parsing(path, "is damaged", REMEDY):
        return parse(content)[1]


def _read_index(path: Path, run: str | None) -> dict[str, Any]:
    try:
        index = unseal_json(_read(path / META), run)
        if not ({"round", "num_clients", "rows", "files", "meta"} <= index.keys() and SERVER in index["files"]):
            raise ValueError("entries are missing")
        if path.name != f"checkpoint-{index['round']}":
            raise ValueError(f"it is of round {index['round']}")
    except (ValueError, TypeError) as error:
        raise DataError(f"{path / META} is damaged or misplaced ({reason(error)}): {REMEDY}.") from None
    require(path / META, index, SNAPSHOT, REMEDY)
    for name in index["files"].keys() - {SERVER}:
        if not re.fullmatch(r"clients-\d+\.safetensors", name):
            raise DataError(f"{path / META} lists {name!r}, which is no file of a checkpoint: {REMEDY}.")
    return index


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {REMEDY}.") from error
