"""A site's loss with its effects integrated out: derivatives, symmetry, and the linear model's closed form."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from fedual.glm.distributions import distribution
from fedual.glm.likelihood import Likelihood
from fedual.glm.mixed.cholesky import factor
from fedual.glm.mixed.integrated import Integrated
from fedual.glm.mixed.quadratics import Linear, Quadratics, least

FAMILIES = ("binomial", "poisson", "gaussian")


def loss(family: str, effects: int, rows: int = 60, seed: int = 0) -> Integrated:
    rng = np.random.default_rng(seed)
    x = torch.tensor(np.column_stack([np.ones(rows), rng.normal(size=(rows, 2))]))
    y = torch.tensor((rng.random(rows) < 0.4).astype(float))
    weight = torch.tensor(rng.integers(1, 3, rows).astype(float))
    plain = Likelihood(distribution(family), x, y, weight, torch.zeros(rows, dtype=x.dtype))
    return Integrated(plain, torch.eye(3, dtype=x.dtype)[:, :effects])


def point(effects: int, sigma: float = 0.7) -> torch.Tensor:
    return torch.tensor([0.1, 0.3, -0.2, sigma, *[0.2, 0.4][: 2 * (effects - 1)]], dtype=torch.float64)


@pytest.mark.parametrize("effects", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_derivatives_are_those_of_differences(family: str, effects: int):
    """They are the exact integral's; with two effects the quadrature's own error shows."""
    of, psi, step = loss(family, effects), point(effects), 1e-5
    found = of.expand(psi)
    size = 1e-6 if effects == 1 else 2e-4
    for i, each in enumerate(torch.eye(len(psi), dtype=psi.dtype) * step):
        slope = (of.loss(psi + each) - of.loss(psi - each)) / (2 * step)
        curve = (of._expand(psi + each).gradient - of._expand(psi - each).gradient) / (2 * step)
        torch.testing.assert_close(found.gradient[i], slope, atol=size, rtol=size)
        torch.testing.assert_close(found.hessian[i], curve, atol=5 * size, rtol=size)


@pytest.mark.parametrize("family", ["binomial", "poisson"])
@pytest.mark.parametrize("sigma", [0.01, 0.5, 2.0])
def test_the_integral_is_that_of_adaptive_quadrature(family: str, sigma: float):
    of, psi = loss(family, 1, rows=12), point(1, sigma)
    least = float(of.loss(psi))
    v = lambda u: psi[:3] + torch.tensor([sigma * u, 0.0, 0.0], dtype=psi.dtype)
    density = lambda u: float((least - of.plain.loss(v(u)) - u**2 / 2).exp()) / np.sqrt(2 * np.pi)
    assert integrate.quad(density, -9, 9, epsabs=1e-12, epsrel=1e-12)[0] == pytest.approx(1, abs=1e-8)


@given(sigma=st.floats(0.01, 3), seed=st.integers(0, 20))
@settings(max_examples=15, deadline=None)
def test_the_loss_is_even_in_sigma_and_falls_to_the_glms_at_zero(sigma: float, seed: int):
    of = loss("binomial", 1, 20, seed)
    torch.testing.assert_close(of.loss(point(1, sigma)), of.loss(point(1, -sigma)), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(of.loss(point(1, 0.0)), of.plain.loss(point(1)[:3]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("effects", [1, 2])
def test_the_linear_models_closed_form(effects: int):
    """−log N(y; Xβ, I + ZΛΛᵀZᵀ), and the same from sums alone."""
    of, psi = loss("gaussian", effects), point(effects)
    plain = of.plain
    x, w, residual = plain.x, plain.weight, plain.y - plain.x @ psi[:3]
    loadings = x @ of.spread @ factor(psi[3:], effects)
    covariance = torch.diag(1 / w) + loadings @ loadings.mT
    direct = (torch.logdet(covariance) + w.log().sum() + residual @ torch.linalg.solve(covariance, residual)) / 2
    torch.testing.assert_close(of.loss(psi), direct)
    sums = Quadratics((x.mT @ (w[:, None] * x))[None], (x.mT @ (w * plain.y))[None], of.spread).integrated(psi[3:])
    squares = float(w @ plain.y**2) / 2
    beta = psi[:3]
    torch.testing.assert_close(
        beta @ sums.precision @ beta / 2 - sums.shift @ beta + sums.constant + sums.logs + squares, direct
    )


def linear(sites: int, sigma: float, effects: int, seed: int = 0, restricted: bool = True) -> Linear:
    rng = np.random.default_rng(seed)
    parts: list[Any] = []
    for _ in range(sites):
        x = np.column_stack([np.ones(30), rng.normal(size=(30, 2))])
        y = x @ [1.0, 0.5, -0.3] + x[:, :effects] @ (sigma * rng.normal(size=effects)) + rng.normal(size=30)
        parts.append((x.T @ x, x.T @ y, y @ y))
    precision, shift, squares = (np.array(each) for each in zip(*parts, strict=True))
    sums = Quadratics(torch.tensor(precision), torch.tensor(shift), torch.eye(3, dtype=torch.float64)[:, :effects])
    return Linear(sums, float(squares.sum()), 30 * sites, restricted)


@pytest.mark.parametrize(("sigma", "effects"), [(0.0, 1), (0.05, 1), (1.0, 1), (30.0, 1), (0.0, 2), (0.8, 2)])
def test_no_other_sigma_has_a_better_likelihood(sigma: float, effects: int):
    model = linear(8, sigma, effects)
    theta = least(model.criterion, model.sums.unit, effects)
    best, rng = float(model.criterion(theta)), np.random.default_rng(0)
    for size in (1e-3, 0.1, 1.0, 10.0):
        for _ in range(20):
            other = theta + size * torch.tensor(rng.normal(size=len(theta)))
            assert float(model.criterion(other)) >= best - 1e-9 * abs(best)


def test_sites_that_are_alike_have_a_sigma_of_exactly_zero():
    one = linear(1, 0.0, 1).sums
    sums = Quadratics(one.precision.expand(6, -1, -1), one.shift.expand(6, -1), one.spread)
    model = Linear(sums, 6 * linear(1, 0.0, 1).squares, 180, restricted=True)
    assert float(least(model.criterion, sums.unit, 1)) == 0.0
