"""The calls that wandb gets, by a stand-in with the signatures of its documentation (0.29)."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from tracked import DIVERGING, CrashError, crash_after, numbers, same_config, train

from fedual.errors import DivergedError
from fedual.trackers import wandb


class WandbRun:
    """A run that remembers, and refuses steps that do not grow, as wandb does."""

    def __init__(self, id: str, given: dict[str, Any], starting_step: int):
        self.id, self.given, self.starting_step = id, given, starting_step
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.exit_code: int | None = None

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert self.exit_code is None, "it was finished"
        assert step is not None
        assert step >= self.starting_step
        assert not self.logged or step > self.logged[-1][0]
        self.logged.append((step, data))

    def finish(self, exit_code: int | None = None) -> None:
        self.exit_code = exit_code or 0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[WandbRun]:
    """All runs that were started; online, one that is resumed knows how far it was."""
    made: list[WandbRun] = []

    def init(
        *,
        project: str | None = None,
        dir: Any = None,
        id: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        mode: Literal["online", "offline", "disabled", "shared"] | None = None,
        resume: bool | Literal["allow", "never", "must", "auto"] | None = None,
    ) -> WandbRun:
        before = [step for run in made if run.id == id for step, _ in run.logged]
        start = max(before) + 1 if before and mode == "online" else 0
        given = {"project": project, "dir": dir, "name": name, "config": config, "mode": mode, "resume": resume}
        made.append(WandbRun(id or f"id{len(made)}", given, start))
        return made[-1]

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def points(*runs: WandbRun) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for step, data in [entry for run in runs for entry in run.logged]:
        for key, value in data.items():
            found.setdefault(key, []).append((step, value))
    return found


def test_every_figure_of_every_round_and_the_config(tmp_path: Path, runs: list[WandbRun]):
    run = train(wandb("mine"), out=tmp_path / "run", description={"note": {"site": "north"}})
    (found,) = runs
    config = found.given["config"]
    assert same_config(config, run)
    assert (config["note.site"], config["training.batch_size"]) == ("north", 32)
    expected = {"project": "mine", "dir": tmp_path / "run", "name": "run", "mode": "offline", "resume": None}
    assert found.given == expected | {"config": config}
    assert points(found) == numbers(run)
    assert found.exit_code == 0


@pytest.mark.parametrize(("mode", "steps"), [("offline", [2, 3]), ("online", [3])])
def test_a_resumed_run_goes_on_under_its_name(
    tmp_path: Path, runs: list[WandbRun], mode: Literal["offline", "online"], steps: list[int]
):
    """Round 2 was logged, but not saved: offline, where wandb does not look back, it is logged in the new file."""
    with pytest.raises(CrashError):
        train(wandb(mode=mode), crash_after(2), out=tmp_path, rounds=3)
    train(wandb(mode=mode), out=tmp_path, rounds=3)
    first, second = runs
    assert first.exit_code == 1
    assert second.id == first.id
    assert second.given["resume"] == ("allow" if mode == "online" else None)
    assert [step for step, _ in second.logged] == steps
    assert second.exit_code == 0


def test_rounds_from_before_it_was_tracked_are_handed_over(tmp_path: Path, runs: list[WandbRun]):
    train(out=tmp_path, rounds=1)
    run = train(wandb(), out=tmp_path, rounds=2)
    assert points(*runs) == numbers(run)


def test_a_run_that_diverges_failed(runs: list[WandbRun]):
    with pytest.raises(DivergedError):
        train(wandb(), method=DIVERGING)
    assert (runs[0].logged, runs[0].exit_code, runs[0].given["dir"]) == ([], 1, None)
