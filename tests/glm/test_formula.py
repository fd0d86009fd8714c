"""Formulas: what they need, and that a site evaluates nothing but what is on the lists."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedual.errors import InputError
from fedual.glm.formula import parse

INJECTIONS = [
    "y ~ I(__import__('os').system('touch {}'))",
    "I(__import__('os').system('touch {}')) ~ x",
    "y ~ __import__('os').system('touch {}')",
    "__import__('os').system('touch {}') ~ x",
    "y ~ (lambda: __import__('os').system('touch {}'))()",
    "y ~ {{__import__('os').system('touch {}')}}",
    "y ~ C(x, __import__('os').system('touch {}'))",
    "y ~ bs(x, df=__import__('os').system('touch {}'))",
    "y ~ scale(x, **__import__('os').system('touch {}'))",
    "y ~ np.fromfile('{}')",
    "y ~ open('{}', 'w')",
    'y ~ eval(\'open("{}", "w")\')',
    'y ~ I(f\'{{open("{}", "w")}}\')',
    "y ~ Q('{}')",
    "y ~ hashed(open('{}', 'w'))",
]
REFUSED = {
    "attribute": "y ~ I(x.values)",
    "attribute of a call": "y ~ I(x).sum()",
    "lambda": "y ~ I(lambda: x)",
    "list comprehension": "y ~ I([a for a in x])",
    "generator": "y ~ I(a for a in x)",
    "walrus": "y ~ I(a := x)",
    "subscript": "y ~ x[0]",
    "subscript within": "y ~ I(x[0])",
    "f-string": "y ~ I(f'{x}')",
    "bytes": "y ~ I(b'x')",
    "dunder": "y ~ __class__",
    "dunder within": "y ~ I(__class__)",
    "braces": "y ~ {x + 1}",
    "set": "y ~ I({x})",
    "dict": "y ~ I({1: x})",
    "if": "y ~ I(x if x else z)",
    "and": "y ~ I(x and z)",
    "in": "y ~ I(x in z)",
    "chain of comparisons": "y ~ I(1 < x < 2)",
    "star": "y ~ log(*x)",
    "two stars": "y ~ scale(x, **z)",
    "yield": "y ~ I((yield x))",
    "await": "y ~ I(await x)",
    "complex": "y ~ I(1j * x)",
    "ellipsis": "y ~ I(...)",
    "tuple": "y ~ I((x, z))",
    "statement": "y ~ I(x; z)",
    "text": "y ~ 'x'",
    "text within": "y ~ I('x' + 'y')",
    "multiplied text": "y ~ I('x' * 999999999)",
    "two parts": "y ~ x | z",
    "other operator": "y ~ x @ z",
    "numbers": "y ~ 3",
    "second argument": "y ~ log(x, 2)",
    "spline within": "y ~ log(bs(x, 3))",
    "expression as levels": "y ~ C(x + 1)",
    "open bracket": "y ~ log(x",
    "open backtick": "y ~ `x",
    "dangling plus": "y ~ x +",
    "no operator": "y ~ x z",
}
SENSELESS = {
    "no response": "~ x",
    "no tilde": "x",
    "empty": "",
    "two tildes": "y ~ x ~ z",
    "two responses": "y + z ~ x",
    "constant response": "1 ~ x",
    "categorical response": "C(y) ~ x",
    "scaled response": "scale(y) ~ x",
    "response on the right": "y ~ x + y",
    "no terms": "y ~ 0",
    "no right side": "y ~ ",
    "no argument": "y ~ scale()",
    "unknown option": "y ~ bs(x, dff=3)",
    "option twice": "y ~ bs(x, 5, df=5)",
    "df and knots": "y ~ bs(x, df=5, knots=[1.0])",
    "knots not sorted": "y ~ bs(x, knots=[2, 1])",
    "knots beyond the bounds": "y ~ bs(x, knots=[2], lower_bound=3)",
    "df too low": "y ~ bs(x, df=2)",
    "df is no number": "y ~ bs(x, df='a')",
    "degree too high": "y ~ poly(x, 30)",
    "no df": "y ~ cr(x)",
    "scale 0": "y ~ scale(x, scale=0)",
    "unknown contrasts": "y ~ C(x, Fancy)",
    "a column and an expression of one name": "y ~ `log(x)` + log(x)",
    "a column named as a number": "y ~ 1 + `1`",
}
HUGE = {
    "power": "y ~ (a + b + c + d + e)**20",
    "power of powers": "y ~ ((a + b + c)**9)**9",
    "huge power": "y ~ (a + b)**99999999999999999999",
    "product": "y ~ " + " * ".join("abcdefghijklmnopqrst"),
    "interactions": "y ~ " + ":".join(["(a + b + c + d + e + f + g + h)"] * 9),
    "length": "y ~ " + " + ".join(f"x{i}" for i in range(30_000)),
    "long expression": "y ~ I(" + " + ".join(f"x{i}" for i in range(1000)) + ")",
    "many parts": "y ~ I(" + "-" * 1000 + "x)",
    "nested brackets": "y ~ I(" + "(" * 900 + "x" + ")" * 900 + ")",
    "knots": "y ~ bs(x, df=1000)",
    "whole number": f"y ~ I({'9' * 400} * x)",
}


PIECES = [
    *"yx~+-*/:^()[]{}.,01<=%|#",
    "`a b`",
    "**",
    "2.5",
    "'m'",
    '"',
    "`",
    "\\",
    "log(",
    "C(",
    "bs(",
    "I(",
    "df=4",
    "__x__",
]


class TestWhatItNeeds:
    def test_variables_come_in_order(self):
        formula = parse("died ~ age + C(sex):log(dose) + bs(bmi, 4)")
        assert formula.response == "died"
        assert formula.variables == ("died", "age", "sex", "dose", "bmi")
        assert formula.categorical == {"sex"}
        assert formula.stateful == ("bs(bmi, 4)",)
        assert formula.has_intercept

    def test_backticks(self):
        formula = parse("`odd y` ~ `a b` + log(`c d`) + C(`e-f`)")
        assert formula.variables == ("odd y", "a b", "c d", "e-f")
        assert formula.response == formula.plain_response == "odd y"

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("y ~ x", True), ("y ~ x - 1", False), ("y ~ 0 + x", False), ("y ~ 1", True), ("y ~ . - 1", False)],
    )
    def test_intercept(self, text, expected):
        assert parse(text).has_intercept is expected

    def test_inner_states_come_first(self):
        assert parse("y ~ bs(scale(log(x)), df=4) + center(x)").stateful == (
            "scale(log(x))",
            "bs(scale(log(x)), df=4)",
            "center(x)",
        )

    def test_a_response_may_be_an_expression(self):
        formula = parse("I(y > 3) ~ x")
        assert (formula.response, formula.plain_response, formula.variables) == ("I(y > 3)", None, ("y", "x"))

    def test_declared_categorical(self):
        assert parse("y ~ grade + x", ["grade"]).categorical == {"grade"}
        with pytest.raises(InputError, match=r"'grad'.*did you mean 'grade'"):
            parse("y ~ grade + x", ["grad"])
        with pytest.raises(InputError, match="computes with 'grade'"):
            parse("y ~ log(grade)", ["grade"])

    def test_many_columns(self):
        assert len(parse("y ~ " + " + ".join(f"x{i}" for i in range(3000))).variables) == 3001


class TestDot:
    def test_it_stands_for_the_other_columns(self):
        formula = parse("log(y) ~ .")
        assert formula.dot
        assert formula.expand(["y", "a", "b c", "1d"]).text == "log(y) ~ (a + `b c` + `1d`)"

    def test_with_other_terms(self):
        assert parse("y ~ . - b + log(a) - 1").expand(["a", "b", "c", "y"]).variables == ("y", "a", "c")
        assert len(parse("y ~ .**2").expand(["a", "b", "c"]).terms) == 1 + 3 + 3

    def test_declared_categorical_columns_stay_so(self):
        assert parse("y ~ .", ["g"]).expand(["y", "g"]).categorical == {"g"}

    def test_there_must_be_others(self):
        with pytest.raises(InputError, match="no column but the response"):
            parse("y ~ .").expand(["y"])

    def test_a_formula_without_dot_stays_itself(self):
        formula = parse("y ~ x")
        assert formula.expand(["z"]) is formula


class TestNothingIsEvaluated:
    @pytest.mark.parametrize("text", INJECTIONS)
    def test_injections_have_no_effect(self, text, tmp_path):
        target = tmp_path / "pwned"
        with pytest.raises(InputError):
            parse(text.format(target))
        assert not target.exists()

    @pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
    def test_other_syntax_is_refused(self, text):
        with pytest.raises(InputError):
            parse(text)

    @pytest.mark.parametrize("text", SENSELESS.values(), ids=SENSELESS)
    def test_senseless_formulas_are_refused(self, text):
        with pytest.raises(InputError):
            parse(text)

    @pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
    def test_huge_formulas_are_refused_at_once(self, text):
        with pytest.raises(InputError):
            parse(text)

    @given(st.lists(st.sampled_from(PIECES), max_size=12))
    @settings(max_examples=300)
    def test_any_text_is_read_or_refused(self, pieces):
        with suppress(InputError):
            assert parse("y ~ " + " ".join(pieces)).response == "y"

    def test_unknown_functions_get_a_hint(self):
        with pytest.raises(InputError, match="did you mean 'log'"):
            parse("y ~ lo(x)")
        with pytest.raises(InputError, match="choose one of log, "):
            parse("y ~ eval('1')")

    def test_not_a_text(self):
        with pytest.raises(InputError, match="formula = 3"):
            parse(3)  # pyright: ignore[reportArgumentType]
        with pytest.raises(InputError, match="categorical = 'sex'"):
            parse("y ~ sex", "sex")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("(y > 2) ~ x", r"'>' is not allowed: use .* with all else in I\(…\)"),
        ("y ~ x + (x == 3)", r"'==' is not allowed: use .* with all else in I\(…\)"),
        ("y ~ x + (1|ward)", r"the groups are .ward., but only the sites can be"),
        ("y ~ x + offset(log(t))", r"give offset= instead"),
        ("y ~ ns(x, 4)", r"use cr\("),
        ("cbind(y, n) ~ x", r"trials= instead"),
        ("y ~ factor(x)", r"use C\(x\)"),
        ("y ~ I(x^2)", r"powers as x\*\*2"),
    ],
)
def test_what_r_writes_otherwise_has_a_remedy(text: str, remedy: str):
    with pytest.raises(InputError, match=remedy):
        parse(text)
