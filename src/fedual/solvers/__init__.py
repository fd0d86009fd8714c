"""Solvers of the client's problem (Eq. 15), and the losses they understand."""

from fedual.solvers.base import Loss, Stack, moments, natural_gradient
from fedual.solvers.blr import BLR, AtServer
from fedual.solvers.clients import Clients
from fedual.solvers.draws import Draws
from fedual.solvers.exact import Conjugate, Exact
from fedual.solvers.ivon import IVON
from fedual.solvers.laplace import Laplace
from fedual.solvers.linear import Linear
from fedual.solvers.minibatches import Minibatches
from fedual.solvers.network import Network
from fedual.solvers.point import Point
from fedual.solvers.scale import Gain, Hidden, Noise, Reach, Units
from fedual.solvers.sgd import SGD
from fedual.solvers.stochastic import Stepper
from fedual.solvers.von import VON

__all__ = [
    "BLR",
    "IVON",
    "SGD",
    "VON",
    "AtServer",
    "Clients",
    "Conjugate",
    "Draws",
    "Exact",
    "Gain",
    "Hidden",
    "Laplace",
    "Linear",
    "Loss",
    "Minibatches",
    "Network",
    "Noise",
    "Point",
    "Reach",
    "Stack",
    "Stepper",
    "Units",
    "moments",
    "natural_gradient",
]
