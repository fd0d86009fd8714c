"""Which coefficients a site adds to: the columns of the design with random effects."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedual.errors import InputError
from fedual.glm import matrix
from fedual.glm.agreement import Schema
from fedual.glm.mixed.cholesky import MOST
from fedual.glm.prior import INTERCEPT


def columns(schema: Schema) -> tuple[str, ...]:
    """The columns whose coefficients differ by site: those of the formula's random part, by default the intercept."""
    if INTERCEPT not in schema.terms:
        raise InputError(f"{schema.formula!r} has no intercept, about which those of the sites vary: add 1 to it.")
    random = schema.parsed.random
    if random is None:
        return (INTERCEPT,)
    found = matrix.names(random, schema.kinds, schema.levels)
    if lost := [name for name in found if name not in schema.terms]:
        raise InputError(
            f"{schema.formula!r} lets the sites differ in {lost[0]!r}, of which it has no common coefficient: add it "
            "outside the parentheses, too."
        )
    if len(found) > MOST:
        raise InputError(f"{schema.formula!r} has {len(found)} effects of each site: use at most {MOST}.")
    return found


def spread(random: Sequence[str], terms: Sequence[str], centre: Tensor, scale: Tensor) -> Tensor:
    """E `(p, q)`: what the effects add to the coefficients of standardised columns.

    Without an intercept among them, the effect of a column is that of the column as it is, not about its mean.
    """
    matrix = torch.zeros(len(terms), len(random), dtype=scale.dtype)
    for place, name in enumerate(random):
        j = terms.index(name)
        matrix[j, place] = 1.0
        if INTERCEPT not in random:
            matrix[terms.index(INTERCEPT), place] = centre[j] / scale[j]
    return matrix
