"""Softmax regression on heterogeneous clients: Bayesian-ADMM, PVI (plain and damped) and Bregman-ADMM.

Five clients with two classes each, δ = 10; ρ = 1, PVI damped by 0.2, Bregman-ADMM with γ = 0.2, as in the paper.
The bound is Σ_k E_q[ℓ_k] + KL(q ‖ π_0) (Eq. 9) at the server's q, estimated with noise that no method has used. The
left panel has full covariances, as the paper's text says, the right one diagonal ones. The dashed line is the batch
optimum, found by L-BFGS over (m, Σ^{1/2}) of the pooled problem.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedual import methods
from fedual.algorithm.duals import Natural
from fedual.algorithm.method import Method
from fedual.algorithm.round import init, step
from fedual.algorithm.servers import Blend
from fedual.errors import FedualError
from fedual.families import Diagonal, Full, Gaussian, MonteCarlo, kl
from fedual.solvers import BLR, VON, Linear
from studies.figures.common import BLUE, GREEN, INK, ORANGE, RED, Drawing, Options, canvas, handwriting

DELTA, RHO, DAMPING, ROUNDS = 10.0, 1.0, 0.2, 25
TEST_NOISE = MonteCarlo(256, seed=99)
LOOKS = {"Bayesian-ADMM": (BLUE, "o"), "PVI": (RED, "^"), "PVI, damped": (ORANGE, "v"), "Bregman-ADMM": (GREEN, "s")}


@dataclass(frozen=True)
class Problem:
    """The clients' losses, and the same data in one place."""

    clients: Linear
    pooled: Linear

    def prior(self, family: Gaussian) -> Tensor:
        """Return N(0, I/δ)."""
        return family.natural(self.clients.x.new_zeros(self.clients.dim), DELTA)

    def bound(self, family: Gaussian, lam: Tensor) -> float:
        """Return the bound (Eq. 9) at q."""
        expected = self.pooled.moments(family, lam[None], TEST_NOISE, curvature="none").value[0]
        return float(expected + kl(family, lam, self.prior(family)))


def problem(options: Options) -> tuple[str, Problem]:
    """Return the data's name and the problem: the paper's size (5000 images, 14 × 14) or 1000 images, 7 × 7."""
    name, clients = handwriting(options, *((5000, 14) if options.full else (1000, 7)))
    together = (torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]))
    return name, Problem(Linear.from_clients("softmax", clients), Linear.from_clients("softmax", [together]))


def compositions(family: Gaussian, solver: BLR) -> dict[str, Method]:
    """Compose the four methods of the figure."""
    return {
        "Bayesian-ADMM": Method(family, solver, Natural(RHO), Blend(), RHO),
        "PVI": methods.pvi(family, solver),
        "PVI, damped": methods.pvi(family, solver, DAMPING),
        "Bregman-ADMM": methods.bregman_admm(family, solver, RHO, DAMPING),
    }


class Curve(NamedTuple):
    """The bound at the start and after each round, and the number of updates left out in each round."""

    bound: list[float]
    left_out: list[int]


def curve(method: Method, what: str, problem: Problem, rounds: int, options: Options) -> Curve:
    """Run a method; the curve is shorter than `rounds` if an inner solver did not converge."""
    family = method.family
    assert isinstance(family, Gaussian)
    state = init(method, problem.prior(family), len(problem.clients))
    found = Curve([problem.bound(family, state.lam_g)], [])
    for t in range(rounds):
        options.say(f"{what}, {family}, round {t + 1} of {rounds}")
        try:
            state, info = step(method, state, problem.clients)
        except FedualError as error:
            options.say(str(error))
            break
        found.bound.append(problem.bound(family, state.lam_g))
        found.left_out.append(int(info.refused.sum()))
    return found


def batch_optimum(family: Gaussian, problem: Problem, options: Options, steps: int = 400) -> float:
    """Return the bound of the pooled problem, minimised by L-BFGS over the mean and a root of the covariance."""
    data, dim = problem.pooled, problem.clients.dim
    full, (size, classes) = isinstance(family, Full), (data.x.shape[-1], data.y.shape[-1])
    x, y = data.x[0], data.y[0]
    mean, root = x.new_zeros(dim), x.new_ones(dim) / DELTA**0.5
    mean, root = mean.requires_grad_(), (torch.diag(root) if full else root).requires_grad_()
    # every example has its own noise, so that the root cannot fit the noise
    noise = MonteCarlo(32, seed=7)(len(x) * classes, 0, mean)[0].unflatten(1, (len(x), classes)).transpose(0, 1)
    jitter = 1e-12 * torch.eye(classes).to(x)

    def bound() -> Tensor:
        triangle = root.tril() if full else root
        if full:
            spread = torch.einsum("nd,dcp->ncp", x, triangle.unflatten(0, (size, classes)))
            factor = torch.linalg.cholesky(spread @ spread.mT + jitter)
        else:
            factor = torch.diag_embed((x**2 @ triangle.unflatten(0, (size, classes)) ** 2).sqrt())
        f = (x @ mean.unflatten(0, (size, classes))).unsqueeze(-2) + noise @ factor.mT
        expected = (torch.logsumexp(f, -1) - (y.unsqueeze(-2) * f).sum(-1)).mean(-1).sum()
        log_det = 2 * (triangle.diagonal() if full else triangle).abs().log().sum()
        log_det = log_det + dim * math.log(DELTA)
        return expected + (DELTA * (mean @ mean + (triangle**2).sum()) - dim - log_det) / 2

    optimiser = torch.optim.LBFGS([mean, root], max_iter=steps, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = bound()
        value.backward()
        options.say(f"batch optimum, {family}: {float(value.detach()):.1f}")
        return value.detach()

    optimiser.step(closure)
    scale = root.detach().tril() if full else root.detach()
    precision = torch.cholesky_inverse(scale * scale.diagonal().sign()) if full else scale**-2
    return problem.bound(family, family.natural(mean.detach(), precision))


def draw(options: Options) -> Drawing:
    """Draw the bound over rounds for full and diagonal covariances."""
    name, task = problem(options)
    noise = MonteCarlo(32, seed=1)
    solvers = {Full(): VON(noise, tol=1e-4), Diagonal(): BLR(noise, tol=1e-3, max_steps=3000)}
    optima = {str(family): batch_optimum(family, task, options) for family in solvers}
    runs = {
        str(family): {
            what: curve(method, what, task, ROUNDS, options) for what, method in compositions(family, solver).items()
        }
        for family, solver in solvers.items()
    }
    noisy = {
        f"{steps} steps, β = {beta}": curve(
            methods.pvi(Full(), VON(MonteCarlo(2, 3, fresh=True), beta, max_steps=steps)), "noisy PVI", task, 6, options
        ).bound
        for steps, beta in ((5, 0.2), (20, 0.1), (20, 0.5))
    }
    numbers = {
        "data": name,
        "parameters": task.clients.dim,
        "settings": {"delta": DELTA, "rho": RHO, "damping": DAMPING, "bregman_gamma": DAMPING},
        "batch_optimum": optima,
        "bound_by_round": {family: {what: c.bound for what, c in curves.items()} for family, curves in runs.items()},
        "left_out_by_round": {
            family: {what: c.left_out for what, c in curves.items()} for family, curves in runs.items()
        },
        "plain_pvi_full_with_noisy_inner_steps": noisy,
    }
    with canvas(7.2, 3.1) as figure:
        for axis, family in zip(figure.subplots(1, 2), runs, strict=True):
            _panel(axis, family, runs[family], optima[family])
    return Drawing(figure, numbers, _findings(runs, optima, noisy))


def _findings(runs: dict, optima: dict, noisy: dict) -> list[str]:
    found = []
    for family, curves in runs.items():
        best = optima[family]
        parts = []
        for what, (values, left_out) in curves.items():
            reached = [t for t in range(len(values)) if all(abs(v / best - 1) <= 0.01 for v in values[t:])]
            when = f"within 1 % from round {reached[0]} on" if reached else "not within 1 %"
            stopped = "" if len(values) > ROUNDS else f", stopped after round {len(values) - 1}"
            without = f", {sum(left_out)} updates left out" if sum(left_out) else ""
            parts.append(f"{what} {when} (last {values[-1] / best - 1:+.1%}{without}{stopped})")
        found.append(f"{family}, batch optimum {best:.1f}: " + "; ".join(parts) + ".")
    worst = max(values[-1] / optima["Full"] - 1 for values in noisy.values())
    found.append(f"Plain PVI, full, with 5 to 20 noisy inner steps: after 6 rounds at most {worst:+.1%} off.")
    return found


def _panel(axis, family: str, curves: dict[str, Curve], best: float) -> None:
    axis.axhline(best, color=INK, ls="--", lw=1, label="batch optimum")
    for what, (values, _) in curves.items():
        colour, marker = LOOKS[what]
        axis.plot(values, color=colour, marker=marker, ms=3, lw=1.5, label=what)
        if len(values) <= ROUNDS:
            axis.annotate("not solved", (len(values) - 1, values[-1]), (6, -3), textcoords="offset points", fontsize=8)
    start = curves["PVI"].bound[0]
    axis.set(xlabel="communication rounds", xlim=(-0.5, ROUNDS + 0.5), yscale="log", ylim=(0.92 * best, 1.05 * start))
    ticks = [float(f"{best * (start / best) ** (i / 4):.2g}") for i in range(5)]
    axis.set_yticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axis.minorticks_off()
    axis.set_title("Full covariance" if family == "Full" else "Diagonal covariance")
    if family == "Full":
        axis.set_ylabel("bound (smaller is better)")
    else:
        axis.legend(loc="upper right")
