"""Fuzzers for scenario files and `--set`: damaged TOML, other values, and settings that nobody would choose."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from adversary import mutations
from adversary.folders import SCENARIO
from adversary.harness import Case
from fedual import methods, settings
from fedual.rundir.jsonable import dumps
from fedual.scenarios import load, names
from fedual.scenarios.federation import execute
from fedual.scenarios.scenario import read

Make = Callable[[Random], Case]
LARGE = """
title = "all there is"
[data]
name = "digits"
fraction = 0.5
[split]
kind = "dirichlet"
clients = 5
class_concentration = 0.5
client_concentration = 1.0
[model]
name = "mlp"
inputs = 64
hidden = [4, 3]
outputs = 10
activation = "relu"
[train]
rounds = 2
batch_size = 8
local_epochs = 1
participation = 0.5
noise = "shared"
posterior = "bayes"
[method.ivon-admm]
lr = 0.1
rho = 0.5
[method.ivon-admm.train]
local_steps = 2
[method.fedavg]
lr = 0.1
[preset.paper.train]
rounds = 3
[sweep.ivon-admm]
lr = [0.1, 0.2]
"""
KEYS = ["lr", "rho", "tau", "train.rounds", "train.batch_size", "train.local_epochs", "split.clients", "data.fraction",
        "model.hidden", "model.inputs", "model.name", "split.kind", "train.noise", "delta", "gamma", "samples", "seed",
        "data.name", "data.file", "data.sites", "train.participation", "train.chunk", "x", ""]  # fmt: skip
VALUES = ["1e9", "10000000000", "-1", "0", "nan", "inf", "1e400", "true", "[]", "[1,2]", "{a=1}", "'a'", "a\nb", "é",
          "\"\\u0000\"", "2020-01-01", "1e-300", "9" * 5000, "[" * 3000, "{a=" * 2000, "\x1b[2J", "../../x",
          "/etc/passwd", "None"]  # fmt: skip


def toml(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).replace("inf", "inf") if value == value else "nan"
    return _quoted(value) if isinstance(value, str) else "''" if value is None else str(value)


def _quoted(text: str) -> str:
    return '"' + "".join(letter if letter.isprintable() and letter not in '"\\' else f"\\U{ord(letter) % 0xD800:08x}"
                         for letter in text) + '"'  # fmt: skip


def _key(key: str) -> str:
    return _quoted(str(key))


def _document(rng: Random, text: str) -> str:
    """The same file with another tree."""
    other = mutations.tree(rng, tomllib.loads(text))
    if not isinstance(other, dict):
        return toml(other)
    return "\n".join(f"{_key(key)} = {toml(value)}" for key, value in other.items())


def scenarios(folder: Path) -> Make:
    """Files: damaged, with other trees, and with settings from `--set`."""
    path = folder / "mine.toml"
    shipped = [LARGE] * 4 + [SCENARIO.format(target="'label'", outputs=3, loss="'cross_entropy'", rounds=2)]
    from importlib.resources import files

    shipped += [(files("fedual.scenarios") / f"{name}.toml").read_text() for name in names()]

    def make(rng: Random) -> Case:
        text = rng.choice(shipped)
        kind = rng.random()
        content = text.encode()
        if kind < 0.35:
            content = mutations.data(rng, content, [other.encode() for other in shipped])
        elif kind < 0.8:
            content = _document(rng, text).encode(errors="replace")
        elif kind < 0.82:
            content += b"\nx = " + rng.choice([b"[" * 5000, b"{a=" * 5000, b"9" * 10**4, b'"""' + b"a" * 10**6])
        path.write_bytes(content)
        sets = [f"{rng.choice(KEYS)}={rng.choice(VALUES)}" for _ in range(rng.choice([0, 0, 1, 2]))]
        if kind > 0.95:
            sets.append(mutations.letters(rng, "train.batch_size=16"))
        preset, method = (
            rng.choice([None, None, "paper", "default", "x"]),
            rng.choice([*methods.NAMES, "ivon-admm", "x"]),
        )

        def case() -> None:
            read(path)
            found = load(path, preset=preset, sets=sets, method=method)
            found.spec()
            settings.split(found.train)
            dumps(found.describe(), "config")

        return case

    return make


def executed(folder: Path) -> Make:
    """Settings that are valid one by one, run on a tiny federation: refused before work starts, or run."""
    path = folder / "mine.toml"
    numbers = [
        0,
        1,
        2,
        7,
        100,
        10**4,
        10**9,
        10**12,
        2**31,
        2**63,
        2**64,
        -1,
        0.5,
        1e-9,
        1e-300,
        1e9,
        1e300,
        True,
        "a",
        [1],
    ]
    keys = ["train.batch_size", "train.local_steps", "train.samples", "train.decay", "train.schedule", "train.order",
            "train.participation", "train.evaluate_every", "train.chunk", "train.noise", "train.precision",
            "train.client_state", "split.clients", "split.class_concentration", "split.client_concentration",
            "data.fraction", "model.hidden", "model.inputs", "model.outputs", "lr", "rho", "tau", "gamma", "delta",
            "h0", "clip", "beta1", "beta2", "samples", "damping", "train.posterior", "train.loss"]  # fmt: skip
    words = {"noise": ["shared", "shared-fixed", "independent"], "order": ["shared", "shared-fixed", "independent"],
             "schedule": ["harmonic", "cosine", "constant"], "posterior": ["calibrated", "bayes", "point"],
             "loss": ["mse", "cross_entropy", "l1"]}  # fmt: skip
    small = LARGE.replace("fraction = 0.5", "fraction = 0.02").replace("hidden = [4, 3]", "hidden = []")
    small = (
        small.replace("rounds = 2", "rounds = 1")
        .replace("inputs = 64", "inputs = 64")
        .replace("clients = 5", "clients = 2")
    )
    path.write_text(small)
    known = [name for name in methods.NAMES if name not in ("newton",)]

    def make(rng: Random) -> Case:
        sets = []
        for _ in range(rng.choice([1, 1, 2])):
            key = rng.choice(keys)
            choices = words.get(key.split(".")[-1], numbers)
            sets.append(f"{key}={toml(rng.choice(choices if rng.random() < 0.8 else numbers))}")
        method = rng.choice(["ivon-admm", *known])

        def case() -> None:
            found = load(path, sets=sets, method=method)
            if isinstance(found.train.get("local_steps"), int) and found.train["local_steps"] > 100:
                return  # honest work
            execute(found, 0, device="cpu", engine="sequential")

        return case

    return make


FUZZERS = {"scenarios": scenarios, "scenarios-executed": executed}
