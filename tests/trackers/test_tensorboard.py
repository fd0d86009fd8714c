"""What TensorBoard reads back from the event files."""

import struct
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked import DIVERGING, CrashError, crash_after, numbers, same_config, stop_after, train

from fedual.errors import DivergedError
from fedual.trackers import tensorboard


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    return found.Reload()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = read(folder)
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def single(figures: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """As TensorBoard stores them, in 32 bits."""
    return {key: [(step, float(np.float32(value))) for step, value in points] for key, points in figures.items()}


def config(folder: Path) -> dict[str, str]:
    found = read(folder)
    (event,) = found.Tensors("config/text_summary")
    lines = event.tensor_proto.string_val[0].decode().splitlines()[2:]
    return {row[0].strip(): row[1].strip() for row in (line.strip("|").split(" | ") for line in lines)}


def test_every_figure_of_every_round_and_the_config(tmp_path: Path):
    run = train(tensorboard(tmp_path), description={"mine": {"site": "north", "list": [1, 2]}})
    assert scalars(tmp_path) == single(numbers(run))
    found = config(tmp_path)
    assert same_config(found, run)
    assert (found["mine.site"], found["mine.list"], found["training.batch_size"]) == ("north", "[1, 2]", "32")


def test_rounds_that_come_again_after_a_crash_are_there_once(tmp_path: Path):
    with pytest.raises(CrashError):
        train(tensorboard(tmp_path / "tb"), crash_after(2), out=tmp_path, rounds=3)
    assert [step for step, _ in scalars(tmp_path / "tb")["nll"]] == [1, 2]
    run = train(tensorboard(tmp_path / "tb"), out=tmp_path, rounds=3)
    assert scalars(tmp_path / "tb") == single(numbers(run))
    assert config(tmp_path / "tb")["rounds"] == "3"


def test_a_resumed_run_appends(tmp_path: Path):
    """Also for readers that know nothing of rounds that come again: no event has an old step."""
    train(tensorboard(tmp_path / "tb"), out=tmp_path, rounds=1)
    run = train(tensorboard(tmp_path / "tb"), out=tmp_path, rounds=3)
    second = max((tmp_path / "tb").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert [step for step, _ in scalars(second)["nll"]] == [2, 3]
    assert scalars(tmp_path / "tb") == single(numbers(run))


def test_rounds_from_before_it_was_tracked_are_handed_over(tmp_path: Path):
    train(out=tmp_path, rounds=1)
    run = train(tensorboard(tmp_path / "tb"), out=tmp_path, rounds=2)
    assert scalars(tmp_path / "tb") == single(numbers(run))


@pytest.mark.parametrize("how", ["ends", "is stopped by a later callback", "diverges", "crashes"])
def test_the_files_are_closed_however_the_run_ends(tmp_path: Path, how: str):
    tracker = tensorboard(tmp_path)
    if how == "ends":
        train(tracker)
    elif how == "diverges":
        with pytest.raises(DivergedError):
            train(tracker, method=DIVERGING)
    elif how == "crashes":
        with pytest.raises(CrashError):
            train(tracker, crash_after(1))
    else:
        assert len(train(tracker, stop_after(1)).history) == 1
    assert tracker.backend is None
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    while content:  # every record is whole: its length, a checksum, its bytes, a checksum
        (length,) = struct.unpack("<Q", content[:8])
        assert len(content) >= length + 16
        content = content[length + 16 :]


def test_one_tracker_serves_one_run_after_the_other(tmp_path: Path):
    tracker = tensorboard(tmp_path)
    train(tracker, rounds=3)
    run = train(tracker, rounds=2, seed=1)
    assert scalars(tmp_path) == single(numbers(run))


def test_a_file_of_the_same_second_is_read_before_the_new_one(tmp_path: Path):
    """Names hold whole seconds, then the host, the process and a count, in which 10 comes before 9."""
    train(tensorboard(tmp_path))
    (first,) = tmp_path.iterdir()
    first = first.rename(tmp_path / f"events.out.tfevents.{int(time.time()):010d}.zzz")
    train(tensorboard(tmp_path))
    assert first != max(tmp_path.iterdir())
