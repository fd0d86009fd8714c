"""The folder of a run, from which a run that was killed at any moment can be resumed.

    out/   config.json · environment.json · metrics.jsonl (one JSON object a round) · checkpoint-<round>/

A run appends the record of a round, then saves its snapshot (not after every round if that takes long):

    run = RunDirectory.create(out, config)           run = RunDirectory.open(out, config)      # resume
    …                                                snapshot = run.load(server)
    run.append({"round": 1, …})                      if snapshot: run.restore(store)
    run.save(1, server, meta, store)                 run.rewind(snapshot.round if snapshot else 0)
"""

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.forms import require
from fedual.parsing import loads, reason
from fedual.rundir import atomic, checkpoint
from fedual.rundir.checkpoint import Snapshot
from fedual.rundir.checksum import seal_json, unseal_json
from fedual.rundir.config import differences, digest
from fedual.rundir.jsonable import dumps, plain, without_nan
from fedual.rundir.old_config import converted, matched
from fedual.rundir.provenance import changes, environment
from fedual.stored import CONFIG, RECORD, RESTORE

if TYPE_CHECKING:
    from fedual.backends.client_store import Store

logger: logging.Logger = logging.getLogger("fedual")
ENVIRONMENT = "environment.json"
NAMED = 3
"""How many differences the refusal of another config names: through rules, one setting can change several others."""


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder; made by `create` or `open`.

    Attributes:
        path: The folder.
        config: The content of config.json.
        digest: Of the config with which the run began, which all files of the run have; None if an earlier version,
            whose files have no seals, began it.
        changes: In what the environment of a resumed run differs from the one before, in words.
    """

    path: Path
    config: dict[str, Any]
    digest: str | None
    changes: str = ""

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: dict[str, Any]) -> "RunDirectory":
        """Start a run in a folder without one, which is made if it does not exist.

        `config` is all that the result depends on, as JSON values.
        """
        config = plain(config)
        run = cls(Path(path), config, digest(config))
        if run._config.exists() or run._metrics.exists() or checkpoint.newest(run.path):
            rounds = max((record["round"] for record in cls(run.path, {}, None).history()), default=0)
            raise InputError(
                f"{path} holds a run of {rounds} rounds: resume it (--resume, resume=True) or choose another folder."
            )
        atomic.make_folder(run.path)
        run._store_json(run.path / ENVIRONMENT, environment())
        run._store_json(run._config, run.config)  # last, because this file says that there is a run
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: dict[str, Any] | None = None) -> "RunDirectory":
        """Open the folder of a run, to read or to resume it.

        `config` is the config of the resumed run: the stored one, except that `rounds` may have grown (the larger
        number is stored). If versions or the device differ from those before, a warning says so, because numbers may
        differ in their last digits. Without `config`, the run can only be read.
        """
        content, digest = read_config(Path(path))
        stored = converted(content)
        if config is None:
            return cls(Path(path), stored, digest)
        config = plain(config)
        if stored is not content:
            stored = matched(stored, config)
        if changed := differences(stored, config):
            first = "; ".join(f"{key} = {before}, not {after}" for key, before, after in changed[:NAMED])
            raise InputError(
                f"{path} holds a run with {first}: resume with the same settings (rounds may grow), or choose another "
                "folder."
            )
        run = cls(Path(path), config, digest, _changes(Path(path), digest))
        if run.changes:
            logger.warning("%s goes on with %s: numbers may differ in their last digits", path, run.changes)
            run._store_json(run.path / ENVIRONMENT, environment())
        if config != content:
            run._store_json(run._config, config)
        return run

    def append(self, record: dict[str, Any]) -> None:
        """Add the record of a round to metrics.jsonl; NaN and ±∞, which JSON lacks, are written as null.

        If the line cannot be written, the file is as before.
        """
        if not isinstance(record.get("round"), int):
            raise InputError(f"record = {record}: a record needs the number of its round.")
        line = seal_json(json.loads(dumps(without_nan(record), "record")), self.digest)
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
        self._store_records([*rest, without_nan(last | more)])

    def history(self) -> list[dict[str, Any]]:
        """The records so far, without a last line that a kill cut short."""
        try:
            *lines, torn = self._metrics.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(f"{self._metrics} cannot be read ({error.strerror}): restore the file.") from error
        if _is_json(torn[:-1]):  # a whole record, with another byte in the place of its newline
            lines.append(torn)
        records = []
        for number, line in enumerate(lines, 1):
            try:
                record = unseal_json(line + b"\n", self.digest)
            except ValueError as error:
                why = f"Line {number} of {self._metrics} is no record of this run ({error})"
                raise DataError(f"{why}: restore or remove it.") from None
            require(f"Line {number} of {self._metrics}", record, RECORD, "restore or remove it")
            records.append(record)
        return records

    def rewind(self, round: int, dropped: Callable[[str], bool] = lambda key: False) -> None:
        """Make the folder agree with the snapshot of `round` (0 without a snapshot) before a run is resumed.

        Removes the records of later rounds, the figures that are `dropped`, and the remains of other snapshots.
        """
        earlier = [record for record in self.history() if record["round"] <= round]
        rounds = [record["round"] for record in earlier]
        if self.digest is not None and rounds != list(range(1, round + 1)):
            listed = ", ".join(map(str, rounds)) or "none"
            raise DataError(
                f"{self._metrics} should have the records of rounds 1 to {round} and has {listed}: restore the file, "
                "or start anew."
            )
        self._store_records([{key: value for key, value in record.items() if not dropped(key)} for record in earlier])
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
            checkpoint.save(self.path, self.digest, round, server, meta, store)

    def load(self, like: dict[str, Tensor] | None = None) -> Snapshot | None:
        """Read the last snapshot without the clients' rows; None if there is none.

        `like` holds the server's tensors at the start of this run: the loaded ones must have their names, shapes and
        dtypes, and are put on their devices. If it is None, they are not checked and stay on the CPU.
        """
        last = checkpoint.newest(self.path)
        return last and checkpoint.load(last[1], self.digest, like)

    def restore(self, store: "Store") -> None:
        """Copy the clients' rows of the last snapshot, which must be as many and alike, into a store, in parts."""
        last = checkpoint.newest(self.path)
        if not last:
            raise InputError(f"{self.path} has no checkpoint to restore from: start at round 0.")
        checkpoint.restore(last[1], self.digest, store)

    @property
    def _config(self) -> Path:
        return self.path / "config.json"

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def _remains(self) -> str:
        last = checkpoint.newest(self.path)
        return f"the last checkpoint (round {last[0]}) is intact" if last else "there is no checkpoint yet"

    def _store_records(self, records: list[dict[str, Any]]) -> None:
        atomic.store(self._metrics, b"".join(seal_json(record, self.digest) for record in records), self._remains())

    def _store_json(self, path: Path, value: dict[str, Any]) -> None:
        atomic.store(path, seal_json(value, self.digest, indent=2), self._remains())


def read_config(folder: Path) -> tuple[dict[str, Any], str | None]:
    """The content of a folder's config.json, and the digest that the run's files have."""
    path = folder / "config.json"
    try:
        content = path.read_bytes()
        digest = dict(loads(content)).get("run")  # `unseal_json` checks it
        config = unseal_json(content, digest)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{folder} holds no run: start one there without resuming, or name another folder.") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({reason(error)}): restore the file, or start anew.") from error
    require(path, config, CONFIG, RESTORE)
    return config, digest


def _changes(folder: Path, digest: str | None) -> str:
    """In what this environment differs from the one that the folder names."""
    path = folder / ENVIRONMENT
    try:
        return changes(unseal_json(path.read_bytes(), digest), environment())
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): delete it to go on without it.") from None


def _is_json(line: bytes) -> bool:
    try:
        loads(line)
    except (ValueError, RecursionError):
        return False
    return True
