"""Other ways to the same coefficients: the error of each after every round.

A round is one message to every site and one back. All start where fedual does, at the fit with an intercept alone, but
IRLS, which starts from zero. Newton and IRLS see the pooled rows, since sums over sites are all that they need.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from fedual.algorithm import ClientState, Method, ServerState, State, step
from fedual.errors import FedualError
from fedual.families import Full
from fedual.glm.distributions import distribution
from fedual.glm.likelihood import Likelihood
from fedual.methods import newton_admm, pvi
from fedual.solvers import Loss, Newton
from studies.regression.pooled import Design, Expansion, Pooled, Vector

ROUNDS = 12
SHORTER = (0.5, 0.25, 0.1, 0.03)
"""Steps of Newton's line search beside the full one."""
LOCAL_STEPS = 20
"""Gradient steps of a site in a round of FedAvg."""
WEAK_SD, WEAK_INTERCEPT_SD, WEAK_EXTRA_SD = 2.5, 10.0, 1.5
"""Of the first q_g of ADMM and PVI, as of fedual's rounds."""


def errors(oracle: Pooled) -> dict[str, list[float | None]]:
    """Method → error in standard errors after 1, 2, … rounds; None where it has diverged."""
    return {name: _curve(method(oracle), oracle) for name, method in METHODS.items()}


def _curve(points: Iterator[Vector], oracle: Pooled) -> list[float | None]:
    found: list[float | None] = []
    try:
        for point in islice(points, ROUNDS):
            error = oracle.error(oracle.units @ point)
            if not error < 1e6:
                break
            found.append(error)
    except (FedualError, np.linalg.LinAlgError, FloatingPointError):
        pass
    return found + [None] * (ROUNDS - len(found))


def newton(oracle: Pooled) -> Iterator[Vector]:
    """Safeguarded Newton from the fit with an intercept alone.

    In every round sites tell (ℓ, ∇ℓ, ∇²ℓ) at the full step and ℓ at shorter ones, so that a step that is too long
    costs one round.
    """
    expand, best, length = oracle.whole.expand, oracle.start, 1.0
    found = expand(best)
    while True:
        move = -_solve(found.hessian, found.gradient)
        yield best + move
        trial = expand(best + move)
        if not _descends(trial, found):
            losses = [expand(best + t * move).loss for t in SHORTER]
            length = SHORTER[int(np.argmin(losses))]
            best = best + length * move
            yield best
            found = expand(best)
        else:
            best, found = best + move, trial


def _descends(trial: Expansion, found: Expansion) -> bool:
    return math.isfinite(trial.loss) and trial.loss <= found.loss + 1e-11 * abs(found.loss)


def irls(oracle: Pooled) -> Iterator[Vector]:
    """Fisher scoring from zero, without a safeguard, as GLM programs do it."""
    theta = np.zeros_like(oracle.start)
    while True:
        found = oracle.whole.expand(theta)
        if not math.isfinite(found.loss):
            return
        theta = theta - np.linalg.solve(found.expected, found.gradient)
        yield theta


def _solve(hessian: np.ndarray, gradient: Vector) -> Vector:
    """A descent step: eigenvalues of the scaled Hessian count by their size."""
    scale = np.abs(np.diag(hessian)) ** -0.5
    values, vectors = np.linalg.eigh(hessian * scale * scale[:, None])
    values = np.maximum(np.abs(values), 1e-13 * np.abs(values).max())
    return scale * (vectors @ (vectors.T @ (scale * gradient) / values))


def fedavg(oracle: Pooled) -> Iterator[Vector]:
    """Sites take `LOCAL_STEPS` gradient steps with a line search; the server averages them by their rows."""
    theta, rows = oracle.start, np.array([len(site.y) for site in oracle.sites])
    while True:
        theta = np.average([_descended(site, theta) for site in oracle.sites], axis=0, weights=rows)
        yield theta


def _descended(site: Design, theta: Vector) -> Vector:
    found = site.expand(theta)
    rate = 1 / np.linalg.eigvalsh(found.expected)[-1]
    for _ in range(LOCAL_STEPS):
        for _ in range(60):
            trial = site.expand(theta - rate * found.gradient)
            if trial.loss <= found.loss:
                break
            rate /= 2
        else:
            break
        theta, found = theta - rate * found.gradient, trial
    return theta


@dataclass(frozen=True)
class Sites(Loss):
    """The losses of several sites for a solver that takes one after the other."""

    each: list[Likelihood]

    def __len__(self) -> int:
        return len(self.each)

    def __getitem__(self, clients: Any) -> Loss:
        if isinstance(clients, slice) and clients.stop == clients.start + 1:
            return self.each[clients.start]
        return self

    @property
    def num_examples(self) -> torch.Tensor:
        """N_k."""
        return torch.cat([one.num_examples for one in self.each])


def rounds_of(make: Callable[[int], Method]) -> Callable[[Pooled], Iterator[Vector]]:
    """Rounds of one of fedual's methods, given K, from the first q_g of fedual's regressions."""

    def points(oracle: Pooled) -> Iterator[Vector]:
        whole, tensor = oracle.whole, torch.from_numpy
        kind = distribution(whole.family, whole.link)
        loss = lambda s: Likelihood(kind, tensor(s.x), tensor(s.y), tensor(s.weight), tensor(0 * s.y))
        sites = Sites([loss(site) for site in oracle.sites])
        method, size, dim = make(len(sites)), whole.x.shape[1], len(oracle.start)
        precision = torch.full((dim,), WEAK_SD**-2).double()
        precision[0] = WEAK_INTERCEPT_SD**-2
        precision[size:] = WEAK_EXTRA_SD**-2
        lam = Full().natural(tensor(oracle.start), torch.diag(precision))
        penalty, centre = tensor(whole.penalty), tensor(whole.centre)
        prior = torch.cat([(penalty * centre)[None], -torch.diag(penalty) / 2])
        many = lam.expand(len(sites), *lam.shape).clone()
        state = State(ServerState(prior, lam, torch.zeros_like(lam)), ClientState(torch.zeros_like(many), many, {}))
        while True:
            state, _ = step(method, state, sites)
            yield Full().mean(state.server.lam_g).numpy()

    return points


METHODS: dict[str, Callable[[Pooled], Iterator[Vector]]] = {
    "Newton": newton,
    "IRLS from 0": irls,
    "ADMM": rounds_of(lambda sites: newton_admm(1 / sites, Newton())),
    "ADMM, rho = 1": rounds_of(lambda sites: newton_admm(1.0, Newton())),
    "damped PVI": rounds_of(lambda sites: pvi(Full(), Newton(), damping=0.5)),
    "FedAvg": fedavg,
}
"""Name → its points, round by round."""
