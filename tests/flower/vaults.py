"""One number in a vault, and what a client goes on from."""

from pathlib import Path

import torch

from fedual.flower.vault import Rows, opened


def rows(value: float) -> Rows:
    return {"eta": torch.full((2, 3), value), "solver.step": torch.tensor(int(value))}


def answer(folder: Path, ack: str | None, nonce: str, value: float) -> float:
    """Handle one message: what the client found (0: nothing), before it keeps `value` for the round `nonce`."""
    with opened(folder, "trial", "site-1") as vault:
        found = vault.settle(ack)
        vault.put(nonce, rows(value))
    return 0.0 if found is None else number(found)


def read(folder: Path, ack: str | None) -> float | None:
    """What a client would go on from."""
    with opened(folder, "trial", "site-1") as vault:
        found = vault.settle(ack)
    return None if found is None else number(found)


def number(found: Rows) -> float:
    """The one value that all rows were made of."""
    assert found.keys() == {"eta", "solver.step"}
    value = found["solver.step"].item()
    assert found["eta"].equal(rows(value)["eta"])
    return value


def file(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found
