"""Rounds of `mnist-2class-100` by everybody, in turns: what a client's step costs, and who is how much faster.

Claims: fedual's vectorised engine runs IVON-ADMM at least 5 times as fast as a plain eager loop with `ivon-opt` (aim
10), and FedAvg at least twice as fast as Flower's simulation (aim 3). Same clients, batches and numbers of steps. The
first round of each, with start-up and compilation, stands apart; the others take turns, and the median counts. Loops
that take one client after the other are timed on a tenth of the clients and scaled. Flower's idle processes, about 5 %
of a core, stay while the others of FedAvg have their turn.
"""

import statistics
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from bench import eager, engines, flower
from bench.work import Work

VECTORISED = "vectorised engine"


class Entry(NamedTuple):
    """One of those compared."""

    name: str
    work: Work  # that is timed
    rounds: Generator[float]  # seconds


class Claim(NamedTuple):
    """`method`: fedual's vectorised engine is at least `least` times as fast as `other`."""

    method: str
    other: str
    least: float
    aim: float


CLAIMS = (Claim("ivon-admm", "the plain eager loop", 5, 10), Claim("fedavg", "Flower's simulation", 2, 3))


def entries(work: Work, method: str, repeats: int) -> Iterator[Entry]:
    """Who runs a method."""
    tenth = work.first(max(1, len(work.clients) // 10))
    if method == "ivon-admm":
        yield Entry("the plain eager loop", tenth, eager.rounds(tenth, eager.train_ivon))
        yield Entry("sequential engine", tenth, engines.rounds(tenth, method, "sequential"))
    else:
        yield Entry("the plain eager loop", tenth, eager.rounds(tenth, eager.train_adam))
        if flower.installed():
            yield Entry("Flower's simulation", work, flower.rounds(work, 1 + repeats))
        else:
            print("Flower is not installed, and left out: `make bench` installs it.")
    yield Entry(VECTORISED, work, engines.rounds(work, method))


def compare(work: Work, method: str, repeats: int) -> dict[str, dict[str, Any]]:
    """Time everybody who runs a method, in turns.

    Returns:
        For each name the seconds of the rounds that were timed, of how many clients, and what follows for all.
    """
    every = list(entries(work, method, repeats))
    try:
        first = {entry.name: _wall(entry) for entry in every}
        times: dict[str, list[float]] = {entry.name: [] for entry in every}
        for _ in range(repeats):
            for entry in every:
                times[entry.name].append(next(entry.rounds))
    finally:
        for entry in every:
            entry.rounds.close()  # Flower's processes end
    table = {}
    for entry in every:
        seconds = statistics.median(times[entry.name]) / entry.work.steps
        table[entry.name] = {
            "clients timed": len(entry.work.clients),
            "seconds timed": times[entry.name],
            "seconds of start-up and first round": first[entry.name],
            "ms a client step": 1e3 * seconds,
            "seconds a round": seconds * work.steps,
        }
    fastest = table[VECTORISED]["seconds a round"]
    for row in table.values():
        row["ratio"] = row["seconds a round"] / fastest
    return table


def show(work: Work, method: str, table: dict[str, dict[str, Any]]) -> None:
    """Print what `compare` found."""
    clients = len(work.clients)
    print(f"\n{method}: {clients} clients, {work.steps:,} client steps a round; first: with start-up and compilation")
    print(f"  {'':22} ms a client step   s a round   / vectorised   first, s")
    for name, row in table.items():
        timed = row["clients timed"]
        note = "" if timed == clients else f"   {timed} of {clients} clients timed, s a round scaled"
        print(
            f"  {name:22} {row['ms a client step']:16.3f} {row['seconds a round']:11.2f} {row['ratio']:13.1f}×"
            f" {row['seconds of start-up and first round']:10.2f}{note}"
        )


def _wall(entry: Entry) -> float:
    """Seconds of start-up, compilation and the first round together."""
    began = time.perf_counter()
    next(entry.rounds)
    return time.perf_counter() - began


def verdict(claim: Claim, table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether a claim holds, in a line."""
    ratio = table[claim.other]["ratio"]
    ok = ratio >= claim.least
    found = f"{claim.method}: vectorised {ratio:.1f}× {claim.other} (at least {claim.least:g}, aim {claim.aim:g})"
    return {**claim._asdict(), "ratio": ratio, "ok": ok, "line": f"{found}: {'ok' if ok else 'TOO SLOW'}"}
