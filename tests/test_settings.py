"""Settings of a run: each has its type from one place, and a new one reaches everything from there."""

import json
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import sealed
import torch
from federation import Federation  # pyright: ignore[reportMissingImports]  # of tests/flower
from own_files import (  # pyright: ignore[reportMissingImports]  # of tests/scenarios
    chosen,
    patients,
    scenario,
    write,
)

from fedual import settings
from fedual.errors import InputError
from fedual.flower import wire
from fedual.run import Run
from fedual.rundir import RunDirectory
from fedual.scenarios import load
from fedual.scenarios.federation import execute
from fedual.settings import SECTIONS, Evaluation, Execution, LocalTraining


@pytest.mark.parametrize("section", [LocalTraining(batch_size=8, rest=2.5), Execution(chunk=3), Evaluation(samples=0)])
def test_settings_come_back_from_json(section: Any):
    again = type(section).from_dict(json.loads(json.dumps(section.to_dict())))
    assert again == section


def test_settings_that_do_not_exist_or_are_of_another_version_are_refused():
    with pytest.raises(InputError, match="LocalTraining has no setting 'batchsize': did you mean 'batch_size'"):
        LocalTraining.from_dict({"version": 1, "batchsize": 8})
    with pytest.raises(InputError, match=r"settings of LocalTraining have version 99, this fedual reads 1"):
        LocalTraining.from_dict({"version": 99})


def test_no_two_sections_share_a_name():
    names = [own.name for section in SECTIONS.values() for own in fields(section)]
    assert len(set(names)) == len(names)


class TestNewOption:
    """A field that is added to `LocalTraining` reaches scenarios, the command line, config.json and Flower."""

    @pytest.fixture(autouse=True)
    def _added(self, monkeypatch: pytest.MonkeyPatch):
        added = [("patience", int, field(default=3)), ("order_by", Literal["size", "name"], field(default="size"))]
        extended = make_dataclass("LocalTraining", added, bases=(LocalTraining,), frozen=True)
        monkeypatch.setattr(settings, "LocalTraining", extended)
        monkeypatch.setitem(settings.SECTIONS, "training", extended)

    @pytest.fixture
    def data(self, tmp_path: Path) -> str:
        write(tmp_path / "all.csv", chosen(patients(), "age", "dose", "label"))
        return 'file = "all.csv"\ntarget = "label"\ntest_fraction = 0.2'

    def run(self, path: Path, *sets: str, out: Path, resume: bool = False) -> Run:
        return execute(load(path, sets=sets), 0, device="cpu", out=out, resume=resume)

    def test_a_scenario_takes_it_with_its_type(self, tmp_path: Path, data: str):
        path = scenario(tmp_path, data, train='patience = 5\norder_by = "name"')
        assert self.run(path, out=tmp_path / "run").local.patience == 5  # type: ignore[attr-defined]
        for line, message in (
            ('patience = "long"', "patience = 'long': it must be a whole number"),
            ("patience = true", "patience = True: it must be a whole number"),
            ("order_by = 3", "order_by = 3: it must be a text"),
            ("patiense = 3", r"unknown setting of \[train\] 'patiense': did you mean 'patience'"),
        ):
            with pytest.raises(InputError, match=message):
                load(scenario(tmp_path, data, train=line))
        for line, message in (
            ("patience = 0", "patience = 0: it must be a whole number of at least 1"),
            ('order_by = "age"', "order_by = 'age': choose size, name"),
        ):
            with pytest.raises(InputError, match=message):
                self.run(scenario(tmp_path, data, train=line), out=tmp_path / "none")

    def test_it_is_set_by_hand_and_resumed_with(self, tmp_path: Path, data: str):
        path, out = scenario(tmp_path, data), tmp_path / "run"
        self.run(path, "rounds=1", "train.patience=4", "order_by=name", out=out)
        training = RunDirectory.open(out).config["training"]
        assert (training["patience"], training["order_by"]) == (4, "name")
        with pytest.raises(InputError, match=r"holds a run with .*train\.patience = 4, not 5: resume"):
            self.run(path, "patience=5", "order_by=name", out=out, resume=True)
        assert len(self.run(path, "patience=4", "order_by=name", out=out, resume=True).history) == 2

    def test_runs_from_before_it_are_resumed_with_its_default(self, tmp_path: Path, data: str):
        path, out = scenario(tmp_path, data), tmp_path / "run"
        self.run(path, "rounds=1", out=out)
        config = sealed.content(out / "config.json")
        del config["training"]["patience"]
        sealed.age(out / "config.json", config)
        assert len(self.run(path, out=out, resume=True).history) == 2
        assert RunDirectory.open(out).config["training"]["patience"] == 3

    def test_flower_sends_it(self, tmp_path: Path):
        federation = Federation(tmp_path)
        federation.run(1, patience=7)
        sent = [wire.config_of(message.content) for message in federation.grid.sent]
        training = [json.loads(config["train"]) for config in sent if "train" in config]
        assert [one["patience"] for one in training] == [7, 7, 7]
        assert torch.isfinite(federation.ledger.server.lam_g).all()
