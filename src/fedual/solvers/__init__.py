"""Solvers of the client's problem (Eq. 15), and the losses they understand."""

from fedual.solvers.base import Loss, Stack, moments, natural_gradient
from fedual.solvers.blr import BLR, AtServer
from fedual.solvers.exact import Conjugate, Exact
from fedual.solvers.linear import Linear
from fedual.solvers.point import Point
from fedual.solvers.von import VON

__all__ = [
    "BLR",
    "VON",
    "AtServer",
    "Conjugate",
    "Exact",
    "Linear",
    "Loss",
    "Point",
    "Stack",
    "moments",
    "natural_gradient",
]
