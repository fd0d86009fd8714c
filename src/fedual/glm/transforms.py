# ruff: noqa: D102 (`Transform` documents these methods)
"""Functions of a formula that depend on the data of all sites: here `scale`, `center`, `standardize` and `poly`.

The federation measures what they need, in at most three trips; a site answers with sums over its rows:

    moments     n, mean and M2 = Σ(x − mean)², combined by Chan's formula
    histogram   counts of x in 64 cells over mean ± 4 sd and two beyond: approximate quantiles become knots, and the
                outermost cells in use become bounds; no minimum or maximum leaves a site
    powers      Σ zʲ of z = (x − mean)/sd, for the orthogonal polynomials
    means       column means of a natural spline's basis, for `constraints="center"`
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from formulaic.materializers.types import FactorValues

from fedual.errors import InputError

MAX_DEGREE = 10
"""Of polynomials, which need sums of powers up to twice the degree, and of the pieces of splines."""

State = Mapping[str, Any]


class Transform:
    """One call of a function, with its options; its state is a dict of JSON values."""

    several = False
    """Whether it makes several columns of the design, and so can only be a term by itself."""

    def begin(self) -> dict[str, Any]:
        """The state before anything is measured."""
        return {}

    def request(self, state: State) -> str | None:
        """What must be measured next; None if the state is complete."""
        raise NotImplementedError

    def answer(self, request: str, x: np.ndarray, state: State, least: int) -> list[float]:
        """A site's answer to a request, from its argument's values `(N,)`."""
        if request == "moments":
            mean = x.mean()
            return [float(len(x)), float(mean), float(((x - mean) ** 2).sum())]
        raise InputError(f"{request!r} is not what this function needs: ask for what `unmeasured` names.")

    def combine(self, request: str, answers: np.ndarray, state: State) -> dict[str, Any]:
        """The state after the answers of all sites, one a row."""
        n, mean, m2 = pooled(answers)
        if not m2 > 0:
            raise InputError("its argument is constant over all sites: leave it out.")
        return {**state, "mean": mean, "sd": math.sqrt(m2 / (n - 1))}

    def apply(self, x: np.ndarray, state: State) -> Any:
        """The columns `(N,)` of the design."""
        raise NotImplementedError

    def placeholder(self) -> State:
        """A complete state that gives columns of the same names at x = 0.5."""
        raise NotImplementedError


def pooled(moments: np.ndarray) -> tuple[float, float, float]:
    """(n, mean, M2) of all rows from those of each site: Chan, Golub and LeVeque (1983)."""
    n, means, m2 = moments.T
    mean = float(n @ means / n.sum())
    return float(n.sum()), mean, float(m2.sum() + n @ (means - mean) ** 2)


@dataclass(frozen=True)
class Scale(Transform):
    """(x − center) / scale; True means the mean, and the root mean square about the center."""

    center: bool | float = True
    scale: bool | float = True
    ddof: float = 1

    def __post_init__(self):
        require(is_number(self.center) or isinstance(self.center, bool), "center", self.center, "True, False, a number")
        require(is_number(self.scale) or isinstance(self.scale, bool), "scale", self.scale, "True, False, a number")
        require(self.scale is False or self.scale != 0, "scale", self.scale, "True, False, a number other than 0")
        require(is_number(self.ddof), "ddof", self.ddof, "a number")

    def begin(self):
        return {} if self.center is True or self.scale is True else self._state(0, 0, 0)

    def request(self, state):
        return None if "center" in state else "moments"

    def combine(self, request, answers, state):
        return self._state(*pooled(answers))

    def _state(self, n: float, mean: float, m2: float) -> dict[str, Any]:
        center = mean if self.center is True else float(self.center)
        if self.scale is not True:
            return {"center": center, "scale": float(self.scale) or 1.0}
        squares = m2 + n * (mean - center) ** 2
        if not (squares > 0 and n > self.ddof):
            raise InputError("its argument is constant over all sites: leave it out.")
        return {"center": center, "scale": math.sqrt(squares / (n - self.ddof))}

    def apply(self, x, state):
        return (x - state["center"]) / state["scale"]

    def placeholder(self):
        return {"center": 0.0, "scale": 1.0}


def center() -> Scale:
    """x − mean."""
    return Scale(scale=False)


def standardize(center: bool | float = True, rescale: bool | float = True, ddof: float = 0) -> Scale:
    """patsy's name of `scale`, with the divisor n."""
    return Scale(center, rescale, ddof)


@dataclass(frozen=True)
class Poly(Transform):
    """Orthonormal polynomials of x under the distribution of all sites' rows, as R's `poly`, or plain powers."""

    degree: int = 1
    raw: bool = False
    several = True

    def __post_init__(self):
        require(is_count(self.degree, 1, MAX_DEGREE), "degree", self.degree, f"a whole number from 1 to {MAX_DEGREE}")
        require(isinstance(self.raw, bool), "raw", self.raw, "True or False")

    def request(self, state):
        if self.raw or "coefficients" in state:
            return None
        return "powers" if "sd" in state else "moments"

    def answer(self, request, x, state, least):
        if request != "powers":
            return super().answer(request, x, state, least)
        return np.vander((x - state["mean"]) / state["sd"], 2 * self.degree + 1, increasing=True).sum(0).tolist()

    def combine(self, request, answers, state):
        if request != "powers":
            return super().combine(request, answers, state)
        sums = answers.sum(0)
        hankel = np.array([sums[i : i + self.degree + 1] for i in range(self.degree + 1)])  # Σ zⁱ⁺ʲ
        eigenvalues = np.linalg.eigvalsh(hankel / np.sqrt(np.outer(hankel.diagonal(), hankel.diagonal())))
        if eigenvalues[0] < 1e-12:
            raise InputError("its argument has too few different values: use a lower degree.")
        return {**state, "coefficients": np.linalg.inv(np.linalg.cholesky(hankel))[1:].tolist()}

    def apply(self, x, state):
        if self.raw:
            return x[:, None] ** np.arange(1, self.degree + 1)
        powers = np.vander((x - state["mean"]) / state["sd"], self.degree + 1, increasing=True)
        columns = powers @ np.array(state["coefficients"]).T
        return FactorValues({str(i + 1): columns[:, i] for i in range(self.degree)}, kind="numerical")

    def placeholder(self):
        return {"mean": 0.0, "sd": 1.0, "coefficients": np.eye(self.degree + 1)[1:].tolist()}


def is_number(value: Any) -> bool:
    """Whether an option is a finite number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_count(value: Any, least: int, most: int = 1000) -> bool:
    """Whether an option is a whole number between two others."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def require(condition: bool, name: str, value: Any, what: Any) -> None:
    """Raise unless an option is what it must be."""
    if not condition:
        raise InputError(f"{name}={value!r} must be {what}.")
