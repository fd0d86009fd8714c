"""What a site may still tell: how much a reply tells of each value of its table, and the rules that object to it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedual.glm.ledger import Book, Rows, Told
from fedual.glm.rules import Guards

ROUNDING = 1e-9


class Objection(NamedTuple):
    """Why a reply must not leave."""

    rule: str
    words: str  # for the server
    private: str  # for the site's log


@dataclass
class Table:
    """The table of the fit that a site is answering about."""

    rows: Rows
    size: int
    parameters: int
    variables: Mapping[str, int]  # variable → values in each row
    smallest: int  # rows of the smallest group of a 0/1 column
    exposed: tuple[str, str] | None  # two 0/1 columns with a cell that varying weights expose
    share: float = 0.0  # the largest w_i² / Σw² of the table's own weights and trials

    def told(self, numbers: int, effective: float) -> Told:
        """What a reply tells of each value; `effective` rows have nearly all the weight at its points."""
        exposed = numbers / min(effective, self.size)
        if effective < math.inf:  # of every 0/1 column, the p numbers in its row of the Hessian
            exposed = max(exposed, min(numbers, self.parameters) / self.smallest)
        unknowns = sum(self.variables.values())
        return Told(numbers / (self.size * unknowns), exposed / unknowns)


def objections(
    rules: Guards, book: Book, table: Table | None, numbers: int, effective: float = math.inf, fit: str | None = None
) -> list[Objection]:
    """The rules against a reply of so many numbers, which is one of the rounds of `fit` if that is given."""
    if len(book.refusals) >= rules.max_refusals:
        return [closed(book)]
    if table is None or not table.size:
        return []
    against: list[Objection] = []
    if (gap := book.difference(table.rows, rules.min_difference)) is not None:  # another fit may have come between
        against.append(alike(rules, gap))
    rounds = 0 if fit is None else book.rounds.get(fit, 0) + 1
    if rounds > rules.max_rounds:
        words = f"a fit has at most {rules.max_rounds} rounds here."
        against.append(Objection("max_rounds", words, f"round {rounds}"))
    new = table.told(numbers, effective)
    before = book.before(table.rows, table.variables)
    for rule, told in (
        ("numbers_per_unknown", {name: old.numbers + new.numbers for name, old in before.items()}),
        ("numbers_per_exposed", {name: old.exposed + new.exposed for name, old in before.items()}),
    ):
        if spent := {name: each for name, each in told.items() if each > getattr(rules, rule) + ROUNDING}:
            first, others = next(iter(spent)), len(spent) - 1
            names = f"{first!r}" + (f" and {others} other column{'s' * (others != 1)}" if others else "")
            words = f"it has told as much of {names} as it may; ask for fewer columns, rounds or fits."
            private = ", ".join(f"{each:.3g} numbers for each value of {name!r}" for name, each in spent.items())
            against.append(Objection(rule, words, private))
    return against


def alike(rules: Guards, gap: int) -> Objection:
    """The rows of two fits are nearly the same."""
    words = (
        f"the rows of this fit and of earlier ones differ by fewer than {rules.min_difference}; use the "
        "columns with missing values in all fits, or in none."
    )
    return Objection("min_difference", words, f"the sum over {gap} rows would follow from differences of fits")


def closed(book: Book) -> Objection:
    """The site has refused as often as it may."""
    words = "it has refused so many requests that it answers no more; its operator can raise the limit."
    return Objection("max_refusals", words, f"{len(book.refusals)} refusals")
