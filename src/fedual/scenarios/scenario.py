"""Read a scenario: its TOML file, then a preset, then single settings.

[data]     name, or the user's file or sites and how to read them; fraction of the training examples to use
[split]    kind (dirichlet | homogeneous | two-class), clients, settings of the kind; or kind (sites | column)
[model]    name, settings of `fedual.models.build`; or the user's function, module:function, and its arguments
[train]    rounds, loss, posterior, and the settings of `fedual.settings`
[method.NAME]         settings of `fedual.methods.build`; [method.NAME.train] wins over [train]
[preset.NAME.TABLE]   overrides TABLE if the preset is chosen
[sweep.NAME]          lists of values to try; every combination is a trial
"""

import os
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from importlib.resources import files
from inspect import signature
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedual.errors import InputError
from fedual.parsing import SETTINGS, parsing, read_bytes, require_depth
from fedual.scenarios import schema
from fedual.scenarios.schema import Keys, check_table, check_type, known

if TYPE_CHECKING:
    from fedual.methods import MethodSpec

Table = dict[str, Any]
DEFAULT = "default"
"""The preset that every scenario has: the method's own defaults, whatever the file sets for it."""


@dataclass(frozen=True)
class Scenario:
    """One method on one scenario, with the settings that were given; all others have fedual's defaults."""

    name: str
    title: str
    preset: str | None
    data: Table
    split: Table
    model: Table
    train: Table
    method: str
    settings: Table
    sweep: Table
    folder: Path = Path()  # paths of the user's files and modules are relative to it

    def spec(self) -> "MethodSpec":
        """The method with its settings."""
        from fedual import methods

        return methods.spec(self.method, **self.settings)

    def override(self, key: str, value: Any, where: str) -> "Scenario":
        """Change one setting, named `table.key` or, if only one table has it, `key`; errors begin with `where`."""
        tables = self._keys()
        table, dot, name = key.partition(".")
        if dot:
            known("table", table, tables, where)
        else:
            name, having = key, [table for table, keys in tables.items() if key in keys]
            if len(having) > 1:
                choices = " or ".join(f"{table}.{key}" for table in having)
                raise InputError(f"{where}: {key!r} is a setting of {' and '.join(having)}: write {choices}.")
            known("setting", key, [name for keys in tables.values() for name in keys], where)
            table = having[0]
        check_table(table, {name: value}, tables[table], where)
        field = "settings" if table == "method" else table
        return replace(self, **{field: {**getattr(self, field), name: value}})

    def trials(self) -> list[tuple[Table, "Scenario"]]:
        """Every combination of the values in [sweep], with the scenario that has these settings."""
        found, where = [], f"scenario {self.name}, [sweep.{self.method}]"
        for values in product(*self.sweep.values()) if self.sweep else ():
            settings = dict(zip(self.sweep, values, strict=True))
            found.append((settings, reduce(lambda trial, item: trial.override(*item, where), settings.items(), self)))
        return found

    def describe(self) -> Table:
        """What a run's config stores: all but folder, sweep, and rounds, which may grow when the run is resumed."""
        described = asdict(self)
        del described["folder"], described["sweep"], described["train"]["rounds"]
        return described

    def _keys(self) -> dict[str, Keys]:
        """The settings of each table that can be changed."""
        from fedual import methods

        own = _types(methods.settings(self.method))
        model, train = self._model_keys(), schema.train_keys()
        return {"data": schema.DATA, "split": schema.SPLIT, "model": model, "train": train, "method": own}

    def _model_keys(self) -> Keys:
        from fedual import models
        from fedual.scenarios import user_model

        if "function" in self.model:
            check_type("model.function", self.model["function"], str, f"scenario {self.name}")
            taken = user_model.arguments(self.model["function"], self.folder)
            return {"function": str, **dict.fromkeys(self.model if taken is None else taken)}
        name = self.model["name"]
        check_type("model.name", name, str, f"scenario {self.name}")
        known("model", name, models.MODELS, f"scenario {self.name}")
        arguments = signature(models.MODELS[name]).parameters.values()
        return {"name": str, **_types({argument.name: argument.default for argument in arguments})}


def names() -> list[str]:
    """The scenarios that come with fedual."""
    shipped = (path.name for path in files("fedual.scenarios").iterdir())
    return sorted(name.removesuffix(".toml") for name in shipped if name.endswith(".toml"))


def read(name_or_path: str | os.PathLike[str]) -> tuple[str, Table]:
    """Read one of `names()`, or a file that ends in .toml; the settings of runs and methods are not checked yet.

    Returns:
        The scenario's name and its tables.

    Raises:
        InputError: There is no such scenario, or the file is no scenario.
    """
    given = str(name_or_path)
    if given.endswith(".toml"):
        path, name = Path(given), Path(given).stem
    else:
        known("scenario", given, names(), "SCENARIO")
        path, name = files("fedual.scenarios") / f"{given}.toml", given
    with parsing(f"{given}: the scenario file", "is no TOML", "correct the file", InputError):
        content = read_bytes(path, SETTINGS) if isinstance(path, Path) else path.read_bytes()
        document = tomllib.loads(content.decode())
        require_depth(document)
    schema.check_file(document, f"scenario {name}")
    return name, document


def load(
    name_or_path: str | os.PathLike[str],
    *,
    preset: str | None = None,
    sets: Sequence[str] = (),
    method: str = "ivon-admm",
) -> Scenario:
    """Read a scenario for one method.

    Args:
        name_or_path: One of `names()`, or a file that ends in .toml.
        preset: One of the file's presets, which overrides its tables; or `default`, which ignores the method's table.
        sets: `key=value` each, applied last, in order: `lr=0.01`, `train.batch_size=16`, `split.clients=20`.
        method: Any of `fedual.methods.METHODS`; without a table in the file it has its default settings.

    Raises:
        InputError: A scenario, preset, method, table, key or value does not exist, or has the wrong type.
    """
    from fedual import methods

    name, document = read(name_or_path)
    where = f"scenario {name}"
    schema.check_training(document, where)
    presets = document.get("preset", {})
    if preset == DEFAULT:
        document = {key: value for key, value in document.items() if key not in ("method", "sweep")}
    elif preset is not None:
        known("preset", preset, [*presets, DEFAULT], where)
        document = _laid_over(document, presets[preset])
    for kind in ("method", "sweep"):
        for other in document.get(kind, {}):
            known("method", other, methods.NAMES, f"{where}, [{kind}.{other}]")
    for other, table in document.get("method", {}).items():
        settings = {key: value for key, value in table.items() if key != "train"}
        check_table(f"method.{other}", settings, _types(methods.settings(other)), where)
    table = dict(document.get("method", {}).get(method, {}))
    train = {**document["train"], **table.pop("train", {})}
    tables = {key: dict(document[key]) for key in ("data", "split", "model")}
    tables |= {"train": train, "settings": table, "sweep": document.get("sweep", {}).get(method, {})}
    scenario = Scenario(name, document["title"], preset, method=method, folder=Path(name_or_path).parent, **tables)
    for text in sets:
        scenario = scenario.override(*schema.parse_setting(text), where=f"setting {text!r}")
    schema.check_sources(scenario.data, scenario.split, scenario.model, where)
    check_table("model", scenario.model, scenario._keys()["model"], where)
    return scenario


def _laid_over(below: Table, above: Table) -> Table:
    """Merge two tables, and the tables in them; `above` overrides `below`."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key, {}), dict)
        merged[key] = _laid_over(below.get(key, {}), value) if both else value
    return merged


def _types(defaults: Table) -> dict[str, type | None]:
    """The types of settings, from their defaults; None accepts any type, and tuples are lists in TOML."""
    kinds = {type(None): None, tuple: list}
    return {key: kinds.get(type(value), type(value)) for key, value in defaults.items()}
