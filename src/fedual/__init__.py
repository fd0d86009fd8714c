"""fedual: federated learning that returns posteriors.

`fedual.fit` trains a network on clients' data, `fedual.compare` does so with several methods. Below them are
`fedual.methods` (what to run), `fedual.admm` (`init` and `step`) and `fedual.families`; the parts are loaded when they
are first used, so that `fedual --help` does not wait for torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedual._version import __version__

# MKL promises the same bits in every run only in this mode, which it enters at its first use; no cost was measured
os.environ.setdefault("MKL_CBWR", "AUTO")

if TYPE_CHECKING:
    from fedual import (
        admm,
        comparing,
        data,
        duals,
        errors,
        evaluate,
        experiments,
        families,
        figures,
        methods,
        models,
        posterior,
        runs,
        servers,
        simulate,
        solvers,
        trackers,
        training,
    )
    from fedual.comparing import compare
    from fedual.posterior import Posterior
    from fedual.training import fit

__all__ = [
    "Posterior",
    "__version__",
    "admm",
    "compare",
    "comparing",
    "data",
    "duals",
    "errors",
    "evaluate",
    "experiments",
    "families",
    "figures",
    "fit",
    "methods",
    "models",
    "posterior",
    "runs",
    "servers",
    "simulate",
    "solvers",
    "trackers",
    "training",
]
_FROM = {"fit": "training", "compare": "comparing", "Posterior": "posterior"}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(import_module(f"fedual.{_FROM[name]}"), name)
    if name in __all__:
        return import_module(f"fedual.{name}")
    raise AttributeError(f"module 'fedual' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
