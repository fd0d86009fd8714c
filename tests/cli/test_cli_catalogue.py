import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fedual import methods
from fedual.cli import build
from fedual.errors import InputError
from fedual.experiments import names


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


def test_scenarios_does_not_load_torch():
    code = (
        "import sys; from fedual.cli import main; sys.argv = ['fedual', 'scenarios']\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "digits-heterog-10" in done.stdout


def test_methods():
    lines = output("methods").splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(methods.METHODS)]] == list(methods.METHODS)
    rows = json.loads(output("methods", "--json"))["methods"]
    assert {row["name"] for row in rows if row["networks"]} == set(methods.NETWORKS)
    assert all(row["summary"] for row in rows)


@pytest.mark.parametrize("name", methods.NETWORKS)
def test_settings_of_a_method(name: str):
    shown = {line.split()[0] for line in output("methods", name).splitlines()[2:]}
    assert shown == methods.settings(name).keys()
    as_json = json.loads(output("methods", name, "--json"))["settings"]
    assert {key: str(value) for key, value in as_json.items()} == {
        key: str(value) for key, value in methods.settings(name).items()
    }


def test_unknown_method():
    with pytest.raises(InputError, match="did you mean 'fedavg"):
        output("methods", "fedavgg")
