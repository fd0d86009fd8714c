"""The times of a site's rows: when each enters, when it is last seen, and with which others it is compared."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedual.glm.columns import levels, refuse_row
from fedual.glm.formula import Formula
from fedual.glm.matrix import Rows, chunks

REMEDY = "correct it, or leave the row out"


@dataclass(frozen=True, eq=False)
class Times:
    """Of each row.

    Args:
        time: When it is last seen, `(N,)`.
        entry: When it is first at risk, just afterwards; −∞ if from the beginning, `(N,)`.
        stratum: The number of its stratum `(N,)`.
    """

    time: Tensor
    entry: Tensor
    stratum: Tensor

    @property
    def truncated(self) -> bool:
        """True if some row enters late."""
        return bool(self.entry.isfinite().any())

    def strata(self) -> Iterator[Tensor]:
        """The rows of each stratum."""
        order = self.stratum.argsort(stable=True)
        yield from order.split(torch.bincount(self.stratum).tolist())


def times(rows: Rows, formula: Formula, places: np.ndarray) -> Times:
    """The times of a site's complete rows, or `DataError` with the first row at fault.

    Args:
        rows: The table.
        formula: A formula whose response is `Surv(…)`.
        places: The rows' places in the table.
    """
    response = formula.survival
    assert response is not None
    time, entry = np.empty(len(places)), np.full(len(places), -np.inf)
    for part, where in chunks(places):
        here = Rows(rows.frame, where, rows.site, rows.kinds, rows.known, rows.states)
        time[part] = response.time.value(here)
        if response.entry is not None:
            entry[part] = response.entry.value(here)
    name = response.time.text
    refuse_row(rows.site, f"the time {name!r} is not finite", ~np.isfinite(time), places, REMEDY)
    refuse_row(rows.site, f"the time {name!r} is negative", time < 0, places, REMEDY)
    if response.entry is not None:
        name = response.entry.text
        refuse_row(rows.site, f"the entry {name!r} is not finite", ~np.isfinite(entry), places, REMEDY)
        refuse_row(rows.site, f"the entry {name!r} is negative", entry < 0, places, REMEDY)
        refuse_row(rows.site, f"the entry {name!r} is not before the time", entry >= time, places, REMEDY)
    stratum = np.zeros(len(places), int)
    for name in formula.strata:
        codes, found = levels(rows.frame[name].iloc[places])
        _, stratum = np.unique(stratum * (len(found) + 1) + codes, return_inverse=True)
    return Times(torch.from_numpy(time), torch.from_numpy(entry), torch.from_numpy(stratum))
