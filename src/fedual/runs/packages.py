"""Packages that only some need: imported where they are used, named with their pip command where they are missing."""

from importlib import import_module
from typing import Any

from fedual.errors import InputError


def load(what: str, module: str, install: str) -> Any:
    """Import a module that `what` needs; `install` is what pip is asked for."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(f"{what} needs {error.name or module}, which is missing: pip install {install}") from None
