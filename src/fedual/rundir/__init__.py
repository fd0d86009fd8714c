"""The folder of a run: `RunDirectory` (config, metrics, checkpoint), `Snapshot`, `environment`."""

from fedual.rundir.checkpoint import Snapshot
from fedual.rundir.folder import RunDirectory
from fedual.rundir.provenance import environment

__all__ = ["RunDirectory", "Snapshot", "environment"]
