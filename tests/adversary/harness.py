"""Run a fuzzer's cases in a process of its own, with limits of memory and time, and judge what comes out of each.

The rule: a case ends with a result or with a `FedualError` of one printable sentence. Any other exception, a dead
process, a sentence about memory that ran out (the size should have been refused first), and a result that is not the
one of the intact example (unless the fuzzer says that the change may be seen) is a failure.
"""

import json
import mmap
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow

from fedual.errors import FedualError

MEMORY = 1 << 30
"""Bytes that a case may take beyond what its process took before: four times the largest file that is read whole."""
SECONDS = 20.0
"""A case that takes longer hangs."""
LETTERS = 600
"""A sentence has at most as many."""
STACK = 3000
"""Letters of a traceback that are kept."""

Case = Callable[[], Any]
Fuzzer = Callable[[Path], Callable[[Random], Case]]
"""A function that makes valid examples in a folder, and returns one that makes a case of a random source.

A case returns whether what it saw is the intact example's result (None: nothing to compare with); it raises what the
library raises.
"""


COUNTS: Counter[str] = Counter()
"""What a fuzzer counts besides its cases, for the record."""


class Changed(AssertionError):
    """A damaged example was accepted, and gave another result."""


class Slow(BaseException):
    """A case took too long."""


@dataclass
class Report:
    """What came of a fuzzer's cases."""

    name: str
    seed: int
    cases: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # what else a fuzzer counts
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    peak_mib: float = 0.0

    def add(self, other: dict[str, Any]) -> None:
        """Count what a process found."""
        self.cases += other["cases"]
        self.outcomes = dict(Counter(self.outcomes) + Counter(other["outcomes"]))
        self.counts = dict(Counter(self.counts) + Counter(other.get("counts", {})))
        self.failures += other["failures"]
        self.seconds += other["seconds"]
        self.peak_mib = max(self.peak_mib, other["peak_mib"])

    def kinds(self) -> list[tuple[dict[str, Any], int]]:
        """One failure of each kind, and how many are like it."""
        alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for failure in self.failures:
            frames = re.findall(r'File ".*?/src/(fedual/.*?)", line (\d+)', failure.get("stack", ""))
            alike.setdefault((failure["what"].split(":")[0][:40], ":".join(frames[-1:] and frames[-1])), []).append(
                failure
            )
        return [(kind[0], len(kind)) for kind in alike.values()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def run(name: str, fuzzer: Fuzzer, seed: int, cases: range, seconds: float = SECONDS, most: int = 200) -> Report:
    """Run these cases of a fuzzer; after `most` failures the rest is left."""
    report, left = Report(name, seed), cases
    while left:
        done, found, death = _in_child(name, fuzzer, seed, left, seconds, most - len(report.failures))
        report.add(found)
        if death is None:
            break
        report.failures.append({"case": done, "what": death})
        left = range(done + 1, cases.stop)
        if len(report.failures) >= most:
            break
    return report


def random_of(name: str, seed: int, case: int) -> Random:
    """The random source of one case."""
    return Random(f"{name}/{seed}/{case}")


def _in_child(
    name: str, fuzzer: Fuzzer, seed: int, cases: range, seconds: float, most: int
) -> tuple[int, dict[str, Any], str | None]:
    """Run cases in a forked process: the last case, what it found, and how it died."""
    shared = mmap.mmap(-1, 8)
    folder = Path(tempfile.mkdtemp(prefix="fz", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    results = folder / "results.json"
    (folder / "work").mkdir()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks where libraries have threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            warnings.simplefilter("ignore")
            os.chdir(folder / "work")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some report what they do
            _worker(name, fuzzer, seed, cases, seconds, most, folder / "work", shared, results)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    last = struct.unpack("q", shared[:])[0]
    empty = {"cases": 0, "outcomes": {}, "failures": [], "seconds": 0.0, "peak_mib": 0.0}
    found = json.loads(results.read_text()) if results.exists() else empty
    shutil.rmtree(folder, ignore_errors=True)
    death = None
    if os.WIFSIGNALED(status):
        death = f"the process died of {signal.Signals(os.WTERMSIG(status)).name}"
    elif os.WEXITSTATUS(status):
        death = f"the process ended with code {os.WEXITSTATUS(status)}"
    return last, found, death


def _worker(
    name: str, fuzzer: Fuzzer, seed: int, cases: range, seconds: float, most: int, folder: Path, shared: Any, to: Path
) -> None:
    make = fuzzer(folder)
    pyarrow.array(["what Arrow reserves is not counted"])
    made = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (made + MEMORY, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _too_slow)
    signal.signal(signal.SIGPROF, _too_slow)
    before, outcomes, failures = _status("VmHWM"), Counter[str](), list[dict[str, Any]]()
    began, count, kept = time.monotonic(), 0, time.monotonic()

    def store() -> None:
        peak = (_status("VmHWM") - before) / 2**20
        spent = time.monotonic() - began
        found = {
            "cases": count,
            "outcomes": outcomes,
            "counts": COUNTS,
            "failures": failures,
            "seconds": spent,
            "peak_mib": peak,
        }
        to.write_text(json.dumps(found))

    for case in cases:
        shared[:] = struct.pack("q", case)
        outcome, failure = judged(make, random_of(name, seed, case), seconds)
        outcomes[outcome] += 1
        count += 1
        if failure is not None:
            failures.append({"case": case, **failure})
            store()
            if len(failures) >= most:
                break
        elif time.monotonic() > kept + 1:  # what a dead process did is lost otherwise
            kept = time.monotonic()
            store()
    store()


def judged(make: Callable[[Random], Case], rng: Random, seconds: float) -> tuple[str, dict[str, Any] | None]:
    """Run one case: its outcome, and why it is a failure."""
    try:
        with limited(seconds):
            same = make(rng)()
    except FedualError as error:
        problem = no_sentence(str(error))
        return ("refused", None) if problem is None else ("bad sentence", _failure(error, problem))
    except Changed as error:
        return "changed", _failure(error, str(error))
    except (Exception, Slow) as error:
        return type(error).__name__, _failure(error, f"{type(error).__name__}: {error}")
    return ("accepted" if same is None else "same" if same else "seen"), None


def no_sentence(text: str) -> str | None:
    """Why a text is no sentence for a user; None if it is one."""
    if not text.strip():
        return "the message is empty"
    if len(text) > LETTERS:
        return f"the message has {len(text)} letters: {text[:300]}"
    if not text.isprintable():
        return f"the message has control characters: {text!r}"
    if "allocate" in text or "MemoryError" in text:
        return f"memory was asked for before the size was refused: {text}"
    return None


def _failure(error: BaseException, what: str) -> dict[str, Any]:
    stack = "".join(traceback.format_exception(error))
    return {"what": what[:LETTERS], "stack": stack[-STACK:]}


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Slow` in the block if it works longer, or waits ten times as long."""
    timers = {signal.ITIMER_PROF: seconds, signal.ITIMER_REAL: 10 * seconds}  # others use the machine, too
    for timer, most in timers.items():
        signal.setitimer(timer, most)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)


def _too_slow(*_: Any) -> None:
    raise Slow("the case hangs")


def _status(key: str) -> int:
    """Bytes that /proc says of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(key)
