"""A small table of patients in every format, and scenarios that name it."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

SCENARIO = """
title = "mine"
[data]
{data}
[split]
{split}
[model]
name = "mlp"
hidden = [4]
inputs = {inputs}
outputs = {outputs}
[train]
rounds = 2
batch_size = 8
local_epochs = 1
{train}
"""
EVEN = 'kind = "homogeneous"\nclients = 3'


def patients(number: int = 60, seed: int = 0) -> dict[str, np.ndarray]:
    """Columns: two of numbers that tell the class, a text, a site, a class of three and a number to predict."""
    rng = np.random.default_rng(seed)
    label = rng.integers(3, size=number)
    return {
        "age": 50 + 10 * rng.standard_normal(number) + 5 * label,
        "dose": rng.standard_normal(number) - label,
        "colour": np.array(["red", "green", "blue"])[rng.integers(3, size=number)],
        "hospital": np.array(["north", "east"])[rng.integers(2, size=number)],
        "label": np.array(["mild", "none", "severe"])[label],
        "days": rng.standard_normal(number) + label,
    }


def write(path: Path, columns: dict[str, Any]) -> Path:
    """Write columns as what the path's ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        np.savez(path, **columns)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(np.asarray(values).tolist() for values in columns.values()), strict=True))
    return path


def chosen(columns: dict[str, Any], *names: str, rows: Any = slice(None)) -> dict[str, Any]:
    """Some columns, and some rows of them."""
    return {name: np.asarray(columns[name])[rows] for name in names}


def scenario(
    folder: Path, data: str, split: str = EVEN, *, inputs: int = 2, outputs: int = 3, train: str = "", more: str = ""
) -> Path:
    """Write a scenario file."""
    path = folder / "mine.toml"
    text = SCENARIO.format(data=data, split=split, inputs=inputs, outputs=outputs, train=train)
    path.write_text(text + more)
    return path
