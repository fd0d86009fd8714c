"""The rules of a site's guard, and what it raises."""

from dataclasses import dataclass, fields

from fedual.errors import FedualError, InputError


@dataclass(frozen=True)
class Guards:
    """The rules of a site; docs/how-to/disclosure.md gives the reasons for the numbers.

    Args:
        min_rows: Rows of a fit.
        rows_per_parameter: Rows for each column of the design.
        min_cell: Rows in which a column differs from its most frequent value, in a level, a class, or a combination of
            columns that is zero elsewhere.
        min_pair: Values in a cell of two 0/1 columns, where weights vary: its rows times the fit's other columns.
        min_events: Events of a survival model, at the site and in each of its strata that has some.
        min_effective_rows: (Σw)² / Σw² at every point, for the rows' weights and for their scores.
        max_rounds: Rounds of one fit.
        numbers_per_unknown: Numbers told of each value of the table, over all fits.
        numbers_per_exposed: The same for the values of the effective rows, and of the smallest level.
        min_difference: Rows in which the sets of rows of two fits differ, or in any difference of sums over fits.
        max_refusals: Different requests that are refused because of what is in the table, before the site answers no
            more: refusals tell something, too.
        columns: The only columns of the table that a fit may use; None for all.
        formulas: The only formulas, and expressions for weights, offset and trials; None for all.
    """

    min_rows: int = 10
    rows_per_parameter: float = 3.0
    min_cell: int = 5
    min_pair: int = 5
    min_events: int = 10
    min_effective_rows: float = 5.0
    max_rounds: int = 10
    numbers_per_unknown: float = 0.5
    numbers_per_exposed: float = 1.5
    min_difference: int = 5
    max_refusals: int = 20
    columns: frozenset[str] | None = None
    formulas: frozenset[str] | None = None

    def __post_init__(self) -> None:
        for name, default in ((field.name, field.default) for field in fields(self)):
            value, whole = getattr(self, name), isinstance(default, int)
            if default is None:
                if isinstance(value, str) or not all(isinstance(each, str) for each in value or ()):
                    raise InputError(f"The guard {name} = {value!r}: it must be a list of texts.")
                object.__setattr__(self, name, None if value is None else frozenset(value))
            elif isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value >= 0:
                kind = "a whole number" if whole else "a number"
                raise InputError(f"The guard {name} = {value!r}: it must be {kind} of at least 0.")


class Refusal(FedualError):
    """A site does not answer.

    Attributes:
        rule: The field of `Guards`, or "ledger".
        private: The reason with the site's own figures, for the site's log only.
    """

    def __init__(self, site: str, rule: str, words: str, private: str):
        super().__init__(f"Site {site!r} refuses by its rule {rule}: {words}")
        self.rule, self.private = rule, private
