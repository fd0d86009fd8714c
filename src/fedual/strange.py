"""What is strange about inputs, compared with what training saw, and the sentences that say so."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedual.data.user_files import Unseen
from fedual.networks.moments import Moments

SHOWN = 5
"""Sentences about columns, and about categories; the others are counted."""
_ROWS = 1024  # inputs that are compared at a time


class Far(NamedTuple):
    """A column in which inputs are far from the values of training; the numbers are those of the farthest input."""

    column: str
    value: float
    mean: float  # of training
    deviations: float  # (value − mean) / standard deviation; ±∞ if training had a constant
    inputs: Tensor  # indices of all inputs that are far in this column, farthest first


class Warnings(NamedTuple):
    """What is strange about inputs, or about the model."""

    names: Sequence[str]  # of the inputs
    far: list[Far]  # farthest first
    unseen: list[Unseen]
    model: str | None = None
    scale: str | None = None

    def sentences(self) -> list[str]:
        """One sentence for each warning, and a count of those that are too many to read."""
        found = [text for text in (self.model, self.scale) if text is not None]
        found += [self._far(one) for one in self.far[:SHOWN]]
        if (more := len(self.far) - SHOWN) > 0:
            found.append(f"… and {more} more column{'s' * (more > 1)} with values that are far from training.")
        found += [self._unseen(one) for one in self.unseen[:SHOWN]]
        if (more := len(self.unseen) - SHOWN) > 0:
            found.append(f"… and {more} more that training never saw.")
        return found

    def _far(self, far: Far) -> str:
        who = self._who(far.inputs.tolist())
        if math.isinf(far.deviations):
            other = f"{far.column} = {far.value:.6g}, but all of training had {far.mean:.6g}"
            return f"{who}: {other}: check it, because the model cannot have learned what it means."
        sd, many = (far.value - far.mean) / far.deviations, abs(far.deviations)
        text = lambda number: f"{number:.{min(15, max(3, 2 + math.ceil(math.log10(abs(number / sd) or 1))))}g}"
        how_far = f"{many:.0f}" if 10 <= many < 1e6 else f"{many:.2g}"
        side = "above" if far.deviations > 0 else "below"
        where = f"{far.column} = {text(far.value)} is {how_far} sd {side} the training mean {text(far.mean)}"
        return f"{who}: {where}: check the value and its unit."

    def _unseen(self, unseen: Unseen) -> str:
        what = f"{unseen.column} = {unseen.value!r} is a category that training never saw, and counts as none"
        return f"{self._who(unseen.rows)}: {what}: correct it, or do not rely on the prediction."

    def _who(self, inputs: list[int]) -> str:
        more = f" (and {len(inputs) - 1} more)" if len(inputs) > 1 else ""
        return f"Input {self.names[inputs[0]]}{more}"


def far_columns(
    x: Tensor, moments: Moments, names: Sequence[str | None] | None, offset: Tensor, scale: Tensor
) -> list[Far]:
    """The columns of inputs `(N, ...)` with values beyond the limit of `moments`; at most one if these are pooled.

    Args:
        x: Inputs as they are stored.
        moments: Of the training inputs.
        names: Of the D numbers of an input, where None is one that is not looked at; by default their positions.
        offset: What encoding subtracted, `(D,)` or `(1,)`.
        scale: What it then divided by, `(D,)` or `(1,)`.
    """
    shape, pooled, moments = x.shape[1:], len(moments.mean) == 1, moments.in_units(offset, scale)
    looked_at = torch.tensor([name is not None for name in names or [""] * shape.numel()])
    values = lambda rows: x[rows.to(x.device)].to("cpu", torch.float64).reshape(len(rows), -1) * scale + offset
    found = []
    for rows in torch.arange(len(x)).split(_ROWS):
        scores = moments.scores(values(rows))
        scores = torch.where((scores.abs() > moments.limit) & looked_at, scores, 0.0)
        if pooled:  # all columns are one, of which each input has its farthest value
            farthest = scores.abs().argmax(1, keepdim=True)
            scores = torch.zeros_like(scores).scatter(1, farthest, scores.gather(1, farthest))
        row, column = scores.nonzero(as_tuple=True)
        found.append(torch.stack([rows[row].double(), column.double(), scores[row, column]], 1))
    far = torch.cat(found)
    far = far[far[:, 2].abs().argsort(descending=True, stable=True)]
    groups = [far] if pooled else [far[far[:, 1] == column] for column in far[:, 1].unique()]
    means = moments.mean.expand(shape.numel())
    columns = []
    for group in groups:
        if len(group):
            inputs, column = group[:, 0].long(), int(group[0, 1])
            value, position = values(inputs[:1])[0, column], np.unravel_index(column, shape)
            name = names[column] if names else f"x{[*map(int, position)]}" if shape else "x"
            columns.append(Far(str(name), float(value), float(means[column]), float(group[0, 2]), inputs))
    return sorted(columns, key=lambda one: (math.isinf(one.deviations), -abs(one.deviations)))
