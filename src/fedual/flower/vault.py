"""A client's state between rounds: its dual changes exactly once for every round that counts at the server.

A client answers a round before it knows whether the answer counts. It therefore keeps two copies of its rows (dual,
solver state, error feedback): *committed*, from which it answered, and *pending*, which replaces it if the answer
counts. The next message names the last round of this client that counted, and `settle` takes the copy of that round:

    with opened(folder, experiment, client) as vault:
        rows = vault.settle(ack)      # of the round that counted; None: start from zero
        …                             # the client's step
        vault.put(nonce, rows)        # durable before the answer leaves

The file is a sealed safetensors file (`fedual.rundir.checksum`) with the tensors `committed.NAME` and `pending.NAME`
and a JSON text in its metadata.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.flower.refusal import Refusal
from fedual.forms import require
from fedual.parsing import parsing
from fedual.rundir.atomic import PRIVATE, make_private, store, sync, writing
from fedual.rundir.checksum import parse, seal, verify
from fedual.rundir.locking import locked
from fedual.stored import VAULT

Rows = dict[str, Tensor]
"""What a client keeps, by name."""
DUAL = "eta"
"""The row of the dual."""
FORMAT = "fedual-vault-1"
WAIT = 60.0
"""Seconds to wait until another process or thread closes a vault."""
ASIDE = 3
"""How many old states of a client are kept aside."""
REMEDY = "re-admit this client at the server (docs/how-to/deploy.md)"


class StateLost(Refusal):
    """A client no longer has its rows of the last round that counted; going on from other rows would corrupt Σ η."""


class OtherRun(Refusal):
    """A client keeps its rows of another run of the same experiment, which a new run must not replace."""


class Copy(NamedTuple):
    """The rows of a client after the round named `nonce`."""

    nonce: str
    rows: Rows

    @property
    def ledger(self) -> str:
        """The id of the server's ledger, with which its nonces begin."""
        return self.nonce.partition(".")[0]


@contextmanager
def opened(folder: Path, experiment: str, client: str, wait: float = WAIT) -> Iterator["Vault"]:
    """Open a client's vault for this process and thread alone.

    Args:
        folder: The site's folder; made if it does not exist.
        experiment: Its name; a run with the same name is resumed.
        client: The client's id, one for each site.
        wait: Seconds to wait until another process or thread closes the vault.

    Raises:
        StateLost: The file is damaged, or belongs to another client.
        DataError: The vault is still open elsewhere, or cannot be read or written.
        InputError: A name is empty, or the time to wait is negative.
    """
    for name, value in (("experiment", experiment), ("client", client)):
        if not isinstance(value, str) or not value:
            raise InputError(f"{name} = {value!r}: it must be a text that is not empty.")
    if not wait >= 0:
        raise InputError(f"wait = {wait!r}: it must be a number of seconds, at least 0.")
    # private, because a dual discloses something of the site's data
    make_private(folder)
    path = vault_file(folder, experiment, client)
    with locked(path.with_suffix(".lock"), wait):
        yield Vault(path, experiment, client)


def set_aside(folder: Path, experiment: str, client: str) -> Path | None:
    """Let a client start an experiment anew; return where its state is kept, None if there is none.

    The files of the last `ASIDE` times are kept, with the time in their names.
    """
    path = vault_file(folder, experiment, client)
    with locked(path.with_suffix(".lock"), WAIT):
        if not path.exists():
            return None
        kept = path.with_name(f"{path.stem}.{datetime.now(UTC):%Y-%m-%dT%H-%M-%S-%fZ}.safetensors.aside")
        with writing(kept, 0, "nothing was changed"):
            os.rename(path, kept)
            sync(folder)
            for old in sorted(folder.glob(f"{path.stem}.*.safetensors.aside"))[:-ASIDE]:
                old.unlink()
        return kept


class Vault:
    """A client's rows of the last round that counted and of the last round that it answered; made by `opened`.

    There is a file once there is something to keep.
    """

    def __init__(self, path: Path, experiment: str, client: str):
        self._path = path
        self._identity = {"format": FORMAT, "experiment": experiment, "client": client}
        self._committed: Copy | None = None
        self._pending: Copy | None = None
        self._base: Copy | None = None
        self._settled = False
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): allow reading it, then resume.") from error
        else:
            self._read(content)

    @property
    def answered(self) -> str | None:
        """The nonce of the last round that was answered, whether or not it counted."""
        return None if self._pending is None else self._pending.nonce

    def settle(self, ack: str | None, factor: float = 1.0, ledger: str | None = None) -> Rows | None:
        """Take the rows of the round that counted; the file stays as it is until `put`.

        Args:
            ack: The nonce of this client's last round that counted; None if the server has counted none.
            factor: By what the server cut the update of that round: η_k has moved by this part of its step. Rows that
                are kept as committed have it already.
            ledger: The id of the server's ledger, if it is known.

        Returns:
            A copy of the rows; None to start from zero.

        Raises:
            StateLost: The rows of that round are not here.
            OtherRun: The server has counted no round, and the rows here belong to another server's ledger.
        """
        copies = {copy.nonce: copy for copy in (self._committed, self._pending) if copy is not None}
        if ack is not None and ack not in copies:
            raise StateLost(
                f"Client {self._identity['client']!r} has no state of round {ack}, which the server counted last: "
                f"{REMEDY}.",
                f"the rounds in {self._path} are: {' and '.join(copies) or 'none'}",
            )
        if others := {copy.ledger for copy in copies.values()} - {ledger} if ack is None and ledger else set():
            raise OtherRun(
                f"Client {self._identity['client']!r} keeps its state of another run of this experiment: choose "
                "another experiment, or let the site's operator set the old state aside (docs/how-to/deploy.md).",
                f"{self._path} belongs to ledger {' and '.join(sorted(others))}, the server has {ledger}: see `fedual "
                "flower set-aside`",
            )
        # both copies stay in memory, because they stay on disk if `put` fails
        self._base = None if ack is None else copies[ack]
        if factor != 1 and self._base is self._pending and self._base is not None and DUAL in self._base.rows:
            eta, before = self._base.rows[DUAL], {} if self._committed is None else self._committed.rows
            before = before.get(DUAL, torch.zeros_like(eta))
            self._base = Copy(self._base.nonce, {**self._base.rows, DUAL: before + factor * (eta - before)})
        self._settled = True
        return None if self._base is None else _clone(self._base.rows)

    def put(self, nonce: str, rows: Rows) -> None:
        """Keep the rows of a round that is about to be answered beside those that `settle` took; durable on return.

        A message can be delivered twice. Both answers must be the same, because either may be counted.

        Args:
            nonce: The name of this attempt at a round, never used for another attempt.
            rows: The client's rows if the server counts the answer.

        Raises:
            DataError: The rows cannot be written; those that `settle` took are still on disk. Do not answer.
            InputError: The round was answered with other rows, it already counted, or `settle` was not called.
        """
        if not self._settled:
            raise InputError(f"Round {nonce} is put before settle: first take the rows of the round that counted.")
        if self._base is not None and self._base.nonce == nonce:
            raise InputError(f"Round {nonce} counted already: give every attempt at a round a name of its own.")
        new = Copy(nonce, _clone(rows))
        if self.answered == nonce and self._pending and seal(self._pending.rows, {}) != seal(new.rows, {}):
            raise InputError(f"Round {nonce} was answered with other numbers before: leave it out, begin a new round.")
        self._write(self._base, new)
        self._committed, self._pending = self._base, new

    def _write(self, committed: Copy | None, pending: Copy | None) -> None:
        copies = {"committed": committed, "pending": pending}
        nonces = {name: copy and copy.nonce for name, copy in copies.items()}
        tensors = {f"{name}.{key}": value for name, copy in copies.items() if copy for key, value in copy.rows.items()}
        content = seal(tensors, {"vault": json.dumps({**self._identity, **nonces})})
        store(self._path, content, mode=PRIVATE)

    def _read(self, content: bytes) -> None:
        if not verify(content):
            raise StateLost(
                f"The state of client {self._identity['client']!r} is damaged, or no file of fedual's: remove it and "
                f"{REMEDY}.",
                f"it is {self._path}",
            )
        where = f"The state of client {self._identity['client']!r}"
        try:
            with parsing(where, "is damaged", f"remove it and {REMEDY}"):
                metadata, tensors = parse(content)
                about = json.loads(metadata["vault"])
                require(where, about, VAULT, f"remove it and {REMEDY}")
        except DataError as error:
            raise StateLost(str(error), f"it is {self._path}") from None
        identity = {name: about.get(name) for name in self._identity}
        if identity != self._identity:
            raise StateLost(
                f"The state of client {self._identity['client']!r} belongs to another client or version: remove it and "
                f"{REMEDY}.",
                f"{self._path} belongs to {identity}, not to {self._identity}",
            )
        under = lambda prefix: {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        self._committed, self._pending = (
            None if about[name] is None else Copy(about[name], under(f"{name}.")) for name in ("committed", "pending")
        )


def vault_file(folder: Path, experiment: str, client: str) -> Path:
    """The file of a client's vault."""
    return folder / f"{file_name(f'{experiment}-{client}', json.dumps([experiment, client]))}.safetensors"


def _clone(rows: Rows) -> Rows:
    """Rows with memory of their own: the caller may change its rows, and safetensors refuses shared memory."""
    return {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in rows.items()}


def file_name(readable: str, identity: str) -> str:
    """A readable name that any file system accepts, different for every identity."""
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9]+', '_', readable)[:60]}-{digest[:16]}"
