"""The handshake: sites agree on the design's columns, and on the unit of each, before the first round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedual.errors import DataError
from fedual.glm import schema as schemas
from fedual.glm.formula import parse
from fedual.glm.messages import Ask, Message
from fedual.glm.prior import INTERCEPT
from fedual.glm.schema import Columns, Schema
from fedual.glm.settings import Settings

Value = TypeVar("Value", float, Tensor)
CONSTANT = 1e-12
"""The sd of a column, relative to its mean, that is rounding."""


@dataclass(frozen=True)
class Moments:
    """Sums over the sites: rows, the response, and every column of the design."""

    rows: Mapping[str, int]
    missing: Mapping[str, Mapping[str, int]]  # site → column → rows dropped
    means: Mapping[str, float]  # site → weighted mean of the response
    weight: float  # Σ w
    mean: float  # of the response, weighted
    sd: float  # of the response
    offset: float  # mean, weighted
    centre: Tensor  # (p,), 0 for the intercept
    scale: Tensor  # (p,), 1 for the intercept
    counts: Mapping[str, Mapping[str, Any]]  # site → all that it told, with what is particular to the kind of model


def agree(ask: Ask, settings: Settings) -> Schema:
    """The schema of all sites: variables and their levels, and what transformations measured."""
    formula = parse(settings.formula, settings.levels)
    columns = Columns(weights=settings.weights, offset=settings.offset, trials=settings.trials)
    facts = {
        "formula": settings.formula,
        "categorical": sorted(settings.levels),
        "columns": {"weights": settings.weights, "offset": settings.offset, "trials": settings.trials},
        "levels": {name: list(levels) for name, levels in settings.levels.items()},
    }
    replies = ask(Message("describe", facts))
    binary = settings.family == "binomial"
    descriptions = {site: reply.facts for site, reply in replies.items()}
    schema = schemas.agree(formula, columns, descriptions, settings.levels, binary=binary, event=settings.event)
    while (request := schemas.unmeasured(schema)) is not None:
        replies = ask(Message("measure", {"schema": schema.to_dict(), "request": request}))
        schema = schemas.measured(schema, {site: reply.facts for site, reply in replies.items()})
    return schema


def moments(ask: Ask, schema: Schema, facts: Mapping[str, Any]) -> Moments:
    """Means and standard deviations over all sites; refuse a constant column."""
    replies = ask(Message("moments", facts))
    rows = {site: int(reply.facts["rows"]) for site, reply in replies.items()}
    parts = [(rows[site], reply.tensors["centre"], reply.tensors["spread"]) for site, reply in replies.items()]
    number, centre, spread = combined(parts)
    scale = (spread / max(1, number - 1)).sqrt()
    ones = torch.tensor([term == INTERCEPT for term in schema.terms])
    for term, varies in zip(schema.terms, ones | (scale > CONSTANT * centre.abs()), strict=True):
        if not varies:
            raise DataError(f"The column {term!r} is constant at all sites, to twelve digits: {_remedy(term)}.")
    weights = {site: float(reply.facts["weight"]) for site, reply in replies.items()}
    total = sum(weights.values())
    means = {site: float(reply.facts["mean"]) for site, reply in replies.items()}
    _, mean, response = combined([(weights[site], means[site], float(replies[site].facts["spread"])) for site in means])
    offset = sum(weights[site] * float(reply.facts["offset"]) for site, reply in replies.items()) / total
    return Moments(
        rows=rows,
        missing={site: dict(reply.facts["missing"]) for site, reply in replies.items()},
        means=means,
        weight=total,
        mean=mean,
        sd=math.sqrt(response / total * number / max(1, number - 1)),
        offset=offset,
        centre=centre.masked_fill(ones, 0.0) if ones.any() else torch.zeros_like(centre),
        scale=scale.masked_fill(ones, 1.0),
        counts={site: reply.facts for site, reply in replies.items()},
    )


def _remedy(term: str) -> str:
    return "leave that level out, or the term" if term.endswith("]") else "leave it out of the formula, or rescale it"


def combined(parts: Sequence[tuple[float, Value, Value]]) -> tuple[float, Value, Value]:
    """The weight, mean and squared deviation of all parts together (Chan, Golub and LeVeque 1979)."""
    number, mean, spread = parts[0]
    for n, m, s in parts[1:]:
        gap, total = m - mean, number + n
        mean = mean + gap * (n / total)
        spread = spread + s + gap * gap * (number * n / total)
        number = total
    return number, mean, spread
