"""The two dual structures, side by side: ADMM's fixed point (Eq. 4) and Bayesian duality (Eq. 13).

The figure is a schematic, and its numbers check what it draws: both methods run to convergence on four random
quadratics ℓ_k(θ) = ½ θᵀA_kθ + b_kᵀθ with ℓ_0(θ) = ½ ‖θ‖², and the residuals of the four equations are evaluated
there. Derivatives come from automatic differentiation, not from the closed forms that the methods use.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedual import methods
from fedual.algorithm.method import Losses, Method
from fedual.algorithm.round import State, init, step
from fedual.families import Full
from fedual.solvers import Conjugate, Exact, Point, Stack
from fedual.solvers.base import derivatives
from studies.figures.common import BLUE, FAINT, INK, RED, Drawing, Options, canvas

CLIENTS, DIM, RHO, TOLERANCE, MAX_ROUNDS = 4, 3, 1.0, 1e-13, 2000
EQUATIONS = ("broadcast", "gradient", "gather", "back_to_primal")


class Structure(NamedTuple):
    """The symbols of one panel in mathtext: four variables, and the equations on the four arrows."""

    title: str
    server: str  # the regulariser or prior, which the server holds
    spaces: tuple[str, str]  # where primal and dual variables live, in words
    primal: tuple[str, str]  # at the server, at a client
    dual: tuple[str, str]
    broadcast: str
    gradient: str
    gather: str
    back: str


ADMM = Structure(
    "ADMM (Eq. 4)",
    r"\ell_0 = \frac{1}{2}\Vert\mathbfit{\theta}\Vert^2",
    ("parameters", "gradients"),
    (r"\mathbfit{\theta}_g^*", r"\mathbfit{\theta}_k^*"),
    (r"\mathbf{v}_g^*", r"\mathbf{v}_k^*"),
    r"\mathbfit{\theta}_k^* = \mathbfit{\theta}_g^*",
    r"\mathbf{v}_k^* = -\nabla \ell_k(\mathbfit{\theta}_k^*)",
    r"\mathbf{v}_g^* = \sum_{k \geq 1}\, \mathbf{v}_k^*",
    r"\mathbfit{\theta}_g^* = \mathbf{v}_g^*",
)
BAYES = Structure(
    "Bayesian duality (Eq. 13)",
    r"\pi_0 \propto \exp(-\ell_0)",
    ("expectations", "natural gradients"),
    (r"\mathbfit{\mu}_g^*", r"\mathbfit{\mu}_k^*"),
    (r"\mathbfit{\lambda}_g^*", r"\mathbfit{\eta}_k^*"),
    r"\mathbfit{\mu}_k^* = \mathbfit{\mu}_g^*",
    r"\mathbfit{\eta}_k^* = -\nabla \mathcal{L}_k(\mathbfit{\mu}_k^*)",
    r"\mathbfit{\lambda}_g^* = \sum_{k \geq 0}\, \mathbfit{\eta}_k^*",
    r"\mathbfit{\mu}_g^* = \nabla A(\mathbfit{\lambda}_g^*)",
)


def draw(options: Options) -> Drawing:
    """Draw the schematic and compute the residuals of its eight equations."""
    a, b = quadratics(seed=0)
    first, admm_rounds = admm_residuals(a, b)
    second, bayes_rounds = bayes_residuals(a, b)
    numbers = {
        "problem": {"clients": CLIENTS, "dim": DIM, "rho": RHO},
        "rounds": {"admm": admm_rounds, "bayesian_admm": bayes_rounds},
        "residuals": {"admm_eq4": first, "bayesian_duality_eq13": second},
    }
    findings = [
        f"ADMM's fixed point meets the four equations of Eq. 4 with a largest residual of {max(first.values()):.1e}.",
        f"Bayesian-ADMM's fixed point meets the four of Eq. 13 with a largest residual of {max(second.values()):.1e}.",
    ]
    with canvas(7.2, 3.5) as figure:
        for axis, structure in zip(figure.subplots(1, 2), (ADMM, BAYES), strict=True):
            _panel(axis, structure)
    return Drawing(figure, numbers, findings)


def quadratics(seed: int) -> tuple[Tensor, Tensor]:
    """Draw A_k, positive semi-definite of rank 2, and b_k."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(CLIENTS, DIM, 2, generator=generator, dtype=torch.float64)
    return root @ root.mT, torch.randn(CLIENTS, DIM, generator=generator, dtype=torch.float64)


def admm_residuals(a: Tensor, b: Tensor) -> tuple[dict[str, float], int]:
    """Return the residuals of Eq. 4 at ADMM's fixed point, and the number of rounds."""
    losses = Stack(_functions(a, b))
    state = _converge(methods.admm(RHO, solver=Point(tol=1e-12)), torch.zeros(1, DIM, dtype=torch.float64), losses)
    theta_g, theta, v, v_g = state.lam_g[0], state.lam[:, 0], state.eta[:, 0], state.server.eta_sum[0]
    gaps = theta - theta_g, v + derivatives(losses, theta, "none").gradient, v_g - v.sum(0), theta_g - v_g
    return _largest(*gaps), state.server.round


def bayes_residuals(a: Tensor, b: Tensor) -> tuple[dict[str, float], int]:
    """Return the residuals of Eq. 13 at Bayesian-ADMM's fixed point over full Gaussians, and the number of rounds.

    k = 0 is the prior N(0, I), with η_0 = λ_0.
    """
    family = Full()
    prior = family.natural(torch.zeros(DIM, dtype=torch.float64))
    losses = Conjugate(family, torch.cat([-b[:, None], -a / 2], 1))
    state = _converge(methods.newton_admm(RHO, Exact()), prior, losses)

    mu_g, mu = family.expectation(state.lam_g), family.expectation(state.lam)
    lam, eta = torch.cat([state.lam_g[None], state.lam]), torch.cat([prior[None], state.eta])
    all_losses = Stack([lambda theta: theta.square().sum(-1) / 2, *_functions(a, b)])
    at_mean = derivatives(all_losses, family.mean(lam))  # for quadratics E_q[∇ℓ] = ∇ℓ(m), E_q[∇²ℓ] = ∇²ℓ(m)
    gradient = family.natural_gradient(lam, at_mean.gradient, at_mean.hessian)
    grad_a = torch.func.grad(family.log_partition)(state.lam_g)
    return _largest(mu - mu_g, eta + gradient, state.lam_g - eta.sum(0), mu_g - grad_a), state.server.round


def _functions(a: Tensor, b: Tensor) -> list[Callable[[Tensor], Tensor]]:
    return [lambda theta, a=a, b=b: ((theta @ a / 2 + b) * theta).sum(-1) for a, b in zip(a, b, strict=True)]


def _converge(method: Method, prior: Tensor, losses: Losses) -> State:
    """Run until neither the clients nor the server move."""
    state = init(method, prior, CLIENTS)
    for _ in range(MAX_ROUNDS):
        state, info = step(method, state, losses)
        if max(info.primal, info.dual) <= TOLERANCE:
            break
    return state


def _largest(*gaps: Tensor) -> dict[str, float]:
    return {name: float(gap.abs().max()) for name, gap in zip(EQUATIONS, gaps, strict=True)}


WIDTH, LEFT, RIGHT, TOP, BOTTOM, RADIUS = 3.26, 0.6, 2.7, 2.28, 0.66, 0.26
"""The width of the server's box, and where the four variables stand, in inches of a panel 3.5 × 3.12."""


def _panel(axis, structure: Structure) -> None:
    """Draw the server above the clients, primal variables left of dual ones, and the cycle of arrows."""
    axis.set(xlim=(0, 3.5), ylim=(0.04, 3.16), aspect="equal")
    axis.set_axis_off()
    axis.set_title(structure.title, loc="center", pad=8, x=WIDTH / 2 / 3.5)
    _box(axis, 0.02, TOP)
    for shift in (0.16, 0.08, 0.0):
        _box(axis, 0.02 + shift, BOTTOM - shift)
    middle = (LEFT + RIGHT) / 2
    axis.text(middle, TOP - 0.24, f"server, ${structure.server}$", alpha=0.65, ha="center", va="center")
    axis.text(middle, BOTTOM + 0.24, r"clients $k = 1, \ldots, K$", alpha=0.65, ha="center", va="center")

    columns = (LEFT, "primal", BLUE, structure.primal), (RIGHT, "dual", RED, structure.dual)
    for (x, name, colour, symbols), space in zip(columns, structure.spaces, strict=True):
        axis.text(x, TOP + 0.76, name, color=colour, ha="center", va="center", fontweight="bold")
        axis.text(x, TOP + 0.57, space, color=colour, ha="center", va="center", fontsize=8)
        for y, symbol in zip((TOP, BOTTOM), symbols, strict=True):
            _node(axis, x, y, symbol, colour)

    gap = RADIUS + 0.05
    _arrow(axis, (LEFT, TOP - gap), (LEFT, BOTTOM + gap))
    _arrow(axis, (LEFT + gap, BOTTOM), (RIGHT - gap, BOTTOM))
    _arrow(axis, (RIGHT, BOTTOM + gap), (RIGHT, TOP - gap))
    _arrow(axis, (RIGHT - gap, TOP), (LEFT + gap, TOP))
    _equation(axis, middle, TOP + 0.17, structure.back, "center")
    _equation(axis, middle, BOTTOM - 0.17, structure.gradient, "center")
    centre = (TOP + BOTTOM) / 2
    for x, align, word, equation in (
        (LEFT + 0.1, "left", "broadcast", structure.broadcast),
        (RIGHT - 0.1, "right", "gather", structure.gather),
    ):
        axis.text(x, centre + 0.2, word, ha=align, va="center")
        _equation(axis, x, centre - 0.06, equation, align)


def _box(axis, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.1"
    axis.add_patch(FancyBboxPatch((x, y - 0.42), WIDTH, 0.84, boxstyle=style, fc="#f6f6f6", ec=FAINT, lw=0.9))


def _node(axis, x: float, y: float, symbol: str, colour: str) -> None:
    from matplotlib.patches import Circle

    axis.add_patch(Circle((x, y), RADIUS, fc="white", ec=colour, lw=1.5, zorder=3))
    axis.text(x, y - 0.01, f"${symbol}$", color=colour, fontsize=12, ha="center", va="center", zorder=4)


def _arrow(axis, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>,head_width=0.22,head_length=0.4", "color": INK, "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", xy=end, xytext=start, arrowprops=style, zorder=2)


def _equation(axis, x: float, y: float, equation: str, align: str) -> None:
    axis.text(x, y, f"${equation}$", ha=align, va="center", fontsize=9.5, zorder=4)
