"""fedual: federated learning that returns posteriors.

Start with `fedual.methods` (what to run), `fedual.admm` (`init` and `step`) and `fedual.families`; the parts are
loaded when they are first used, so that `fedual --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedual._version import __version__

if TYPE_CHECKING:
    from fedual import admm, data, duals, errors, families, figures, methods, servers, solvers

__all__ = [
    "__version__",
    "admm",
    "data",
    "duals",
    "errors",
    "families",
    "figures",
    "methods",
    "servers",
    "solvers",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"fedual.{name}")
    raise AttributeError(f"module 'fedual' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
