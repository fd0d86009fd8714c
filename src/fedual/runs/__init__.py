"""What a run leaves behind: `RunDirectory` (config, metrics, checkpoint), `Snapshot`, `environment`."""

from fedual.runs.directory import RunDirectory
from fedual.runs.provenance import environment
from fedual.runs.snapshot import Snapshot

__all__ = ["RunDirectory", "Snapshot", "environment"]
