"""Where a simulation keeps its clients: the state before the first round, with a row for each client in a store."""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedual import rounds
from fedual.contracts import Method
from fedual.rounds import ServerState
from fedual.simulate.store import Store, create

Place = Literal["auto", "memory", "disk"]


def begin(
    method: Method, start: Tensor, num_clients: int, client_state: Place = "auto", folder: Path | None = None
) -> tuple[ServerState, Store]:
    """The state before the first round: the prior N(0, I/δ), a network's initialisation `start` `(P,)`, duals zero.

    Args:
        method: What will be run.
        start: θ of the network as it was initialised.
        num_clients: K.
        client_state: Where the rows are: in memory (the device's, if they fit), or on disk.
        folder: For rows on disk; the system's temporary folder if None.
    """
    server = rounds.begin(method, start)
    rows = rounds.row(method, server.lam_g)
    nbytes = num_clients * sum(value.nbytes for value in rows.values())
    if nbytes > free_memory(start.device) // 3:
        rows = {name: value.cpu() for name, value in rows.items()}
    on_disk = client_state == "disk" or (client_state == "auto" and nbytes > free_memory(torch.device("cpu")) // 3)
    store = create(rows, num_clients, folder=(folder or Path(tempfile.gettempdir())) if on_disk else None)
    return server, store


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now; on a CPU what the system and the container allow, 4 GiB if neither says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [4 * 2**30]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))]
    with suppress(OSError, ValueError):
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free.append(limit - used)
    return min(free)
