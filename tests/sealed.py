"""JSON files of a run's folder, changed by a test: as an earlier version wrote them, or sealed again."""

import json
from pathlib import Path
from typing import Any

from fedual.rundir.checksum import seal_json
from fedual.rundir.folder import read_config


def content(path: Path) -> dict[str, Any]:
    """A file without its seal."""
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in ("run", "sha256")}


def age(path: Path, value: dict[str, Any]) -> None:
    """Write a file without a seal; with such a config.json the whole folder is that of an earlier version."""
    path.write_text(json.dumps(value))


def reseal(path: Path, value: dict[str, Any]) -> None:
    """Write a file with the seal of its run."""
    path.write_bytes(seal_json(value, read_config(path.parent)[1]))
