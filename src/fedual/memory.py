"""How much memory there is."""

from contextlib import suppress
from pathlib import Path

UNKNOWN = 4 * 2**30
"""What is assumed where the system does not say."""


def available() -> int:
    """Free bytes now: the least of the system's and the container's."""
    free = [UNKNOWN]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))]
    with suppress(OSError, ValueError):
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free.append(limit - used)
    return min(free)
