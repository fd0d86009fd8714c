"""`fedual doctor`: says what is there, and fails where `fedual run` would."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedual.cli import build
from fedual.cli.doctor import EXTRAS, MIN_FREE, NEEDED

ROOT = Path(__file__).parents[2]


def doctor(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(build(), ["doctor", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.output


def answer() -> tuple[int, dict[str, dict[str, Any]]]:
    code, text = doctor("--json")
    told = json.loads(text)
    assert told["ok"] == (code == 0)
    return code, {finding["name"]: finding for finding in told["findings"]}


def test_here_all_that_a_run_needs_is_there():
    code, found = answer()
    assert code == 0
    for package in NEEDED:
        assert found[package] == {"name": package, "state": "ok", "text": version(package)}
    assert "digits" in found["data"]["text"]
    assert "free in" in found["disk"]["text"]
    code, text = doctor()
    assert code == 0
    assert text.splitlines()[-1] == "`fedual run` has all that it needs."
    assert [line.split()[1] for line in text.splitlines()[:2]] == ["python", "torch"]


@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_a_package_that_a_run_needs_and_that_is_missing(package: str, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    code, found = answer()
    assert code == 1
    assert found[package]["state"] == "broken"
    assert f"pip install {package}" in found[package]["text"]
    assert [name for name, finding in found.items() if finding["state"] == "broken"] == [package]
    assert doctor()[1].splitlines()[-1] == f"`fedual run` cannot work: {package}."


def test_a_package_that_is_there_and_does_not_work(tmp_path: Path, monkeypatch):
    (tmp_path / "safetensors.py").write_text("raise OSError('libsomething.so: no such file\\nand more')")
    monkeypatch.delitem(sys.modules, "safetensors")
    monkeypatch.syspath_prepend(tmp_path)
    code, found = answer()
    assert code == 1
    assert found["safetensors"]["text"] == "cannot be imported (libsomething.so: no such file): install it again"


def test_what_only_some_need_is_named_with_its_extra_and_may_be_missing(monkeypatch):
    for packages in EXTRAS.values():
        for module, _ in packages.values():
            if module != "sklearn":
                monkeypatch.setitem(sys.modules, module, None)
    code, found = answer()
    assert code == 0
    for extra, packages in EXTRAS.items():
        for package in packages.keys() - {"scikit-learn"}:
            assert found[package]["state"] == "absent"
            assert f"pip install 'fedual[{extra}]'" in found[package]["text"]
    assert "pip install 'fedual[plots]'" in doctor()[1]  # brackets are no markup


def test_no_data_set_at_all(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setenv("FEDUAL_DATA", str(tmp_path))
    code, found = answer()
    assert code == 1
    assert "pip install 'fedual[data]'" in found["data"]["text"]


def test_the_extras_are_those_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in extras.keys() - {"cli", "all", "test", "docs", "dev", "bench"}:
        assert {re.split(r"[<>=\[]", text)[0] for text in extras[extra]} == EXTRAS[extra].keys()
    assert {re.split(r"[<>=\[]", text)[0] for text in extras["cli"]} <= {*NEEDED, *EXTRAS["cli"]}


def test_a_disk_that_is_full_and_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    for free, state in ((MIN_FREE, "ok"), (MIN_FREE - 1, "absent")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        code, found = answer()
        assert (code, found["disk"]["state"]) == (0, state)
        assert str(tmp_path) in found["disk"]["text"]
    monkeypatch.setattr("os.access", lambda path, mode: False)
    code, found = answer()
    assert (code, found["disk"]["state"]) == (1, "broken")


@pytest.mark.parametrize(("compiler", "state"), [("c++-of-mine", "ok"), (None, "absent")])
def test_a_compiler(tmp_path: Path, monkeypatch, compiler: str | None, state: str):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if compiler:
        (tmp_path / compiler).touch(0o755)
        monkeypatch.setenv("CXX", compiler)
    code, found = answer()
    assert (code, found["compiled steps"]["state"]) == (0, state)


@pytest.mark.slow
def test_it_works_where_only_torch_numpy_typer_and_rich_are_installed():
    optional = ["safetensors", "scipy", *(module for packages in EXTRAS.values() for module, _ in packages.values())]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({optional})); sys.argv = ['fedual', 'doctor']\n"
        "from fedual.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 1
    assert "pip install safetensors" in done.stdout
    assert "pip install 'fedual[flower]'" in done.stdout
