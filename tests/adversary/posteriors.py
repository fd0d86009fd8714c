"""Fuzzers for files of posteriors and fits: damaged, and with hostile content under a right checksum."""

import copy
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from adversary import mutations
from adversary.harness import Case, Changed
from fedual import models
from fedual.calibration import Calibration
from fedual.families import Diagonal, FixedPrecision, Full, Isotropic
from fedual.glm import fit
from fedual.glm.result import Fit
from fedual.networks import Network
from fedual.networks.targets import Targets
from fedual.posterior import Posterior
from fedual.rundir.checksum import parse, seal

Make = Callable[[Random], Case]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def network(loss: str = "cross_entropy") -> Network:
    torch.manual_seed(0)
    recipe = {"model": "mlp", "settings": {"inputs": 3, "hidden": [2], "outputs": 2}}
    targets = Targets(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])) if loss == "mse" else None
    return Network(models.build("mlp", **recipe["settings"]), scale=2.0, recipe=recipe, targets=targets)


def examples() -> list[Posterior]:
    """Posteriors of every family, calibrated and of a regression."""
    own = network()
    size = own.dim
    mean = own.initial()
    chosen = Calibration(0.5, 1.2, 10, 2, 0.5, 0.6, 0, ("a",))
    found = [Posterior(own, Diagonal(), Diagonal().natural(mean, 3.0), 0.5, calibration=chosen)]
    found.append(Posterior(own, Isotropic(1.0), Isotropic(1.0).natural(mean, 1.0)))
    fixed = FixedPrecision(torch.full((size,), 2.0))
    found.append(Posterior(own, fixed, fixed.natural(mean, 2.0)))
    regression = network("mse")
    noise = torch.tensor([0.2, 0.3], dtype=torch.float64)
    found.append(Posterior(regression, Diagonal(), Diagonal().natural(mean, 3.0), 1.0, "mse", noise))
    line = Network(models.build("mlp", inputs=3, hidden=[], outputs=1).double(), recipe={
        "model": "mlp", "settings": {"inputs": 3, "hidden": [], "outputs": 1}})  # fmt: skip
    full = Full()
    lam = full.natural(line.initial(), torch.eye(line.dim, dtype=torch.float64) * 4)
    found.append(Posterior(line, full, lam, 1.0, "mse", torch.tensor([0.5], dtype=torch.float64), noise_in_q=True))
    return found


def used(posterior: Posterior) -> list[Any]:
    """Everything that a user asks of a posterior."""
    x = torch.linspace(-2, 2, 12).reshape(4, 3)
    prediction = posterior.predict(x, 3, 0)
    seen = [value.tolist() for value in prediction if value is not None]
    table = posterior.summary()
    return [*seen, posterior.sample(2).tolist(), table.to_numpy().tolist(), str(posterior), posterior.about]


def sealed_posteriors(folder: Path) -> Make:
    """Other content of metadata and tensors under a right checksum: the seal is not a signature."""
    path = folder / "p.safetensors"
    stored = []
    for posterior in examples():
        posterior.save(path)
        stored.append(parse(path.read_bytes()))

    def make(rng: Random) -> Case:
        about, tensors = copy.deepcopy(rng.choice(stored))
        about.pop("sha256")
        for _ in range(rng.choice([1, 1, 2])):
            (_metadata if rng.random() < 0.7 else _tensors)(rng, about, tensors)
        try:
            path.write_bytes(seal(tensors, about))
        except Exception:  # safetensors stores no such thing
            return lambda: None
        model = rng.choice([None, None, None, lambda **_: network(), nn.Linear(3, 2)])
        return lambda: used(Posterior.load(path, model)) and None

    return make


def _metadata(rng: Random, about: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    name = rng.choice(sorted(about))
    if rng.random() < 0.1:
        about.pop(name)
    elif name == "format" or rng.random() < 0.1:
        about[name] = mutations.letters(rng, about[name]).encode(errors="replace").decode()
    else:
        try:
            text = mutations.as_json(rng, mutations.tree(rng, json.loads(about[name])))
        except (ValueError, RecursionError):  # it was damaged before
            text = mutations.letters(rng, about[name][:1000])
        about[name] = text.encode(errors="replace").decode()


def _tensors(rng: Random, about: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    name = rng.choice([*sorted(tensors), "lam"])
    tensor = tensors.get(name, torch.zeros(2, 2))
    kind = rng.randrange(7)
    if kind == 0:
        tensors.pop(name, None)
    elif kind == 1:
        tensors[rng.choice(["lam", "family.delta", "family.precision", "frozen.0.weight", "x"])] = tensor
        tensors.pop(name, None)
    elif kind == 2:
        tensors[name] = tensor.to(rng.choice(DTYPES))
    elif kind == 3:
        tensors[name] = tensor.reshape(-1)[: rng.randrange(4)].clone()
    elif kind == 4:
        turned = tensor.mT.contiguous() if tensor.dim() > 1 else tensor
        tensors[name] = rng.choice([tensor[None], tensor.flatten(), torch.zeros(0), torch.zeros(()), turned]).clone()
    elif kind == 5 and tensor.numel() and tensor.is_floating_point():
        flat = tensor.flatten().clone()
        odd = torch.tensor(rng.choice([math.nan, math.inf, -math.inf, 0.0, 1e300, -1e300, 1e-45]), dtype=torch.float64)
        flat[rng.randrange(len(flat))] = odd.to(flat.dtype)
        tensors[name] = flat.reshape(tensor.shape)
    else:
        tensors[name] = (tensor * rng.choice([-1, 0, 1e30, 1e-30])).to(tensor.dtype)


def flipped_posteriors(folder: Path) -> Make:
    """Damaged bytes: none may be accepted."""
    path = folder / "p.safetensors"
    contents = []
    for posterior in examples():
        posterior.save(path)
        contents.append(path.read_bytes())

    def make(rng: Random) -> Case:
        content = rng.choice(contents)
        other = (mutations.flipped if rng.random() < 0.6 else mutations.data)(rng, content)
        path.write_bytes(other)

        def case() -> bool:
            Posterior.load(path)
            if other not in contents:
                raise Changed("a damaged file was accepted")
            return True

        return case

    return make


# Regressions


def _fitted() -> Fit:
    rng = np.random.default_rng(0)
    tables = [{"age": rng.normal(size=20), "dead": rng.integers(0, 2, 20)} for _ in range(2)]
    return fit("dead ~ age", tables, family="binomial")


def sealed_fits(folder: Path) -> Make:
    """fit.json with other content under a right checksum."""
    path = folder / "fit.json"
    _fitted().save(path)
    whole = json.loads(path.read_bytes())

    def make(rng: Random) -> Case:
        text = mutations.as_json(rng, mutations.tree(rng, json.loads(whole["fit"])))
        text = text.encode(errors="replace").decode()
        digest = hashlib.sha256(text.encode()).hexdigest()
        other = {**whole, "fit": text, "sha256": digest}
        if rng.random() < 0.1:
            other = mutations.tree(rng, other)
        path.write_bytes(json.dumps(other).encode(errors="replace"))

        def case() -> None:
            found = Fit.load(path)
            str(found.summary())
            found.to_csv(folder / "table.csv")
            repr(found)

        return case

    return make


def flipped_fits(folder: Path) -> Make:
    """fit.json with damaged bytes: what is accepted must be the same fit."""
    path = folder / "fit.json"
    _fitted().save(path)
    content, intact = path.read_bytes(), str(Fit.load(path).summary())

    def make(rng: Random) -> Case:
        path.write_bytes((mutations.flipped if rng.random() < 0.6 else mutations.data)(rng, content))

        def case() -> bool:
            if str(Fit.load(path).summary()) != intact:
                raise Changed("a damaged fit was accepted")
            return True  # white space outside the sealed text

        return case

    return make


FUZZERS = {
    "posteriors-sealed": sealed_posteriors,
    "posteriors-flipped": flipped_posteriors,
    "fits-sealed": sealed_fits,
    "fits-flipped": flipped_fits,
}
