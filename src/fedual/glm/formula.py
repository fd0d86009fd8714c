"""Formulas such as `y ~ age + C(sex) + bs(bmi, 4)`: formulaic's language, read without evaluating anything.

formulaic splits a formula into terms and factors, and later multiplies the factors' columns. It would evaluate a factor
as Python; here each factor is an `Expression` from an allow-list, and formulaic looks its values up by its text.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from formulaic.errors import FormulaicError
from formulaic.parser import DefaultFormulaParser
from formulaic.parser.algos.sanitize_tokens import sanitize_tokens
from formulaic.parser.algos.tokenize import tokenize
from formulaic.parser.types import ASTNode, Factor, Term, Token

from fedual.errors import InputError, hint
from fedual.glm import expressions
from fedual.glm.expressions import Call, Expression
from fedual.glm.mixed import bars
from fedual.glm.survival import response as survival
from fedual.glm.survival.response import Surv

MAX_LENGTH, MAX_TERMS, MAX_POWER = 100_000, 10_000, 10
"""Letters, terms and powers of terms: beyond all in use, and little work for a site to which a formula was sent."""
OPERATORS = frozenset("~+-*/:^.")
NUMBER = re.compile(r"\d+(\.\d*)?|\.\d*")  # a lone dot means all other columns


@dataclass(frozen=True)
class Formula:
    """A formula that `parse` allowed.

    Args:
        text: The formula.
        response: The source of its left side.
        variables: The columns that it needs, the response's first.
        categorical: Columns whose values are names of levels: those inside C(…), and those declared.
        stateful: The sources of the calls that depend on the data of all sites, such as "scale(x)"; inner ones first.
        has_intercept: Whether the design has a column of ones.
        declared: Columns declared categorical.
        dot: Whether it names "all other columns" by a dot; `expand` puts their names in.
        terms: The terms of the right side, whose factors are looked up by their sources.
        expressions: Each factor and the response by source.
        strata: The columns of `strata(…)`, which is no term.
        fixed: The text without its random part.
        random: The formula of the site's random effects, from `(1 + x | site)`; None without one.
    """

    text: str
    response: str
    variables: tuple[str, ...]
    categorical: frozenset[str]
    stateful: tuple[str, ...]
    has_intercept: bool
    declared: frozenset[str] = field(repr=False)
    dot: bool = field(repr=False)
    terms: tuple[Term, ...] = field(repr=False, compare=False)
    expressions: dict[str, Expression] = field(repr=False, compare=False)
    fixed: str = ""
    random: "Formula | None" = None
    strata: tuple[str, ...] = ()

    @property
    def survival(self) -> Surv | None:
        """The response of a survival model."""
        found = self.expressions[self.response]
        return found if isinstance(found, Surv) else None

    @property
    def calls(self) -> dict[str, Call]:
        """The calls named in `stateful`."""
        return {call.text: call for factor in self.expressions.values() for call in factor.calls}

    @property
    def uses(self) -> dict[str, frozenset[str]]:
        """What is needed of each column: "term" (by itself, as it is), "number", "text" or "levels"."""
        return expressions.merged(self.expressions.values())

    @property
    def plain_response(self) -> str | None:
        """The response's column, if it is one by itself; of a survival model the event's."""
        if self.survival is not None:
            return self.survival.column
        return self.response if {use for _, use in self.expressions[self.response].uses} <= {"term", "levels"} else None

    def expand(self, columns: Sequence[str]) -> "Formula":
        """Replace the dot by `columns`, without those of the response."""
        if not self.dot:
            return self
        response = {name for name, _ in self.expressions[self.response].uses}
        names = [_quoted(name) for name in columns if name not in response]
        if not names:
            raise InputError(f"{_shown(self.text)}: the table has no column but the response: add some.")
        text = self.text
        for token in reversed(list(tokenize(self.fixed))):
            if token.token == "." and token.source_start is not None:
                text = f"{text[: token.source_start]}({' + '.join(names)}){text[token.source_start + 1 :]}"
        return parse(text, self.declared)


def parse(text: str, categorical: Collection[str] = ()) -> Formula:
    """Read a formula, or raise `InputError` if it holds anything that is not allowed.

    Args:
        text: The response, `~`, and terms joined by `+`, `-`, `:`, `*`, `/`, `**` or `^`; their factors are columns, or
            expressions of columns. Odd column names stand in backticks.
        categorical: Columns that are names of levels even without C(…).
    """
    if not isinstance(text, str):
        raise InputError(f"formula = {text!r}: give a text such as 'y ~ age + C(sex)'.")
    if isinstance(categorical, str):
        raise InputError(f"categorical = {categorical!r}: give a list of column names.")
    return _parse(text, frozenset(categorical))


@lru_cache(maxsize=64)
def _parse(whole: str, declared: frozenset[str]) -> Formula:
    if len(whole) > MAX_LENGTH:
        raise InputError(f"{_shown(whole)} has {len(whole)} characters: use at most {MAX_LENGTH}.")
    text, effects = bars.split(whole)
    tokens = _tokens(text)
    parser = DefaultFormulaParser()
    context: dict[str, Any] = {"__formulaic_variables_available__": ()}
    try:
        if (size := _size(parser.get_ast(text, context=context))) > MAX_TERMS:
            raise InputError(f"{_shown(text)} has {size} terms: use at most {MAX_TERMS}.")
        sides = parser.get_terms(text, context=context)
    except InputError:
        raise
    except (FormulaicError, SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"{_shown(text)} cannot be read ({_reason(error)}): correct it.") from None
    if not hasattr(sides, "lhs"):
        raise InputError(f"{_shown(text)} has no response: write 'y ~ x + z'.")
    terms, strata = _without_strata(text, sides.rhs)
    factors = [factor for term in (*sides.lhs, *sides.rhs) for factor in term.factors if not _is_literal(factor)]
    found: dict[str, Expression] = {}
    for factor in factors:
        plain = factor.eval_method is Factor.EvalMethod.LOOKUP
        use = "levels" if factor.expr in declared else "term"
        expression = expressions.plain(factor.expr, use) if plain else _expression(text, factor.expr)
        found[factor.expr] = expression
    response = _response(text, sides.lhs, found)
    dot = any(token.token == "." for token in tokens)
    if not (sides.rhs or dot) or not text.partition("~")[2].strip():
        raise InputError(f"{_shown(text)} has no terms: write at least 'y ~ 1'.")
    if response in {factor.expr for term in sides.rhs for factor in term.factors}:
        raise InputError(f"{_shown(text)} has its response {response!r} on the right side too: leave it out there.")
    _check_survival(text, response, found, terms, strata)
    uses = expressions.merged(found.values())
    for name in declared:
        if name not in uses and not dot:
            raise InputError(f"{name!r} was declared categorical, but {_shown(text)} lacks it: {hint(name, uses)}")
        if "number" in uses.get(name, ()):
            raise InputError(f"{_shown(text)} computes with {name!r}, which was declared categorical: use C({name}).")
    random = None
    if effects is not None:  # a dot may stand for columns that only the sites know
        left, own = text.partition("~")[0], declared & uses.keys()
        random = _random(whole, left, effects, own, {*found} if not dot else ())
    return Formula(
        whole,
        response,
        tuple(uses),
        frozenset(name for name, kinds in uses.items() if "levels" in kinds),
        tuple(dict.fromkeys(call.text for expression in found.values() for call in expression.calls)),
        any(all(factor.expr == "1" for factor in term.factors) for term in terms),
        declared,
        dot,
        tuple(Term([_looked_up(factor) for factor in term.factors]) for term in terms),
        found,
        text,
        random,
        tuple(name for text in strata for name, _ in found[text].uses),
    )


def _without_strata(text: str, terms: Iterable[Term]) -> tuple[list[Term], list[str]]:
    """The terms that have columns in the design, and the sources of `strata(…)`."""
    kept, strata = [], []
    for term in terms:
        calls = [factor.expr for factor in term.factors if expressions.called(factor.expr) == "strata"]
        if calls and len(term.factors) > 1:
            raise InputError(f"{_shown(text)}: {calls[0]!r} must be a term by itself: fit the strata one by one.")
        strata += calls
        kept += [] if calls else [term]
    return kept, strata


def _check_survival(
    text: str, response: str, found: Mapping[str, Expression], terms: Iterable[Term], strata: Iterable[str]
) -> None:
    """Refuse `Surv(…)` on the right side, and what needs a time on the left."""
    if not isinstance(found[response], Surv):
        for source, one in found.items():
            if isinstance(one, Surv) or source in strata:
                raise InputError(f"{_shown(text)}: {source!r} needs Surv(time, event) as the response: write it there.")
        return
    if any(isinstance(one, Surv) for source, one in found.items() if source != response):
        raise InputError(f"{_shown(text)} has Surv(…) on both sides: use columns on the right.")
    if not any(all(factor.expr == "1" for factor in term.factors) for term in terms):
        raise InputError(f"{_shown(text)}: hazards have no intercept to leave out: remove the 0, or the - 1.")


def _random(whole: str, response: str, effects: str, declared: frozenset[str], common: Collection[str]) -> Formula:
    """The formula of random effects, which are those of terms that have fixed effects, too."""
    if "." in re.sub(r"\d+\.\d*|\.\d+", "", effects):
        raise InputError(f"{_shown(whole)}: name the terms of the random part one by one, without a dot.")
    names = {token.token for token in _tokens(f"{response}~ {effects}")}
    found = _parse(f"{response}~ {effects}", frozenset(name for name in declared if name in names))
    if common and (lost := [text for text in found.expressions if text not in common]):
        raise InputError(
            f"{_shown(whole)} lets the sites differ in {lost[0]!r}, of which it has no common coefficient: add it "
            "outside the parentheses, too."
        )
    return found


def _tokens(text: str) -> list[Token]:
    """formulaic's tokens, after a check of all that is not an expression."""
    try:
        tokens = list(tokenize(text))
        for token in tokens:
            _check(text, token)
        tokens = list(sanitize_tokens(tokens))
    except InputError:
        raise
    except (FormulaicError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{_shown(text)} cannot be read ({_reason(error)}): correct it.") from None
    if sum(token.token.count("~") for token in tokens if token.kind is Token.Kind.OPERATOR) != 1:
        raise InputError(f"{_shown(text)} must have one response: write 'y ~ x + z'.")
    columns = {token.token for token in tokens if token.kind is Token.Kind.NAME}
    if same := columns & {token.token for token in tokens if token.kind in (Token.Kind.PYTHON, Token.Kind.VALUE)}:
        raise InputError(f"{_shown(text)} has a column and an expression {min(same)!r}: rename the column.")
    return tokens


def _check(text: str, token: Token) -> None:
    part, kind = token.token, token.kind
    if kind is Token.Kind.PYTHON:
        if text[token.source_start or 0] == "{":
            raise InputError(f"{_shown(text)}: braces are not allowed: write I({part}).")
        _expression(text, part)
    elif kind is Token.Kind.OPERATOR and not set(part) <= OPERATORS:
        rest = ", with all else in I(…)" if set(part) <= set("<>=!&%") else ""
        raise InputError(f"{_shown(text)}: {part!r} is not allowed: use ~ + - : * / ** and ( ){rest}.")
    elif kind is Token.Kind.VALUE and not NUMBER.fullmatch(part):
        raise InputError(f"{_shown(text)}: {part} is not allowed: terms are columns and functions of them.")
    elif kind is Token.Kind.CONTEXT and part not in "()":
        raise InputError(f"{_shown(text)}: {part!r} is not allowed: use ( ).")
    elif kind is Token.Kind.NAME and part.startswith("__") and text[token.source_start or 0] != "`":
        raise InputError(f"{_shown(text)}: {part!r} is not allowed: put backticks about it if it is a column.")


def _size(node: Any) -> int:
    """How many terms formulaic will multiply out, at most: checked before it does."""
    results: dict[int, int] = {}
    stack = [node]
    while stack:
        top = stack[-1]
        if not isinstance(top, ASTNode):
            results[id(stack.pop())] = 1
            continue
        parts: list[Any] = list(top.args)
        if waiting := [part for part in parts if id(part) not in results]:
            stack.extend(waiting)
            continue
        sizes = [results[id(part)] for part in parts]
        symbol = top.operator.symbol
        if symbol in ("**", "^"):
            power = parts[1].token if isinstance(parts[1], Token) else ""
            if not (power.isdecimal() and 1 <= int(power[:3]) <= MAX_POWER):
                raise InputError(f"A power of terms must be a whole number from 1 to {MAX_POWER}: use I(x**2) for x².")
            size = sizes[0] ** int(power)
        elif symbol in ("*", ":", "/") and len(sizes) == 2:
            size = sizes[0] * sizes[1] + (0 if symbol == ":" else sum(sizes))
        else:
            size = sum(sizes)
        results[id(stack.pop())] = min(size, 10**9)
    return results[id(node)]


def _expression(text: str, source: str) -> Expression:
    own = {"Surv": survival.surv, "strata": survival.strata}.get(expressions.called(source))
    try:
        return expressions.parse(source) if own is None else own(expressions.syntax_tree(source))
    except InputError as error:
        raise InputError(f"{_shown(text)}: {error}") from None


def _response(text: str, terms: Iterable[Term], found: dict[str, Expression]) -> str:
    factors = [[factor.expr for factor in term.factors] for term in terms]
    if len(factors) != 1 or len(factors[0]) != 1 or factors[0][0] not in found:
        raise InputError(f"{_shown(text)} must have one column or expression as its response: write 'y ~ x + z'.")
    response = found[factors[0][0]]
    coded = any(use == "levels" and name != response.text for name, use in response.uses)
    if response.calls or not response.uses or coded:
        raise InputError(f"{_shown(text)}: {factors[0][0]!r} cannot be the response: use a column, or e.g. log(y).")
    return factors[0][0]


def _looked_up(factor: Factor) -> Factor:
    return factor if _is_literal(factor) else Factor(factor.expr, eval_method="lookup")


def _is_literal(factor: Factor) -> bool:
    return factor.eval_method is Factor.EvalMethod.LITERAL


def _quoted(name: str) -> str:
    if "`" in name:
        raise InputError(f"The column {name!r} cannot stand in a formula because of its backtick: rename it.")
    return name if re.fullmatch(r"[^\W\d]\w*", name) and not name.startswith("__") else f"`{name}`"


def _reason(error: Exception) -> str:
    return str(getattr(error, "msg", error)).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}…")
