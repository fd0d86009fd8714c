"""A seeded slice of every fuzzer: a result, or one sentence; no silent change; bounded memory."""

import os

import pytest

from adversary import harness
from adversary.fuzzers import FUZZERS, SHARES
from fedual.errors import DataError

SEED = 27
QUICK, LEAST, MORE = 120, 6, 12
"""Cases of a fuzzer, of a slow one at least, and how many times as many in `make test-all`."""


def shown(report: harness.Report) -> str:
    found = [f"{failure['case']} ({count} alike): {failure['what']}" for failure, count in report.kinds()]
    return f"{report.name} --seed {report.seed} --case …\n" + "\n".join(found)


def cases(name: str) -> int:
    return max(LEAST, int(QUICK * SHARES.get(name, 1.0)))


@pytest.mark.parametrize("name", FUZZERS)
def test_bytes_and_messages_of_any_kind(name):
    report = harness.run(name, FUZZERS[name], SEED, range(cases(name)))
    assert not report.failures, shown(report)
    assert report.cases == cases(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZERS)
def test_more_bytes_and_messages_of_any_kind(name):
    report = harness.run(name, FUZZERS[name], SEED + 1, range(MORE * cases(name)))
    assert not report.failures, shown(report)


def divided():
    raise ZeroDivisionError


def told(text):
    def case():
        raise DataError(text)

    return case


def endless():
    while True:
        pass


def changed():
    raise harness.Changed("other numbers")


@pytest.mark.parametrize(
    ("case", "what"),
    [
        (divided, "ZeroDivisionError"),
        (told(""), "the message is empty"),
        (told("DefaultCPUAllocator: can't allocate memory"), "before the size was refused"),
        (lambda: os.kill(os.getpid(), 9), "SIGKILL"),
        (endless, "hangs"),
        (lambda: bytearray(2 * harness.MEMORY), "MemoryError"),
        (changed, "other numbers"),
    ],
)
def test_the_harness_sees_what_it_is_for(case, what):
    report = harness.run("harness", lambda folder: lambda rng: case, 0, range(1), 0.2)
    (failure,) = report.failures
    assert what in failure["what"]


@pytest.mark.parametrize("text", ["", "two\nlines", "x" * 601, "\x1b[2J", "MemoryError"])
def test_what_is_no_sentence(text):
    assert harness.no_sentence(text)
    assert harness.no_sentence("A sentence names the value, the cause and the remedy.") is None


def test_the_harness_goes_on_after_a_process_died():
    def make(rng):
        return (lambda: os.kill(os.getpid(), 9)) if rng.random() < 0.3 else lambda: None

    report = harness.run("harness", lambda folder: make, 0, range(12))
    dead = [number for number in range(12) if harness.random_of("harness", 0, number).random() < 0.3]
    assert [failure["case"] for failure in report.failures] == dead
    assert 0 < len(dead) < 12
