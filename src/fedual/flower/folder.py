"""The folder of a server's run: config, records and ledger, for one process at a time, killed at any moment or not.

    out/   config.json · environment.json · metrics.jsonl · server.safetensors · lock · posterior.safetensors

A record that the ledger does not know, since the server was killed in between, is taken back: its round did not count.
"""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedual.errors import DataError, InputError
from fedual.flower.ledger import Ledger
from fedual.runs import RunDirectory
from fedual.runs.files import sync, writing


class Folder(NamedTuple):
    """A run that is going on."""

    run: RunDirectory
    ledger: Ledger

    @property
    def checkpoint(self) -> Path:
        """The ledger's file."""
        return self.run.path / "server.safetensors"

    def close(self, record: dict[str, Any]) -> None:
        """End a round: durable on return, and only then may the next message leave."""
        self.run.append(record)
        sync(self.run.path / "metrics.jsonl")  # no round without its record
        self.ledger.save(self.checkpoint)


@contextmanager
def opened(path: Path, config: Mapping[str, Any], ledger: Ledger) -> Iterator[Folder]:
    """Start a run, or go on with the one that is there.

    Args:
        path: The folder, made where missing.
        config: What the run is, or was, started with; `rounds` may grow.
        ledger: Of a run that starts.

    Raises:
        InputError: Another server works here, or the run has another config.
        DataError: Files are missing, damaged or cannot be written.
    """
    with writing(path, 0, "nothing was changed"):
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{path} is in use by another server: stop it first.") from None
        there = (path / "config.json").exists()
        run = (RunDirectory.open if there else RunDirectory.create)(path, dict(config))
        checkpoint = Folder(run, ledger).checkpoint
        if checkpoint.exists():
            ledger = Ledger.load(checkpoint, ledger.server)
        elif run.history():
            raise DataError(f"{checkpoint} is missing: restore the file, or choose another experiment.")
        run.rewind(ledger.server.round)
        ledger.starts += 1
        ledger.save(checkpoint)
        yield Folder(run, ledger)
