import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedual import scaling
from fedual.cli import bench, build, main
from fedual.errors import DataError, InputError
from fedual.scaling import Point, Task


def run(*arguments: str) -> str:
    done = CliRunner().invoke(build(), ["bench", *arguments])
    if done.exception:
        raise done.exception
    return done.output


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Task]:
    """No process is started: time is linear in the work, memory constant; the tasks asked for."""
    asked = []

    def apart(task: Task, device: str) -> Point:
        asked.append(task)
        steps = task.clients * (task.local_steps or 1)
        seconds = steps * task.parameters / 1e6
        memory = 300_000_000 if task.parameters < 50_000 else 200_000_000 + 1000 * task.parameters
        rest = (seconds, 2 * seconds, 0.5, 200_000_000, memory, 0, 12 * task.parameters * task.clients)
        return Point(task.clients, task.parameters, task.local_steps, steps, task.chunk, *rest)

    monkeypatch.setattr(scaling, "apart", apart)
    monkeypatch.chdir(tmp_path)
    return asked


def test_bench_compares_the_engines_on_the_same_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "SETS", ("train.rounds=2", "train.local_epochs=1"))
    output = run("--device", "cpu", "--json")
    found = json.loads(output.splitlines()[-1])
    ms = found["ms_per_client_step"]
    assert found["ratio"] == pytest.approx(ms["sequential"] / ms["vectorised"])
    assert min(ms.values()) > 0
    assert (found["clients"], found["device"]) == (10, "cpu")
    # 1437 examples in batches of 32: 45 full ones, and at most one short one for each of the 10 clients
    assert 45 <= found["client_steps"] <= 55
    assert {"torch", "commit", "threads"} <= found["environment"].keys()
    assert re.search(r"sequential +\d+\.\d{3} ms a step", output)


def test_scale_writes_the_points_the_verdicts_and_the_drawing(measured: list[Task]):
    output = run("scale", "--quick", "--device", "cpu", "--json")
    folder = Path("out/bench-scale")
    assert sorted(path.name for path in folder.iterdir()) == ["scaling.json", "scaling.png", "scaling.svg"]
    text = json.loads((folder / "scaling.json").read_text())
    numbers = text["numbers"]
    assert (numbers["device"], numbers["seed"]) == ("cpu", 0)
    assert {"commit", "torch", "threads", "seconds"} <= text["record"].keys()
    plan = scaling.plan(quick=True)
    assert measured == [task for tasks in plan.values() for task in tasks]
    for curve, tasks in plan.items():
        assert [p[curve] for p in numbers["curves"][curve]] == [getattr(task, curve) for task in tasks]
    last = json.loads(output.splitlines()[-1])
    assert last["verdicts"] == numbers["verdicts"]
    assert all(verdict["ok"] for verdict in last["verdicts"])
    assert "time against clients: work to the 1.00 (at most 1.15): ok" in output


def test_the_drawing_is_the_same_every_time(measured: list[Task]):
    for folder in ("one", "two"):
        run("scale", "--quick", "--device", "cpu", "--out", folder)
    one, two = (Path(folder, "scaling.svg").read_bytes() for folder in ("one", "two"))
    assert one == two
    assert b"<svg" in one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scale", "--device", "tpu"], "device = 'tpu' is not there"),
        (["--device", "tpu"], "device = 'tpu' is not there"),
        (["--json", "scale"], "write them after it"),
        (["--device", "cpu", "scale"], "write them after it"),
    ],
)
def test_bad_input_is_refused_before_measuring(measured: list[Task], arguments: list[str], message: str):
    with pytest.raises(InputError, match=message):
        run(*arguments)
    assert not measured
    assert not Path("out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_measuring(measured: list[Task]):
    Path("file").touch()
    with pytest.raises(DataError, match="nothing was measured"):
        run("scale", "--device", "cpu", "--out", "file/here")
    assert not measured


def test_without_matplotlib_it_names_the_extra_and_ends_with_2(measured: list[Task], monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["fedual", "bench", "scale", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "fedual[plots]" in capsys.readouterr().err
    assert not measured


def test_help_names_scale():
    assert "fedual bench scale" in run("--help")
