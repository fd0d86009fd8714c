"""Sites that agree on a schema, with JSON for a network."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedual.glm.formula import parse
from fedual.glm.schema import Columns, Design, Schema, agree, describe, design, measure, measured, unmeasured


def sent(value: Any) -> Any:
    return json.loads(json.dumps(value))


def agreed(
    text: str,
    frames: Mapping[str, pd.DataFrame],
    columns: Columns | None = None,
    least: int = 1,
    levels: Mapping[str, Any] | None = None,
    **options: Any,
) -> Schema:
    """What the sites agree on; levels= declares columns categorical."""
    columns, formula = columns or Columns(), parse(text, levels or ())
    told = {site: sent(describe(frame, site, formula, columns, least, levels)[0]) for site, frame in frames.items()}
    schema = agree(formula, columns, told, levels, **options)
    while (request := unmeasured(schema)) is not None:
        at_sites = Schema.from_dict(sent(schema.to_dict()))
        assert at_sites == schema
        replies = {site: sent(measure(frame, site, at_sites, request, least)) for site, frame in frames.items()}
        schema = measured(schema, replies)
    return schema


def designs(text: str, frames: Mapping[str, pd.DataFrame], *args: Any, **options: Any) -> tuple[Schema, list[Design]]:
    schema = agreed(text, frames, *args, **options)
    return schema, [design(frame, site, schema) for site, frame in frames.items()]


def stacked(found: list[Design]) -> np.ndarray:
    return np.vstack([one.x.numpy() for one in found])
