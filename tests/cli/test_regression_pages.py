"""What the tutorial and the README print is what fedual prints, and R's figures are those of the script."""

import json
import re
import shlex
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from command import fedual

from fedual import glm

ROOT = Path(__file__).parent.parent.parent
SURVIVAL = ROOT / "docs" / "tutorials" / "survival.md"
TUTORIAL = ROOT / "docs" / "tutorials" / "regression.md"
FAIR = ROOT / "tests" / "glm" / "oracles" / "fair"


def blocks(page: str) -> list[tuple[str, str]]:
    """Kind and content of each fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a console, with what it prints."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0].partition("#")[0], part.partition("\n")[2]) for part in parts]


def run(folder: Path, command: str) -> tuple[str | None, Path]:
    """What a command of fedual prints, None for other commands, and the folder that comes next."""
    printed = None
    for part in command.split("&&"):
        words = [
            word
            for text in shlex.split(part)
            for word in (sorted(str(path.relative_to(folder)) for path in folder.glob(text)) if "*" in text else [text])
        ]
        if words[0] == "fedual":
            done = fedual(folder, *words[1:])
            assert done.code == 0, done.err
            printed = done.out
        elif words[0] == "cd":
            folder = folder / words[1]
    return printed, folder


def assert_prints(shown: str, printed: str) -> None:
    """All that is shown was printed; a line with … alone stands for some that are left out."""
    plain = lambda text: re.sub(r"next step \S+ SE", "next step", text).splitlines()
    rest = plain(printed)
    for part in re.split(r"^…$", "\n".join(plain(shown)), flags=re.MULTILINE):
        lines = part.strip("\n").splitlines()
        place = next((i for i in range(len(rest)) if rest[i : i + len(lines)] == lines), None)
        assert place is not None, f"{part}\nis not in\n" + "\n".join(rest)
        rest = rest[place + len(lines) :]


def play(folder: Path, console: str) -> None:
    for command, shown in commands(console):
        told, folder = run(folder, command)
        if told is not None and shown:
            assert_prints(shown, told)


def test_the_readme_prints_what_it_shows(tmp_path: Path):
    (console,) = [
        content
        for kind, content in blocks((ROOT / "README.md").read_text())
        if kind == "console" and "fedual glm" in content
    ]
    play(tmp_path, console)


@pytest.mark.slow
def test_the_tutorial_prints_what_it_shows(tmp_path: Path):
    scope, printed, compared = {}, "", 0
    with chdir(tmp_path):
        for kind, content in blocks(TUTORIAL.read_text()):
            if kind == "python":
                out = StringIO()
                with redirect_stdout(out):
                    exec(compile(content, str(TUTORIAL), "exec"), scope)
                printed = out.getvalue()
            elif kind == "console":
                play(tmp_path, content)
            elif kind == "r":
                printed = FAIR.with_suffix(".txt").read_text()
                assert content.splitlines()[1] in FAIR.with_suffix(".R").read_text()
            else:
                assert_prints(content, printed)
                compared += 1
        assert compared >= 8
        assert_equal_to_r(scope["fit"], scope["formula"], scope["sites"])


def test_the_tutorial_of_survival_prints_what_it_shows(tmp_path: Path):
    scope, printed, compared = {}, "", 0
    with chdir(tmp_path):
        for kind, content in blocks(SURVIVAL.read_text()):
            if kind == "python":
                out = StringIO()
                with redirect_stdout(out):
                    exec(compile(content, str(SURVIVAL), "exec"), scope)
                printed = out.getvalue()
            elif kind == "console":
                play(tmp_path, content)
            elif kind == "text":
                assert_prints(content, printed)
                compared += 1
    assert compared == 5
    r = json.loads((FAIR.parent / "survival.json").read_text())["fits"]["tutorial"]
    oracle = [*r["coefficients"], *(row[i] ** 0.5 for i, row in enumerate(r["covariance"]))]
    terms, fit = scope["fit"].terms, scope["fit"].table
    rows = zip(terms, fit["estimate"], oracle[:4], fit["se"], oracle[4:], strict=True)
    for term, one, other, se, other_se in rows:
        assert f"| {term} | {one:.9f} | {other:.9f} | {se:.7f} | {other_se:.7f} |\n" in SURVIVAL.read_text()
        assert one == pytest.approx(other, rel=1e-7)


def assert_equal_to_r(fit: glm.Fit, formula: str, sites: list[Path]) -> None:
    r = json.loads(FAIR.with_suffix(".json").read_text())
    for name in ("deviance", "loglik", "aic"):
        assert getattr(fit, name) == pytest.approx(r[name], rel=1e-9)
    assert fit.table["estimate"].tolist() == pytest.approx(r["estimate"], rel=1e-8)
    assert fit.table["se"].tolist() == pytest.approx(r["se"], rel=1e-5)
    curve = "bs(yrs_married, knots=[6], lower_bound=0.5, upper_bound=23)"
    found = glm.anova(fit, glm.fit(formula.replace("yrs_married", curve), sites, family="binomial"))
    assert [found.df, found.statistic, found.p] == pytest.approx(r["spline"], rel=1e-6)
    assert side_by_side(fit) in TUTORIAL.read_text()


def side_by_side(fit: glm.Fit) -> str:
    """The tutorial's table of both."""
    r = json.loads(FAIR.with_suffix(".json").read_text())
    rows = zip(fit.terms, fit.table["estimate"], r["estimate"], fit.table["se"], r["se"], strict=True)
    return "".join(f"| {term} | {one:.9f} | {other:.9f} | {se:.7f} | {other_se:.7f} |\n"
                   for term, one, other, se, other_se in rows)  # fmt: skip
