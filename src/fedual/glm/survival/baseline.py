"""A site's own baseline hazard: it can compute it from its table and the federation's fit, and need not tell it.

With the terms l of the partial likelihood at the estimate, in units relative to a row at the means of all columns,

    Λ(t) = Σ_{l ≤ t} w̄/S_l,    v(t) = Σ_{l ≤ t} w̄/S_l²,    d(t) = Σ_{l ≤ t} (M_l − x̄) w̄/S_l

are the cumulative hazard, the variance that it has by itself, and how it moves with the coefficients (Tsiatis 1981).
These are the figures of R's `survfit(coxph(…))`.
"""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from fedual.errors import DataError, InputError, require_count
from fedual.forms import Number, require
from fedual.glm.inference import chosen
from fedual.glm.schema import design
from fedual.glm.survival.partial import PartialLikelihood
from fedual.glm.tables import Source, read
from fedual.parsing import DOCUMENT, loads, parsing, read_bytes
from fedual.rundir.atomic import store

if TYPE_CHECKING:
    from fedual.glm.figures import Figures

FORMAT = "fedual-baseline-1"
LEAST = 10
"""Events between two times of a coarse baseline."""


@dataclass(frozen=True, eq=False)
class Baseline:
    """The baseline of one site, or of one of its strata.

    Args:
        times: Of the events, in order, `(D,)`.
        events: How many there were up to each, `(D,)`.
        hazard: Λ, the cumulative hazard at the means of all columns, `(D,)`.
        variance: v `(D,)`.
        drift: d `(D, P)`.
    """

    times: np.ndarray
    events: np.ndarray
    hazard: np.ndarray
    variance: np.ndarray
    drift: np.ndarray

    def frame(self) -> pd.DataFrame:
        """Cumulative hazard and survival at the means of all columns, by time."""
        table = {"events": self.events, "cumulative_hazard": self.hazard, "survival": np.exp(-self.hazard)}
        return pd.DataFrame(table, index=pd.Index(self.times, name="time"))

    def coarse(self, least: int = LEAST) -> "Baseline":
        """A baseline to hand over: its steps have at least so many events each, and show no single one."""
        require_count("least", least)
        kept, before = [], 0
        for i, number in enumerate(self.events):
            if number - before >= least and self.events[-1] - number >= (0 if number == self.events[-1] else least):
                kept.append(i)
                before = number
        if not kept:
            raise DataError(f"The baseline has {int(self.events[-1])} events: fewer than {least} cannot be told.")
        return Baseline(*(getattr(self, field.name)[kept] for field in fields(self)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file."""
        content = {field.name: getattr(self, field.name).tolist() for field in fields(self)}
        store(Path(path), json.dumps({"format": FORMAT, **content}, allow_nan=False).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Baseline":
        """Read what `save` wrote."""
        with parsing(path, "is no JSON", "save it again"):
            found = loads(read_bytes(Path(path), DOCUMENT))
        numbers = [Number()]
        form = {"format": FORMAT, **{field.name: numbers for field in fields(cls)}, "drift": [numbers]}
        require(path, found, form, "save it again")
        arrays = [np.array(found[field.name], float) for field in fields(cls)]
        if len({len(one) for one in arrays}) > 1 or arrays[-1].ndim != 2:
            raise DataError(f"{path} has parts of different length: save it again.")
        return cls(*arrays)


def baseline(fit: "Figures", table: Source) -> Baseline:
    """See `Fit.baseline`."""
    survival = fit.survival
    if survival is None or survival.baseline != "stratified":
        cause = "no survival model" if survival is None else "a fit with a common baseline: curves(frame) has it"
        raise InputError(f"baseline() of {fit.formula!r}, {cause}.")
    rows = design(read(table, "here"), "here", fit.schema)
    assert rows.times is not None
    if len(rows.times.stratum.unique()) > 1:
        names = ", ".join(survival.strata)
        raise InputError(f"The table has several strata of {names}: give the rows of one of them.")
    columns = [fit.schema.terms.index(term) for term in fit.terms]
    beta = torch.from_numpy(chosen(fit, None)[0].coefficients)
    x = rows.x[:, columns]
    partial = PartialLikelihood(x, rows.y, rows.weights, rows.offset, rows.times, survival.ties)
    if partial.says_nothing:
        raise DataError("The table has no event: it has no baseline.")
    (risk,) = partial.risks(beta)
    terms, centre = risk.terms, x.mean(0) - torch.from_numpy(survival.means)  # `risks` is relative to the table's means
    total = risk.total * (risk.shift + centre @ beta).exp()
    means = risk.sums(partial.centred[terms.rows]) / risk.total[:, None] + centre
    cumulated = lambda each: each.cumsum(0)[terms.last.unique() - 1].numpy()
    return Baseline(
        times=terms.time.unique().numpy(),
        events=terms.last.unique().to(total).numpy(),
        hazard=cumulated(terms.weight / total),
        variance=cumulated(terms.weight / total**2),
        drift=cumulated(means * (terms.weight / total)[:, None]),
    )
