"""`fedual glm`: the table of `fedual.glm.fit`, on the terminal and in files; mistakes are one sentence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command import fedual

from fedual import glm
from fedual.glm import fitting
from fedual.glm.settings import Settings
from fedual.glm.survival import data

FORMULA = "sick ~ age + C(sex)"
FILES = ["north.csv", "south.csv", "west.csv"]
COLUMNS = ["estimate", "se", "lower", "upper", "z", "p", "posterior", "posterior_sd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    for number, name in enumerate(FILES):
        rows = 80 + 40 * number
        age, sex = random.normal(50, 10, rows), random.choice(["female", "male"], rows)
        sick = random.random(rows) < 1 / (1 + np.exp(2.5 - age / 20 - 0.5 * (sex == "male")))
        pd.DataFrame({"age": age, "sex": sex, "sick": sick.astype(int)}).to_csv(folder / name, index=False)
    return folder


def last(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])


def test_the_table_of_the_function(folder: Path):
    done = fedual(folder, "glm", FORMULA, *FILES, "--family", "binomial", "--json")
    assert done.code == 0, done.err
    fit = glm.fit(FORMULA, [folder / name for name in FILES], family="binomial")
    assert done.out.startswith(str(fit.summary()))
    content = last(done.out)
    rows = pd.DataFrame(content["coefficients"]).set_index("term")
    np.testing.assert_allclose(rows[COLUMNS].astype(float), fit.table[COLUMNS], rtol=1e-14)
    assert content["sites"] == ["north", "south", "west"]
    assert content["n"] == fit.n == 360
    assert content["converged"] is True
    assert content["path"] is None


def test_files(folder: Path, tmp_path: Path):
    out = tmp_path / "a" / "fit"
    done = fedual(folder, "glm", FORMULA, *FILES, "--family", "binomial", "--level", "0.9", "--out", str(out))
    assert done.code == 0, done.err
    assert f"wrote {out}/fit.json" in done.out
    fit = glm.Fit.load(out / "fit.json")
    table = pd.read_csv(out / "table.csv", index_col="term")
    np.testing.assert_allclose(table, fit.summary(0.9).frame(), rtol=1e-15)
    assert (out / "summary.txt").read_text() == f"{fit.summary(0.9)}\n"
    assert "<table" in (out / "summary.html").read_text()
    assert json.loads((out / "figures.json").read_text())["level"] == 0.9


@pytest.mark.parametrize("how", [[FORMULA, "--site", "random"], [f"{FORMULA} + (1 | site)"]])
def test_random_intercepts(folder: Path, how: list[str]):
    done = fedual(folder, "glm", *how, *FILES, "--family", "binomial", "--json", "--out", "mixed")
    assert done.code == 0, done.err
    fit = glm.fit(FORMULA, [folder / name for name in FILES], family="binomial", site="random")
    assert fit.components is not None
    assert last(done.out)["components"]["sd"] == pytest.approx(fit.components.sd.tolist(), abs=1e-9)
    assert "½χ²₀ + ½χ²₁" in done.out
    back = glm.Fit.load(folder / "mixed" / "fit.json")
    assert back.posterior_kind == "integrated"


def test_robust_errors_do_not_apply_to_random_intercepts(folder: Path):
    done = fedual(folder, "glm", FORMULA, *FILES, "--family", "binomial", "--site", "random", "--robust", "hc0")
    assert done.code == 2
    assert "a mixed model has the dependence within sites in it" in done.err


def test_robust_standard_errors(folder: Path):
    done = fedual(folder, "glm", FORMULA, *FILES, "--family", "binomial", "--robust", "hc0", "--json")
    fit = glm.fit(FORMULA, [folder / name for name in FILES], family="binomial").robust("hc0")
    rows = pd.DataFrame(last(done.out)["coefficients"]).set_index("term")
    np.testing.assert_allclose(rows["se"], fit.table["se"], rtol=1e-14)


def test_names_of_sites(folder: Path):
    done = fedual(folder, "glm", FORMULA, "a=north.csv", "b=north.csv", "--family", "binomial", "--json")
    assert last(done.out)["sites"] == ["a", "b"]
    done = fedual(folder, "glm", FORMULA, "north.csv", "b=north.csv", "--family", "binomial", "--json")
    assert last(done.out)["sites"] == ["north", "b"]


OPTIONS = {
    "--family binomial": {"family": "binomial"},
    "--family binomial --link probit": {"family": "binomial", "link": "probit"},
    "--weights w": {"weights": "w"},
    "--offset o": {"offset": "o"},
    "--family binomial --trials n": {"family": "binomial", "trials": "n"},
    "--family binomial --event yes": {"family": "binomial", "event": "yes"},
    "--site fixed": {"site": "fixed"},
    "--prior flat": {"prior": "flat"},
    "--prior 1.5": {"prior": 1.5},
    "--estimate both": {"estimate": "both"},
    "--max-rounds 5": {"max_rounds": 5},
    "--tol 1e-6": {"tol": 1e-6},
    "--levels sex=male,female --levels smoker=no,yes": {"levels": {"sex": ("male", "female"), "smoker": ("no", "yes")}},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_reaches_its_setting(folder: Path, monkeypatch: pytest.MonkeyPatch, options: str):
    class Seen(BaseException):  # the command line tells other errors in a sentence
        pass

    seen = list[Settings]()

    def simulate(settings: Settings, sites: Any) -> Any:
        seen.append(settings)
        raise Seen

    monkeypatch.setattr(fitting, "simulate", simulate)
    with pytest.raises(Seen):
        fedual(folder, "glm", FORMULA, *FILES, *options.split())
    assert seen == [Settings(FORMULA, **OPTIONS[options])]


MISTAKES = {
    "no file": ([FORMULA, "nowhere.csv"], "nowhere"),
    "no column": (["sick ~ height", *FILES], "height"),
    "another family": ([FORMULA, *FILES, "--family", "binomal"], "did you mean 'binomial'"),
    "no formula": (["sick", *FILES], "sick"),
    "code": (["sick ~ __import__('os')", *FILES], "__import__"),
    "one name twice": ([FORMULA, "north.csv", "north.csv"], "north"),
    "one given name twice": ([FORMULA, "a=north.csv", "a=south.csv"], "the name 'a': name each of them by NAME=FILE"),
    "a level twice": ([FORMULA, *FILES, "--levels", "sex=male,male,female"], "the level 'male' of 'sex' twice"),
    "a level of no row": (
        [FORMULA, *FILES, "--levels", "sex=male,female,other"],
        "[T.other]' is constant at all sites, to twelve digits: leave that level out",
    ),
    "a level beyond 1": ([FORMULA, *FILES, "--level", "95"], "level = 95"),
    "unknown errors": ([FORMULA, *FILES, "--robust", "hc3"], "robust = 'hc3': did you mean 'hc0'"),
    "levels without a name": ([FORMULA, *FILES, "--levels", "male,female"], "levels = 'male,female': name a variable"),
    "levels that are not all": ([FORMULA, *FILES, "--levels", "sex=male"], "sex"),
    "an out that is a file": ([FORMULA, *FILES, "--out", "north.csv"], "north.csv is a file"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_sentence_and_code_2(folder: Path, what: str):
    arguments, told = MISTAKES[what]
    done = fedual(folder, "glm", *arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("fedual: ")
    assert done.err.count("\n") == 1
    assert told in done.err


def test_help_has_an_example(folder: Path):
    done = fedual(folder, "glm", "--help")
    assert "fedual glm 'sick ~ age + C(sex)' north.csv" in " ".join(done.out.split())


@pytest.mark.parametrize("missing", ["formulaic", "pandas", "scipy"])
def test_without_the_extra(folder: Path, missing: str):
    code = f"import sys; sys.modules[{missing!r}] = None; from fedual.cli import main; main()"
    command = [sys.executable, "-c", code, "glm", FORMULA, *FILES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"fedual: fedual glm needs {missing}")
    assert done.stderr.endswith("which is missing: pip install 'fedual[glm]'\n")


def test_survival(tmp_path: Path):
    rossi = data.rossi()
    for number, name in enumerate(FILES):
        rossi.iloc[number::3].to_csv(tmp_path / name, index=False)
    formula = "Surv(week, arrest) ~ fin + age"
    files = [str(tmp_path / name) for name in FILES]
    done = fedual(tmp_path, "glm", formula, *FILES, "--ties", "breslow", "--transform", "log", "--json")
    assert done.code == 0, done.err
    shown, fit = last(done.out), glm.fit(formula, files, ties="breslow", transform="log")
    assert [row["estimate"] for row in shown["coefficients"]] == fit.coefficients.to_list()
    assert (shown["events"], shown["concordance"]) == (114, fit.survival.c)  # type: ignore[union-attr]
    done = fedual(tmp_path, "glm", formula, *FILES, "--baseline", "piecewise", "--pieces", "13,26")
    assert "common baseline constant in 3 pieces" in done.out
    done = fedual(tmp_path, "glm", formula, *FILES, "--pieces", "many")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "pieces = 'many': give a number from 1 to 200" in done.err
