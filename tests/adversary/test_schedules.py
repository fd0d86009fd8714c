"""Random schedules of faults: every answer counts exactly once, none wrong; and wrong rules are caught."""

import pytest
from slow import rest_slow

from adversary import harness, mutants, schedules
from adversary.test_fuzz import SEED, shown

QUICK, MORE = 12, 150
SECONDS = 60.0
EASY = ("pending taken for committed", "older message answered", "ack not checked")
"""Mutants that the first schedules catch."""


def test_random_faults():
    report = harness.run("schedules", schedules.schedule, SEED, range(QUICK), SECONDS)
    assert not report.failures, shown(report)


@pytest.mark.slow
def test_more_random_faults():
    report = harness.run("schedules", schedules.schedule, SEED + 1, range(MORE), SECONDS)
    assert not report.failures, shown(report)


@pytest.mark.parametrize("name", rest_slow(list(mutants.MUTANTS), *EASY))
def test_a_wrong_rule_is_caught(name):
    report = mutants.hunt(name, SEED)
    assert report.failures, f"{name} survived {report.cases} schedules: {mutants.MUTANTS[name].wrong}"
