import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fedual import defaults, methods
from fedual.cli import build
from fedual.errors import InputError
from fedual.scenarios import names


def output(*arguments: str) -> str:
    done = CliRunner().invoke(build(), list(arguments))
    if done.exception:
        raise done.exception
    return done.output


def test_scenarios():
    lines = output("scenarios").splitlines()
    assert [line.split()[0] for line in lines] == ["scenario", *names()]
    rows = json.loads(output("scenarios", "--json"))["scenarios"]
    assert [row["name"] for row in rows] == names()
    assert {row["name"]: row["split"]["clients"] for row in rows} == {
        name: int(name.rpartition("-")[2]) for name in names()
    }


def test_help_and_scenarios_do_without_torch():
    helped = ["", "run", "predict", "doctor", "data", "data get"]
    commands = [*([*words.split(), "--help"] for words in helped), ["scenarios"]]
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fedual.cli import main\n"
        f"for words in {commands}:\n"
        "    sys.argv = ['fedual', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, end"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("Usage") == len(helped)
    assert "--preset" in done.stdout
    assert "digits-heterog-10" in done.stdout


def test_methods():
    lines = output("methods").splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(methods.METHODS)]] == list(methods.METHODS)
    rows = json.loads(output("methods", "--json"))["methods"]
    assert {row["name"] for row in rows if row["networks"]} == set(methods.NAMES)
    assert all(row["summary"] for row in rows)


@pytest.mark.parametrize("name", methods.NAMES)
def test_settings_of_a_method(name: str):
    shown = {line.split()[0] for line in output("methods", name).splitlines()[2:]}
    assert shown == defaults.settings(name).keys() == methods.settings(name).keys()
    as_json = json.loads(output("methods", name, "--json"))["settings"]
    assert {key: str(value) for key, value in as_json.items()} == {
        key: str(value) for key, value in defaults.settings(name).items()
    }


def test_unknown_method():
    with pytest.raises(InputError, match="did you mean 'fedavg"):
        output("methods", "fedavgg")
