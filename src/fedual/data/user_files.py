"""A user's own data, from one file or one for each site, as inputs and targets for a network.

    numbers     unchanged or, if standardised, (x − mean) / deviation
    texts       one column of 0 and 1 for each category of the training data; all 0 for a category that it lacks
    classes     numbered in the order of their names: `UserData.classes[y]` is the name

`UserData.inputs` keeps what this encoding learned from the training data as plain JSON, with which `encode` treats
other files the same way. Nothing here depends on the run's seed.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedual.data.partition import held_out
from fedual.data.tables import Table, are_texts, marked, names, number, ordered, parsed, read
from fedual.errors import DataError, InputError
from fedual.parsing import parsing

CATEGORIES = 100  # most different texts in a column: one with more is probably an identifier


class Unseen(NamedTuple):
    """A category that training never saw."""

    column: str
    value: str
    rows: list[int]  # from 0


class UserData(NamedTuple):
    """Inputs (N, …), and targets: class numbers (N,), or the numbers (N,) or (N, D) of a regression."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    groups: Tensor | None  # (N,), the client of every training example
    sites: list[str] | None  # the clients' names
    classes: list[str] | None
    inputs: dict[str, Any]


def load(folder: Path, data: Mapping[str, Any], *, column: str | None = None, classes: bool = True) -> UserData:
    """Read the files that a scenario's [data] names relative to a folder.

    `data` has `file` or `sites`, and optionally target, drop, test or test_fraction, and standardise. The values of
    `column` are the clients; it is no input. The target is a number unless there are `classes`.
    """
    tables, test = _read(folder, data)
    first, target = tables[0], data.get("target", "y")
    excluded = [target, *data.get("drop", ()), *([column] if column else ())]
    for name in excluded:
        first.column(name)
    columns = ["x"] if first.path.suffix == ".npz" else [name for name in first.columns if name not in excluded]
    if not columns:
        raise DataError(f"{first.path} has no column but the target: give it some inputs.")
    for table in tables[1:]:
        for lacking, having in ((table, first), (first, table)):
            if missing := having.columns.keys() - lacking.columns.keys() - set(excluded):
                problem = f"{lacking.path} has no column {min(missing)!r}, but {having.path} has one"
                raise DataError(f"{problem}: give all sites the same columns, or drop it.")
    x, y = _examples(tables, columns, target, classes)
    groups, sites = _groups(tables, column)
    if test is not None:
        x_test, y_test = _examples([test], columns, target, classes)
    else:
        drawn = held_out(y if classes else np.zeros(len(y), int), data["test_fraction"])
        x_test, y_test = {name: values[drawn] for name, values in x.items()}, y[drawn]
        x, y, groups = {name: values[~drawn] for name, values in x.items()}, y[~drawn], groups[~drawn]
    for i, name in enumerate(sites):
        if not (groups == i).any():
            raise DataError(f"{name} has no rows left to train on: give it more, or lower data.test_fraction.")
    inputs = _learned(x, groups, data.get("standardise", False), first.path)
    labels = ordered(y.tolist()) if classes else None
    if labels and len(labels) == 1:
        raise DataError(f"{first.path}, column {target!r}: there is one class only, {labels[0]!r}: give at least two.")
    test_path, has_clients = (test or first).path, bool(column) or "sites" in data
    return UserData(
        _encoded(x, inputs, first.path),
        _targets(y, labels, first.path),
        _encoded(x_test, inputs, test_path),
        _targets(y_test, labels, test_path),
        torch.from_numpy(groups) if has_clients else None,
        sites if has_clients else None,
        labels,
        inputs,
    )


def encode(path: Path, inputs: Mapping[str, Any]) -> tuple[Tensor, list[Unseen]]:
    """Encode another table like the training data, and name its categories that training never saw.

    It needs no target, and columns that were no inputs are ignored.
    """
    table, unseen = read(path), []
    for name, categories in inputs["categories"].items():
        values = table.column(name)
        if values.ndim > 1:
            raise DataError(f"{path}: {name} has the shape {values.shape}: give one text for each input, (N,).")
        all_numbers = np.ones(len(values), bool)
        numbers = marked(values, lambda text: not math.isnan(number(text))) if are_texts(values) else all_numbers
        if numbers.any():
            value = str(values[numbers][0])
            raise DataError(f"{table.first(name, numbers)}: {value!r} is a number, but training had texts: correct it.")
        known, rows = set(categories), defaultdict[str, list[int]](list)
        for row, value in enumerate(values.tolist()):
            if value not in known:
                rows[value].append(row)
        unseen += [Unseen(name, value, rows[value]) for value in ordered(rows)]
    return _encoded(_inputs(table, inputs["columns"]), inputs, path), unseen


def units(inputs: Mapping[str, Any]) -> tuple[list[str | None], np.ndarray, np.ndarray]:
    """The columns of the encoded inputs, and the mean and deviation that standardised them; categories have no name."""
    names, scales = [], []
    for column in inputs["columns"]:
        categories = inputs["categories"].get(column)
        scale = np.array(inputs["standardised"].get(column, (0.0, 1.0))).reshape(2, -1)
        scales += [scale] * len(categories or [""])
        names += [column] * scale.shape[1] if categories is None else [None] * len(categories)
    return names, *np.concatenate(scales, 1)


def moments(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of all sites' rows (N_k, …), from sums that a site can send without showing a row.

    These are first the number of rows and their sum; then, once the mean is known, the sum of squared distances from it
    and the extremes, which tell a constant from a rounding error. A constant has the deviation 1.
    """
    # each column becomes a contiguous row, so that its sum has the same bits whether it came alone or in an array
    sites = [np.ascontiguousarray(np.moveaxis(part, 0, -1)) for part in parts]
    count = sum(len(part) for part in parts)
    mean = np.sum([site.sum(-1) for site in sites], 0) / count
    squares = np.sum([np.square(site - mean[..., None]).sum(-1) for site in sites], 0)
    least, most = np.min([site.min(-1) for site in sites], 0), np.max([site.max(-1) for site in sites], 0)
    return mean, np.where(least == most, 1.0, np.sqrt(squares / count))


def _read(folder: Path, data: Mapping[str, Any]) -> tuple[list[Table], Table | None]:
    """Read the training tables, and the test table unless it is to be drawn from them."""
    sites = data.get("sites", [data.get("file")])
    if isinstance(sites, str):
        sites, pattern = _matching(folder, sites), sites
        if not sites:
            raise InputError(f"data.sites = {pattern!r}: no file in {folder.resolve()} matches: check the pattern.")
    paths = [folder / name for name in sites]
    test = folder / data["test"] if "test" in data else None
    for i, path in enumerate(paths):
        if path in paths[:i] or path == test:
            role = "twice in data.sites" if path != test else "a site, and data.test"
            raise InputError(f"{path} is {role}: name it once.")
    tables = [_table(path) for path in paths]
    columns = tables[0].columns
    if "file" in data and columns.keys() >= {"x_train", "y_train", "x_test", "y_test"}:
        if data.keys() & {"test", "test_fraction"}:
            raise InputError(f"{paths[0]} has a test set, x_test: leave data.test and data.test_fraction out.")
        train, test = ({"x": columns[f"x_{part}"], "y": columns[f"y_{part}"]} for part in ("train", "test"))
        return [Table(paths[0], train)], Table(paths[0], test)
    if test is None and "test_fraction" not in data:
        raise InputError(f"{paths[0]} has no test set: say data.test = FILE, or data.test_fraction = 0.2.")
    return tables, _table(test) if test else None


def _matching(folder: Path, pattern: str) -> list[str]:
    """The files that match a pattern, which is relative to a folder unless it begins at the root."""
    anchor = Path(pattern).anchor
    with parsing(f"data.sites = {pattern!r}", "is no pattern", "write one such as data/*.csv", InputError):
        found = Path(anchor).glob(pattern.removeprefix(anchor)) if anchor else folder.glob(pattern)
        return sorted(str(path if anchor else path.relative_to(folder)) for path in found)


def _table(path: Path) -> Table:
    """Read a table; refuse an .npz whose inputs are no numbers, or not as many as its targets."""
    table = read(path)
    for x, y in (("x", "y"), ("x_train", "y_train"), ("x_test", "y_test")):
        if path.suffix != ".npz" or x not in table.columns:
            continue
        if are_texts(table.columns[x]):
            raise DataError(f"{path}: {x} holds texts: give numbers.")
        if len(table.columns[x]) != len(table.column(y)):
            lengths = f"{len(table.columns[x])} inputs in {x}, but {len(table.column(y))} targets in {y}"
            raise DataError(f"{path} has {lengths}: give one target to each input.")
    return table


def _examples(
    tables: Sequence[Table], columns: Sequence[str], target: str, classes: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the inputs by column, and the targets, of all tables together."""
    parts = [_inputs(table, columns) for table in tables]
    x = {name: _concatenated(tables, [part[name] for part in parts], name) for name in columns}
    return x, _concatenated(tables, [_target(table, target, classes) for table in tables], target)


def _inputs(table: Table, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Return columns as numbers or texts; those of an .npz keep their type, which tells pixels from word numbers."""
    inputs = {name: parsed(table, name) for name in columns}
    keep = lambda values: are_texts(values) or table.path.suffix == ".npz"
    return {name: values if keep(values) else values.astype(np.float64) for name, values in inputs.items()}


def _target(table: Table, name: str, classes: bool) -> np.ndarray:
    """Return the names of the classes, or numbers."""
    if not classes:
        values = parsed(table, name)
        if are_texts(values):
            problem = f"{table.where(name)}, row 1: {str(values[0])!r} is not a number"
            raise DataError(f'{problem}: a regression needs numbers, classes train.loss = "cross_entropy".')
        return values.astype(np.float64)
    values = table.column(name)
    if values.ndim > 1:
        raise DataError(f"{table.path}: {name} has shape {values.shape}: give one class for each example, (N,).")
    labels = names(values, table.where(name))
    numeric = {label: number(label) for label in set(labels.tolist())}
    fractions = {label for label, value in numeric.items() if not (math.isnan(value) or value.is_integer())}
    if fractions:
        bad = marked(labels, fractions.__contains__)
        remedy = 'give names or whole numbers, or set train.loss = "mse" for a regression'
        raise DataError(f"{table.first(name, bad)}: {labels[bad][0]!r} is no class: {remedy}.")
    return labels


def _kind(values: np.ndarray) -> str:
    return "texts" if are_texts(values) else "numbers"


def _concatenated(tables: Sequence[Table], parts: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Concatenate one column of all tables."""
    for table, part in zip(tables, parts, strict=True):
        if _kind(part) != _kind(parts[0]):
            kinds = f"{_kind(parts[0])} in {tables[0].path}, but {_kind(part)} in {table.path}"
            raise DataError(f"Column {name!r} holds {kinds}: correct one of them, or drop the column.")
        if part.shape[1:] != parts[0].shape[1:]:
            shapes = f"{parts[0].shape[1:]} in {tables[0].path}, but {part.shape[1:]} in {table.path}"
            raise DataError(f"An example of {name} has the shape {shapes}: make them the same.")
    return np.concatenate(parts)


def _groups(tables: Sequence[Table], column: str | None) -> tuple[np.ndarray, list[str]]:
    """Return the client of every row, and the clients' names: file names, or the values of the column."""
    if column is None:
        return np.repeat(np.arange(len(tables)), [len(table) for table in tables]), [t.path.stem for t in tables]
    values = names(tables[0].column(column), tables[0].where(column))
    sites = ordered(values.tolist())
    number_of = {name: i for i, name in enumerate(sites)}
    return np.array([number_of[name] for name in values.tolist()]), sites


def _learned(x: Mapping[str, np.ndarray], groups: np.ndarray, standardise: bool, path: Path) -> dict[str, Any]:
    """Return what the encoding needs to know of the training data, as JSON."""
    categories, scales = {}, {}
    for name, values in x.items():
        if _kind(values) == "texts":
            categories[name] = ordered(values.tolist())
            if len(categories[name]) > CATEGORIES:
                count = f"{len(categories[name])} different texts, more than {CATEGORIES}"
                raise DataError(f"{path}, column {name!r} holds {count}: drop it, or make them fewer.")
        elif standardise:
            parts = [values[groups == site].astype(np.float64) for site in np.unique(groups)]
            scales[name] = [moment.tolist() for moment in moments(parts)]
    return {"columns": list(x), "categories": categories, "standardised": scales}


def _encoded(x: Mapping[str, np.ndarray], inputs: Mapping[str, Any], path: Path) -> Tensor:
    blocks = []
    for name, values in x.items():
        expected = "texts" if name in inputs["categories"] else "numbers"
        if _kind(values) != expected:
            holds, example = (
                f"holds {_kind(values)}, but {expected} in training",
                repr(values.reshape(-1)[:1].tolist()[0]),
            )
            raise DataError(f"{path}, column {name!r} {holds}, as in row 1, {example}: correct it.")
        if expected == "texts":
            values = _indicators(values, inputs["categories"][name])
        elif name in inputs["standardised"]:
            mean, deviation = map(np.array, inputs["standardised"][name])
            values = (values - mean) / deviation
        if values.dtype == np.uint64 and values.max() > np.iinfo(np.int64).max:
            problem = f"holds {values.max()}, beyond the whole numbers of 64 bits with a sign"
            raise DataError(f"{path}, column {name!r} {problem}: save smaller numbers, or floats.")
        blocks.append(values[:, None] if values.ndim == 1 else values)
    encoded = torch.from_numpy(np.ascontiguousarray(blocks[0] if len(blocks) == 1 else np.concatenate(blocks, 1)))
    if encoded.dtype == torch.uint8:
        return encoded
    real = encoded.is_floating_point() or encoded.dtype == torch.bool
    return encoded.to(torch.get_default_dtype() if real else torch.int64)


def _indicators(values: np.ndarray, categories: Sequence[str]) -> np.ndarray:
    """A column of 0 and 1 for each category, `(N, C)`."""
    place = {category: i for i, category in enumerate(categories)}
    codes = np.array([place.get(value, len(categories)) for value in values.tolist()], int)
    return np.eye(len(categories) + 1, len(categories))[codes]


def _targets(y: np.ndarray, classes: list[str] | None, path: Path) -> Tensor:
    if classes is None:
        return torch.from_numpy(y).to(torch.get_default_dtype())
    number_of = {name: i for i, name in enumerate(classes)}
    if unknown := sorted(set(y.tolist()) - number_of.keys()):
        raise DataError(f"{path} has the class {unknown[0]!r}, which no training example has: leave its rows out.")
    return torch.tensor([number_of[name] for name in y.tolist()])
