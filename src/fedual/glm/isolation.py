"""Few rows that the columns of a table single out: sums over such columns are sums over these rows.

From XᵀWX and Xᵀy the server knows Σ_i v_i x_i for every v = Xa. If v is zero but for a few rows, the sum is theirs
alone, whatever the number of rows is. A column may do that (a rare level, a spline's outermost piece), a combination
of columns (the difference of x and x + 1[age = 97]), or the product of two 0/1 columns, whose sum of weights is an
entry of XᵀWX.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CARRIED = 1 - 1e-4
"""Part of Σ v² in a few rows from which on the sum over v counts as theirs: others are noise of one percent.

Honest tables reach 1 − 3·10⁻⁴: shares of rare kinds of schools, at sites of 60 districts (docs/how-to/disclosure.md).
"""
CHUNK = 4096
"""Rows at a time: their products stay in the cache."""
WELL_CONDITIONED = 1e-4
"""Smallest diagonal entry of the Cholesky factor of unit columns' products whose leverages are good to a millionth."""
DEPENDENT = 1e-13
"""Length of a column, relative to its own, that the columns before it leave: less is rounding."""


def effective_rows(weights: Tensor) -> float:
    """(Σ|w|)² / Σw²: how many rows would have the same sums if all had the same weight.

    Zero weights have no rows; the scale does not matter, however small.
    """
    size = weights.abs().max()
    if not size > 0:
        return 0.0
    scaled = weights.abs() / size
    return float(scaled.sum() ** 2 / scaled.square().sum())


def largest_share(weights: Tensor) -> float:
    """The largest w_i² / Σw²; 0 for zero weights."""
    size = weights.abs().max()
    return 1 / float((weights / size).square().sum()) if size > 0 else 0.0


def nearly_constant(columns: Tensor, least: int) -> Tensor:
    """Columns `(N, q)` in which some rows, but fewer than `least`, differ from all others.

    Among any 2·least − 1 rows of such a column the common value has a majority, so that it is their median.
    """
    enough = len(columns) >= 2 * least - 1
    common = columns[: 2 * least - 1].median(0).values if enough else columns.mode(0).values
    few = (columns[:CHUNK] != common).sum(0) < least  # most columns are found to vary by their first rows
    others = (columns[:, few] != common[few]).sum(0)
    few[few.clone()] = (others > 0) & (others < least)
    return few


def singled_out(columns: Tensor, most: int) -> bool:
    """True if a combination of columns `(N, q)` is carried by at most `most` rows.

    With an orthonormal basis Q of the columns' span, the share of the rows T in the combination that serves them best
    is the largest eigenvalue of Q_T Q_Tᵀ. It is at most the sum of their leverages, so that one of them has a leverage
    of at least 1/most; the rows that go with it are those with the largest entries in its column of QQᵀ.
    """
    if _spread_out(columns, CARRIED / most):
        return False
    basis = _basis(columns)
    for row in (basis.square().sum(1) >= CARRIED / most).nonzero().ravel():
        rows = (basis @ basis[row]).abs().topk(min(most, len(basis))).indices
        if float(torch.linalg.eigvalsh(basis[rows] @ basis[rows].mT)[-1]) > CARRIED:
            return True
    return False


def _spread_out(columns: Tensor, least: float) -> bool:
    """True if all leverages are well below a limit: quickly, by the columns' products where they have full rank."""
    products = columns.mT @ columns
    scale = products.diagonal().rsqrt()
    factor, info = torch.linalg.cholesky_ex(products * scale * scale[:, None])
    if info != 0 or not factor.diagonal().min() > WELL_CONDITIONED:
        return False
    root = torch.linalg.solve_triangular(factor, torch.diag(scale), upper=False).mT
    return all(bool((rows @ root).square().sum(1).max() < 0.9 * least) for rows in columns.split(CHUNK))


def _basis(columns: Tensor) -> Tensor:
    """An orthonormal basis of the span of columns, `(N, rank)`.

    Where a column is determined by those before it, the factorisation goes on with an arbitrary vector in its place, of
    which later columns lose their part: it begins again without that column.
    """
    columns = columns[:, : len(columns)]
    q, r = torch.linalg.qr(columns)
    kept = r.diagonal().abs() > DEPENDENT * columns.norm(dim=0)
    return q if kept.all() else _basis(columns[:, kept])


class Groups(NamedTuple):
    """Groups of rows that 0/1 columns, or others with two values, form."""

    smallest: int  # rows of the smallest group of one column; N if there is none
    exposed: tuple[int, int] | None  # two columns with a cell whose rows their weights alone expose


def groups(columns: Tensor, least: int, unknowns: int) -> Groups:
    """The groups of columns with two values, and those of pairs of them.

    XᵀWX has the sum of the weights of each cell of two such columns. With one row in a cell every evaluation tells its
    linear predictor, and as many evaluations as its other columns tell the row. A cell of c rows with u other columns
    is exposed if c·u < least. Columns that are constant where one of the two is as in the cell are not unknown.

    Args:
        columns: The design `(N, p)`.
        least: Values in a cell, at least.
        unknowns: Values in each row that the fit depends on, the response's and those of the two columns included.
    """
    low, high = columns.amin(0), columns.amax(0)
    varies, two = low < high, lambda part, j: ((part[:, j] == low[j]) | (part[:, j] == high[j])).all(0)
    binary = varies.nonzero().ravel()
    for part in (columns[:CHUNK], columns):  # the first rows leave out most of the others
        binary = binary[two(part, binary)]
    ones = (columns[:, binary] == high[binary]).to(columns.dtype)
    states = torch.stack([1 - ones, ones], 2).flatten(1)  # (N, 2b): both values of every column
    counts = (states.mT @ states).long()
    sizes = counts.diagonal()
    if not len(binary):
        return Groups(len(columns), None)
    # whether column j takes both of its values where column i is as in state s
    both = (counts[:, 0::2] > 0) & (counts[:, 1::2] > 0)
    others = int(varies.sum()) - len(binary)
    for a, b in ((counts > 0) & (counts < least)).triu(1).nonzero().tolist():
        unknown = both[a] & both[b]
        unknown[[a // 2, b // 2]] = False
        values = min(int(unknown.sum()) + others, unknowns - 3)
        if 0 < int(counts[a, b]) * values < least:
            return Groups(int(sizes.min()), (int(binary[a // 2]), int(binary[b // 2])))
    return Groups(int(sizes.min()), None)
