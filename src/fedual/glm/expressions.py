"""Expressions within a formula, such as `log(x)` or `C(sex)`: what is allowed, and their values.

A site evaluates formulas that a server sent. Python therefore never runs their text: `parse` walks its syntax tree,
refuses whatever is not in `fedual.glm.language`, and returns functions of NumPy that it put together itself.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
from formulaic.transforms import C, contrasts

from fedual.data.tables import names
from fedual.errors import InputError, hint
from fedual.glm.language import CONTRASTS, FUNCTIONS, OPERATORS, TRANSFORMS
from fedual.glm.transforms import Transform

MAX_LENGTH, MAX_PARTS = 2_000, 300
"""Letters and syntax nodes of an expression: beyond all in use, and little work for a site to which they were sent."""
CALL = re.compile(r"\s*(\w+)\s*\(")
QUOTES = re.compile(r"\"[^\"\\]*\"|'[^'\\]*'|`([^`]*)`")


class Columns(Protocol):
    """Where an expression finds a site's values."""

    def plain(self, name: str) -> Any:
        """A column as the term that it is by itself: numbers or categories, as the federation agreed."""
        ...

    def numbers(self, name: str) -> np.ndarray:
        """A column as float64 `(N,)`."""
        ...

    def texts(self, name: str) -> np.ndarray:
        """A column of texts as `str` objects `(N,)`."""
        ...

    def categories(self, name: str) -> pd.Categorical:
        """A column as the levels on which the federation agreed `(N,)`."""
        ...

    def state(self, call: "Call") -> Mapping[str, Any] | None:
        """What the federation measured for a call such as `scale(x)`; None to learn the names of its columns only."""
        ...


@dataclass(frozen=True, eq=False)
class Expression:
    """An expression that `parse` allowed.

    Args:
        text: Its source.
        value: Its values `(N,)`, or formulaic's `FactorValues` of several columns.
        uses: Each column with what is needed of it: "term" (as it is), "number", "text" or "levels".
        calls: Calls whose result depends on the data of all sites; inner ones come first.
        bases: Each column with its base level of `C(column, Treatment("level"))`.
    """

    text: str
    value: Callable[[Columns], Any]
    uses: tuple[tuple[str, str], ...] = ()
    calls: "tuple[Call, ...]" = ()
    bases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function such as `scale`, whose state the federation measures."""

    text: str
    transform: Transform
    argument: Expression

    def value(self, columns: Columns) -> Any:
        """Its values, given its state."""
        x, state = self.argument.value(columns), columns.state(self)
        if state is None:
            return self.transform.apply(np.full_like(x, 0.5), self.transform.placeholder())
        try:
            return self.transform.apply(x, state)
        except InputError as error:
            raise InputError(f"{self.text}: {error}") from None


def parse(source: str) -> Expression:
    """Parse an expression, or raise `InputError` if it holds anything that is not allowed."""
    return _term(syntax_tree(source))


def called(source: str) -> str:
    """The name of the function that an expression calls outermost; empty if it is no call."""
    return found[1] if (found := CALL.match(source)) else ""


def syntax_tree(source: str) -> Any:
    """The syntax tree of an expression, in which names in backticks keep them."""
    if len(source) > MAX_LENGTH:
        raise InputError(f"{source[:40]!r}… has {len(source)} characters: use at most {MAX_LENGTH} in an expression.")
    quoted: dict[str, str] = {}

    def alias(match: re.Match) -> str:
        if match[1] is None:
            return match[0]
        quoted[name := f"quoted_{len(quoted)}_"] = match[0]
        return f" {name} "

    try:
        tree = ast.parse(QUOTES.sub(alias, source).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or "too deeply nested"
        raise InputError(
            f"{source[:80]!r} cannot be read ({reason}): correct it, and put backticks about odd column names."
        ) from None
    if sum(isinstance(node, ast.expr) for node in ast.walk(tree)) > MAX_PARTS:
        raise InputError(f"{source[:40]!r}… has more than {MAX_PARTS} parts: compute a column of the table instead.")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if node.id.startswith("__"):
                raise InputError(f"{node.id!r} in {source!r} is not allowed: put backticks about it if it is a column.")
            node.id = quoted.get(node.id, node.id)  # `ast.unparse` then shows the backticks
    return tree


def parse_number(source: str) -> Expression:
    """Parse an expression of numbers from one row, such as "log(time)", or the name of a column."""
    try:
        expression = parse(source)
    except InputError:
        return Expression(source, lambda columns: columns.numbers(source), ((source, "number"),))
    if expression.calls or not expression.uses or any(use == "levels" for _, use in expression.uses):
        raise InputError(
            f"{source!r} cannot be used here: give a column of numbers, or a function such as log(column)."
        )
    return expression


def plain(name: str, use: str) -> Expression:
    """The expression that is a column by itself."""
    return Expression(name, lambda columns: columns.plain(name), ((name, use),))


def merged(expressions: Iterable[Expression]) -> dict[str, frozenset[str]]:
    """What is needed of each column."""
    uses: dict[str, frozenset[str]] = {}
    for name, use in (pair for one in expressions for pair in one.uses):
        uses[name] = uses.get(name, frozenset()) | {use}
    return uses


def _term(node: ast.expr) -> Expression:
    """What can only be a term by itself, or any number."""
    match node:
        case ast.Call(func=ast.Name(id="C")):
            return _categorical(node)
        case ast.Call(func=ast.Name(id=name)) if name in TRANSFORMS:
            return _stateful(node, name)
    return number(node)


def number(node: ast.expr) -> Expression:
    """An expression whose value is one number a row."""
    match node:
        case ast.Name(id=quoted):
            name = quoted.strip("`")
            return Expression(quoted, lambda columns: columns.numbers(name), ((name, "number"),))
        case ast.Constant(value=bool() | int() | float() as number):
            constant = _float(number)  # floats only: no huge integers
            return Expression(ast.unparse(node), lambda columns: constant)
        case ast.UnaryOp(op=operator, operand=operand) if type(operator) in OPERATORS:
            return _combined(node, OPERATORS[type(operator)], operand)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
            return _combined(node, OPERATORS[type(operator)], left, right)
        case ast.Compare(
            left=ast.Name(id=name),
            ops=[ast.Eq() | ast.NotEq() as operator],
            comparators=[ast.Constant(value=str(text))],
        ):
            return Expression(ast.unparse(node), _compared(operator, name, text), ((name.strip("`"), "text"),))
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in OPERATORS:
            return _combined(node, OPERATORS[type(operator)], left, right)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return _combined(node, FUNCTIONS[name], argument)
        case ast.Call(func=ast.Name(id=name)) if name in TRANSFORMS:
            stateful = _stateful(node, name)
            if not stateful.calls[-1].transform.several:
                return stateful
    raise InputError(f"{ast.unparse(node)!r} is not allowed here: {_remedy(node)}")


def _remedy(node: ast.expr) -> str:
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            return f"{name}() takes one argument."
        case ast.Call(func=ast.Name(id=name)) if name in ("C", *TRANSFORMS):
            return f"{name}() must be a term by itself."
        case ast.Call(func=ast.Name(id="offset")):
            return "leave it out of the formula, and give offset= instead."
        case ast.BinOp(op=ast.BitXor()):
            return "write powers as x**2."
        case ast.Call(func=ast.Name(id="cbind")):
            return "give the successes as the response, and trials= instead."
        case ast.Call(func=ast.Name(id="factor")):
            return "use C(x)."
        case ast.Call(func=ast.Name(id="ns")):
            return "use cr(x, df=4, constraints='center')."
        case ast.Call(func=ast.Name(id=name)):
            return hint(name, (*FUNCTIONS, "C", *TRANSFORMS))
        case ast.Attribute():
            return "call functions by their plain names, and put backticks about a column name with a dot."
        case ast.Constant(value=str()):
            return "a text can only be compared with a column, as in I(sex == 'male')."
    return "use columns, numbers, arithmetic, single comparisons and the functions of the formula language."


def _float(number: float) -> np.float64:
    try:
        return np.float64(number)
    except OverflowError:
        raise InputError("A whole number of more than 308 digits is not allowed: use a smaller one.") from None


def _combined(node: ast.expr, function: Callable, *parts: ast.expr) -> Expression:
    inner = [number(part) for part in parts]

    def value(columns: Columns) -> np.ndarray:
        with np.errstate(all="ignore"):  # values that are not finite are refused later, with their row
            return np.asarray(function(*[one.value(columns) for one in inner]), float)

    uses = tuple(use for one in inner for use in one.uses)
    return Expression(ast.unparse(node), value, uses, tuple(call for one in inner for call in one.calls))


def _compared(operator: ast.cmpop, name: str, text: str) -> Callable[[Columns], np.ndarray]:
    function = OPERATORS[type(operator)]
    return lambda columns: np.asarray(function(columns.texts(name.strip("`")), text), float)


def _stateful(node: ast.Call, name: str) -> Expression:
    text, make = ast.unparse(node), TRANSFORMS[name]
    options = list(inspect.signature(make).parameters)
    if not node.args:
        raise InputError(f"{text!r} has no argument: write {name}(column).")
    if len(node.args) - 1 > len(options):
        raise InputError(f"{text!r} has {len(node.args)} arguments: {name}() takes at most {len(options) + 1}.")
    given = [*zip(options, node.args[1:], strict=False), *((one.arg or "", one.value) for one in node.keywords)]
    if any(isinstance(value, ast.Starred) for _, value in given) or any(one.arg is None for one in node.keywords):
        raise InputError(f"{text!r} is not allowed: write its options out.")
    for i, (option, _) in enumerate(given):
        if option not in options:
            raise InputError(f"{text!r} has the option {option!r}: {hint(option, options)}")
        if option in dict(given[:i]):
            raise InputError(f"{text!r} has the option {option!r} twice: leave one out.")
    argument = number(node.args[0])
    try:
        transform = make(**{option: _literal(value) for option, value in given})
    except InputError as error:
        raise InputError(f"{text!r}: {error}") from None
    call = Call(text, transform, argument)
    return Expression(text, call.value, argument.uses, (*argument.calls, call))


def _categorical(node: ast.Call) -> Expression:
    match node:
        case ast.Call(args=[ast.Name(id=quoted)], keywords=[]):
            kind, base = "Treatment", None
        case (
            ast.Call(args=[ast.Name(id=quoted), coding], keywords=[])
            | ast.Call(args=[ast.Name(id=quoted)], keywords=[ast.keyword(arg="contrasts", value=coding)])
        ):
            kind, base = _coding(coding)
        case _:
            raise InputError(
                f"{ast.unparse(node)!r} is not allowed: write C(column), or C(column, Treatment('level'))."
            )
    name = quoted.strip("`")
    coded = CONTRASTS[kind]() if base is None else contrasts.TreatmentContrasts(base=base)

    def value(columns: Columns) -> Any:
        found = columns.categories(name)
        return C(found, coded, levels=list(found.categories))

    bases = () if base is None else ((name, base),)
    return Expression(ast.unparse(node), value, ((name, "levels"),), bases=bases)


def _coding(node: ast.expr) -> tuple[str, str | None]:
    """The contrasts of `C(column, node)`, and their base level."""
    match node:
        case ast.Name(id=kind) | ast.Call(func=ast.Name(id=kind), args=[], keywords=[]) if kind in CONTRASTS:
            return kind, None
        case (
            ast.Call(func=ast.Name(id="Treatment"), args=[level], keywords=[])
            | ast.Call(func=ast.Name(id="Treatment"), args=[], keywords=[ast.keyword(arg="reference", value=level)])
        ) if isinstance(base := _literal(level), str | int | float):
            return "Treatment", str(names(np.array([base], object), "Treatment")[0])
    raise InputError(f"{ast.unparse(node)!r} is not allowed: use Treatment('level') or {', '.join(CONTRASTS)}.")


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise InputError(f"{ast.unparse(node)} is not allowed: options are plain numbers and texts.") from None
