"""A model of the user's: `module:function`, a file beside the scenario and a function in it that returns a module.

The file is imported anew every time, with its folder at the front of the module path only while it is used: two
folders may each have a model.py.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedual.errors import InputError, hint, in_one_line


def build(function: str, folder: Path, settings: Mapping[str, Any]) -> nn.Module:
    """The model that `module:function`, with the module in a folder, makes from keyword arguments.

    Raises:
        InputError: There is no such module or function, or it fails or returns something else.
    """
    with _imported(function, folder) as found:
        try:
            model = found(**settings)
        except Exception as error:
            raise InputError(f"The model {function!r} failed ({in_one_line(error)}): correct it.") from error
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise InputError(f"The model {function!r} returns a {kind}: it must return a torch.nn.Module.")
    return model


def arguments(function: str, folder: Path) -> list[str] | None:
    """The names of a function's arguments; None if it takes any."""
    with _imported(function, folder) as found:
        known = inspect.signature(found).parameters.values()
    return None if any(argument.kind == argument.VAR_KEYWORD for argument in known) else [a.name for a in known]


@contextmanager
def _imported(given: str, folder: Path) -> Iterator[Callable[..., Any]]:
    """Yield the function while its folder can be imported from; then restore the path and the modules."""
    module, _, name = given.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise InputError(f"The model {given!r}: write module:function, e.g. model:build for build in model.py.")
    folder = folder.resolve()
    path = folder.joinpath(*module.split("."))
    if not (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()):
        raise InputError(f"The model {given!r}: there is no {module.replace('.', '/')}.py in {folder}: add it.")
    local = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    loaded = lambda: [key for key in sys.modules if key.partition(".")[0] in local]
    hidden = {key: sys.modules.pop(key) for key in loaded() if not _within(sys.modules[key], folder)}
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        try:
            found = importlib.import_module(module)
        except Exception as error:
            reason = f"{module} cannot be imported ({in_one_line(error)})"
            raise InputError(f"The model {given!r}: {reason}: correct it.") from error
        if not _within(found, folder):
            raise InputError(f"The model {given!r}: {module} is a module of Python's own: rename the file.")
        if not callable(function := getattr(found, name, None)):
            functions = [key for key, value in vars(found).items() if inspect.isfunction(value)]
            raise InputError(f"The model {given!r}: {module} has no function {name!r}: {hint(name, functions)}")
        yield function
    finally:
        sys.path.remove(str(folder))
        for key in set(loaded()) - before:
            del sys.modules[key]
        sys.modules.update(hidden)


def _within(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder)
