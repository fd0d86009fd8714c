"""Fuzzers for state that is kept: a site's vault, a server's ledger, and a site's ledger of regressions."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from federation import Federation

from adversary import mutations
from adversary.clock import hurried
from adversary.harness import Case, Changed
from adversary.posteriors import _tensors
from fedual.flower.ledger import Ledger
from fedual.flower.vault import opened
from fedual.glm import ledger as glm_ledger
from fedual.rundir.checksum import parse, seal

Make = Callable[[Random], Case]


def vaults(folder: Path) -> Make:
    """A damaged vault is refused as lost; nothing else may come out of it."""
    with opened(folder / "site", "e", "1") as vault:
        vault.settle(None)
        vault.put("a.1.1", {"eta": torch.arange(6.0).reshape(2, 3), "solver.step": torch.tensor(3)})
    with opened(folder / "site", "e", "1") as vault:
        vault.settle("a.1.1")
        vault.put("a.1.2", {"eta": torch.arange(6.0).reshape(2, 3) + 1, "solver.step": torch.tensor(4)})
    (path,) = (folder / "site").glob("*.safetensors")
    content = path.read_bytes()

    def make(rng: Random) -> Case:
        other = (mutations.flipped if rng.random() < 0.5 else mutations.data)(rng, content)
        path.write_bytes(other)

        def case() -> bool:
            with opened(folder / "site", "e", "1") as vault:
                vault.settle(rng.choice(["a.1.1", "a.1.2", None]))
            if other != content:
                raise Changed("a damaged vault was accepted")
            return True

        return case

    return make


def sealed_vaults(folder: Path) -> Make:
    """A vault with other content under a right checksum."""
    with opened(folder / "site", "e", "1") as vault:
        vault.settle(None)
        vault.put("a.1.1", {"eta": torch.arange(6.0).reshape(2, 3), "solver.step": torch.tensor(3)})
    (path,) = (folder / "site").glob("*.safetensors")
    about, tensors = parse(path.read_bytes())

    def make(rng: Random) -> Case:
        path.write_bytes(resealed(rng, about, tensors))

        def case() -> None:
            with opened(folder / "site", "e", "1") as vault:
                rows = vault.settle(rng.choice(["a.1.1", None]))
                vault.put("a.1.2", rows or {"eta": torch.zeros(2, 3)})

        return case

    return make


def resealed(rng: Random, about: dict[str, str], tensors: dict[str, torch.Tensor]) -> bytes:
    """Other metadata or tensors under a right checksum."""
    about, tensors = copy.deepcopy((about, tensors))
    about.pop("sha256", None)
    if rng.random() < 0.7:
        name = rng.choice(sorted(about))
        try:
            value = json.loads(about[name])
            other = mutations.as_json(rng, mutations.tree(rng, value))
        except ValueError:
            other = mutations.letters(rng, about[name])
        about[name] = other.encode(errors="replace").decode()
    else:
        _tensors(rng, about, tensors)
    try:
        return seal(tensors, about)
    except Exception:  # safetensors stores no such thing
        return seal(tensors, {})


class Example:
    """A federation after some rounds, and its ledger's file."""

    def __init__(self, folder: Path):
        hurried()
        torch.set_default_dtype(torch.float64)
        self.sites = Federation(folder / "federation")
        self.sites.run(3)
        self.path = self.sites.out / "server.safetensors"
        self.content = self.path.read_bytes()
        self.like = self.sites.server(1).ledger.server

    def seen(self) -> Any:
        found = Ledger.load(self.path, self.like)
        server = {name: value.tolist() for name, value in found.server.tensors().items()}
        rest = {key: str(value) for key, value in vars(found).items() if key != "server"}
        return server, found.server.round, found.server.moved, rest


def ledgers(folder: Path) -> Make:
    """A damaged ledger is refused."""
    example = Example(folder)

    def make(rng: Random) -> Case:
        other = (mutations.flipped if rng.random() < 0.5 else mutations.data)(rng, example.content)
        example.path.write_bytes(other)

        def case() -> bool:
            example.seen()
            if other != example.content:
                raise Changed("a damaged ledger was accepted")
            return True

        return case

    return make


def sealed_ledgers(folder: Path) -> Make:
    """A ledger with other content under a right checksum, from which a server goes on."""
    example = Example(folder)
    about, tensors = parse(example.content)

    def make(rng: Random) -> Case:
        example.path.write_bytes(resealed(rng, about, tensors))
        return lambda: example.seen() and None

    return make


def glm_ledgers(folder: Path) -> Make:
    """A regression's ledger at a site: damaged, or with other content under a right checksum."""
    path = folder / "site" / "book"
    with glm_ledger.opened(path) as book:
        rows = book.hashed(np.arange(5, dtype=np.uint64))
        book.charge(rows, {"age": glm_ledger.Told(1.0, 0.5)})
        book.rounds["fit"] = 2
    content = path.read_bytes()
    about, tensors = parse(content)

    def make(rng: Random) -> Case:
        sealed = rng.random() < 0.5
        other = resealed(rng, about, tensors) if sealed else mutations.data(rng, content)
        path.write_bytes(other)

        def case() -> bool:
            with glm_ledger.opened(path) as book:
                str(book)
            if not sealed and other != content:
                raise Changed("a damaged ledger was accepted")
            return True

        return case

    return make


FUZZERS = {
    "vaults": vaults,
    "vaults-sealed": sealed_vaults,
    "ledgers": ledgers,
    "ledgers-sealed": sealed_ledgers,
    "glm-ledgers": glm_ledgers,
}
