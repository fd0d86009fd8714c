"""Flower's messages with other content: what a site may be asked, and what it may answer."""

import json
import math
from random import Random
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from adversary import mutations
from fedual.flower import wire

DTYPES = ["<f4", "<f8", "<f2", "<i8", "|u1", "|b1", ">f8", "<c16", "<U3", "|O", "<M8[s]"]


def altered(rng: Random, content: RecordDict) -> RecordDict:
    """A message's content with one to three changes in its arrays, its settings, its figures, or its records."""
    arrays = dict(content.array_records.get(wire.ARRAYS, {}))
    config, metrics = wire.config_of(content), wire.metrics_of(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.random()
        if kind < 0.4 and config:
            config = _settings(rng, config)
        elif kind < 0.75 and arrays:
            arrays = _arrays(rng, arrays)
        elif kind < 0.95:
            metrics = _figures(rng, metrics)
        else:
            return _records(rng, content)
    try:
        records = {wire.ARRAYS: ArrayRecord(arrays), wire.CONFIG: ConfigRecord(config)}
        return RecordDict({**records, wire.METRICS: MetricRecord(metrics)})
    except (TypeError, ValueError, OverflowError):  # Flower carries no such thing
        return RecordDict({wire.ARRAYS: ArrayRecord(arrays)})


def _records(rng: Random, content: RecordDict) -> RecordDict:
    """Records that are missing, or under other names."""
    kept = {name: record for name, record in content.items() if rng.random() < 0.5}
    if rng.random() < 0.3:
        kept = {rng.choice([*content, "x", "arrays", "config"]): record for record in content.values()}
    try:
        return RecordDict(kept)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return RecordDict()


def _settings(rng: Random, config: dict[str, Any]) -> dict[str, Any]:
    """Another value of one key, of the types that Flower carries; JSON within a text gets another tree."""
    name, config = rng.choice(list(config)), dict(config)
    value, kind = config[name], rng.random()
    if kind < 0.1:
        del config[name]
    elif kind < 0.15:
        config[rng.choice([*mutations.TEXTS[:6], "refusal", "lost", "fold", "targets", "ack", "payload"])] = value
    elif isinstance(value, str) and value[:1] in ("{", "[") and rng.random() < 0.8:
        try:
            config[name] = mutations.as_json(rng, mutations.tree(rng, json.loads(value)))
        except (ValueError, RecursionError):  # it was damaged before
            config[name] = mutations.letters(rng, value)
    elif kind < 0.55:
        config[name] = mutations.near(rng, value)
    else:
        config[name] = mutations.edge(rng)
    config[name] = _carried(config[name]) if name in config else None
    return {key: value for key, value in config.items() if value is not None}


def _carried(value: Any) -> Any:
    """The value as Flower carries it: numbers of 64 bits, texts without surrogates, flat lists."""
    if isinstance(value, bool | bytes):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else float(value) if abs(value) < 1e308 else math.inf
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list) and all(
        type(item) is type(value[0]) and isinstance(item, int | float | str) for item in value
    ):
        return [_carried(item) for item in value]
    return value if isinstance(value, float) or value is None else json.dumps(value)


def _figures(rng: Random, metrics: dict[str, Any]) -> dict[str, Any]:
    metrics = dict(metrics)
    name = rng.choice([*metrics, "num-examples", "limited", "x"])
    if rng.random() < 0.15:
        metrics.pop(name, None)
        return metrics
    value = rng.choice([rng.choice(mutations.EDGES), mutations.near(rng, metrics.get(name, 1.0)), [1.0, 2.0]])
    metrics[name] = _carried(value) if isinstance(value, int | float | list) else 0
    return metrics


def _arrays(rng: Random, arrays: dict[str, Array]) -> dict[str, Array]:
    name, arrays = rng.choice(list(arrays)), dict(arrays)
    array = arrays[name]
    kind = rng.randrange(10)
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[rng.choice(["lam", "eta", "eta_change", "before", "codes", "scales", "table", "squares", "x"])] = array
    elif kind == 2:
        data = mutations.data(rng, bytes(array.data))
        arrays[name] = Array(array.dtype, tuple(array.shape), array.stype, data)
    elif kind == 3:
        announced = tuple(rng.choice([0, 1, 2**40, 2**62, -1]) for _ in range(rng.randrange(4)))
        stype = rng.choice([array.stype, "pickle", ""])
        arrays[name] = Array(rng.choice(DTYPES), announced, stype, array.data)
    else:
        try:
            arrays[name] = Array(_numbers(rng, array.numpy()))
        except Exception:  # it was damaged before
            del arrays[name]
    return arrays


def _numbers(rng: Random, values: np.ndarray) -> np.ndarray:
    """Other numbers, shapes or types."""
    kind, values = rng.randrange(7), values.copy()
    with np.errstate(all="ignore"):
        if kind == 0:
            dtype = rng.choice(["<f4", "<f8", "<f2", "<i8", "|u1", "|b1", ">f8", "<c16"])
            return values.astype(dtype)
        if kind == 1:
            return rng.choice([values[..., :1], values[None], values.reshape(-1), values[:0], np.zeros(()), values.T])
        if kind == 2 and values.size and values.dtype.kind == "f":
            flat = values.reshape(-1)
            flat[rng.randrange(flat.size)] = rng.choice(
                [math.nan, math.inf, -math.inf, 0.0, 1e300, -1e300, 5e-324, 1e30]
            )
            return flat.reshape(values.shape)
        factor = rng.choice([-1.0, 0.0, 1e-300, 1e-9, 0.5, 1 + 1e-12, 2.0, 10.0, 1e3, 1e6, 1e30, 1e154, 1e300])
        if kind == 3 and values.ndim == 2:
            values[rng.randrange(len(values))] *= np.asarray(factor, values.dtype)
            return values
        return (values * factor).astype(values.dtype)


def reply(rng: Random, answer: Message, question: Message) -> Message:
    """An answer with other content, or an error that Flower reports."""
    if rng.random() < 0.04:
        why = rng.choice(mutations.TEXTS).encode(errors="replace").decode()
        return Message(Error(rng.choice([0, 3, 5, 8, 99]), why), reply_to=question)
    if not answer.has_content():
        return answer
    return Message(altered(rng, answer.content), reply_to=question)
