"""What a server that does not follow the protocol learns from sums, as functions of an oracle θ → (ℓ, ∇ℓ, ∇²ℓ).

The first entry of θ is the intercept. Attackers know the model (logistic), the number of rows and nothing of the data.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, linear_sum_assignment

Array = NDArray[np.float64]
Evaluate = Callable[[Array], tuple[float, Array, Array]]


def reconstruct(evaluate: Evaluate, rows: int, size: int, points: int, seed: int = 0) -> Array:
    """All rows of a small site from Hessians at random points: least squares in the covariates, `(rows, size)`."""
    rng = np.random.default_rng(seed)
    thetas = rng.normal(size=(points, size)) * 1.5
    told = np.stack([evaluate(theta)[2] for theta in thetas])
    above = np.triu_indices(size)

    def residuals(values: Array) -> Array:
        x = _design(values, rows)
        return np.concatenate(
            [((x.T * _weights(x @ theta)) @ x - h)[above] for theta, h in zip(thetas, told, strict=True)]
        )

    best = None
    for _ in range(40):
        found = least_squares(residuals, rng.normal(size=rows * (size - 1)), method="lm")
        best = found if best is None or found.cost < best.cost else best
        if best.cost < 1e-18:
            break
    assert best is not None
    return _design(best.x, rows)


def isolate(evaluate: Evaluate, size: int, column: int) -> Array:
    """The row with the largest value of a standardised column: far beyond it, H is the outer product of that row."""
    value = 6.0  # surely beyond; each answer is closer to the row
    for slope in (30.0, 300.0, 3000.0):
        theta = np.zeros(size)
        theta[0], theta[column] = -slope * value, slope
        _, _, hessian = evaluate(theta)
        row = hessian[0] / hessian[0, 0]
        value = row[column]
    return row


def subtract(first: Evaluate, second: Evaluate, size: int, more: int) -> Array:
    """The row that the second fit lacks, which has `more` columns: both Hessians at a point that does not use these."""
    theta = np.full(size, 0.3)
    difference = first(theta)[2] - second(np.concatenate([theta, np.zeros(more)]))[2][:size, :size]
    return difference[0] / difference[0, 0]


def read_cell(evaluate: Evaluate, size: int, pair: tuple[int, int], column: int) -> float:
    """The value of a column in the only row in which two 0/1 columns are one: their entry of H is that row's weight."""
    theta = np.zeros(size)
    theta[0], theta[column] = -5.0, 0.1  # η < 0 for the values that the column can have
    weight = evaluate(theta)[2][pair]
    eta = np.log((1 - np.sqrt(1 - 4 * weight)) / (1 + np.sqrt(1 - 4 * weight)))
    return (eta - theta[0]) / theta[column]


def compare_columns(evaluate: Evaluate, size: int, pair: tuple[int, int]) -> Array:
    """The only row in which two columns differ: the difference of their rows of XᵀX."""
    _, _, hessian = evaluate(np.zeros(size))
    difference = hessian[pair[0]] - hessian[pair[1]]
    return difference / difference[0]


def nearest(found: Array, truth: Array) -> Array:
    """The largest error of each true row, matched with the rows that were found."""
    gaps = np.abs(found[:, None] - truth[None]).max(2)
    pairs = linear_sum_assignment(gaps)
    return gaps[pairs][np.argsort(pairs[1])]


def _design(values: Array, rows: int) -> Array:
    return np.column_stack([np.ones(rows), values.reshape(rows, -1)])


def _mean(eta: Array) -> Array:
    return 1 / (1 + np.exp(-eta))


def _weights(eta: Array) -> Array:
    return _mean(eta) * (1 - _mean(eta))
