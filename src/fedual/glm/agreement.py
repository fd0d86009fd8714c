"""The agreed schema of a fit as data, which is stored and sent."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fedual.errors import InputError
from fedual.glm.columns import Kind
from fedual.glm.expressions import Expression, parse_number
from fedual.glm.formula import Formula, parse
from fedual.rundir.jsonable import plain

VERSION = 1


@dataclass(frozen=True)
class Columns:
    """Columns with a role of their own; expressions such as "log(time)" are allowed too.

    Args:
        weights: Weights of the rows.
        offset: What is added to the predictor.
        trials: Numbers of trials; the response counts successes.
    """

    weights: str | None = None
    offset: str | None = None
    trials: str | None = None

    @property
    def expressions(self) -> dict[str, Expression]:
        """The expression of each role that is taken."""
        roles = {one.name: getattr(self, one.name) for one in fields(self)}
        return {role: parse_number(text) for role, text in roles.items() if text is not None}

    def names(self) -> tuple[str, ...]:
        """The columns of the table that they need."""
        return tuple(dict.fromkeys(name for one in self.expressions.values() for name, _ in one.uses))


@dataclass(frozen=True)
class Schema:
    """What all sites agreed on.

    Args:
        formula: The formula; a dot is replaced by the names of the columns.
        kinds: "numeric", "boolean" or "categorical" for each column of the table that is needed.
        levels: The levels of each categorical column, the base level first.
        states: What transformations such as `scale(x)` measured over all sites.
        terms: The names of the design's columns, "Intercept" first if there is one.
        weights: See `Columns`.
        offset: See `Columns`.
        trials: See `Columns`.
        event: The level of the response that counts as 1; None for a response of numbers.
        categorical: Columns declared categorical outside the formula.
    """

    formula: str
    kinds: Mapping[str, Kind]
    levels: Mapping[str, tuple[str, ...]]
    states: Mapping[str, Mapping[str, Any]]
    terms: tuple[str, ...]
    weights: str | None = None
    offset: str | None = None
    trials: str | None = None
    event: str | None = None
    categorical: tuple[str, ...] = ()

    @property
    def parsed(self) -> Formula:
        """The formula as `fedual.glm.formula.parse` reads it."""
        return parse(self.formula, self.categorical)

    @property
    def response(self) -> str:
        """The left side of the formula."""
        return self.formula.partition("~")[0].strip()

    @property
    def columns(self) -> Columns:
        """The columns with a role of their own."""
        return Columns(self.weights, self.offset, self.trials)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the version of their form."""
        return plain({"version": VERSION, **{one.name: getattr(self, one.name) for one in fields(self)}})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Schema":
        """The inverse of `to_dict`; refuse another version, and other fields."""
        rest = {name: frozen(value) for name, value in values.items()}
        version = rest.pop("version", None)
        if version != VERSION or rest.keys() != {one.name for one in fields(cls)}:
            raise InputError(f"A schema of version {version!r} cannot be read: run one version of fedual everywhere.")
        return cls(**rest)


def frozen(value: Any) -> Any:
    """JSON values with tuples for lists."""
    if isinstance(value, Mapping):
        return {name: frozen(one) for name, one in value.items()}
    return tuple(frozen(one) for one in value) if isinstance(value, list | tuple) else value
