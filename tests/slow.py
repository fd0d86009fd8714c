"""`rest_slow` leaves some of a test's parameters to `make test-all`."""

from collections.abc import Sequence
from typing import Any

import pytest


def rest_slow(params: Sequence[Any], *quick: Any) -> list[Any]:
    """The same parameters, of which all but the `quick` ones run in `make test-all` only."""
    assert set(quick) <= set(params), f"{quick} are not among {params}"
    return [param if param in quick else pytest.param(param, marks=pytest.mark.slow) for param in params]
