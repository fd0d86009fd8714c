"""How the cost of a round of IVON-ADMM grows with clients, parameters and local steps.

Claim: time grows at most linearly with the work, (steps of all clients) × parameters. If the clients' state is on disk,
memory is bounded by the chunk of clients trained at once, not by their number K.

Each point has its own process (`python -m studies.scaling TASK DEVICE`), and with it a peak memory of its own. It
trains an MLP on random examples for a few rounds. The first round may compile and is left out; of the others the
fastest counts, since other load can only add to a time. The memory in use before there is any client is subtracted.

The number of examples N is the same for every K. All clients together take about ⌈N/32⌉ steps a round until a client
has less than a batch of 32, and K steps from there on: linearity is judged against the work, not against K.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from fedual.cli.run import Device, Json
from fedual.errors import FedualError
from fedual.fitting import find_device, fit
from fedual.models import mlp
from fedual.networks import Clients
from fedual.rundir.atomic import writing
from fedual.settings import Execution, LocalTraining
from studies.figures.common import canvas, save

SEED, INPUTS, CLASSES, BATCH = 0, 64, 10, 32
SLOPE = 1.15
"""The largest exponent of time in the work that counts as linear. Over the decade above 1000, n log n has 1.12, and an
error of 10 % in the last time shifts the exponent by 0.04: both pass, and n^1.5 does not."""
GROWTH = 1.5
"""The largest growth of a memory that should be constant. An allocator's reuse varies by tens of percent; memory
proportional to the clients or steps would grow tenfold over the upper half of the full curves."""


@dataclass(frozen=True)
class Task:
    """What is trained for a point: an MLP with two hidden layers of equal width."""

    clients: int
    examples: int  # of all clients together, shared evenly
    parameters: int  # the number wanted; the width is rounded
    local_steps: int | None  # of a client in a round; None for one epoch
    chunk: int  # clients trained at once
    compile: bool = True  # the choice of `fit` depends on the length of the run and may change along a curve
    rounds: int = 4  # the first is not timed


@dataclass(frozen=True)
class Point:
    """The measurements of a point."""

    clients: int
    parameters: int
    local_steps: int | None
    client_steps: int  # steps of all clients in a round
    chunk: int
    seconds: float  # the fastest round without the first
    first_seconds: float  # the first round
    setup_seconds: float  # before the first round
    baseline_bytes: int  # peak memory before there was any client
    peak_bytes: int  # peak memory at the end
    device_bytes: int  # peak memory allocated on a GPU; 0 on a CPU
    state_bytes: int  # the clients' state on disk

    @property
    def work(self) -> int:
        """The work of a round, in which time should be linear."""
        return self.client_steps * self.parameters

    @property
    def memory(self) -> int:
        """Bytes of main memory that the federation took, at least 1, since logarithms are taken."""
        return max(1, self.peak_bytes - self.baseline_bytes)


class Verdict(NamedTuple):
    """A value that must not exceed its limit."""

    curve: str
    what: str
    value: float
    limit: float
    sentence: str

    @property
    def ok(self) -> bool:
        """True if within the limit."""
        return self.value <= self.limit


Curves = Mapping[str, Sequence[Point]]
"""Points by the field of `Point` that varies: clients, parameters or local_steps."""


def plan(quick: bool = False) -> dict[str, list[Task]]:
    """Return the tasks of each curve in rising order; `quick` has fewer and smaller ones, without compilation."""
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
    """Return the hidden width h of an MLP in–h–h–out with about P parameters: h² + (in + out + 2)h + out = P."""
    return max(1, round(float(np.roots([1, INPUTS + CLASSES + 2, CLASSES - parameters]).real.max())))


def measure(task: Task, device: str) -> Point:
    """Train a task in this process."""
    torch.empty(1, device=device)  # start the GPU before memory is read
    source = torch.Generator().manual_seed(SEED)
    x = torch.randn(task.examples, INPUTS, generator=source)
    y = torch.randint(CLASSES, (task.examples,), generator=source)
    baseline, began, ready = peak_memory(), time.perf_counter(), []
    torch.manual_seed(SEED)
    run = fit(
        mlp(INPUTS, (width(task.parameters),) * 2, CLASSES),
        Clients(x, y, torch.arange(task.examples).tensor_split(task.clients)),
        rounds=task.rounds,
        seed=SEED,
        posterior="point",
        local=LocalTraining(batch_size=BATCH, local_epochs=1, local_steps=task.local_steps),
        execution=Execution(device=device, chunk=task.chunk, compile=task.compile, client_state="disk"),
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
    """Train a task in its own process."""
    command = [sys.executable, "-m", "studies.scaling", json.dumps(asdict(task)), device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["killed; was there enough memory?"])[-1]
        raise FedualError(f"{task} ended with exit code {done.returncode} ({reason}): try --quick, with smaller tasks.")
    return Point(**json.loads(done.stdout.splitlines()[-1]))


def sweep(
    tasks: Mapping[str, Sequence[Task]], device: str, say: Callable[[str], None] = lambda line: None
) -> dict[str, list[Point]]:
    """Measure every task; `say` is called before each of them and with its measurements."""
    curves: dict[str, list[Point]] = {}
    for curve, some in tasks.items():
        curves[curve] = []
        for task in some:
            say(f"{curve.replace('_', ' ')} = {getattr(task, curve):,}")
            curves[curve].append(point := apart(task, device))
            memory = f"{point.memory / 1e6:.0f} MB, GPU {point.device_bytes / 1e6:.0f} MB"
            say(f"  {point.client_steps:,} steps of all clients, {point.seconds:.3f} s a round, {memory}")
    return curves


def peak_memory() -> int:
    """Return this process's peak resident memory in bytes."""
    # on Linux ru_maxrss starts at the parent's peak; VmHWM does not
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent b of y ∝ x^b by least squares on the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def verdicts(curves: Curves) -> list[Verdict]:
    """Judge the upper half of each curve; in the lower half, constant costs hide those that grow."""
    found = []
    for curve, points in curves.items():
        upper = points[-max(2, len(points) // 2) :]
        name, first, last = curve.replace("_", " "), getattr(upper[0], curve), getattr(upper[-1], curve)
        exponent = slope([p.work for p in upper], [p.seconds for p in upper])
        found.append(Verdict(curve, "time", exponent, SLOPE, f"time against {name}: work to the {exponent:.2f}"))
        kinds = {"memory": [p.memory for p in upper], "GPU memory": [p.device_bytes for p in upper]}
        for what, values in kinds.items():
            if not values[-1]:
                continue  # no GPU
            if curve == "parameters":  # memory may be proportional to P
                growth, limit = slope([p.parameters for p in upper], values), SLOPE
                sentence = f"{what} against {name}: {name} to the {growth:.2f}"
            else:
                growth, limit = values[-1] / values[0], GROWTH
                sentence = f"{what} against {name}: ×{growth:.2f} from {first:,} to {last:,}"
            found.append(Verdict(curve, what, growth, limit, sentence))
    return found


def report(curves: Curves, device: str) -> dict[str, Any]:
    """Return points and verdicts as plain data."""
    points = {curve: [asdict(point) for point in some] for curve, some in curves.items()}
    judged = [{**verdict._asdict(), "ok": verdict.ok} for verdict in verdicts(curves)]
    return {"device": device, "seed": SEED, "batch_size": BATCH, "curves": points, "verdicts": judged}


def scaling(
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for scaling.svg, .png and .json.")] = Path("out/scaling"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller points: less than a minute.")] = False,
    as_json: Json = False,
) -> None:
    """Measure and draw how a round's time and memory grow; all points take some minutes.

    Example: python -m studies scaling --quick
    """
    from studies.figures.scaling import draw

    start, device, tasks = time.perf_counter(), str(find_device(device)), plan(quick)
    with canvas(1, 1):  # refuse a missing matplotlib before anything is measured
        pass
    with writing(out, 0, "nothing was measured"):
        out.mkdir(parents=True, exist_ok=True)
    drawing = draw(sweep(tasks, device, lambda line: typer.echo(line, err=True)), device)
    paths = save(drawing, "scaling", out, time.perf_counter() - start)
    for line in [*drawing.findings, *(f"wrote {path}" for path in paths)]:
        typer.echo(line)
    if as_json:
        typer.echo(json.dumps({**drawing.numbers, "files": [str(path) for path in paths]}))


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Task(**json.loads(sys.argv[1])), sys.argv[2]))))
