"""The words of formulas: the functions, operators and codings that an expression may use, and what they compute."""

import ast
from collections.abc import Callable

import numpy as np
from formulaic.transforms import contrasts

from fedual.glm.splines import BSpline, NaturalSpline
from fedual.glm.transforms import Poly, Scale, Transform, center, standardize

FUNCTIONS = {
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "log10": np.log10,
    "exp": np.exp,
    "expm1": np.expm1,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "I": np.asarray,
}
"""Of one number in each row."""
OPERATORS = {
    ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide, ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod, ast.Pow: np.power, ast.UAdd: np.positive, ast.USub: np.negative,
    ast.BitAnd: np.logical_and, ast.BitOr: np.logical_or, ast.Invert: np.logical_not,
    ast.Eq: np.equal, ast.NotEq: np.not_equal, ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
}  # fmt: skip
TRANSFORMS: dict[str, Callable[..., Transform]] = {
    "scale": Scale,
    "center": center,
    "standardize": standardize,
    "bs": BSpline,
    "cr": NaturalSpline,
    "cs": NaturalSpline,
    "poly": Poly,
}
"""Functions that depend on the data of all sites, by their options."""
CONTRASTS = {
    "Treatment": contrasts.TreatmentContrasts,
    "Sum": contrasts.SumContrasts,
    "Helmert": contrasts.HelmertContrasts,
    "Diff": contrasts.DiffContrasts,
}
"""Of `C(column, …)`."""
