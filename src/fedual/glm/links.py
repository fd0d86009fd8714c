"""Links: the mean μ as a function of the linear predictor f, with derivatives, and f as a function of μ."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.special import log_ndtr, ndtri

Derivatives = tuple[Tensor, Tensor, Tensor]
"""A function of f with its first and second derivative."""

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Link(NamedTuple):
    """A link of means on the line, or on its positive half."""

    mean: Callable[[Tensor], Derivatives]
    predictor: Callable[[Tensor], Tensor]


class BinaryLink(NamedTuple):
    """A link of probabilities: log μ and log(1 − μ) stay accurate where μ rounds to 0 or 1."""

    logs: Callable[[Tensor], tuple[Derivatives, Derivatives]]
    predictor: Callable[[Tensor], Tensor]


def _exp(f: Tensor) -> Derivatives:
    mean = f.exp()
    return mean, mean, mean


def _logit(f: Tensor) -> tuple[Derivatives, Derivatives]:
    yes, no = torch.sigmoid(f), torch.sigmoid(-f)
    second = -yes * no
    return (logsigmoid(f), no, second), (logsigmoid(-f), -yes, second)


def _probit(f: Tensor) -> tuple[Derivatives, Derivatives]:
    ratio = lambda t: (-(t**2) / 2 - HALF_LOG_2PI - log_ndtr(t)).exp()
    up, down = ratio(f), ratio(-f)
    return (log_ndtr(f), up, -up * (f + up)), (log_ndtr(-f), -down, -down * (down - f))


def _cloglog(f: Tensor) -> tuple[Derivatives, Derivatives]:
    rate = f.exp()
    up = rate / torch.expm1(rate)
    up = torch.where(rate > 0, up, torch.ones_like(up))
    return (torch.log(-torch.expm1(-rate)), up, up * (1 - rate - up)), (-rate, -rate, -rate)


LINKS = {
    "identity": Link(lambda f: (f, torch.ones_like(f), torch.zeros_like(f)), lambda mean: mean),
    "log": Link(_exp, torch.log),
    "sqrt": Link(lambda f: (f**2, 2 * f, torch.full_like(f, 2.0)), torch.sqrt),
    "inverse": Link(lambda f: (1 / f, -1 / f**2, 2 / f**3), lambda mean: 1 / mean),
}
BINARY_LINKS = {
    "logit": BinaryLink(_logit, torch.logit),
    "probit": BinaryLink(_probit, ndtri),
    "cloglog": BinaryLink(_cloglog, lambda mean: torch.log(-torch.log1p(-mean))),
}
