# ruff: noqa: D102 (`Transform` documents these methods)
"""Splines whose knots and bounds the federation measures: `bs` and `cr`.

Splines with given knots span the same functions as formulaic's on the pooled table, whatever their bounds, because they
continue beyond the bounds; given bounds too, they are the same columns. With `df=` the knots are approximate quantiles.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from formulaic.transforms import basis_spline, natural_cubic_spline

from fedual.errors import InputError
from fedual.glm.transforms import MAX_DEGREE, State, Transform, is_count, is_number, require

CELLS, SPREAD = 64, 4.0
"""Cells of a histogram, and sds that they reach to either side of the mean: knots are exact to an eighth of an sd."""
MAX_KNOTS = 50
"""Beyond all in use; it bounds the size of a design before any site makes it."""
EXTRAPOLATIONS = ("raise", "clip", "zero", "extend")


class Spline(Transform):
    """What B-splines and natural splines share: their knots and bounds."""

    several = True
    num_knots: int
    df: int | None
    knots: Any
    lower_bound: float | None
    upper_bound: float | None
    extrapolation: str | None

    def _check(self) -> None:
        for name in ("lower_bound", "upper_bound"):
            value = getattr(self, name)
            require(value is None or is_number(value), name, value, "a number")
        require(self.df is None or self.knots is None, "df", self.df, "left out where knots are given")
        knots = [] if self.knots is None else self.knots
        require(
            isinstance(knots, list | tuple) and all(map(is_number, knots)) and list(knots) == sorted(set(knots)),
            "knots",
            self.knots,
            "a list of increasing numbers",
        )
        require(0 <= self.num_knots <= MAX_KNOTS, "df", self.df, f"such that there are 0 to {MAX_KNOTS} knots")
        choices = (None, *EXTRAPOLATIONS)
        require(self.extrapolation in choices, "extrapolation", self.extrapolation, f"one of {choices[1:]}")
        bounds = [-np.inf if self.lower_bound is None else self.lower_bound, *knots]
        bounds.append(np.inf if self.upper_bound is None else self.upper_bound)
        require(bounds == sorted(set(bounds)), "knots", self.knots, "between the bounds")

    @property
    def _is_bounded(self) -> bool:
        return self.lower_bound is not None and self.upper_bound is not None

    def begin(self):
        if not self._is_bounded or (self.knots is None and self.num_knots):
            return {}
        knots = [float(knot) for knot in self.knots or ()]
        return {"lower_bound": self.lower_bound, "upper_bound": self.upper_bound, "knots": knots}

    def request(self, state: State) -> str | None:
        if "knots" in state:
            return None
        return "histogram" if "sd" in state else "moments"

    def answer(self, request, x, state, least):
        if request != "histogram":
            return super().answer(request, x, state, least)
        counts = np.histogram(x, [-np.inf, *_edges(state), np.inf])[0]
        return np.where(counts < least, 0, counts).astype(float).tolist()

    def combine(self, request, answers, state):
        if request != "histogram":
            return super().combine(request, answers, state)
        counts, edges = answers.sum(0), _edges(state)
        if not counts.any():
            raise InputError("too few rows share a cell of its histogram: give knots, lower_bound and upper_bound.")
        edges = np.array([edges[0], *edges, edges[-1]])  # the cells beyond have no width
        used = np.flatnonzero(counts)
        knots = list(self.knots or ()) or quantiles(counts, edges, np.linspace(0, 1, self.num_knots + 2)[1:-1])
        lower = self.lower_bound if self.lower_bound is not None else edges[used[0]]
        upper = self.upper_bound if self.upper_bound is not None else edges[used[-1] + 1]
        if self.knots:  # wherever the data are, the given knots are inside
            lower = lower if lower < knots[0] else knots[0] - state["sd"]
            upper = upper if upper > knots[-1] else knots[-1] + state["sd"]
        points = [float(point) for point in (lower, *knots, upper)]
        if points != sorted(set(points)):
            raise InputError("its argument has too few different values for its knots: use a lower df.")
        return {**state, "lower_bound": points[0], "knots": points[1:-1], "upper_bound": points[-1]}

    def _settings(self, x: np.ndarray, state: State) -> dict[str, Any]:
        if len(state["knots"]) != self.num_knots:
            raise InputError(f"its state has {len(state['knots'])} knots, not {self.num_knots}: measure it again.")
        extrapolation = self.extrapolation or ("raise" if self._is_bounded else "extend")
        lower, upper = state["lower_bound"], state["upper_bound"]
        if extrapolation == "raise" and ((x < lower) | (x > upper)).any():
            raise InputError("a value is beyond the bounds of the spline: widen them, or set extrapolation='extend'.")
        bounds = {"lower_bound": lower, "upper_bound": upper}
        return {"knots": list(state["knots"]), **bounds, "extrapolation": extrapolation}

    def placeholder(self):
        return {"lower_bound": 0.0, "knots": np.linspace(0, 1, self.num_knots + 2)[1:-1].tolist(), "upper_bound": 1.0}


@dataclass(frozen=True)
class BSpline(Spline):
    """The B-spline basis of R's, patsy's and formulaic's `bs`."""

    df: int | None = None
    knots: Any = None
    degree: int = 3
    include_intercept: bool = False
    lower_bound: float | None = None
    upper_bound: float | None = None
    extrapolation: str | None = None
    num_knots: int = field(init=False)

    def __post_init__(self):
        require(is_count(self.degree, 0, MAX_DEGREE), "degree", self.degree, f"a whole number up to {MAX_DEGREE}")
        require(isinstance(self.include_intercept, bool), "include_intercept", self.include_intercept, "True or False")
        least = self.degree + self.include_intercept
        require(self.df is None or is_count(self.df, least), "df", self.df, f"a whole number of at least {least}")
        num_knots = len(self.knots or ()) if self.df is None else self.df - least
        object.__setattr__(self, "num_knots", num_knots)
        self._check()

    def apply(self, x, state):
        options = {"degree": self.degree, "include_intercept": self.include_intercept}
        return basis_spline(x, **options, **self._settings(x, state))


@dataclass(frozen=True)
class NaturalSpline(Spline):
    """The natural cubic spline of mgcv's, patsy's and formulaic's `cr`."""

    df: int | None = None
    knots: Any = None
    lower_bound: float | None = None
    upper_bound: float | None = None
    constraints: str | None = None
    extrapolation: str | None = None
    num_knots: int = field(init=False)

    def __post_init__(self):
        require(self.constraints in (None, "center"), "constraints", self.constraints, "'center', or left out")
        require(self.df is not None or self.knots is not None, "df", self.df, "given, unless knots are")
        least = 1 if self.constraints else 2
        require(self.df is None or is_count(self.df, least), "df", self.df, f"a whole number of at least {least}")
        num_knots = len(self.knots or ()) if self.df is None else self.df - least
        object.__setattr__(self, "num_knots", num_knots)
        self._check()

    def request(self, state: State) -> str | None:
        if "knots" in state and self.constraints and "means" not in state:
            return "means"
        return super().request(state)

    def answer(self, request, x, state, least):
        if request != "means":
            return super().answer(request, x, state, least)
        basis = natural_cubic_spline(x, **self._settings(x, state))
        return [float(len(x)), *(float(column.mean()) for column in basis.values())]

    def combine(self, request, answers, state):
        if request != "means":
            return super().combine(request, answers, state)
        return {**state, "means": (answers[:, 0] @ answers[:, 1:] / answers[:, 0].sum()).tolist()}

    def apply(self, x, state):
        constraints = np.array([state["means"]]) if self.constraints else None
        return natural_cubic_spline(x, constraints=constraints, **self._settings(x, state))

    def placeholder(self):
        return {**super().placeholder(), "means": [1.0] * (self.num_knots + 2)}


def quantiles(counts: np.ndarray, edges: np.ndarray, shares: np.ndarray) -> list[float]:
    """Quantiles of a histogram's rows, as if they were spread evenly within each of its cells."""
    used = np.flatnonzero(counts)
    below = np.concatenate([[0.0], np.cumsum(counts[used])]) / counts.sum()
    found = []
    for share in shares:
        i = min(int(np.searchsorted(below, share, side="right")) - 1, len(used) - 1)
        low, high = edges[used[i]], edges[used[i] + 1]
        found.append(float(low + (high - low) * (share - below[i]) / (below[i + 1] - below[i])))
    return found


def _edges(state: State) -> np.ndarray:
    reach = SPREAD * state["sd"]
    return np.linspace(state["mean"] - reach, state["mean"] + reach, CELLS + 1)
