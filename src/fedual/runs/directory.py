"""The folder of a run, written so that a run killed at any moment can go on where it was.

    out/   config.json · environment.json · metrics.jsonl (one JSON object a round) · checkpoint-<round>/

A run appends the record of a round, then saves its snapshot (not after every round, if that takes long):

    run = RunDirectory.create(out, config)           run = RunDirectory.open(out, config)      # resume
    …                                                snapshot = run.load(server)
    run.append({"round": 1, …})                      if snapshot: run.restore(store)
    run.save(1, server, meta, store)                 run.rewind(snapshot.round if snapshot else 0)
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.runs.files import replace, sync, writing
from fedual.runs.provenance import environment
from fedual.runs.snapshot import Snapshot, clean, newest
from fedual.runs.snapshot import load as load_snapshot
from fedual.runs.snapshot import restore as restore_snapshot
from fedual.runs.snapshot import save as save_snapshot
from fedual.runs.values import difference, dumps, plain, without_nan

if TYPE_CHECKING:
    from fedual.simulate.store import Store


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder; made by `create` or `open`."""

    path: Path
    config: dict[str, Any]

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: dict[str, Any]) -> "RunDirectory":
        """Start a run in a folder that holds none.

        Args:
            path: the folder; made where it is missing.
            config: all that the result depends on, as JSON values.

        Raises:
            InputError: the folder holds a run, is a file or cannot be written, or `config` is not JSON.
            DataError: the disk is full.
        """
        run = cls(Path(path), plain(config))
        if run.path.exists() and not run.path.is_dir():
            raise InputError(f"{path} is a file: choose a folder for the run.")
        if run._config.exists() or run._metrics.exists() or newest(run.path):
            raise InputError(
                f"{path} holds a run of {run._rounds()} rounds: resume it (--resume, resume=True) "
                f"or choose another folder."
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{path} cannot be made ({error.strerror}): choose another folder for the run.") from error
        if not os.access(run.path, os.W_OK | os.X_OK):
            raise InputError(f"{path} is not writable: choose another folder for the run, or allow writing.")
        run._put(run.path / "environment.json", environment())
        run._put(run._config, run.config)  # last: this file says that there is a run
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: dict[str, Any] | None = None) -> "RunDirectory":
        """Open the folder of a run, to read it or to go on with it.

        Args:
            path: the folder.
            config: what the run is to go on with, which must be what it was started with, but that `rounds` may
                have grown (and is then stored); None to read the run as it is.

        Raises:
            InputError: there is no run, or it has another config.
            DataError: config.json cannot be read.
        """
        run = cls(Path(path), {})
        try:
            stored = dict(json.loads(run._config.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"{path} holds no run: start one there without resuming, or name another folder."
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{run._config} cannot be read ({error}): restore the file, or start anew.") from error
        if config is None:
            return cls(run.path, stored)
        config = plain(config)
        if found := difference(stored, config):
            key, old, new = found
            raise InputError(
                f"{path} holds a run with {key} = {old}, not {new}: resume with the same settings (rounds may grow), "
                f"or choose another folder."
            )
        run = cls(run.path, config)
        if config != stored:
            run._put(run._config, config)
        return run

    def append(self, record: dict[str, Any]) -> None:
        """Add the record of a round to metrics.jsonl; NaN and ±∞ are written as null, for JSON has no word for them.

        Raises:
            InputError: a record without a round, or with values that are not JSON.
            DataError: the line could not be written; the file is as before.
        """
        if not isinstance(record.get("round"), int):
            raise InputError(f"record = {record}: a record needs the number of its round.")
        line = (dumps(without_nan(record), "record") + "\n").encode()
        # unbuffered: nothing is left over to be written when the file is closed after an error
        with writing(self._metrics, len(line), self._remains()), self._metrics.open("ab", buffering=0) as file:
            size, rest = file.tell(), memoryview(line)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise

    def history(self) -> list[dict[str, Any]]:
        """The records so far; a last line without its end, from a kill while writing, is left out.

        Raises:
            DataError: a line that is no record.
        """
        try:
            lines = self._metrics.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(f"{self._metrics} cannot be read ({error.strerror}): restore the file.") from error
        records = []
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                records.append({**record, "round": int(record["round"])})
            except (ValueError, TypeError, KeyError):
                raise DataError(f"Line {number} of {self._metrics} is no record: restore or remove it.") from None
        return records

    def rewind(self, round: int) -> None:
        """Make the folder agree with the snapshot of `round` (0 where there is none) before the run goes on.

        Cuts metrics.jsonl back to the rounds up to `round`, and removes what a kill left of other snapshots.
        """
        kept = [record for record in self.history() if record["round"] <= round]
        content = "".join(json.dumps(record) + "\n" for record in kept).encode()
        with writing(self._metrics, len(content), self._remains()):
            replace(self._metrics, content)
        clean(self.path)

    def save(self, round: int, server: dict[str, Tensor], meta: dict[str, Any], store: "Store") -> None:
        """Write a snapshot in the place of the last one, which stays until the new one is whole.

        A round that is saved already is not written again: a run is a function of its config.

        Args:
            round: how many rounds are done, and recorded by `append`.
            server: named tensors of any shape, dtype and device.
            meta: what else is needed to go on, as JSON values; floats come back exactly, NaN and ±∞ included.
            store: the clients' rows; read in parts.

        Raises:
            InputError: a later round is saved already, or `meta` is not JSON.
            DataError: it could not be written; the last snapshot is intact, and no part of the new one is left.
        """
        last = newest(self.path)
        if last and round <= last[0]:
            if round == last[0]:
                return
            raise InputError(f"round = {round}, but {self.path} has a checkpoint of round {last[0]}: rounds only grow.")
        nbytes = sum(value.nbytes for value in server.values()) + store.nbytes
        with writing(self.path / f"checkpoint-{round}", nbytes, self._remains()):
            if self._metrics.exists():
                sync(self._metrics)  # no snapshot without the records that lead to it
            save_snapshot(self.path, round, server, meta, store)

    def load(self, like: dict[str, Tensor] | None = None) -> Snapshot | None:
        """Read the last snapshot, but for the clients' rows; None where there is none.

        Args:
            like: the tensors that this run starts with at the server: the loaded ones must have their names, shapes
                and dtypes, and come back on their devices. Without it they come back on the CPU, unchecked.

        Raises:
            InputError: the server's tensors are others than those of `like`.
            DataError: a file is missing, damaged or truncated.
        """
        last = newest(self.path)
        return last and load_snapshot(last[1], like)

    def restore(self, store: "Store") -> None:
        """Write the clients' rows of the last snapshot into a store, in parts.

        Raises:
            InputError: there is no snapshot, or it has other clients or rows than the store.
            DataError: a file is missing, damaged or truncated.
        """
        last = newest(self.path)
        if not last:
            raise InputError(f"{self.path} has no checkpoint to restore from: start at round 0.")
        restore_snapshot(last[1], store)

    @property
    def _config(self) -> Path:
        return self.path / "config.json"

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def _rounds(self) -> int:
        return max((record["round"] for record in self.history()), default=0)

    def _remains(self) -> str:
        last = newest(self.path)
        return f"the last checkpoint (round {last[0]}) is intact" if last else "there is no checkpoint yet"

    def _put(self, path: Path, value: dict[str, Any]) -> None:
        content = (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
        with writing(path, len(content), self._remains()):
            replace(path, content)
