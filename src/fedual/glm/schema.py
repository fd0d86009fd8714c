"""How sites agree on what to fit, so that each builds the same columns whatever its data hold.

    describe → agree → (unmeasured → measure → measured)* → design

`describe`, `measure` and `design` run at a site; the others at the server, on what the sites said. A site says how many
rows it has, how many values are missing, the kinds of its columns, names of levels, and sums: no row and no extreme.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fedual.data.tables import ordered
from fedual.errors import DataError, InputError, hint
from fedual.glm import columns as tables
from fedual.glm import matrix
from fedual.glm.agreement import Columns as Columns
from fedual.glm.agreement import Schema as Schema
from fedual.glm.agreement import frozen
from fedual.glm.columns import Kind
from fedual.glm.design import Design as Design
from fedual.glm.design import design as design
from fedual.glm.formula import Formula
from fedual.glm.survival.response import MAX_CODES, event_of

MAX_LEVELS = 1000
"""Levels of a column: with more it is hardly a factor, and its levels may name single rows."""


def describe(
    frame: pd.DataFrame,
    site: str,
    formula: Formula,
    columns: Columns,
    least: int = 1,
    levels: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """What a site says about the variables of a formula, and what only its own guard sees.

    Args:
        frame: The site's table.
        site: Its name, for errors.
        formula: What is to be fitted.
        columns: Weights, offset and trials.
        least: A level is named only if it has at least so many rows.
        levels: The levels of some columns, if the analyst gave them; others are refused.

    Returns:
        The reply, JSON values: rows, complete (rows without a missing value), missing (by column), kinds (of all that
        the fit needs), levels, rare (columns with levels of fewer than `least` rows), and, where the formula has a dot,
        others (the columns that it stands for). And the number of complete rows by column and level.
    """
    others = [str(name) for name in frame.columns if name not in columns.names()]
    whole = formula.expand(others)
    kinds = tables.inspect(frame, site, [*whole.expressions.values(), *columns.expressions.values()])
    kept, missing = tables.complete(frame, site, kinds)
    tables.require_rows(site, kept, missing)
    counts: dict[str, dict[str, int]] = {}
    events = [name for name, uses in whole.uses.items() if "event" in uses]
    for name, kind in kinds.items():
        uses, values = whole.uses.get(name, frozenset()), tables.column(frame, site, name)
        classes = name == whole.plain_response and kind != "categorical" and tables.is_binary(values)
        if uses & {"levels", "event"} or ("term" in uses and kind == "categorical") or classes:
            found = tables.counts(values, kept)
            most = MAX_CODES if "event" in uses else MAX_LEVELS
            if len(found) > most:
                what = "values: Surv(time, event) takes an event last" if "event" in uses else "levels: leave it out"
                raise DataError(f"Site {site!r}, column {name!r} has more than {most} {what}, or merge them.")
            if levels and name in levels and found.keys() - set(tables.spelled(levels[name])):
                raise DataError(
                    f"Site {site!r}, column {name!r} has a level that is not in levels=: correct one of them."
                )
            counts[name] = found
    reply = {
        "rows": len(frame),
        "complete": int(kept.sum()),
        "missing": missing,
        "kinds": kinds,
        "levels": {name: ordered(one for one in found if found[one] >= least) for name, found in counts.items()},
        "rare": [name for name, found in counts.items() if min(found.values()) < least and name not in events],
    }
    counts = {name: found for name, found in counts.items() if name not in events}  # they have rules of their own
    return reply | ({"others": others} if formula.dot else {}), counts


def agree(
    formula: Formula,
    columns: Columns,
    descriptions: Mapping[str, Mapping[str, Any]],
    levels: Mapping[str, Sequence[Any]] | None = None,
    binary: bool = False,
    event: Any = None,
) -> Schema:
    """The schema of all sites, or `InputError` that names the site and the column in which they differ.

    A level that only some sites have is a level of all. Levels are sorted, as numbers if all of them are, unless
    `levels` gives them; the first is the base level.

    Args:
        formula: What is to be fitted.
        columns: Weights, offset and trials.
        descriptions: The sites' replies to `describe`, by name.
        levels: The levels of some columns, in order.
        binary: Whether the response has two classes (or counts of `trials`).
        event: The class of the response that counts as 1; otherwise the second one does.
    """
    if formula.dot:
        formula = formula.expand(_others(descriptions))
    given = {name: tables.spelled(values) for name, values in (levels or {}).items()}
    kinds: dict[str, Kind] = {
        name: _kind(name, formula, descriptions) for name in dict.fromkeys((*formula.variables, *columns.names()))
    }
    for name in given:
        if name not in kinds:
            raise InputError(f"levels= has {name!r}, which the formula lacks: {hint(name, kinds)}")
    known = {name: _levels(name, descriptions, given) for name in kinds if name != formula.plain_response}
    known = {name: found for name, found in known.items() if found}
    for name, base in (pair for one in formula.expressions.values() for pair in one.bases):
        if base not in known[name]:
            raise InputError(f"{base!r} is no level of {name!r}: {hint(base, known[name])}")
    for name, found in known.items():
        if len(found) == 1:
            raise InputError(
                f"Column {name!r} has the level {found[0]!r} only, at all sites: leave it out of the formula."
            )
    classes, chosen = _classes(formula, kinds, descriptions, given, binary and columns.trials is None, event)
    if formula.plain_response is not None and classes:
        known[formula.plain_response] = classes
    return Schema(
        formula=formula.text,
        kinds=kinds,
        levels=known,
        states={text: frozen(call.transform.begin()) for text, call in formula.calls.items()},
        terms=matrix.names(formula, kinds, known),
        weights=columns.weights,
        offset=columns.offset,
        trials=columns.trials,
        event=chosen,
        categorical=tuple(sorted(formula.declared)),
    )


def _others(descriptions: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """The columns that a dot stands for, in the order of the first site."""
    (first, named), *rest = ((site, one["others"]) for site, one in descriptions.items())
    for site, other in rest:
        if odd := sorted(set(named) ^ set(other)):
            has, lacks = (first, site) if odd[0] in named else (site, first)
            raise InputError(
                f"The dot in the formula stands for other columns at each site ({odd[0]!r} is at {has!r}, not at "
                f"{lacks!r}): name the columns in the formula."
            )
    return named


def _kind(name: str, formula: Formula, descriptions: Mapping[str, Mapping[str, Any]]) -> Kind:
    """The kind of a column at all sites."""
    if name in formula.declared:
        return "categorical"
    found: dict[str, Kind] = {site: one["kinds"][name] for site, one in descriptions.items()}
    most = Counter(found.values()).most_common(1)[0][0]
    odd = [site for site in found if found[site] != most]
    if not odd:
        return most
    if formula.uses.get(name, frozenset()) in ({"levels"}, {"strata"}) and "boolean" not in found.values():
        return "categorical"
    usual = next(site for site in found if found[site] == most)
    raise InputError(
        f"Column {name!r} is {found[odd[0]]} at site {odd[0]!r}, but {most} at site {usual!r}: write it alike at all "
        "sites, numbers with a decimal point."
    )


def _levels(
    name: str, descriptions: Mapping[str, Mapping[str, Any]], given: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """The levels of a column at all sites, the base level first; none if it holds numbers."""
    if name in given:
        return given[name]
    for site, one in descriptions.items():
        if name in one["rare"]:
            raise InputError(
                f"Column {name!r} has a level with too few rows at site {site!r}: merge its levels there, or give the "
                "levels of all sites in levels=."
            )
    return tuple(ordered(level for one in descriptions.values() for level in one["levels"].get(name, ())))


def _classes(
    formula: Formula,
    kinds: Mapping[str, Kind],
    descriptions: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, tuple[str, ...]],
    binary: bool,
    event: Any,
) -> tuple[tuple[str, ...], str | None]:
    """The classes of a response of texts, and the class that counts as 1; None if the numbers themselves count."""
    name = formula.plain_response
    if formula.survival is not None:
        return (), event_of(name, kinds[name] if name else None, list(descriptions.values()), event)
    texts = name is not None and kinds[name] == "categorical"
    if not binary or name is None:
        if texts:
            raise InputError(f"The response {name!r} holds texts: give numbers, or two classes and family='binomial'.")
        if event is not None:
            raise InputError(f"event = {event!r} needs a response of two classes and family='binomial': leave it out.")
        return (), None
    classes: tuple[str, ...] = ()
    if texts or all(name in one["levels"] and name not in one["rare"] for one in descriptions.values()):
        classes = _levels(name, descriptions, given)
    if len(classes) == 1:
        raise InputError(f"The response {name!r} has the class {classes[0]!r} only, at all sites: it needs two.")
    chosen = None if event is None else tables.spelled([event])[0]
    if classes and chosen is not None and chosen not in classes:
        raise InputError(f"event = {event!r} is no class of the response {name!r}: {hint(chosen, classes)}")
    if texts and chosen is None:
        if len(classes) != 2:
            raise InputError(f"The response {name!r} has {len(classes)} classes: name the one that counts by event=.")
        chosen = classes[1]
    return classes if texts else (), chosen


def unmeasured(schema: Schema) -> dict[str, str] | None:
    """What the sites must be asked next: the kind of measurement by the source of a call; None if nothing."""
    requests, waiting = {}, set()
    for text, call in schema.parsed.calls.items():
        request = call.transform.request(schema.states[text])
        if request or waiting & {inner.text for inner in call.argument.calls}:
            waiting.add(text)
        if request and not waiting & {inner.text for inner in call.argument.calls}:
            requests[text] = request
    return requests or None


def measure(
    frame: pd.DataFrame,
    site: str,
    schema: Schema,
    request: Mapping[str, str],
    least: int = 1,
    check: Callable[[np.ndarray, str, np.ndarray], None] | None = None,
) -> dict[str, list[float]]:
    """A site's answer to what `unmeasured` asks for: sums over its complete rows, by the source of the call.

    Cells of a histogram with fewer than `least` rows count as empty. `check`, if given, sees the complete rows' places
    in the table, each call, and its argument's values, and may refuse.
    """
    formula, roles = schema.parsed, schema.columns.expressions
    kinds = tables.inspect(frame, site, [*formula.expressions.values(), *roles.values()])
    kept, missing = tables.complete(frame, site, kinds)
    tables.require_rows(site, kept, missing)
    places = np.flatnonzero(kept)
    rows = matrix.Rows(frame, places, site, schema.kinds, schema.levels, schema.states)
    answers = {}
    for text, asked in request.items():
        if text not in formula.calls:
            raise InputError(f"The formula does not call {text!r}: {hint(text, formula.calls)}")
        call = formula.calls[text]
        x = call.argument.value(rows)
        tables.refuse_row(site, f"{call.argument.text!r} is not finite", ~np.isfinite(x), places, "correct it")
        if check is not None:
            check(places, text, x)
        answers[text] = call.transform.answer(asked, x, schema.states[text], least)
    return answers


def measured(schema: Schema, replies: Mapping[str, Mapping[str, Sequence[float]]]) -> Schema:
    """The schema with the states that follow from the sites' answers."""
    states, calls = dict(schema.states), schema.parsed.calls
    for text, request in (unmeasured(schema) or {}).items():
        answers = np.array([reply[text] for reply in replies.values()], float)
        try:
            states[text] = frozen(calls[text].transform.combine(request, answers, states[text]))
        except InputError as error:
            raise InputError(f"{text}: {error}") from None
    return replace(schema, states=states)
