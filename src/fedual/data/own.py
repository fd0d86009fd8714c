"""Data of the user's, from one file or one for each site, as inputs and targets that a network can take.

    numbers     as they are or, standardised, (x − mean) / deviation
    texts       one column of 0 and 1 for each category of the training data; all 0 for one that it never saw
    classes     numbered in the order of their names: `Own.classes[y]` is the name

What was learned from the training data to get there is `Own.inputs`, plain JSON, with which `encode` treats other files
the same way. All of it is the same for every seed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedual.data.tables import Table, names, numbers, ordered, read
from fedual.errors import DataError, InputError

CATEGORIES = 100
"""Different texts that a column may hold: with more it is probably an identifier."""


class Own(NamedTuple):
    """The user's data: inputs (N, …), targets (N,) as class numbers, or as numbers (N,) or (N, D) of a regression."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    groups: Tensor | None  # (N,), the client of every training example
    sites: list[str] | None  # the clients' names
    classes: list[str] | None
    inputs: dict[str, Any]


def load(folder: Path, told: Mapping[str, Any], *, column: str | None = None, classes: bool = True) -> Own:
    """Read what a scenario's [data] names.

    Args:
        folder: what paths are relative to.
        told: `file` or `sites`, and what else [data] says: target, drop, test or test_fraction, standardise.
        column: of the file, whose values are the clients; it is no input.
        classes: the target is a class, not a number.

    Raises:
        InputError: files that `told` names, but that are not there or named twice.
        DataError: files that cannot be read, do not go together, or hold what is no input or no target.
    """
    tables, test = _read(folder, told)
    first, target = tables[0], told.get("target", "y")
    for name in (target, *told.get("drop", ()), *([column] if column else ())):
        first.column(name)
    aside = {target, column, *told.get("drop", ())}
    columns = ["x"] if first.path.suffix == ".npz" else [name for name in first.columns if name not in aside]
    if not columns:
        raise DataError(f"{first.path} has no column but the target: give it some inputs.")
    for table in tables[1:]:
        _same_columns(first, table, aside)
    plain = [_plain(table, columns) for table in tables]
    x = {name: _joined(tables, [values[name] for values in plain], name) for name in columns}
    y = _joined(tables, [_target(table, target, classes) for table in tables], target)
    groups, sites = _groups(tables, column)
    kept = np.ones(len(y), bool)
    if test is None:
        kept = ~drawn(y if classes else np.zeros(len(y), int), told["test_fraction"])
        x_test, y_test = {name: values[~kept] for name, values in x.items()}, y[~kept]
    else:
        x_test, y_test = _plain(test, columns), _target(test, target, classes)
    x, y, groups = {name: values[kept] for name, values in x.items()}, y[kept], groups[kept]
    for number, name in enumerate(sites):
        if not (groups == number).any():
            raise DataError(f"{name} has no rows left to train on: give it more, or lower data.test_fraction.")
    inputs = _learned(x, groups, told.get("standardise", False), first)
    classes_found = ordered(y.tolist()) if classes else None
    if classes_found and len(classes_found) == 1:
        raise DataError(
            f"{first.path}, column {target!r}: there is one class only, {classes_found[0]!r}: give at least two."
        )
    whose = (test or first).path
    return Own(
        _encoded(x, inputs, first.path),
        _targets(y, classes_found, first.path),
        _encoded(x_test, inputs, whose),
        _targets(y_test, classes_found, whose),
        torch.from_numpy(groups) if column or "sites" in told else None,
        sites if column or "sites" in told else None,
        classes_found,
        inputs,
    )


def encode(path: Path, inputs: Mapping[str, Any]) -> Tensor:
    """The inputs in another file, treated as those of the training data; columns that these did not have are ignored.

    Args:
        path: a table; it needs no target.
        inputs: `Own.inputs`, which the config of a run has under `inputs`.
    """
    return _encoded(_plain(read(path), inputs["columns"]), inputs, path)


def drawn(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Mark the test examples: of each label's n, round(fraction · n), at least 1 and at most n − 1.

    A generator that is always the same draws them, label by label: the test set depends on the data alone.
    """
    rng = np.random.Generator(np.random.PCG64(0))
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        test[rng.choice(members, count, replace=False)] = True
    if not test.any():
        raise DataError(f"{len(labels)} rows are too few for data.test_fraction = {fraction}: give a test file.")
    return test


def moments(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of all rows, from sums that every site can send without showing a row.

    First the number of rows and their sum; then, knowing the mean, the sum of squared distances from it (and the
    extremes, which tell a constant from a rounding error). A constant has the deviation 1.

    Args:
        parts: each site's rows (N_k, …).
    """
    # a column in a row: its sum is then the same to the bit, whether it came alone or as part of an array
    sites = [np.ascontiguousarray(np.moveaxis(part, 0, -1)) for part in parts]
    count = sum(len(part) for part in parts)
    mean = np.sum([site.sum(-1) for site in sites], 0) / count
    squares = np.sum([np.square(site - mean[..., None]).sum(-1) for site in sites], 0)
    least, most = np.min([site.min(-1) for site in sites], 0), np.max([site.max(-1) for site in sites], 0)
    return mean, np.where(least == most, 1.0, np.sqrt(squares / count))


def _read(folder: Path, told: Mapping[str, Any]) -> tuple[list[Table], Table | None]:
    """The training tables, and the test table unless it is to be drawn from them."""
    sites = told.get("sites", [told.get("file")])
    if isinstance(sites, str):
        sites, pattern = sorted(str(path.relative_to(folder)) for path in folder.glob(sites)), sites
        if not sites:
            raise InputError(f"data.sites = {pattern!r}: no file in {folder.resolve()} matches: check the pattern.")
    paths = [folder / name for name in sites]
    test = folder / told["test"] if "test" in told else None
    for place, path in enumerate(paths):
        if path in paths[:place] or path == test:
            role = "twice in data.sites" if path != test else "a site, and data.test"
            raise InputError(f"{path} is {role}: name it once.")
    tables = [read(path) for path in paths]
    for table in tables:
        if table.path.suffix == ".npz":
            _check_arrays(table)
    if {"x_train", "y_train", "x_test", "y_test"} <= tables[0].columns.keys() and "file" in told:
        if told.keys() & {"test", "test_fraction"}:
            raise InputError(f"{paths[0]} has a test set, x_test: leave data.test and data.test_fraction out.")
        part = lambda which: Table(paths[0], {key: tables[0].columns[f"{key}_{which}"] for key in "xy"})
        return [part("train")], part("test")
    if test is None and "test_fraction" not in told:
        raise InputError(f"{paths[0]} has no test set: say data.test = FILE, or data.test_fraction = 0.2.")
    if test is None:
        return tables, None
    found = read(test)
    if test.suffix == ".npz":
        _check_arrays(found)
    return tables, found


def _check_arrays(table: Table) -> None:
    """Refuse an .npz whose inputs are no numbers, or not as many as its targets."""
    for x, y in (("x", "y"), ("x_train", "y_train"), ("x_test", "y_test")):
        if x not in table.columns:
            continue
        if table.columns[x].dtype.kind == "U":
            raise DataError(f"{table.path}: {x} holds texts: give numbers.")
        if len(table.columns[x]) != len(table.column(y)):
            lengths = f"{len(table.columns[x])} inputs in {x}, but {len(table.column(y))} targets in {y}"
            raise DataError(f"{table.path} has {lengths}: give one target to each input.")


def _same_columns(first: Table, other: Table, aside: set[str | None]) -> None:
    own, its = (set(table.columns) - aside for table in (first, other))
    for lacking, having, gone in ((other, first, own - its), (first, other, its - own)):
        if gone:
            raise DataError(
                f"{lacking.path} has no column {min(gone)!r}, but {having.path} has one: give all sites the same "
                "columns, or drop it."
            )


def _plain(table: Table, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """The columns as numbers or texts; those of an .npz keep their type, which says pixels and numbers of words."""
    found = {}
    for name in columns:
        values = numbers(table, name)
        values = table.column(name) if values is None else values
        keeps = values.dtype.kind == "U" or table.path.suffix == ".npz"
        found[name] = values if keeps else values.astype(np.float64)
    return found


def _target(table: Table, name: str, classes: bool) -> np.ndarray:
    """The names of the classes, or numbers."""
    values = table.column(name)
    if not classes:
        found = numbers(table, name)
        if found is None:
            raise DataError(
                f"{table.path}, column {name!r}, row 1: {str(values[0])!r} is not a number: a regression needs "
                'numbers, classes train.loss = "cross_entropy".'
            )
        return found.astype(np.float64)
    if values.ndim > 1:
        raise DataError(f"{table.path}: {name} has shape {values.shape}: give one class for each example, (N,).")
    found = names(values)
    if fractions := [label for label in set(found.tolist()) if _is_fraction(label)]:
        row = int(np.isin(found, fractions).argmax())
        raise DataError(
            f"{table.path}, column {name!r}, row {row + 1}: {str(found[row])!r} is no class: give names or whole "
            'numbers, or set train.loss = "mse" for a regression.'
        )
    return found


def _is_fraction(name: str) -> bool:
    try:
        return not float(name).is_integer()
    except ValueError:
        return False


def _joined(tables: Sequence[Table], parts: Sequence[np.ndarray], name: str) -> np.ndarray:
    """One column of all sites."""
    for table, part in zip(tables, parts, strict=True):
        if (part.dtype.kind == "U") != (parts[0].dtype.kind == "U"):
            kinds = ("numbers", "texts") if part.dtype.kind == "U" else ("texts", "numbers")
            raise DataError(
                f"Column {name!r} holds {kinds[0]} in {tables[0].path}, but {kinds[1]} in {table.path}: correct one of "
                "them, or drop the column."
            )
        if part.shape[1:] != parts[0].shape[1:]:
            shapes = f"{parts[0].shape[1:]} in {tables[0].path}, but {part.shape[1:]} in {table.path}"
            raise DataError(f"An example of {name} has the shape {shapes}: make them the same.")
    return np.concatenate(parts)


def _groups(tables: Sequence[Table], column: str | None) -> tuple[np.ndarray, list[str]]:
    """The client of every row, and the clients' names: those of the files, or the values of the column."""
    if column is None:
        return np.repeat(np.arange(len(tables)), [len(table) for table in tables]), [t.path.stem for t in tables]
    values = names(tables[0].column(column))
    sites = ordered(values.tolist())
    number = {name: place for place, name in enumerate(sites)}
    return np.array([number[name] for name in values.tolist()]), sites


def _learned(x: Mapping[str, np.ndarray], groups: np.ndarray, standardise: bool, first: Table) -> dict[str, Any]:
    """What encoding needs to know of the training data: JSON."""
    categories, scales = {}, {}
    for name, values in x.items():
        if values.dtype.kind == "U":
            categories[name] = ordered(values.tolist())
            if len(categories[name]) > CATEGORIES:
                raise DataError(
                    f"{first.path}, column {name!r} holds {len(categories[name])} different texts, more than "
                    f"{CATEGORIES}: drop it, or make them fewer."
                )
        elif standardise:
            found = moments([values[groups == site].astype(np.float64) for site in np.unique(groups)])
            scales[name] = [value.tolist() for value in found]
    return {"columns": list(x), "categories": categories, "standardised": scales}


def _encoded(x: Mapping[str, np.ndarray], inputs: Mapping[str, Any], path: Path) -> Tensor:
    blocks = []
    for name, values in x.items():
        if (values.dtype.kind == "U") != (name in inputs["categories"]):
            kinds = ("texts", "numbers") if name in inputs["categories"] else ("numbers", "texts")
            raise DataError(f"{path}, column {name!r} holds {kinds[1]}, but {kinds[0]} in training: correct it.")
        if name in inputs["categories"]:
            values = (values[:, None] == np.array(inputs["categories"][name])).astype(np.float64)
        elif name in inputs["standardised"]:
            mean, deviation = (np.array(value) for value in inputs["standardised"][name])
            values = (values - mean) / deviation
        blocks.append(values[:, None] if values.ndim == 1 else values)
    found = torch.from_numpy(np.ascontiguousarray(blocks[0] if len(blocks) == 1 else np.concatenate(blocks, 1)))
    if found.dtype in (torch.uint8, torch.int64):
        return found
    return found.to(
        torch.get_default_dtype() if found.is_floating_point() or found.dtype == torch.bool else torch.int64
    )


def _targets(y: np.ndarray, classes: list[str] | None, path: Path) -> Tensor:
    if classes is None:
        return torch.from_numpy(y).to(torch.get_default_dtype())
    number = {name: place for place, name in enumerate(classes)}
    if strange := sorted(set(y.tolist()) - number.keys()):
        raise DataError(f"{path} has the class {strange[0]!r}, which no training example has: leave its rows out.")
    return torch.tensor([number[name] for name in y.tolist()])
