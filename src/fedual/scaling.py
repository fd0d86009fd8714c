"""How the cost of a round of IVON-ADMM grows: with clients, with parameters, with local steps.

Claim: time grows at most linearly with the work, (steps of all clients) × parameters, and memory is bounded by the
chunk of clients trained at once, not by their number K, where their state is on disk.

A point is a process of its own (`python -m fedual.scaling TASK DEVICE`, JSON on its last line), so that its peak memory
is its own. It trains MLPs on random examples for a few rounds: the first, which may compile, does not count, and of the
others the fastest does, since whatever else the machine does can only add to a time. Memory is also read before there
is any client (imports, device, examples), and what comes on top is what a federation costs.

The total of examples is the same for every K. A round is one epoch in batches of 32, so that its steps of all clients
stay about ⌈N/32⌉ until a client has less than a batch; from there on they are K. Linearity is therefore judged against
the work, not against K.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedual.errors import FedualError
from fedual.models import mlp
from fedual.solvers import Clients
from fedual.training import fit

SEED, INPUTS, CLASSES, BATCH = 0, 64, 10, 32
SLOPE = 1.15
"""The largest exponent of time in the work that passes for linear. Over the decade above 1000, n log n has 1.12, and
an error of 10 % in the last time shifts the exponent by 0.04: this lets both pass, and nothing like n^1.5."""
GROWTH = 1.5
"""By how much memory may grow where it should stay: an allocator's reuse differs by tens of percent, and memory
proportional to the clients or steps would grow tenfold over the upper half of the full curves."""


@dataclass(frozen=True)
class Task:
    """What a point trains.

    Args:
        clients: K.
        examples: Of all clients together; each has as many as the others, ±1.
        parameters: P, of an MLP with two hidden layers of equal width, as nearly as a whole width allows.
        local_steps: A client's steps in a round; None is one epoch.
        chunk: Clients that are trained at once.
        compile: As in `fit`, which would otherwise choose by the length of the run, here and there on one curve.
        rounds: The first of them is not timed.
    """

    clients: int
    examples: int
    parameters: int
    local_steps: int | None
    chunk: int
    compile: bool = True
    rounds: int = 4


@dataclass(frozen=True)
class Point:
    """What a point found."""

    clients: int
    parameters: int
    local_steps: int | None
    client_steps: int  # steps of all clients in a round
    chunk: int
    seconds: float  # the fastest round but the first
    first_seconds: float  # the first round
    setup_seconds: float  # before the first round
    baseline_bytes: int  # peak memory before there was any client
    peak_bytes: int  # peak memory at the end
    device_bytes: int  # peak of what was allocated on a GPU; 0 on a CPU
    state_bytes: int  # the clients' state on disk

    @property
    def work(self) -> int:
        """What time should be linear in."""
        return self.client_steps * self.parameters

    @property
    def memory(self) -> int:
        """Bytes of main memory that the federation took, at least 1 for the sake of logarithms."""
        return max(1, self.peak_bytes - self.baseline_bytes)


class Verdict(NamedTuple):
    """A figure that must not exceed its limit."""

    curve: str
    what: str
    value: float
    limit: float
    sentence: str

    @property
    def ok(self) -> bool:
        """Whether it does not."""
        return self.value <= self.limit


Curves = Mapping[str, Sequence[Point]]
"""Points by the field of `Point` that varies: clients, parameters, local_steps."""


def plan(quick: bool = False) -> dict[str, list[Task]]:
    """The tasks of each curve, in rising order; `quick` has fewer and smaller ones, and does not compile."""
    if quick:
        return {
            "clients": [Task(clients, 1600, 10_000, None, 50, False, 3) for clients in (100, 400, 1600)],
            "parameters": [Task(2, 320, parameters, 5, 2, False, 3) for parameters in (10_000, 100_000, 1_000_000)],
            "local_steps": [Task(10, 400, 10_000, steps, 10, False, 3) for steps in (1, 10, 100)],
        }
    return {
        "clients": [Task(clients, 20_000, 12_000, None, 250) for clients in (10, 30, 100, 300, 1000, 3000, 10_000)],
        "parameters": [Task(2, 320, round(10 ** (4 + n / 2)), 5, 2) for n in range(7)],
        "local_steps": [Task(10, 2000, 12_000, steps, 10) for steps in (1, 3, 10, 30, 100, 300)],
    }


def width(parameters: int) -> int:
    """The hidden width h of an MLP in–h–h–out with about P parameters: h² + (in + out + 2)h + out = P."""
    return max(1, round(float(np.roots([1, INPUTS + CLASSES + 2, CLASSES - parameters]).real.max())))


def measure(task: Task, device: str) -> Point:
    """Train a task in this process."""
    torch.empty(1, device=device)  # a GPU's own start-up is no cost of clients
    source = torch.Generator().manual_seed(SEED)
    x = torch.randn(task.examples, INPUTS, generator=source)
    y = torch.randint(CLASSES, (task.examples,), generator=source)
    baseline, began, ready = peak_memory(), time.perf_counter(), []
    torch.manual_seed(SEED)
    run = fit(
        mlp(INPUTS, (width(task.parameters),) * 2, CLASSES),
        Clients(x, y, torch.arange(task.examples).tensor_split(task.clients)),
        rounds=task.rounds,
        batch_size=BATCH,
        local_epochs=1,
        local_steps=task.local_steps,
        seed=SEED,
        device=device,
        chunk=task.chunk,
        compile=task.compile,
        client_state="disk",
        callbacks=[lambda run, record: ready.append(time.perf_counter())],
    )
    seconds = [record["seconds"] for record in run.history]
    return Point(
        clients=task.clients,
        parameters=run.losses.dim,
        local_steps=task.local_steps,
        client_steps=sum(run.losses.steps),
        chunk=task.chunk,
        seconds=min(seconds[1:]),
        first_seconds=seconds[0],
        setup_seconds=ready[0] - began,
        baseline_bytes=baseline,
        peak_bytes=peak_memory(),
        device_bytes=torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else 0,
        state_bytes=run.store.nbytes,
    )


def apart(task: Task, device: str) -> Point:
    """Train a task in a process of its own."""
    command = [sys.executable, "-m", "fedual.scaling", json.dumps(asdict(task)), device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["killed; was there enough memory?"])[-1]
        raise FedualError(f"{task} ended with exit code {done.returncode} ({reason}): try --quick, with smaller tasks.")
    return Point(**json.loads(done.stdout.splitlines()[-1]))


def sweep(
    tasks: Mapping[str, Sequence[Task]], device: str, say: Callable[[str], None] = lambda line: None
) -> dict[str, list[Point]]:
    """Measure every task; `say` is told of each before it begins."""
    curves: dict[str, list[Point]] = {}
    for curve, some in tasks.items():
        curves[curve] = []
        for task in some:
            say(f"{words(curve)} = {getattr(task, curve):,}")
            curves[curve].append(apart(task, device))
    return curves


def peak_memory() -> int:
    """Bytes of this process's peak resident memory."""
    # Linux lets ru_maxrss begin at the parent's peak; VmHWM is the program's own
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent b of y ∝ x^b, by least squares on the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def verdicts(curves: Curves) -> list[Verdict]:
    """Judge the upper half of each curve: below it, costs that do not grow hide those that do."""
    found = []
    for curve, points in curves.items():
        upper = points[-max(2, len(points) // 2) :]
        name, first, last = words(curve), getattr(upper[0], curve), getattr(upper[-1], curve)
        exponent = slope([p.work for p in upper], [p.seconds for p in upper])
        found.append(Verdict(curve, "time", exponent, SLOPE, f"time against {name}: work to the {exponent:.2f}"))
        kinds = {"memory": [p.memory for p in upper], "GPU memory": [p.device_bytes for p in upper]}
        for what, values in kinds.items():
            if not values[-1]:
                continue  # no GPU
            if curve == "parameters":  # a chunk's variables have that size
                growth, limit = slope([p.parameters for p in upper], values), SLOPE
                sentence = f"{what} against {name}: {name} to the {growth:.2f}"
            else:
                growth, limit = values[-1] / values[0], GROWTH
                sentence = f"{what} against {name}: ×{growth:.2f} from {first:,} to {last:,}"
            found.append(Verdict(curve, what, growth, limit, sentence))
    return found


def words(curve: str) -> str:
    """A curve's name as people write it."""
    return curve.replace("_", " ")


def report(curves: Curves, device: str) -> dict[str, Any]:
    """All of it, as JSON."""
    judged = [{**verdict._asdict(), "ok": verdict.ok} for verdict in verdicts(curves)]
    points = {curve: [asdict(point) for point in some] for curve, some in curves.items()}
    return {"device": device, "seed": SEED, "batch_size": BATCH, "curves": points, "verdicts": judged}


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Task(**json.loads(sys.argv[1])), sys.argv[2]))))
