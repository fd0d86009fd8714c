"""fedual: federated learning that returns posteriors.

`fedual.fit` trains a network on clients' data, and `fedual.compare` does so with several methods; `fedual.glm.fit` fits
a regression to the tables of several sites. Below them are
`fedual.methods` (what to run), `fedual.algorithm` (one round: `init`, `step`, `client_step`, `server_step`) and
`fedual.families`. Modules are loaded when they are first used, so that `fedual --help` does not wait for torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedual._version import __version__

# MKL promises the same bits in every run only in this mode, which it enters at its first use; no cost was measured
os.environ.setdefault("MKL_CBWR", "AUTO")

if TYPE_CHECKING:
    from fedual import (
        algorithm,
        calibration,
        comparison,
        data,
        defaults,
        errors,
        families,
        fitting,
        flower,
        glm,
        methods,
        metrics,
        models,
        networks,
        posterior,
        predict,
        report,
        scenarios,
        settings,
        solvers,
        trackers,
    )
    from fedual.comparison import compare
    from fedual.fitting import fit
    from fedual.posterior import Posterior

__all__ = [
    "Posterior",
    "__version__",
    "algorithm",
    "calibration",
    "compare",
    "comparison",
    "data",
    "defaults",
    "errors",
    "families",
    "fit",
    "fitting",
    "flower",
    "glm",
    "methods",
    "metrics",
    "models",
    "networks",
    "posterior",
    "predict",
    "report",
    "scenarios",
    "settings",
    "solvers",
    "trackers",
]
_FROM = {"fit": "fitting", "compare": "comparison", "Posterior": "posterior"}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(import_module(f"fedual.{_FROM[name]}"), name)
    if name in __all__:
        return import_module(f"fedual.{name}")
    raise AttributeError(f"module 'fedual' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
