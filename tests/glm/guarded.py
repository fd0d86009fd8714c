"""A logistic site in NumPy whose answers pass through a `Guard`, as those of `fedual.glm.site.Site` do."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from attacks import Array, Evaluate

from fedual.glm.design import Design
from fedual.glm.guards import Guard, Guards

OFF = Guards(
    min_rows=0, rows_per_parameter=0, min_cell=0, min_pair=0, min_events=0, min_effective_rows=0, max_rounds=10**6,
    numbers_per_unknown=1e9, numbers_per_exposed=1e9, min_difference=0, max_refusals=10**6,
)  # fmt: skip
"""Rules that refuse nothing."""


def design(x: Array, y: Array, rows: np.ndarray | None = None, weights: Array | None = None) -> Design:
    ones = torch.ones(len(x))
    weight = ones if weights is None else torch.tensor(weights)
    frame = pd.DataFrame({"row": np.arange(len(x)) if rows is None else rows})
    return Design(torch.tensor(x), torch.tensor(y), weight, 0 * ones, ones, np.arange(len(x)), frame, {})


def names(x: Array) -> list[str]:
    return ["Intercept", *(f"x{j}" for j in range(1, x.shape[1]))]


def variables(x: Array) -> dict[str, int]:
    return {"y": 1} | dict.fromkeys(names(x)[1:], 1)


def guard(folder: Path, rules: Guards | None = None, site: str = "north") -> Guard:
    return Guard(rules or Guards(), folder / "ledger", enforce=True, site=site)


def site(x: Array, y: Array, guard: Guard | None = None, rows: np.ndarray | None = None) -> Evaluate:
    """What a server can ask of a site; a guard refuses some of it."""
    if guard is not None:
        guard.table(design(x, y, rows), names(x), variables(x))

    def evaluate(theta: Array) -> tuple[float, Array, Array]:
        eta = x @ theta
        mean = np.exp(-np.logaddexp(0, -eta))
        weights, scores = np.exp(-np.logaddexp(0, -eta) - np.logaddexp(0, eta)), mean - y
        loss, gradient, hessian = float(np.logaddexp(0, eta).sum() - y @ eta), x.T @ scores, (x.T * weights) @ x
        if guard is not None:
            guard.point(torch.tensor(weights), torch.tensor(scores))
            told = np.concatenate([[loss], gradient, hessian[np.triu_indices(len(hessian))]])
            guard.charge(sha256(told.tobytes()).hexdigest(), told.size, fit="one")
        return loss, gradient, hessian

    return evaluate


def table(rows: int, size: int, seed: int = 0) -> tuple[Array, Array]:
    """An ordinary table: standard normal covariates and two classes."""
    rng = np.random.default_rng(seed)
    x = np.column_stack([np.ones(rows), rng.normal(size=(rows, size - 1))])
    return x, (rng.random(rows) < 1 / (1 + np.exp(-x[:, -1]))).astype(float)
