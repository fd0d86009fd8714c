"""The folder of a server's run: config, records and ledger, for one process at a time.

    out/   config.json · environment.json · metrics.jsonl · server.safetensors · posterior.safetensors

If the server is killed between writing a record and saving the ledger, that round did not count and its record is
removed.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedual.calibration import of_the_end
from fedual.errors import DataError, InputError
from fedual.flower.ledger import Ledger
from fedual.rundir import RunDirectory
from fedual.rundir.artifacts import read_json
from fedual.rundir.atomic import sync
from fedual.rundir.locking import in_use
from fedual.rundir.old_config import CONFIG_VERSION


class Folder(NamedTuple):
    """An open run."""

    run: RunDirectory
    ledger: Ledger
    news: dict[str, Any]  # for the next record

    @property
    def checkpoint(self) -> Path:
        """The ledger's file."""
        return self.run.path / "server.safetensors"

    def close(self, record: dict[str, Any]) -> None:
        """End a round durably; the next message may leave only afterwards."""
        record |= self.news
        self.news.clear()
        self.run.append(record)
        sync(self.run.path / "metrics.jsonl")  # no round without its record
        self.ledger.save(self.checkpoint)


def is_older(path: Path) -> bool:
    """True if the folder holds a run of a fedual that handed q_g over as it was trained."""
    content = read_json(path / "config.json")
    return content is not None and "posterior" not in content


@contextmanager
def opened(path: Path, config: Mapping[str, Any], ledger: Ledger) -> Iterator[Folder]:
    """Start a run, or resume the run in this folder.

    Args:
        path: The folder; made if it does not exist.
        config: The config of the run; `rounds` may have grown.
        ledger: The ledger with which a new run starts.

    Raises:
        InputError: Another server works here, the run has another config, or an older fedual started it.
        DataError: Files are missing, damaged or cannot be written.
    """
    with in_use(path):
        resumed = (path / "config.json").exists()
        if resumed:
            _refuse_old(path / "config.json")
        run = (RunDirectory.open if resumed else RunDirectory.create)(path, dict(config))
        ledger.run = run.digest
        checkpoint = Folder(run, ledger, {}).checkpoint
        if checkpoint.exists():
            ledger = Ledger.load(checkpoint, ledger.server, run.digest)
        elif run.history():
            raise DataError(f"{checkpoint} is missing: restore the file, or choose another experiment.")
        run.rewind(ledger.server.round, of_the_end if ledger.server.round < config["rounds"] else lambda key: False)
        ledger.starts = max(ledger.starts + 1, time.time_ns() // 1000)
        ledger.save(checkpoint)
        yield Folder(run, ledger, {"resumed_with": run.changes} if run.changes else {})


def _refuse_old(config: Path) -> None:
    """Refuse to continue a run of fedual 0.1, whose config has the method as a text with rules that cannot be compared.

    Its ledger and the sites' vaults have today's form, and its posterior can be loaded.
    """
    try:
        version = dict(json.loads(config.read_bytes())).get("version", 1)
    except (OSError, ValueError, TypeError):
        return  # `RunDirectory.open` says what is wrong with the file
    if version != CONFIG_VERSION:
        raise InputError(
            f"{config.parent} holds a run that another fedual started (config of version {version}, not "
            f"{CONFIG_VERSION}): finish it with the fedual that started it, at the server and at all sites, or choose "
            "another experiment and another folder."
        )
