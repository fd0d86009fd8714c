"""What a client keeps between rounds, exactly once: its dual moves only when the server says that it counted.

A client answers a round before it can know whether the answer counts, so it keeps two copies of its rows (dual, solver
state, error feedback): *committed*, from which it answered, and *pending*, what they become if the answer counts. The
next message names the last round of this client that the server counted, and `settle` finds the copy of that round:

    with opened(folder, experiment, client) as vault:
        rows = vault.settle(ack)      # of the round that counted; None: start from zero
        …                             # the client's step
        vault.put(nonce, rows)        # durable before the answer leaves

A file is safetensors, read without executing anything: the tensors `committed.NAME` and `pending.NAME`, and as metadata
a JSON text and the SHA-256 of all other bytes of the file.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedual.errors import DataError, FedualError, InputError
from fedual.rounds import Rows
from fedual.runs.files import replace, writing

FORMAT = "fedual-vault-1"
REMEDY = "re-admit this client at the server (docs/how-to/deploy.md)"
PAUSE = 0.05
"""Seconds between two attempts to take the lock."""


class StateLost(FedualError):
    """A client whose rows of the last round that counted are gone: going on from others would corrupt Σ η."""


class Copy(NamedTuple):
    """The rows of a client after the round that is called `nonce`."""

    nonce: str
    rows: Rows


@contextmanager
def opened(folder: Path, experiment: str, client: str, wait: float = 60.0) -> Iterator["Vault"]:
    """Open what a client keeps, for this process and thread alone.

    Args:
        folder: the site's own, made where missing.
        experiment: its name; runs that are resumed under the same name go on.
        client: its id, one for each site.
        wait: seconds to wait for whoever has it open.

    Raises:
        StateLost: the file is damaged, or of another client.
        DataError: it is still open elsewhere, or cannot be read or written.
        InputError: an empty name, or a negative time to wait.
    """
    for name, value in (("experiment", experiment), ("client", client)):
        if not isinstance(value, str) or not value:
            raise InputError(f"{name} = {value!r}: it must be a text that is not empty.")
    if not wait >= 0:
        raise InputError(f"wait = {wait!r}: it must be a number of seconds, at least 0.")
    # private: a dual tells of the site's data, and the secret proves who it is
    with writing(folder, 0, "nothing was changed"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / _file_name(experiment, client)
    with _locked(path.with_suffix(".lock"), wait):
        yield Vault(path, experiment, client)


class Vault:
    """A client's rows of the last round that counted, and of the last one that it answered; made by `opened`.

    Attributes:
        secret: random, made when the file is, and kept: it proves that this site had this client id before.
    """

    secret: str

    def __init__(self, path: Path, experiment: str, client: str):
        self._path = path
        self._about = {"format": FORMAT, "experiment": experiment, "client": client}
        self._committed: Copy | None = None
        self._pending: Copy | None = None
        self._base: Copy | None = None
        self._settled = False
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            self.secret = secrets.token_hex(32)
            self._write(None, None)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): allow reading it, then resume.") from error
        else:
            self._read(content)

    @property
    def answered(self) -> str | None:
        """The nonce of what was answered last, counted or not."""
        return None if self._pending is None else self._pending.nonce

    def settle(self, ack: str | None) -> Rows | None:
        """Take the rows of the round that counted; nothing on the disk changes before `put`.

        Args:
            ack: the nonce of this client's last round that the server counted; None: it counted none, or forgot them.

        Returns:
            The rows, for the caller to change; None: start from zero.

        Raises:
            StateLost: the rows of that round are not here.
        """
        found = {copy.nonce: copy for copy in (self._committed, self._pending) if copy is not None}
        if ack is not None and ack not in found:
            here = " and ".join(found) or "none"
            raise StateLost(
                f"Of client {self._about['client']!r} the server counted round {ack} last, and the rounds in "
                f"{self._path} are: {here}; {REMEDY}."
            )
        # what is not taken stays in memory: the disk has it until `put`, which may fail
        self._base = None if ack is None else found[ack]
        self._settled = True
        return None if self._base is None else _copy(self._base.rows)

    def put(self, nonce: str, rows: Rows) -> None:
        """Keep the rows of a round that is about to be answered, and those that `settle` took; durable on return.

        A message can be delivered twice. Its second answer must be the first one's, since either may be counted.

        Args:
            nonce: the name of this attempt at a round, never used for another one.
            rows: what the client's rows become if the server counts the answer.

        Raises:
            DataError: they cannot be written, and what `settle` took is still on the disk: do not answer.
            InputError: the round was answered already, with other rows; or it counted already; or no `settle` before.
        """
        if not self._settled:
            raise InputError(f"Round {nonce} is put before settle: first take the rows of the round that counted.")
        if self._base is not None and self._base.nonce == nonce:
            raise InputError(f"Round {nonce} counted already: give every attempt at a round a name of its own.")
        new = Copy(nonce, _copy(rows))
        if self._pending is not None and self._pending.nonce == nonce and save(self._pending.rows) != save(new.rows):
            raise InputError(f"Round {nonce} was answered with other numbers before: leave it out, begin a new round.")
        self._write(self._base, new)
        self._committed, self._pending = self._base, new

    def _write(self, committed: Copy | None, pending: Copy | None) -> None:
        copies = {"committed": committed, "pending": pending}
        nonces = {name: copy and copy.nonce for name, copy in copies.items()}
        tensors = {f"{name}.{key}": value for name, copy in copies.items() if copy for key, value in copy.rows.items()}
        text = json.dumps({**self._about, "secret": self.secret, **nonces})
        content = _sealed(save(tensors, {"vault": text, "sha256": 64 * "0"}))
        with writing(self._path, len(content), "what was there before is intact"):
            replace(self._path, content)

    def _read(self, content: bytes) -> None:
        if _sealed(content) != content:
            raise StateLost(f"{self._path} is damaged, or no file of fedual's: remove it and {REMEDY}.")
        about = _metadata(content)
        found = {name: about.get(name) for name in self._about}
        if found != self._about:
            raise StateLost(f"{self._path} is of {found}, not of {self._about}: remove it and {REMEDY}.")
        tensors = load(content)
        self.secret = about["secret"]
        self._committed, self._pending = (
            None if about[name] is None else Copy(about[name], _within(f"{name}.", tensors))
            for name in ("committed", "pending")
        )


def _copy(rows: Rows) -> Rows:
    """Rows that share no memory with others: the caller may change its own, and safetensors refuses shared ones."""
    return {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in rows.items()}


def _within(prefix: str, tensors: dict[str, Tensor]) -> Rows:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _file_name(experiment: str, client: str) -> str:
    """A readable name that any file system takes, different for different pairs."""
    digest = hashlib.sha256(json.dumps([experiment, client]).encode()).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9]+", "_", f"{experiment}-{client}")
    return f"{readable[:60]}-{digest[:16]}.safetensors"


def _sealed(content: bytes) -> bytes:
    """The file with the SHA-256 of all its other bytes in the place kept for it, or at its end where there is none.

    Quotes inside a value of the metadata are escaped, so that the first match is the key.
    """
    before, key, rest = content.partition(b'"sha256":"')
    digest = hashlib.sha256(before + key)
    digest.update(memoryview(rest)[64:])
    return b"".join((before, key, digest.hexdigest().encode(), memoryview(rest)[64:]))


def _metadata(content: bytes) -> dict[str, Any]:
    """The JSON text in the header of a safetensors file, whose first 8 bytes are the header's length."""
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    return json.loads(json.loads(header)["__metadata__"]["vault"])


@contextmanager
def _locked(path: Path, wait: float) -> Iterator[None]:
    """Hold an exclusive lock on a file, which stays: removing it would let two processes hold two locks."""
    with writing(path, 0, "nothing was changed"):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + wait
        while not _taken(handle, path):
            if time.monotonic() >= deadline:
                raise DataError(
                    f"{path} is held by another process or message, and still was after {wait:g} seconds: let it end, "
                    f"or stop it where two sites use one client id."
                )
            time.sleep(PAUSE)
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing would not do where a forked child has the handle too
        os.close(handle)


def _taken(handle: int, path: Path) -> bool:
    with writing(path, 0, "nothing was changed"):  # file systems without locks
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
