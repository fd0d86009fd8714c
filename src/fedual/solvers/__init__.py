"""Solvers of the client's problem (Eq. 15), and the losses they understand."""

from fedual.parts import register
from fedual.solvers.adaptive import HiddenDecay, InitialNoise, RoundRate, RoundReach, StepLimit
from fedual.solvers.base import Loss, Stack
from fedual.solvers.blr import BLR, AtServer
from fedual.solvers.exact import Conjugate, Exact
from fedual.solvers.ivon import IVON, FreshIVON
from fedual.solvers.laplace import Laplace
from fedual.solvers.linear import Linear
from fedual.solvers.newton import Newton
from fedual.solvers.point import Point
from fedual.solvers.sgd import SGD
from fedual.solvers.stepper import Stepper
from fedual.solvers.von import VON

__all__ = [
    "BLR", "IVON", "SGD", "VON", "AtServer", "Conjugate", "Exact", "FreshIVON", "HiddenDecay", "InitialNoise",
    "Laplace", "Linear", "Loss", "Newton", "Point", "RoundRate", "RoundReach", "Stack", "StepLimit", "Stepper",
]  # fmt: skip

register(AtServer, BLR, Exact, FreshIVON, IVON, Laplace, Newton, Point, SGD, VON)
register(HiddenDecay, InitialNoise, RoundRate, RoundReach, StepLimit)
