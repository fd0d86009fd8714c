import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import sealed
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedual.backends.client_store import Rows, Store, create
from fedual.errors import DataError, InputError
from fedual.rundir import RunDirectory, checkpoint, environment
from fedual.rundir.old_config import CONFIG_VERSION

CONFIG = {
    "version": CONFIG_VERSION,
    "method": "ivon-admm",
    "rounds": 20,
    "settings": {"rho": 0.1, "lr": 0.1 + 0.2},
    "split": (1, 2),
}
SERVER = {
    "lam_g": torch.tensor([[1.0, -0.0], [math.nan, math.inf]], dtype=torch.float64),
    "half": torch.tensor([1.5, -2.5, 3.0], dtype=torch.bfloat16),
    "single": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "steps": torch.tensor(2**62 + 1),
    "generator": torch.Generator().get_state(),
}
ROW = {
    "lam": torch.zeros(2, 3, dtype=torch.float64),
    "half": torch.zeros(5, dtype=torch.bfloat16),
    "single": torch.zeros(1, dtype=torch.float32),
    "steps": torch.tensor(0),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit: NaN equals itself, 0 is not -0."""
    flat = lambda x: x.contiguous().flatten().view(torch.uint8)
    return a.dtype == b.dtype and a.shape == b.shape and flat(a).equal(flat(b))


def filled(num_clients: int, folder: Path | None, seed: int = 0) -> Store:
    generator = torch.Generator().manual_seed(seed)
    store = create(ROW, num_clients, folder=folder)
    draw = lambda value: torch.randn(num_clients, *value.shape, generator=generator).mul(1000).to(value.dtype)
    store.write(torch.arange(num_clients), {name: draw(value) for name, value in ROW.items()})
    return store


def rows(store: Store) -> Rows:
    return store.read(torch.arange(store.num_clients))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "out", CONFIG)


def test_create_writes_the_config_and_where_it_ran(run: RunDirectory):
    assert sealed.content(run.path / "config.json") == run.config == {**CONFIG, "split": [1, 2]}
    assert sealed.content(run.path / "environment.json") == environment()
    assert run.history() == []
    assert run.load() is None
    assert {path.name for path in run.path.iterdir()} == {"config.json", "environment.json"}


@given(number=st.floats(allow_nan=False, allow_infinity=False))
def test_floats_of_a_config_come_back_exactly(tmp_path_factory: pytest.TempPathFactory, number: float):
    path = tmp_path_factory.mktemp("run") / "out"
    RunDirectory.create(path, {"version": CONFIG_VERSION, "x": number})
    found = RunDirectory.open(path).config["x"]
    assert found.hex() == number.hex()


def test_a_folder_with_a_run_is_refused(run: RunDirectory):
    for number in (1, 2):
        run.append({"round": number})
    with pytest.raises(InputError, match=r"holds a run of 2 rounds: resume it \(--resume, resume=True\)"):
        RunDirectory.create(run.path, CONFIG)
    (run.path / "config.json").unlink()  # without it, the records are still worth something
    with pytest.raises(InputError, match="holds a run of 2 rounds"):
        RunDirectory.create(run.path, CONFIG)


def test_a_folder_with_other_things_is_used(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "environment.json").write_text("left by a kill while the run was made")
    RunDirectory.create(tmp_path, CONFIG)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_place_that_cannot_hold_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is a file"):
        RunDirectory.create(tmp_path / "file", CONFIG)
    with pytest.raises(InputError, match=r"cannot be made \(Not a directory\)"):
        RunDirectory.create(tmp_path / "file" / "out", CONFIG)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(InputError, match="not writable"):
        RunDirectory.create(tmp_path / "closed", CONFIG)


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, torch.tensor(1.0)])
def test_a_config_that_is_not_json_is_refused_before_anything_is_made(tmp_path: Path, value: Any):
    with pytest.raises(InputError, match="use only JSON values"):
        RunDirectory.create(tmp_path / "out", {"x": value})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"method": "fedavg"}, 'method = "ivon-admm", not "fedavg"'),
        ({"settings": {"rho": 0.2, "lr": 0.3}}, "settings.rho = 0.1, not 0.2"),
        ({"settings": {"rho": 0.1, "lr": 0.3}}, "settings.lr = 0.30000000000000004, not 0.3"),
        ({"settings": {"rho": 0.1}}, "settings.lr = 0.30000000000000004, not nothing"),
        ({"settings": None}, r'settings = \{"rho": 0.1, .*\}, not null'),
        ({"gamma": 1}, "gamma = nothing, not 1"),
        ({"split": [2, 1]}, r"split = \[1, 2\], not \[2, 1\]"),
        ({"rounds": 19}, "rounds = 20, not 19"),
        ({"rounds": None}, "rounds = 20, not null"),
    ],
)
def test_resume_with_another_config_is_refused(run: RunDirectory, change: dict, complaint: str):
    with pytest.raises(InputError, match=complaint):
        RunDirectory.open(run.path, {**CONFIG, **change})
    assert RunDirectory.open(run.path).config == run.config


def test_resume_with_the_same_config_or_more_rounds(run: RunDirectory):
    assert RunDirectory.open(run.path, CONFIG) == RunDirectory.open(run.path) == run
    longer = RunDirectory.open(run.path, {**CONFIG, "rounds": 30})
    assert longer.config["rounds"] == RunDirectory.open(run.path).config["rounds"] == 30
    with pytest.raises(InputError, match="rounds = 30, not 20"):
        RunDirectory.open(run.path, CONFIG)


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(InputError, match="holds no run"):
            RunDirectory.open(path, CONFIG)


@pytest.mark.parametrize("content", ["", '{"rounds": 2', "[1, 2]", "7"])
def test_a_damaged_config_is_named(run: RunDirectory, content: str):
    (run.path / "config.json").write_text(content)
    with pytest.raises(DataError, match=r"config\.json cannot be read"):
        RunDirectory.open(run.path, CONFIG)


def test_records_come_back_with_null_for_what_json_cannot_say(run: RunDirectory):
    run.append({"round": 1, "accuracy": 0.1 + 0.2, "nll": math.nan, "more": {"list": (math.inf, 1e300)}})
    run.append({"round": 2, "text": "η\n"})
    assert run.history() == [
        {"round": 1, "accuracy": 0.1 + 0.2, "nll": None, "more": {"list": [None, 1e300]}},
        {"round": 2, "text": "η\n"},
    ]
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    refuse = lambda word: pytest.fail(f"{word} is not JSON")
    for line, record in zip(lines, run.history(), strict=True):
        stored = json.loads(line, parse_constant=refuse)
        assert stored == {**record, "run": run.digest, "sha256": stored["sha256"]}


@pytest.mark.parametrize("record", [{}, {"round": 1.5}, {"round": 1, "x": torch.tensor(1.0)}])
def test_what_is_no_record_is_refused(run: RunDirectory, record: dict):
    with pytest.raises(InputError, match="record = "):
        run.append(record)
    assert run.history() == []


def test_a_torn_last_line_is_left_out_and_rewind_removes_it(run: RunDirectory):
    metrics = run.path / "metrics.jsonl"
    for number in (1, 2, 3):
        run.append({"round": number, "nll": number / 7})
    whole = metrics.read_bytes()
    second = whole.index(b"\n") + 1
    for cut in range(second, whole.index(b"\n", second) + 1):
        metrics.write_bytes(whole[:cut])
        assert [record["round"] for record in run.history()] == [1]
    run.rewind(1)
    assert metrics.read_bytes() == whole[:second]
    run.append({"round": 2, "nll": 2 / 7})
    run.append({"round": 3, "nll": 3 / 7})
    assert metrics.read_bytes() == whole
    run.rewind(0)
    assert run.history() == []


@pytest.mark.parametrize("line", ["{", "[]", "7", "{}", '{"round": null}', ""])
def test_a_damaged_line_is_named(run: RunDirectory, line: str):
    run.append({"round": 1})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(f'{line}\n{{"round": 3}}\n')
    with pytest.raises(DataError, match=r"Line 2 of .*metrics\.jsonl"):
        run.history()


@pytest.mark.parametrize("kinds", [("memory", "disk"), ("disk", "memory")])
@pytest.mark.parametrize("shard", [1, 200, 1 << 25])
def test_a_snapshot_comes_back_bit_for_bit(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, str], shard: int
):
    """A shard of 1 byte holds one client, one of 200 bytes two (70 bytes each), the usual one all seven."""
    monkeypatch.setattr(checkpoint, "SHARD", shard)
    source, target = (tmp_path / f"store{i}" if kind == "disk" else None for i, kind in enumerate(kinds))
    store = filled(7, source)
    meta = {"x": 0.1 + 0.2, "y": [math.inf, None, "η"], "z": -0.0}
    run.save(3, SERVER, meta, store)

    files = {path.name for path in (run.path / "checkpoint-3").iterdir()}
    assert len(files) == 2 + {1: 7, 200: 4, 1 << 25: 1}[shard]
    for found, devices in ((run.load(), None), (RunDirectory.open(run.path, CONFIG).load(SERVER), SERVER)):
        assert found is not None
        assert (found.round, found.meta) == (3, meta)
        assert found.server.keys() == SERVER.keys()
        assert all(same(found.server[name], value) for name, value in SERVER.items())
        assert devices is None or list(found.server) == list(devices)
    fresh = create(ROW, 7, folder=target)
    run.restore(fresh)
    before, after = rows(store), rows(fresh)
    assert all(same(after[name], before[name]) for name in ROW)


def test_one_tensor_under_two_names(run: RunDirectory):
    value = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    run.save(0, {"prior": value, "lam_g": value, "part": value[1]}, {}, create({}, 1))
    found = run.load()
    assert found is not None
    assert found.server["prior"].equal(value)
    assert found.server["lam_g"].equal(value)
    assert found.server["part"].equal(value[1])


def test_a_method_without_client_state(run: RunDirectory):
    run.save(1, {}, {}, create({}, 4))
    assert {path.name for path in (run.path / "checkpoint-1").iterdir()} == {"server.safetensors", "meta.json"}
    run.restore(create({}, 4))
    with pytest.raises(InputError, match="has 4 clients with no tensors, this run 5 with no tensors"):
        run.restore(create({}, 5))


def test_only_the_last_snapshot_is_kept_and_nothing_of_the_user_removed(run: RunDirectory):
    (run.path / "checkpoint-1.bak").mkdir()
    for number in (1, 2, 11):
        run.save(number, {"x": torch.tensor(number)}, {}, create({}, 1))
    found = run.load()
    assert found is not None
    assert found.round == found.server["x"].item() == 11
    assert sorted(path.name for path in run.path.glob("checkpoint-*")) == ["checkpoint-1.bak", "checkpoint-11"]
    run.save(11, {"x": torch.tensor(0)}, {}, create({}, 1))
    assert run.load() == found  # a saved round is not written again
    with pytest.raises(InputError, match=r"round = 9, but .* has a checkpoint of round 11"):
        run.save(9, {}, {}, create({}, 1))


def test_an_unfinished_snapshot_does_not_stand_in_the_way(run: RunDirectory):
    (run.path / "checkpoint-1.tmp" / "folder").mkdir(parents=True)
    assert run.load() is None
    run.save(1, {}, {}, create({}, 1))
    assert {path.name for path in run.path.glob("checkpoint-*/*")} == {"server.safetensors", "meta.json"}


def test_meta_that_is_not_json_is_refused_and_leaves_nothing(run: RunDirectory):
    with pytest.raises(InputError, match="use only JSON values"):
        run.save(1, {}, {"x": torch.tensor(1.0)}, create({}, 1))
    assert not list(run.path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("row", "num_clients", "complaint"),
    [
        ({**ROW}, 8, "has 7 clients with half .*, this run 8 with half"),
        (
            {**ROW, "lam": torch.zeros(2, 4, dtype=torch.float64)},
            7,
            r"lam \[2, 3\] float64, .* this run 7 .* lam \[2, 4\] float64",
        ),
        ({**ROW, "lam": torch.zeros(2, 3, dtype=torch.float32)}, 7, r"this run 7 .* lam \[2, 3\] float32"),
        ({"lam": torch.zeros(2, 3, dtype=torch.float64)}, 7, r"this run 7 with lam \[2, 3\] float64: resume"),
    ],
)
def test_a_store_that_does_not_fit_is_refused(run: RunDirectory, row: Rows, num_clients: int, complaint: str):
    run.save(1, SERVER, {}, filled(7, None))
    with pytest.raises(InputError, match=complaint):
        run.restore(create(row, num_clients))


def test_a_server_that_does_not_fit_is_refused(run: RunDirectory):
    run.save(1, {"lam_g": torch.zeros(2, 178)}, {}, create({}, 1))
    with pytest.raises(InputError, match=r"lam_g \[2, 178\] float64, this run lam_g \[2, 99\] float64"):
        run.load({"lam_g": torch.zeros(2, 99)})
    with pytest.raises(InputError, match="this run no tensors"):
        run.load({})


def test_nothing_to_restore_from(run: RunDirectory):
    with pytest.raises(InputError, match="no checkpoint to restore from"):
        run.restore(create({}, 1))


@pytest.mark.parametrize("name", ["server.safetensors", "clients-00000.safetensors", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "flipped"])
def test_a_damaged_snapshot_is_named(run: RunDirectory, name: str, damage: str):
    run.save(1, SERVER, {}, filled(7, None))
    file = run.path / "checkpoint-1" / name
    content = file.read_bytes()
    file.unlink()
    if damage == "flipped":
        last = bytes([content[-1] ^ 0x80])  # no longer the end of a JSON text, nor the value that was saved
        file.write_bytes(content[:-1] + last)
    elif damage != "missing":
        file.write_bytes(content[:-1] if damage == "truncated" else b"")
    with pytest.raises(DataError, match=name):
        run.restore(filled(7, None)) if name.startswith("clients") else run.load()


@pytest.mark.parametrize("content", ["[]", "{}", '{"round": 1, "num_clients": 1, "rows": {}, "files": {}, "meta": {}}'])
def test_meta_of_another_kind_is_named(run: RunDirectory, content: str):
    run.save(1, {}, {}, create({}, 1))
    (run.path / "checkpoint-1" / "meta.json").write_text(content)
    with pytest.raises(DataError, match=r"meta\.json is damaged"):
        run.load()
