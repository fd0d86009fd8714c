"""Conversion of the config.json that fedual 0.1 wrote, with flat settings and the method as a text.

Only this module knows the old form. It parses the text of a method once and never evaluates it.
"""

import ast
import math
import re
from typing import Any

from fedual.errors import DataError
from fedual.parts import VERSION

CONFIG_VERSION = 2
"""The version of config.json; fedual 0.1 wrote none."""
_TRAINING = ("batch_size", "local_epochs", "local_steps", "participation", "schedule", "decay", "noise", "order")
_EXECUTION = ("engine", "chunk", "compile", "precision")
_EVALUATION = ("evaluate_every", "samples")
_LONG = 200
_POWERS = {"coldest": -2, "strongest": 1}
"""The power of the length of a round with which each limit of a rule was multiplied."""
_DEFAULTS = {"decay": 1.0, "participation": 1.0, "compile": False}
"""Settings that the oldest configs lack, with the values that those runs used."""
_RULES = (  # the old text of a rule, its present form, and the field of its number, which had six digits
    (
        re.compile(r"([\d.e+-]+)/λS"),
        {"type": "RoundRate", "most": 0.1, "coldest": 6.25e6, "schedule": "harmonic"},
        "gain",
    ),
    (re.compile(r"([\d.e+-]+)·RMS\(W\)"), {"type": "InitialNoise"}, "fraction"),
    (re.compile(r"([\d.e+-]+)·a"), {"type": "StepLimit"}, "units"),
    (re.compile(r"([\d.e+-]+)·fan_in·min\(1, 4Var\(x\)\)"), {"type": "HiddenDecay", "strongest": 3e-3}, "strength"),
    (re.compile(r"([\d.e+-]+)/S"), {"type": "RoundReach", "most": 0.01}, "reach"),
)


def converted(config: dict[str, Any]) -> dict[str, Any]:
    """An old config in the present form; a config of this version is returned unchanged.

    Raises:
        DataError: The version is unknown, or the method cannot be parsed.
    """
    if (version := config.get("version", 1)) == CONFIG_VERSION:
        return config
    if version != 1:
        raise DataError(
            f"The run has a config of version {version!r}, this fedual reads up to {CONFIG_VERSION}: update it."
        )
    flower = config.get("engine") == "flower"  # a deployed run has no settings of its execution
    execution = () if flower else _EXECUTION
    rest = {key: value for key, value in config.items() if key not in (*_TRAINING, *execution, *_EVALUATION)}
    pick = lambda keys: {key: config.get(key, _DEFAULTS.get(key)) for key in keys if key in config or key in _DEFAULTS}
    training = {"version": VERSION, **pick(_TRAINING)}
    if training.get("schedule") == "harmonic":
        training["rest"] = max(10, config.get("examples", 0.0) / 600)
    new = {**rest, "version": CONFIG_VERSION, "training": training}
    new |= {} if flower else {"execution": {"version": VERSION, **pick(execution)}}
    new["evaluation"] = {"version": VERSION, **pick(_EVALUATION)}
    if not str(config.get("method", "")).startswith("Method("):
        return new
    steps = config.get("local_steps") or config.get("local_epochs", 0) * config.get("examples", 0.0) / (
        config.get("clients", 1) * config.get("batch_size", 1)
    )
    try:
        new["method"] = method_from_text(config["method"], max(1.0, steps / _LONG))
    except DataError:
        if not flower:
            raise
        del new["method"]  # it has rules without numbers: a report leaves it out, and resuming is refused
        return new
    scenario = config.get("scenario")
    if isinstance(scenario, dict) and isinstance(scenario.get("method"), str):
        new["method"]["name"] = scenario["method"]
    return new


def method_from_text(text: str, length: float = 1.0) -> dict[str, Any]:
    """The dict of a method from its text in old configs and records, for rounds of length L."""
    rules: list[dict[str, Any]] = []
    for pattern, part, number in _RULES:

        def placeholder(match: re.Match, part: dict = part, number: str = number) -> str:
            limits = {key: value * length ** _POWERS[key] for key, value in part.items() if key in _POWERS}
            rules.append({**part, **limits, number: float(match[1])})
            return f"_{len(rules) - 1}"

        text = pattern.sub(placeholder, text)
    try:
        found = _value(ast.parse(text, mode="eval").body, rules)
        solver = found["solver"]
    except (SyntaxError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"The method of an old run cannot be read ({error}): {text[:200]}") from None
    momentum, unit = found.pop("momentum", 0.0), found.pop("unit", 0.0)
    found["extrapolation"] = {"type": "Extrapolation", "beta": momentum} if momentum else None
    found["weighting"] = {"type": "ExampleWeights", "unit": unit} if unit else None
    if solver["type"] == "IVON":
        solver.setdefault("weight_decay", 0.0)
        solver.setdefault("hold", 0.0)
    if solver["type"] in ("SGD", "Laplace"):
        solver.setdefault("proximal", "squared")
    del found["type"]
    return {"version": VERSION, **found, "name": ""}


def matched(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A converted config with the method of `new`, if both differ only in digits that the text did not have.

    It then also gets the scenario's settings of `new`, because the old form left out those that were zero.
    """
    if not _close(old.get("method"), new.get("method")):
        return old
    old = old | {"method": new["method"]}
    if isinstance(scenario := old.get("scenario"), dict) and isinstance(new.get("scenario"), dict):
        old["scenario"] = scenario | {"settings": new["scenario"].get("settings")}
    return old


def _close(old: Any, new: Any) -> bool:
    """True if two methods agree to six digits, which the old text had of a rule's number."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = (old.keys() | new.keys()) - {"name"}
        return all(_close(old.get(key), new.get(key)) for key in keys)
    if isinstance(old, float | int) and isinstance(new, float | int):
        return math.isclose(old, new, rel_tol=1e-5)
    return old == new


def _value(node: ast.AST, rules: list[dict[str, Any]]) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return {"type": node.func.id} | {str(word.arg): _value(word.value, rules) for word in node.keywords}
    if isinstance(node, ast.Name):
        return rules[int(node.id.removeprefix("_"))]
    return ast.literal_eval(node)
