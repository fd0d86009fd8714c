"""Times and events in a formula: `Surv(time, event)` or `Surv(entry, time, event)`, and `strata(x)` on the right.

The event is a column whose codes the federation agrees on (0/1, 1/2, True/False, or texts with `event=`), or a
comparison such as `status == 2`. Strata stay at the site: nothing is agreed about them but the names of their columns.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedual.data.tables import ordered
from fedual.errors import InputError, hint
from fedual.glm import expressions
from fedual.glm.columns import Kind, spelled
from fedual.glm.expressions import Expression

SURV = re.compile(r"\s*Surv\s*\(")
MAX_CODES = 10
"""Codes of an event: a column with more is none, and its values would be told."""
FORM = "write Surv(time, event) or Surv(entry, time, event)"


@dataclass(frozen=True, eq=False)
class Surv(Expression):
    """The response of a survival model; its `value` is that of the event.

    Args:
        time: When a row is seen for the last time.
        entry: When it is seen first; 0 for all rows if None.
        column: The event's column, if it is one by itself.
    """

    time: Expression = field(kw_only=True)
    entry: Expression | None = field(kw_only=True)
    column: str | None = field(kw_only=True)


def is_survival(formula: str) -> bool:
    """True if the response of a formula is `Surv(…)`."""
    return isinstance(formula, str) and SURV.match(formula) is not None


def surv(node: ast.Call) -> Surv:
    """`Surv(…)` as an expression."""
    if node.keywords or len(node.args) not in (2, 3):
        raise InputError(f"{ast.unparse(node)!r} is not allowed: {FORM}.")
    entry = expressions.number(node.args[0]) if len(node.args) == 3 else None
    time, last = expressions.number(node.args[-2]), node.args[-1]
    event, column = expressions.number(last), None
    if isinstance(last, ast.Name):
        column = last.id.strip("`")
        event = Expression(last.id, event.value, ((column, "event"),))
    parts = [part for part in (time, event, entry) if part is not None]
    if any(part.calls for part in parts) or not time.uses or not event.uses:
        raise InputError(f"{ast.unparse(node)!r} is not allowed: {FORM}, of columns and functions of them.")
    uses = tuple(use for part in parts for use in part.uses)
    return Surv(ast.unparse(node), event.value, uses, time=time, entry=entry, column=column)


def strata(node: ast.Call) -> Expression:
    """`strata(x, z)` as an expression without values, which uses its columns as "strata"."""
    names = [one.id.strip("`") for one in node.args if isinstance(one, ast.Name)]
    if node.keywords or not names or len(names) < len(node.args):
        raise InputError(f"{ast.unparse(node)!r} is not allowed: write strata(column), or several columns.")
    return Expression(ast.unparse(node), lambda columns: None, tuple((name, "strata") for name in names))


def event_of(column: str | None, kind: Kind | None, told: Sequence[Mapping[str, Any]], event: Any) -> str | None:
    """The code of the event that all sites use, from what each told of its codes; None if it is an expression."""
    chosen = None if event is None else spelled([event])[0]
    if column is None:
        if chosen is not None:
            raise InputError(f"event = {event!r} with an expression for the event in Surv(…): leave one of them out.")
        return None
    found = list(ordered(level for one in told for level in one["levels"].get(column, ())))
    if chosen is not None:
        if chosen not in found:
            raise InputError(f"event = {event!r} is no code of {column!r} at any site: {hint(chosen, found)}")
        return chosen
    if kind == "boolean":
        return "True"
    if kind == "numeric" and ({*found} <= {"0", "1"} or {*found} <= {"1", "2"}):
        return "2" if "2" in found else "1"
    codes = ", ".join(map(repr, found))
    raise InputError(f"The event {column!r} has the codes {codes}: name the one that counts by event=.")
