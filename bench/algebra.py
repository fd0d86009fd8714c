"""All clients stacked against one client after the other, the same rounds of the exact methods.

Claim: a leading client axis costs less than a loop. Problem: logistic regression, 20 clients of 40 examples, 10
parameters, two rounds, median of three repeats. Floor: both do the same arithmetic; the loop pays the overhead of
every tensor operation 20 times.
"""

import statistics
import time
from dataclasses import replace

import torch

from fedual import methods
from fedual.algorithm.method import Solution, Solver
from fedual.algorithm.round import init, step
from fedual.families import Full, GaussHermite, Isotropic
from fedual.solvers import VON, Linear, Point

CLIENTS, SIZE, DIM, ROUNDS, REPEATS = 20, 40, 10, 2, 3


class OneByOne:
    """The same solver, called for each client alone."""

    def __init__(self, solver: Solver):
        self.solver = solver
        self.init = solver.init

    def __call__(self, problem):
        """Solve Eq. 15, client by client."""
        parts = []
        for k in range(len(problem.eta)):
            parts.append(self.solver(problem.select(slice(k, k + 1))).lam)
        return Solution(torch.cat(parts), problem.carry)


def seconds(method, prior, losses) -> float:
    times = []
    for _ in range(REPEATS):
        state, began = init(method, prior, CLIENTS), time.perf_counter()
        for _ in range(ROUNDS):
            state, _ = step(method, state, losses)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> bool:
    """Print the ratios; whether the claim holds."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    truth, clients = draw(DIM), []
    for _ in range(CLIENTS):
        x = draw(SIZE, DIM)
        clients.append((x, (torch.rand(SIZE, generator=generator) < torch.sigmoid(x @ truth)).double()))
    losses, zero = Linear.from_clients("binomial", clients), torch.zeros(DIM, dtype=torch.float64)
    print(f"algebra: {CLIENTS} clients, {ROUNDS} rounds of logistic regression")
    newton, von = methods.admm(1.0, solver=Point()), methods.newton_admm(1.0, solver=VON(GaussHermite(20)))
    holds = True
    for name, method, prior in (
        ("admm, Newton", newton, Isotropic(1.0).natural(zero)),
        ("newton_admm, VON", von, Full().natural(zero, 1.0)),
    ):
        stacked = seconds(method, prior, losses)
        alone = seconds(replace(method, solver=OneByOne(method.solver)), prior, losses)
        holds &= alone > stacked
        verdict = "ok" if alone > stacked else "SLOWER"
        print(f"  {name:18} stacked {stacked:6.3f} s, one by one {alone:6.3f} s: {alone / stacked:5.1f}×  {verdict}")
    return holds
