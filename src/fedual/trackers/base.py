"""What all trackers share: which numbers they are given, where a resumed run goes on, and how they end."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedual.errors import DataError
from fedual.runs.files import replace, writing
from fedual.runs.run import Record, Run

Parameters = dict[str, str | int | float | bool | None]
Figures = dict[str, float]
FILE = "trackers.json"


class Backend(NamedTuple):
    """A run as a tracking package keeps it."""

    last: int  # the last round that it has; what came before is not handed over again
    log: Callable[[Figures, int], None]  # of a round
    close: Callable[[bool], None]  # with whether the run failed


class Tracker:
    """A callback that hands a run's config and every round's figures to a tracking package.

    `fit` enters it before the first round and leaves it when the run ends, by whatever: the last round, a callback that
    stops it, divergence or any other error. A run that is resumed goes on where the package's record of it ends; rounds
    from before it was tracked are handed over first.

    Args:
        open: Makes the package's record of a run, or finds the one that it has already.
    """

    def __init__(self, open: Callable[[Run], Backend]):
        self.open: Callable[[Run], Backend] = open
        self.backend: Backend | None = None

    def __call__(self, run: Run, record: Record | None) -> None:
        """Hand over what is new."""
        self.backend = self.backend or self.open(run)
        for each in run.history if record is None else [record]:
            if each["round"] > self.backend.last:
                self.backend.log(figures(each), each["round"])

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self.backend:
            self.backend.close(kind is not None)
        self.backend = None


def figures(record: Mapping[str, Any]) -> Figures:
    """The numbers of a round's record, but for the round itself, which is their step."""
    numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "round"}
    return {key: float(value) for key, value in numbers.items()}


def parameters(config: Mapping[str, Any], prefix: str = "") -> Parameters:
    """The config without its levels: {"model": {"settings": …}} has the key model.settings; lists are JSON."""
    flat: Parameters = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= parameters(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str | int | float | None) else json.dumps(value)
    return flat


def recall(run: Run, package: str) -> str | None:
    """The name under which a package knows a run that is resumed; see `remember`."""
    return _known(run).get(package)


def remember(run: Run, package: str, name: str) -> None:
    """Keep that name in the run's folder, in trackers.json."""
    if run.path:
        path = run.path / FILE
        content = json.dumps(_known(run) | {package: name}).encode()
        with writing(path, len(content), "nothing was trained since"):
            replace(path, content)


def _known(run: Run) -> dict[str, str]:
    if not (run.path and (run.path / FILE).exists()):
        return {}
    try:
        return dict(json.loads((run.path / FILE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{run.path / FILE} cannot be read ({error}): delete it, and the run is tracked anew."
        ) from None
