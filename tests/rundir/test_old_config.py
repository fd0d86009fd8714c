"""Folders of fedual 0.1, whose config.json is flat and has the method as a text: they are read and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import sealed
import torch
from flat import fit
from torch import nn

from fedual import defaults, methods, report
from fedual.algorithm import Method
from fedual.defaults import Federation, resolve
from fedual.errors import DataError, InputError
from fedual.predict import open_run
from fedual.run import Run
from fedual.rundir import RunDirectory
from fedual.rundir.old_config import CONFIG_VERSION, converted, matched
from fedual.settings import Evaluation, Execution, LocalTraining

ROOT = Path(__file__).parents[2]
OLD = json.loads(Path(__file__).with_name("old_config.json").read_text())
ADAM = "optimiser='adam', momentum=0.0, beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.0, max_norm=None"
IVON = (
    "Method(family=Diagonal(), solver=IVON(lr={lr}/λS, samples=1, h0=0.7·RMS(W), beta1=0.9, beta2=0.9998, "
    "clip={clip}·a, weight_decay={decay}·fan_in·min(1, 4Var(x)), debias=True, hold=0.25), {rest}, "
    "mean_loss=False, delta=1.0{more})"
)
ADMM = "dual=Natural(gamma={gamma}), server=Blend(alpha=None), rho=6.666666666666666, tau={tau}"
MORE = ", momentum=0.3, unit=22.333333333333332"
SHORT = IVON.format(
    lr="2e+07",
    clip=0.06,
    decay=0.00149254,
    rest=ADMM.format(gamma=0.6666666666666666, tau=5.36e-07),
    more=MORE,
)
TEXTS: list[tuple[str, float, str]] = [  # method, steps in a round, and what fedual 0.1 wrote for SITES
    ("ivon-admm", 67 / 12, SHORT),
    (
        "ivon-admm",
        40 * 67 / 3,
        IVON.format(
            lr="1.00245e+06",
            clip=0.0134328,
            decay=0.00666667,
            rest=ADMM.format(gamma=0.14925373134328357, tau=1.0693795555555555e-05),
            more=MORE,
        ),
    ),
    (
        "ivon-pvi",
        67 / 12,
        IVON.format(
            lr="2e+07",
            clip=0.06,
            decay=0.00149254,
            rest="dual=Natural(gamma=0.3333333333333333), server=Blend(alpha=1.0), rho=1.0, tau=3.573333333333333e-06",
            more="",
        ),
    ),
    (
        "fedadmm",
        5.0,
        f"Method(family=Isotropic(delta=1.0), solver=SGD(lr=0.4/S, {ADAM}), dual=Natural(gamma=0.01), "
        "server=Track(step=1.0), rho=0.01, tau=1.0, mean_loss=True, delta=1.0)",
    ),
    (
        "fedlap-cov",
        3.0,
        f"Method(family=Diagonal(), solver=Laplace(lr=0.4/S, {ADAM}), dual=Natural(gamma=0.1), "
        "server=Blend(alpha=1.0), rho=1.0, tau=1.0, mean_loss=False, delta=1.0)",
    ),
]


def sites() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 4, generator=draw), torch.randint(3, (n,), generator=draw)) for n in (30, 12, 25)]


def train(rounds: int, out: Path | None = None, **options: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    given = {"batch_size": 4, "local_epochs": 1, "samples": 3, "device": "cpu", "test": sites()[0], "seed": 3}
    return fit(model, sites(), "ivon-admm", rounds, out=out, resume=out is not None, **{**given, **options})


def age(folder: Path) -> None:
    """Write the config of a folder as fedual 0.1 did."""
    config = sealed.content(folder / "config.json")
    sections = [config.pop(name) for name in ("training", "execution", "evaluation")]
    flat = {key: value for section in sections for key, value in section.items()}
    for key in ("version", "rest", "device", "client_state", "progress"):
        flat.pop(key, None)
    del config["version"]
    (folder / "config.json").write_text(json.dumps({**config, **flat, "method": SHORT}))


class TestConversion:
    def test_settings_are_in_their_sections(self):
        config = converted(OLD)
        assert config["version"] == CONFIG_VERSION
        training = LocalTraining(batch_size=32, local_epochs=10, schedule="cosine")
        assert LocalTraining.from_dict(config["training"]) == training
        assert Execution.from_dict(config["execution"]) == Execution(chunk=10, compile=False)
        assert Evaluation.from_dict(config["evaluation"]) == Evaluation()
        own = {"version", "method", "training", "execution", "evaluation"}
        assert {key: value for key, value in config.items() if key not in own} == {
            key: OLD[key] for key in config.keys() - own
        }

    def test_the_method_is_the_one_of_its_settings(self):
        method = Method.from_dict(converted(OLD)["method"])
        assert method.name == "ivon-admm"
        assert method == methods.build("ivon-admm", **OLD["scenario"]["settings"], weight_decay=0.0, hold=0.0)

    @pytest.mark.parametrize(("name", "steps", "text"), TEXTS)
    def test_rules_are_those_of_today(self, name: str, steps: float, text: str, monkeypatch: pytest.MonkeyPatch):
        """To the six digits that were written, also where rounds are long; few examples had no τ of their own then."""
        monkeypatch.setattr(defaults, "FEW", 0)
        old = converted({"method": text, "clients": 3, "examples": 67.0, "local_steps": steps})
        today = resolve(name, Federation(3, 67.0, 1.0, steps)).to_dict()
        assert matched(old, {"method": today})["method"] == today
        other = {**today, "rho": 1.001 * today["rho"]}
        assert matched(old, {"method": other})["method"] == old["method"]
        Method.from_dict(old["method"])

    def test_every_record_and_run_of_the_results_is_read(self):
        lines = [line for path in (ROOT / "results").rglob("*.jsonl") for line in path.read_text().splitlines()]
        texts = [*lines, *(path.read_text() for path in (ROOT / "results").rglob("*.json"))]
        documents = [found for text in texts if isinstance(found := json.loads(text), dict)]
        configs = [document["config"] for document in documents if isinstance(document.get("config"), dict)]
        for config in map(converted, configs):
            Method.from_dict(config["method"])
            LocalTraining.from_dict(config["training"])
            Evaluation.from_dict(config["evaluation"])
        assert len(configs) > 300

    def test_today_s_configs_stay_and_others_are_refused(self):
        config = {"version": CONFIG_VERSION, "method": SHORT}
        assert converted(config) is config
        with pytest.raises(DataError, match="config of version 99, this fedual reads up to 2: update it"):
            converted({"version": 99})

    @pytest.mark.parametrize("text", ["Method(family=", "Method(rho=open('x'))", "Method(rho=1/K, solver=SGD())"])
    def test_a_method_that_cannot_be_taken_apart_is_refused_and_never_run(self, text: str):
        with pytest.raises(DataError, match="The method of an old run cannot be read"):
            converted({"method": text})

    def test_rules_that_waited_for_the_sites_of_flower_are_left_out(self):
        old = {"engine": "flower", "method": "Method(rho=20/K)", "rounds": 3, "batch_size": 8}
        config = converted(old)
        assert "method" not in config
        assert "execution" not in config
        assert (config["engine"], config["training"]["batch_size"]) == ("flower", 8)


class TestFolder:
    def test_report(self, tmp_path: Path):
        (tmp_path / "config.json").write_text(json.dumps(OLD))
        (tmp_path / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5, "nll": 1.5}\n')
        page = report.write([tmp_path], None).read_text()
        for words in ("ivon-admm", "τ = 0.001", OLD["scenario"]["title"], "cosine"):
            assert words in page

    def test_predict(self, tmp_path: Path):
        run = train(1, tmp_path)
        age(tmp_path)
        finished = open_run(tmp_path, run.losses.network.model)
        assert finished.samples == 3
        assert finished.seed == run.losses.draws.evaluation(1)

    def test_resume(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """From six digits of a rule's number the same run goes on, bit for bit; another one is refused by name."""
        monkeypatch.setattr(defaults, "FEW", 0)  # few examples had no τ of their own then
        whole = train(2)
        train(1, tmp_path)
        age(tmp_path)
        for options, message in (
            ({"batch_size": 5}, r"training\.batch_size = 4, not 5"),
            ({"chunk": 1}, r"execution\.chunk = 3, not 1"),
            ({"samples": 2}, r"evaluation\.samples = 3, not 2"),
            ({"seed": 4}, r"seed = 3, not 4"),
        ):
            with pytest.raises(InputError, match=message):
                train(2, tmp_path, **options)
        assert torch.equal(train(2, tmp_path).posterior.lam, whole.posterior.lam)
        config = RunDirectory.open(tmp_path).config
        assert config["version"] == CONFIG_VERSION
        assert config["method"] == whole.method.to_dict()

    def test_resume_elsewhere(self, tmp_path: Path):
        """Where rows are kept and what is shown has no influence on the result."""
        train(1, tmp_path, client_state="memory", progress=False)
        assert len(train(2, tmp_path, client_state="disk", progress=None).history) == 2

    def test_a_scenario_s_zeros_that_were_not_written_are_no_difference(self, tmp_path: Path):
        new = converted(OLD)
        new["scenario"] = OLD["scenario"] | {"settings": OLD["scenario"]["settings"] | {"hold": 0.0}}
        (tmp_path / "config.json").write_text(json.dumps(OLD))
        assert RunDirectory.open(tmp_path, new).config == new
