"""What a SuperNode's `--node-config` says: the client that the site is, and the folder that keeps its state."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedual.flower.refusal import Refusal


def client_id(config: Mapping[str, Any]) -> str:
    """The client's id from the node's configuration."""
    name = config.get("client-id", config.get("partition-id"))
    if name is None:
        raise Refusal("This SuperNode has no name: start it with --node-config 'client-id=\"north\"'.")
    return str(name)


def state_folder(config: Mapping[str, Any]) -> Path:
    """The folder that keeps the client's state."""
    configured = config.get("state-dir") or os.environ.get("FEDUAL_STATE")
    return Path(str(configured)) if configured else Path.home() / ".fedual" / "state"
