"""Exponential families in two pictures: maximum entropy, and dual coordinates.

(a) Three densities with the moments μ = (E[θ], E[θ²]) = (0, 1). Of all such densities the Gaussian has the largest
entropy. (b) One-dimensional Gaussians in natural parameters, Ω = {λ : λ₂ < 0}, and in expectation parameters,
M = {μ : μ₂ > μ₁²}: a grid in Ω, its image under ∇A, and four distributions in both. The inverse map is ∇A*.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedual.families import Diagonal, log_prob
from studies.figures.common import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PURPLE, Drawing, Options, canvas

FAMILY = Diagonal()
STEP = 1e-4
THETA = STEP * np.arange(-250_000, 250_001)  # the nodes of every integral: at ±25 all three densities vanish

POINTS = {BLUE: (0.0, -0.5), ORANGE: (1.0, -0.5), GREEN: (-1.0, -0.75), PURPLE: (0.5, -1.5)}
"""The highlighted λ, by colour; the first is the standard normal of panel (a)."""


def gaussian(mean: float, variance: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return the density of N(mean, variance), computed by `Diagonal`."""
    return lambda theta: _density(FAMILY.natural(torch.tensor([mean], dtype=torch.float64), 1 / variance), theta)


def laplace(theta: np.ndarray) -> np.ndarray:
    """Return the Laplace density of variance 1."""
    return np.exp(-math.sqrt(2) * np.abs(theta)) / math.sqrt(2)


def two_bumps(theta: np.ndarray) -> np.ndarray:
    """Return ½ N(0.9, 0.19) + ½ N(−0.9, 0.19), of variance 0.19 + 0.9² = 1."""
    return (gaussian(0.9, 0.19)(theta) + gaussian(-0.9, 0.19)(theta)) / 2


DENSITIES = {"Gaussian": gaussian(0.0, 1.0), "Laplace": laplace, "two bumps": two_bumps}


def summary(density: Callable[[np.ndarray], np.ndarray]) -> dict[str, float]:
    """Compute the moments and the entropy −∫ q log q by the trapezoidal rule."""
    q = density(THETA)
    surprise = -np.log(np.where(q > 0, q, 1.0))
    mean = lambda values: float((q * values).sum() * STEP)
    return {"mass": mean(1.0), "mean": mean(THETA), "second_moment": mean(THETA**2), "entropy": mean(surprise)}


def grid() -> Tensor:
    """Return nine lines of constant λ₁ and seven of constant λ₂, `(16, N, 2, 1)`."""
    span = lambda low, high, number: torch.linspace(low, high, number, dtype=torch.float64)
    mesh = lambda first, second: torch.stack(torch.meshgrid(first, second, indexing="ij"), -1)
    upright = mesh(span(-1.0, 1.0, 9), span(-2.0, -0.5, 121))
    level = mesh(span(-1.0, 1.0, 121), span(-2.0, -0.5, 7)).transpose(0, 1)
    return torch.cat([upright, level])[..., None]


def round_trip(lam: Tensor) -> Tensor:
    """Return the largest change of a coordinate under ∇A* ∘ ∇A, for each λ `(..., 2, 1)`."""
    return (FAMILY.from_expectation(FAMILY.expectation(lam)) - lam).abs().amax((-2, -1))


def draw(options: Options) -> Drawing:
    """Draw panel (a), and panel (b): Ω, the two maps and M."""
    facts = {name: summary(density) for name, density in DENSITIES.items()}
    lam = torch.tensor(list(POINTS.values()), dtype=torch.float64)[..., None]
    mu = FAMILY.expectation(lam)
    errors, grid_error = round_trip(lam), float(round_trip(grid()).max())
    numbers = {
        "densities": facts,
        "points": {"lambda": lam[..., 0], "mu": mu[..., 0], "round_trip_error": errors},
        "grid_round_trip_error": grid_error,
    }

    ranking = sorted(facts, key=lambda name: -facts[name]["entropy"])
    first, second = (facts[name]["entropy"] for name in ranking[:2])
    findings = [
        f"{ranking[0]} has the largest entropy of the three, {first:.4f} nats: {first - second:.4f} more than "
        f"{ranking[1]}, which has the same mean and variance.",
        "From λ to μ = ∇A(λ) and back by ∇A*, no coordinate of a point or of the grid changes by more than "
        f"{max(float(errors.max()), grid_error):.1e}.",
    ]
    with canvas(7.2, 2.7) as figure:
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(2.7, 4.5), wspace=0.04)[0]
        _densities(left.subplots(), facts)
        left.suptitle("(a) Maximum entropy", x=0.02, ha="left", fontsize=10, fontweight="bold")
        omega, maps, moments = right.subplots(1, 3, width_ratios=(1.0, 0.62, 1.0))
        right.suptitle("(b) Dual coordinates", x=0.02, ha="left", fontsize=10, fontweight="bold")
        _natural(omega, lam)
        _maps(maps, lam)
        _expectation(moments, mu)
    return Drawing(figure, numbers, findings)


def _density(lam: Tensor, theta: np.ndarray) -> np.ndarray:
    return log_prob(FAMILY, lam, torch.from_numpy(theta)[:, None]).exp().numpy()


def _densities(axis, facts: dict[str, dict[str, float]]) -> None:
    theta = np.linspace(-3.4, 3.4, 1201)
    for name, colour, style, width, tip, spot in (
        ("Laplace", GREY, "--", 1.4, (0.17, 0.565), (0.85, 0.635)),
        ("two bumps", GREY, (0, (2, 1.5)), 1.4, (1.13, 0.4), (1.6, 0.45)),
        ("Gaussian", INK, "-", 2.0, (1.7, 0.095), (1.85, 0.2)),
    ):
        axis.plot(theta, DENSITIES[name](theta), color=colour, ls=style, lw=width)
        label = f"{name}\n$H = {facts[name]['entropy']:.3f}$"
        leader = {"arrowstyle": "-", "color": GREY, "lw": 0.6, "shrinkA": 1, "shrinkB": 1}
        axis.annotate(label, tip, spot, color=INK, fontsize=8.5, va="center", arrowprops=leader)
    axis.text(-3.3, 0.66, r"$\mu = (0, 1)$")
    axis.set(xlim=(-3.4, 3.4), ylim=(0, 0.74), xticks=(-2, 0, 2), yticks=[], xlabel=r"$\theta$")
    axis.spines["left"].set_visible(False)


def _natural(axis, lam: Tensor) -> None:
    _space(axis, grid(), lam)
    axis.axhspan(-3, 0, color=FAINT, alpha=0.35, lw=0, zorder=0)
    axis.axhline(0, color=GREY, lw=1.0, ls="--")
    axis.text(-1.25, -0.1, r"$\Omega$", fontsize=11, va="top")
    axis.set(xlim=(-1.4, 1.4), ylim=(-2.3, 0.3), xticks=(-1, 0, 1), yticks=(-2, -1, 0))
    axis.set(xlabel=r"$\lambda_1$", ylabel=r"$\lambda_2$")


def _expectation(axis, mu: Tensor) -> None:
    _space(axis, FAMILY.expectation(grid()), mu)
    edge = np.linspace(-2, 2, 201)
    axis.fill_between(edge, edge**2, 3, color=FAINT, alpha=0.35, lw=0, zorder=0)
    axis.plot(edge, edge**2, color=GREY, lw=1.0, ls="--")
    axis.text(0, 2.13, r"$\mathcal{M}$", fontsize=11, va="top", ha="center")
    axis.set(xlim=(-1.55, 1.55), ylim=(-0.26, 2.3), xticks=(-1, 0, 1), yticks=(0, 1, 2))
    axis.set(xlabel=r"$\mu_1$", ylabel=r"$\mu_2$")


def _space(axis, lines: Tensor, points: Tensor) -> None:
    for line in lines:
        axis.plot(line[:, 0, 0], line[:, 1, 0], color=GREY, lw=0.6, alpha=0.8, zorder=1)
    axis.scatter(points[:, 0, 0], points[:, 1, 0], s=34, c=list(POINTS), edgecolors="white", linewidths=0.8, zorder=4)


def _maps(axis, lam: Tensor) -> None:
    """Draw the arrows between the two spaces, and the densities of the highlighted points."""
    axis.set(xlim=(0, 1), ylim=(0, 1))
    axis.set_axis_off()
    arrow = {"arrowstyle": "-|>,head_width=0.2,head_length=0.4", "color": INK, "lw": 1.3}
    for y, start, end, name, above in ((0.84, 0.0, 1.0, r"$\nabla A$", 0.07), (0.16, 1.0, 0.0, r"$\nabla A^*$", -0.08)):
        axis.annotate("", (end, y), (start, y), arrowprops=arrow)
        axis.text(0.5, y + above, name, ha="center", va="center", fontsize=10)

    theta = np.linspace(-3.0, 3.6, 401)
    small = axis.inset_axes((0.02, 0.37, 0.96, 0.34))
    for point, colour in zip(lam, POINTS, strict=True):
        small.plot(theta, _density(point, theta), color=colour, lw=1.4)
    small.set(xticks=[], yticks=[], ylim=(0, None))
    small.spines["left"].set_visible(False)
    axis.text(0.5, 0.29, r"$q(\theta)$", ha="center", va="center")
