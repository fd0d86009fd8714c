"""The environment in which a result was computed, stored with every record."""

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedual._version import __version__


def environment() -> dict[str, str | int | None]:
    """Versions, hardware and commit; `$FEDUAL_COMMIT` names the commit of a source tree without its repository."""
    return {
        "fedual": __version__,
        "commit": os.environ.get("FEDUAL_COMMIT") or _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


COMPARED = "fedual", "torch", "python", "device"
"""What numbers depend on; they may differ in the last digits where one of these does."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In which of `COMPARED` two environments differ, in words; empty if in none."""
    differ = [name for name in COMPARED if name in before and before[name] != now[name]]
    return ", ".join(f"{name} {now[name]} (before: {before[name]})" for name in differ)


def _commit() -> str | None:
    """The commit of fedual's source tree, with a + if there are changes; None if fedual is installed."""
    here = Path(__file__).parent.parent
    git = lambda *words: subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10)
    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no", "--", str(here))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "") if head.returncode == 0 else None
