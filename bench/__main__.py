"""Speed as ratios in one run: all clients stacked against one client after the other, the same rounds.

Claim: a leading client axis costs less than a loop. Problem: logistic regression, 20 clients of 40 examples, 10
parameters, two rounds, median of three repeats. Floor: both do the same arithmetic; the loop pays the overhead of
every tensor operation 20 times.
"""

import statistics
import time

import torch

from fedual import methods
from fedual.admm import Solution, Solver, init, step
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


def main() -> None:
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    truth, clients = torch.randn(DIM, generator=generator), []
    for _ in range(CLIENTS):
        x = torch.randn(SIZE, DIM, generator=generator)
        clients.append((x, (torch.rand(SIZE, generator=generator) < torch.sigmoid(x @ truth)).double()))
    losses = Linear.from_clients("binomial", clients)
    print(f"{CLIENTS} clients, {ROUNDS} rounds, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, make, prior in (
        (
            "admm, Newton",
            lambda solver: methods.admm(1.0, solver=solver or Point()),
            Isotropic(1.0).natural(torch.zeros(DIM)),
        ),
        (
            "newton_admm, VON",
            lambda solver: methods.newton_admm(1.0, solver=solver or VON(GaussHermite(20))),
            Full().natural(torch.zeros(DIM), 1.0),
        ),
    ):
        stacked = seconds(make(None), prior, losses)
        alone = seconds(make(OneByOne(make(None).solver)), prior, losses)
        verdict = "ok" if alone > stacked else "SLOWER"
        print(f"{name:18} stacked {stacked:6.3f} s, one by one {alone:6.3f} s: {alone / stacked:5.1f}×  {verdict}")


if __name__ == "__main__":
    main()
