"""Whatever goes wrong, `fedual` says one sentence and ends with code 2; nothing of a file reaches the terminal raw."""

import csv
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from command import Done, fedual
from rich.console import Console

from fedual import scenarios
from fedual.cli import output
from fedual.cli.predict import _write
from fedual.cli.progress import progress
from fedual.errors import LONGEST, DataError, InputError
from fedual.texts import cell, printable, printable_lines

ESCAPE = "\x1b]0;owned\x07\x1b[31m"


def broken(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Done:
    def load(*arguments: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(scenarios, "load", load)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return fedual(tmp_path, *options, "run")


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("a\nb\x1b[0m"), MemoryError(), RecursionError("deep"), KeyError("x"), OSError(28, "full")],
)
def test_an_unexpected_error_is_one_sentence_and_a_file(error: Exception, tmp_path: Path, monkeypatch):
    done = broken(error, tmp_path, monkeypatch)
    assert done.code == 2
    assert done.out == ""
    assert done.err.endswith("\n")
    assert done.err[:-1].isprintable()
    assert type(error).__name__ in done.err
    found = re.search(r"the traceback is in (\S+\.log)", done.err)
    assert found
    log = Path(found[1])
    assert log.parent == tmp_path
    assert "Traceback" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


def test_the_traceback_is_shown_where_it_is_asked_for(tmp_path: Path, monkeypatch):
    assert "Traceback" in broken(ZeroDivisionError(), tmp_path, monkeypatch, "--debug").err
    assert "Traceback" not in broken(ZeroDivisionError(), tmp_path, monkeypatch).err
    monkeypatch.setenv("FEDUAL_DEBUG", "1")
    done = broken(InputError("expected"), tmp_path, monkeypatch)
    assert done.code == 2
    assert "Traceback" in done.err
    assert done.err.endswith("fedual: expected\n")


def test_ctrl_c_ends_with_130(tmp_path: Path, monkeypatch):
    assert broken(KeyboardInterrupt(), tmp_path, monkeypatch).code == 130


def test_errors_have_no_control_characters_and_are_not_long():
    error = DataError(f"column {ESCAPE}\nof {'x' * 5000}: rename it.")
    assert str(error).isprintable()
    assert len(str(error)) == LONGEST
    assert str(error).startswith("column \\x1b]0;owned\\x07")
    assert str(error).endswith(": rename it.")


def test_a_hostile_toml_file(tmp_path: Path):
    for content in (
        b"a = " + b"[" * 5000,
        b"x = " + b"1" * 5000,
        b"\xff",
        b"\0",
        b"a" * (1 << 21),
        b"[a]\nb = [[[1]]]\n",
    ):
        (tmp_path / "mine.toml").write_bytes(content)
        done = fedual(tmp_path, "run", "mine.toml")
        assert done.code == 2
        assert "unexpected" not in done.err
        assert done.err.count("\n") == 1
    done = fedual(tmp_path, "run", "--set", f"lr={'[' * 5000}")
    assert (done.code, "too deeply" in done.err) == (2, True)
    done = fedual(tmp_path, "run", "--set", f"train.batch_size={10**30}")
    assert (done.code, "at most 64 bits" in done.err) == (2, True)


class TestTexts:
    def test_printable(self):
        assert printable(f"é τ {ESCAPE}\n\u202e\udc80") == "é τ \\x1b]0;owned\\x07\\x1b[31m\\n\\u202e\\udc80"
        assert printable("a\u00a0b") == "a\u00a0b"
        assert printable_lines("a\x1b\nb") == "a\\x1b\nb"

    @pytest.mark.parametrize("text", ["=1+1", "+cmd", "-a", "@SUM(A1)", "\tx", "\r=x", " =1", "＝1", "-1+2"])
    def test_formulas_are_texts(self, text: str):
        assert cell(text).startswith("'")
        assert printable(text) == cell(text)[1:]

    @pytest.mark.parametrize("value", ["-1", "+2.5", "-1e-3", -1, 2.5, None, "north", "a=b", ""])
    def test_numbers_and_texts_stay(self, value: object):
        assert cell(value) == value

    def test_predictions_as_csv(self, tmp_path: Path):
        name = '=HYPERLINK("http://x","y")'
        row = {
            "input": "@1.png",
            "class": name,
            "probability": -0.5,
            "unsure": True,
            "probabilities": {name: 1.0, "-1": 0.0},
        }
        _write(tmp_path / "out.csv", [row])
        with (tmp_path / "out.csv").open(newline="") as file:
            (found,) = csv.DictReader(file)
        assert list(found.items()) == [
            ("input", "'@1.png"), ("class", f"'{name}"), ("probability", "-0.5"), ("unsure", "1"),
            (f"p_{name}", "1.0"), ("p_-1", "0.0"),
        ]  # fmt: skip

    def test_the_terminal_gets_no_escape_codes(self, monkeypatch):
        text = io.StringIO()
        with redirect_stdout(text):
            output.echo(f"one {ESCAPE}\ntwo")
            output.show([[f"cell {ESCAPE}", "[/red][bold]"]], "[head]")
        assert "\x1b" not in text.getvalue()
        assert "\x07" not in text.getvalue()
        assert "[/red][bold]" in text.getvalue()
        assert "[head]" in text.getvalue()
        console = Console(file=io.StringIO(), force_terminal=True)
        with progress(console) as watch:
            watch(f"[/x] {ESCAPE}", 3)(None, None)
        assert "\x07" not in console.file.getvalue()  # type: ignore[attr-defined]
