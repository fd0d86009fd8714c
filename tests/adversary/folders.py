"""Fuzzers for the folders of runs: damaged and tampered, then reported on, predicted with, and resumed."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from adversary import mutations
from adversary.harness import Case, Changed
from fedual import fitting, report
from fedual.metrics import Prediction
from fedual.predict import choose_threshold, open_run, read_inputs, warnings_for
from fedual.rundir.checksum import parse, seal
from fedual.scenarios import load
from fedual.scenarios.federation import materialise
from fedual.settings import Evaluation, Execution, LocalTraining

Make = Callable[[Random], Case]
SCENARIO = """
title = "patients"
[data]
file = "patients.csv"
target = {target}
standardise = true
test_fraction = 0.25
[split]
kind = "column"
column = "site"
[model]
name = "mlp"
hidden = [2]
inputs = 4
outputs = {outputs}
[train]
rounds = {rounds}
batch_size = 8
local_epochs = 1
loss = {loss}
"""
VISIBLE = ("environment.json", "report.html", "diverged.txt")
"""Files that no result depends on; they say where a run was, and why it stopped."""
ROUNDS = 2


class Example:
    """A finished run, a run that lacks a round, and inputs to predict for.

    Args:
        folder: For its files.
        loss: "cross_entropy" or "mse".
    """

    def __init__(self, folder: Path, loss: str):
        self.folder, self.loss = folder / loss, loss
        self.folder.mkdir()
        rng = Random(0)
        rows = [
            {"age": rng.gauss(50, 9), "colour": rng.choice(["red", "green", "blue"]), "site": rng.choice(["n", "e"]),
             "label": rng.choice(["mild", "none", "severe"]), "days": rng.gauss(0, 1)} for _ in range(48)
        ]  # fmt: skip
        target = "label" if loss == "cross_entropy" else "days"
        drop = ({"label", "days"} - {target}).pop()
        with (self.folder / "patients.csv").open("w", newline="") as file:
            names = [name for name in rows[0] if name != drop]
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        told = {"target": json.dumps(target), "outputs": 3 if loss == "cross_entropy" else 1, "loss": json.dumps(loss)}
        self.scenario = self.folder / "patients.toml"
        self.scenario.write_text(SCENARIO.format(rounds=ROUNDS, **told))
        self.finished, self.short = self.folder / "finished", self.folder / "short"
        self.seen: dict[str, Any] = {}
        torch.manual_seed(0)
        self.problem = materialise(load(self.scenario), 0)
        self.run(self.finished, ROUNDS, False)
        self.run(self.short, ROUNDS - 1, False)
        self.seen = {"predict": self.predict(self.finished), "resume": self.resume(self._copy())}

    def run(self, out: Path, rounds: int, resume: bool) -> Any:
        model, clients, test = self.problem
        local = LocalTraining(batch_size=8, local_epochs=1)
        how = Execution(device="cpu", engine="sequential", progress=False)
        evaluation = Evaluation(samples=3)
        return fitting.fit(
            model, clients, "ivon-admm", rounds, test=test, loss=self.loss, posterior="bayes", local=local,
            execution=how, evaluation=evaluation, out=out, resume=resume,
        )  # fmt: skip

    def _copy(self) -> Path:
        to = self.folder / "copy"
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.short, to)
        return to

    def resume(self, path: Path) -> Any:
        """The posterior and the figures of the run when it has ended."""
        done = self.run(path, ROUNDS, True)
        drop = ("seconds", "evaluation_seconds", "calibration_seconds")
        kept = [{key: value for key, value in record.items() if key not in drop} for record in done.history]
        return json.dumps([done.posterior.lam.tolist(), kept])

    def predict(self, path: Path) -> Any:
        """All that a prediction shows."""
        run = open_run(path)
        inputs = read_inputs(self.folder / "patients.csv", run)
        warnings = warnings_for(inputs, run).sentences()
        found = run.posterior.predict(inputs.x, run.samples, run.seed)
        told = [None if part is None else part.tolist() for part in found]
        sure = choose_threshold(found.entropy, run.test, 0.9) if isinstance(found, Prediction) else None
        return json.dumps([told, warnings, sure, run.classes, run.posterior.about])

    def report(self, path: Path) -> None:
        report.write([path], path / "report.html")


def _examples(folder: Path) -> list[Example]:
    return [Example(folder, loss) for loss in ("cross_entropy", "mse")]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", ".lock"))


def tampered(folder: Path) -> Make:
    """Other content of valid syntax in any file, under a right checksum where the file itself has one."""
    examples = _examples(folder)

    def make(rng: Random) -> Case:
        example = rng.choice(examples)
        action = rng.choice(["report", "report", "predict", "predict", "predict", "resume"])
        own = example.folder / "tampered"
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(example.short if action == "resume" else example.finished, own)
        path = rng.choice(_files(own))
        path.write_bytes(_other(rng, path))

        def case() -> None:
            getattr(example, action)(own)

        return case

    return make


def _other(rng: Random, path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".json":
        return mutations.as_json(rng, mutations.tree(rng, json.loads(content))).encode(errors="replace")
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in content.splitlines()]
        place = rng.randrange(len(lines))
        lines[place] = mutations.tree(rng, lines[place])
        return "".join(mutations.as_json(rng, line) + "\n" for line in lines).encode(errors="replace")
    if path.suffix == ".safetensors":
        about, tensors = parse(content)
        name = rng.choice(sorted(tensors))
        tensors[name] = rng.choice([tensors[name][:1], tensors[name].double() * rng.choice([-1, 1e30]),
                                    tensors[name].flatten(), torch.zeros(3), tensors[name].long()]).clone()  # fmt: skip
        if rng.random() < 0.3:
            tensors[rng.choice(["x", "labels", "lam"])] = tensors.pop(name)
        return seal(tensors, {key: value for key, value in about.items() if key != "sha256"})
    return mutations.data(rng, content)


def flipped(folder: Path) -> Make:
    """One bit, or some bytes: what is accepted must give the same predictions, and the same run when resumed."""
    examples = _examples(folder)

    def make(rng: Random) -> Case:
        example = rng.choice(examples)
        action = rng.choice(["report", "predict", "predict", "predict", "predict", "resume"])
        own = example.folder / "flipped"
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(example.short if action == "resume" else example.finished, own)
        path = rng.choice([path for path in _files(own) if path.name not in VISIBLE])
        content = path.read_bytes()
        path.write_bytes((mutations.flipped if rng.random() < 0.7 else mutations.data)(rng, content or b"\n"))

        def case() -> bool | None:
            found = getattr(example, action)(own)
            if action == "report":
                return None
            if found != example.seen[action]:
                raise Changed(f"{path.relative_to(own)} was damaged, and {action} gave another result")
            return True

        return case

    return make


FUZZERS = {"folders-tampered": tampered, "folders-flipped": flipped}
