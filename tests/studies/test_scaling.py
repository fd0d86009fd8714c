"""The points are what they say, and the verdicts tell linear from worse."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedual.errors import DataError, FedualError, InputError
from fedual.fitting import find_device
from studies import scaling
from studies.__main__ import app, main
from studies.figures import common
from studies.scaling import CLASSES, INPUTS, Point, Task, apart, measure, plan, slope, verdicts, width

POINT = Point(10, 1000, None, 10, 5, 1.0, 2.0, 0.5, 200_000_000, 300_000_000, 0, 120_000)
TINY = Task(clients=3, examples=50, parameters=1000, local_steps=None, chunk=2, compile=False, rounds=2)


def curve(field: str, values: list[int], **powers: float) -> dict[str, list[Point]]:
    """Points whose other fields grow as powers of the one that varies."""
    points = []
    for value in values:
        factor = value / values[0]
        grown = {name: getattr(POINT, name) * factor**power for name, power in powers.items()}
        points.append(replace(POINT, **{field: value}, **grown))
    return {field: points}


def test_a_point_counts_what_was_trained():
    found = measure(TINY, "cpu")
    h = width(1000)
    assert found.parameters == (INPUTS * h + h) + (h * h + h) + (h * CLASSES + CLASSES)
    assert found.client_steps == 3  # 17, 17 and 16 examples: one batch of 32 each
    # η_k has two vectors, IVON's momentum one, and its steps are a number
    assert found.state_bytes == 3 * (3 * found.parameters + 1) * torch.get_default_dtype().itemsize
    assert (found.clients, found.local_steps, found.chunk, found.device_bytes) == (3, None, 2, 0)
    assert min(found.seconds, found.first_seconds, found.setup_seconds) > 0
    assert found.peak_bytes >= found.baseline_bytes > 10e6


def test_local_steps_are_every_clients():
    assert measure(replace(TINY, local_steps=4), "cpu").client_steps == 3 * 4


@pytest.mark.parametrize("parameters", [10_000, 10**5, 10**7])
def test_width_is_the_nearest(parameters: int):
    number = lambda h: h * h + (INPUTS + CLASSES + 2) * h + CLASSES
    h = width(parameters)
    assert abs(number(h) - parameters) <= min(abs(number(h + i) - parameters) for i in (-1, 1))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is what getrusage says")
def test_peak_memory_is_the_process_own_and_counts_what_it_touches():
    """A parent that holds much more than the child does not show in the child's peak."""
    held = np.ones(75_000_000)
    code = (
        "import torch; from studies.scaling import peak_memory; before = peak_memory(); torch.ones(25_000_000);"
        "print(before, peak_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < held.nbytes
    assert after - before == pytest.approx(100e6, rel=0.1)


@pytest.mark.slow
def test_a_process_of_its_own_finds_the_same_counts():
    alone, here = apart(TINY, "cpu"), measure(TINY, "cpu")
    for name in ("clients", "parameters", "local_steps", "client_steps", "chunk"):
        assert getattr(alone, name) == getattr(here, name)
    assert alone.state_bytes * 2 == here.state_bytes  # float32 there, float64 in these tests


@pytest.mark.slow
def test_a_process_that_fails_says_why():
    with pytest.raises(FedualError, match=r"clients=51.*exit code 1.*no examples"):
        apart(replace(TINY, clients=51), "cpu")


def test_sweep_says_what_it_does_before_it_does_it(monkeypatch: pytest.MonkeyPatch):
    events = []
    monkeypatch.setattr(scaling, "apart", lambda task, device: events.append((task, device)) or POINT)
    tasks = {"clients": [replace(TINY, clients=n) for n in (1000, 2000)], "local_steps": [replace(TINY, local_steps=7)]}
    curves = scaling.sweep(tasks, "cpu", events.append)
    assert {name: len(points) for name, points in curves.items()} == {"clients": 2, "local_steps": 1}
    first, second, third = [(task, "cpu") for some in tasks.values() for task in some]
    said = ["  10 steps of all clients, 1.000 s a round, 100 MB, GPU 0 MB"]  # after each point
    assert events == [
        *("clients = 1,000", first, *said, "clients = 2,000", second, *said, "local steps = 7", third, *said)
    ]


def test_slope_is_the_exponent_of_a_power_law():
    x = np.array([1.0, 3.0, 7.0, 20.0])
    assert slope(x.tolist(), (5 * x**1.7).tolist()) == pytest.approx(1.7)


@pytest.mark.parametrize(("power", "ok"), [(1.0, True), (0.5, True), (1.5, False), (2.0, False)])
def test_time_may_grow_linearly_with_the_work_and_no_faster(power: float, ok: bool):
    time = verdicts(curve("clients", [10, 100, 1000, 10_000], client_steps=1, seconds=power))[0]
    assert (time.what, time.ok) == ("time", ok)
    assert time.value == pytest.approx(power)


def test_time_n_log_n_passes():
    points = [replace(POINT, clients=n, client_steps=n, seconds=n * np.log(n)) for n in (1000, 3000, 10_000)]
    assert verdicts({"clients": points})[0].ok


def test_time_is_judged_in_the_upper_half_where_fixed_costs_do_not_hide_it():
    """1 s and (n/1000)² s: nearly flat over all points, but not where it counts."""
    sizes = [1, 3, 10, 30, 300, 3000, 30_000]
    points = [replace(POINT, clients=n, client_steps=n, seconds=1 + (n / 1000) ** 2) for n in sizes]
    assert slope(sizes, [point.seconds for point in points]) < scaling.SLOPE
    assert not verdicts({"clients": points})[0].ok


@pytest.mark.parametrize("field", ["clients", "local_steps"])
def test_memory_must_not_grow_with_clients_or_steps(field: str):
    sizes = [1000, 10_000]
    flat = curve(field, sizes, client_steps=1, seconds=1)
    assert [v.ok for v in verdicts(flat)] == [True, True]
    grown = {field: [flat[field][0], replace(flat[field][1], peak_bytes=POINT.baseline_bytes + 10**9)]}
    assert [v.ok for v in verdicts(grown)] == [True, False]
    assert "×10.00 from 1,000 to 10,000" in verdicts(grown)[1].sentence


def test_memory_may_grow_with_parameters_linearly():
    for power, ok in ((1.0, True), (2.0, False)):
        points = curve("parameters", [1000, 2000, 4000, 8000], baseline_bytes=power, peak_bytes=power)
        assert verdicts(points)[1].ok is ok


def test_a_gpus_memory_has_its_own_verdict():
    on_gpu = replace(POINT, device_bytes=10**6)
    points = [on_gpu, replace(on_gpu, clients=100, client_steps=100, device_bytes=2 * 10**6)]
    found = {v.what: v.ok for v in verdicts({"clients": points})}
    assert found == {"time": True, "memory": True, "GPU memory": False}


def test_the_plan_covers_what_is_claimed():
    full = plan()
    assert [task.clients for task in full["clients"]] == [10, 30, 100, 300, 1000, 3000, 10_000]
    assert len({(task.examples, task.parameters, task.chunk) for task in full["clients"]}) == 1
    sizes = [task.parameters for task in full["parameters"]]
    assert (sizes[0], sizes[-1]) == (10**4, 10**7)
    assert [full["local_steps"][i].local_steps for i in (0, -1)] == [1, 300]
    for tasks in (full, plan(quick=True)):
        for field, some in tasks.items():
            values = [getattr(task, field) for task in some]
            assert values == sorted(set(values))
            others = {tuple(value for name, value in vars(task).items() if name != field) for task in some}
            assert len(others) == 1  # one thing varies
        # memory is compared where more clients than a chunk are there
        assert all(task.clients >= 4 * task.chunk for task in tasks["clients"][-2:])


def test_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="device = 'tpu' is not there"):
        find_device("tpu")


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["scaling", *arguments])
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
    monkeypatch.setattr(common, "PNG_DPI", 20)
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.slow
def test_the_command_writes_the_points_the_verdicts_and_the_drawing(measured: list[Task]):
    output = run("--quick", "--device", "cpu", "--json")
    folder = Path("out/scaling")
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
    run("--quick", "--device", "cpu", "--out", "again")
    one, two = (path.joinpath("scaling.svg").read_bytes() for path in (folder, Path("again")))
    assert one == two  # the drawing is the same every time
    assert b"<svg" in one


def test_bad_input_is_refused_before_measuring(measured: list[Task]):
    with pytest.raises(InputError, match="device = 'tpu' is not there"):
        run("--device", "tpu")
    assert not measured
    assert not Path("out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_measuring(measured: list[Task]):
    Path("file").touch()
    with pytest.raises(DataError, match="nothing was measured"):
        run("--device", "cpu", "--out", "file/here")
    assert not measured


def test_without_matplotlib_it_names_the_extra_and_ends_with_2(measured: list[Task], monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["studies", "scaling", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "fedual[plots]" in capsys.readouterr().err
    assert not measured
