"""Settings as texts: options of the command line and keys of a Flower app's configuration."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from fedual.errors import InputError
from fedual.glm.settings import Settings


def settings_from(options: Mapping[str, Any]) -> Settings:
    """Settings from options such as "max-rounds"; an empty text or None is the default, other keys are left out.

    Args:
        options: The fields of `Settings`, with hyphens; `levels` as "sex=female,male; smoker=no,yes".
    """
    given = {key.replace("-", "_"): value for key, value in options.items() if value not in ("", None)}
    known = {field.name for field in fields(Settings)}
    chosen = {key: value for key, value in given.items() if key in known}
    if "formula" not in chosen:
        raise InputError('The formula is missing: give one such as formula = "y ~ age + C(sex)".')
    if isinstance(chosen.get("levels"), str):
        chosen["levels"] = levels_of(chosen["levels"].split(";"))
    return Settings(**chosen)


def levels_of(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Levels of categorical variables from texts such as "sex=female,male"."""
    found = {}
    for text in texts:
        name, _, levels = text.partition("=")
        named = tuple(level.strip() for level in levels.split(",") if level.strip())
        if not name.strip() or not named:
            raise InputError(f"levels = {text.strip()!r}: name a variable and its levels, e.g. sex=female,male.")
        found[name.strip()] = named
    return found
