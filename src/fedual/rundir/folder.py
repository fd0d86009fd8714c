"""The folder of a run, from which a run that was killed at any moment can be resumed.

    out/   config.json · environment.json · metrics.jsonl (one JSON object a round) · checkpoint-<round>/

A run appends the record of a round, then saves its snapshot (not after every round if that takes long):

    run = RunDirectory.create(out, config)           run = RunDirectory.open(out, config)      # resume
    …                                                snapshot = run.load(server)
    run.append({"round": 1, …})                      if snapshot: run.restore(store)
    run.save(1, server, meta, store)                 run.rewind(snapshot.round if snapshot else 0)
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.rundir import atomic, checkpoint
from fedual.rundir.checkpoint import Snapshot
from fedual.rundir.config import differences
from fedual.rundir.jsonable import dumps, plain, without_nan
from fedual.rundir.old_config import converted, matched
from fedual.rundir.provenance import environment

if TYPE_CHECKING:
    from fedual.backends.client_store import Store

NAMED = 3
"""How many differences the refusal of another config names: through rules, one setting can change several others."""


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder; made by `create` or `open`."""

    path: Path
    config: dict[str, Any]

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: dict[str, Any]) -> "RunDirectory":
        """Start a run in a folder without one, which is made if it does not exist.

        `config` is all that the result depends on, as JSON values.
        """
        run = cls(Path(path), plain(config))
        if run.path.exists() and not run.path.is_dir():
            raise InputError(f"{path} is a file: choose a folder for the run.")
        if run._config.exists() or run._metrics.exists() or checkpoint.newest(run.path):
            rounds = max((record["round"] for record in run.history()), default=0)
            raise InputError(
                f"{path} holds a run of {rounds} rounds: resume it (--resume, resume=True) or choose another folder."
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{path} cannot be made ({error.strerror}): choose another folder for the run.") from error
        if not os.access(run.path, os.W_OK | os.X_OK):
            raise InputError(f"{path} is not writable: choose another folder for the run, or allow writing.")
        run._store_json(run.path / "environment.json", environment())
        run._store_json(run._config, run.config)  # last, because this file says that there is a run
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: dict[str, Any] | None = None) -> "RunDirectory":
        """Open the folder of a run, to read or to resume it.

        `config` is the config of the resumed run: the stored one, except that `rounds` may have grown (the larger
        number is stored). Without it, the run can only be read.
        """
        run = cls(Path(path), {})
        content = run._read_config()
        stored = converted(content)
        if config is None:
            return cls(run.path, stored)
        config = plain(config)
        if stored is not content:
            stored = matched(stored, config)
        if changed := differences(stored, config):
            first = "; ".join(f"{key} = {before}, not {after}" for key, before, after in changed[:NAMED])
            raise InputError(
                f"{path} holds a run with {first}: resume with the same settings (rounds may grow), or choose another "
                "folder."
            )
        run = cls(run.path, config)
        if config != content:
            run._store_json(run._config, config)
        return run

    def append(self, record: dict[str, Any]) -> None:
        """Add the record of a round to metrics.jsonl; NaN and ±∞, which JSON lacks, are written as null.

        If the line cannot be written, the file is as before.
        """
        if not isinstance(record.get("round"), int):
            raise InputError(f"record = {record}: a record needs the number of its round.")
        line = (dumps(without_nan(record), "record") + "\n").encode()
        # unbuffered: after an error, closing the file must not write what is left
        with atomic.writing(self._metrics, len(line), self._remains()), self._metrics.open("ab", buffering=0) as file:
            size, rest = file.tell(), memoryview(line)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise

    def amend(self, more: dict[str, Any]) -> None:
        """Add figures to the record of the last round."""
        *rest, last = self.history()
        content = "".join(json.dumps(without_nan(record)) + "\n" for record in (*rest, last | more)).encode()
        atomic.store(self._metrics, content, self._remains())

    def history(self) -> list[dict[str, Any]]:
        """The records so far, without a last line that a kill cut short."""
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

    def rewind(self, round: int, dropped: Callable[[str], bool] = lambda key: False) -> None:
        """Make the folder agree with the snapshot of `round` (0 without a snapshot) before a run is resumed.

        Removes the records of later rounds, the figures that are `dropped`, and the remains of other snapshots.
        """
        earlier = (record for record in self.history() if record["round"] <= round)
        kept = [{key: value for key, value in record.items() if not dropped(key)} for record in earlier]
        content = "".join(json.dumps(record) + "\n" for record in kept).encode()
        atomic.store(self._metrics, content, self._remains())
        checkpoint.clean(self.path)

    def save(self, round: int, server: dict[str, Tensor], meta: dict[str, Any], store: "Store") -> None:
        """Replace the last snapshot, which stays until the new one is whole.

        A round that is already saved is not written again, because a run is a function of its config. `meta` holds
        all else that a resumed run needs, as JSON values; floats come back exactly, including NaN and ±∞. The clients'
        rows in `store` are read in parts.
        """
        last = checkpoint.newest(self.path)
        if last and round <= last[0]:
            if round == last[0]:
                return
            raise InputError(f"round = {round}, but {self.path} has a checkpoint of round {last[0]}: rounds only grow.")
        nbytes = sum(value.nbytes for value in server.values()) + store.nbytes
        with atomic.writing(self.path / f"checkpoint-{round}", nbytes, self._remains()):
            if self._metrics.exists():
                atomic.sync(self._metrics)  # the records must be on disk before the snapshot that follows from them
            checkpoint.save(self.path, round, server, meta, store)

    def load(self, like: dict[str, Tensor] | None = None) -> Snapshot | None:
        """Read the last snapshot without the clients' rows; None if there is none.

        `like` holds the server's tensors at the start of this run: the loaded ones must have their names, shapes and
        dtypes, and are put on their devices. If it is None, they are not checked and stay on the CPU.
        """
        last = checkpoint.newest(self.path)
        return last and checkpoint.load(last[1], like)

    def restore(self, store: "Store") -> None:
        """Copy the clients' rows of the last snapshot, which must be as many and alike, into a store, in parts."""
        last = checkpoint.newest(self.path)
        if not last:
            raise InputError(f"{self.path} has no checkpoint to restore from: start at round 0.")
        checkpoint.restore(last[1], store)

    @property
    def _config(self) -> Path:
        return self.path / "config.json"

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def _read_config(self) -> dict[str, Any]:
        """The content of config.json."""
        try:
            return dict(json.loads(self._config.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"{self.path} holds no run: start one there without resuming, or name another folder."
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{self._config} cannot be read ({error}): restore the file, or start anew.") from error

    def _remains(self) -> str:
        last = checkpoint.newest(self.path)
        return f"the last checkpoint (round {last[0]}) is intact" if last else "there is no checkpoint yet"

    def _store_json(self, path: Path, value: dict[str, Any]) -> None:
        content = (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
        atomic.store(path, content, self._remains())
