"""Sums of targets and of residuals: what the federation learns from them is what pooled data say."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedual.errors import InputError
from fedual.families import Diagonal, Full, Isotropic
from fedual.networks import Clients
from fedual.networks.targets import (
    PRIOR_EXAMPLES,
    PRIOR_VARIANCE,
    Targets,
    client_sums,
    effective_parameters,
    noise_variance,
    pooled,
)

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Tensor:
    return torch.tensor(RNG.normal(size=shape))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_clients_give_the_pooled_mean_and_sd(shape: tuple[int, ...], weighted: bool):
    sizes = [5, 1, 17]
    y = [100 * k + normal(n, *shape) for k, n in enumerate(sizes)]
    weights = [torch.rand(n, dtype=torch.float64) + 0.5 if weighted else torch.ones(n) for n in sizes]
    found = pooled([client_sums(a, w if weighted else None) for a, w in zip(y, weights, strict=True)])
    flat, w = (np.concatenate([a.reshape(len(a), -1).numpy() for a in parts]) for parts in (y, weights))
    mean = np.average(flat, 0, w[:, 0])
    np.testing.assert_allclose(found.mean, mean, rtol=1e-13)
    np.testing.assert_allclose(found.sd, np.sqrt(np.average((flat - mean) ** 2, 0, w[:, 0])), rtol=1e-13)
    torch.testing.assert_close(found.restored(found.standardised(y[2]).reshape(17, -1)), y[2].reshape(17, -1))
    assert found.standardised(y[2]).shape == y[2].shape


def test_clients_count_the_examples_that_they_have():
    y, weights = torch.tensor([1.0, 2.0, 4.0, 99.0]), [torch.tensor([2.0, 1.0]), torch.tensor([3.0])]
    found = Clients(torch.zeros(4, 1), y, [torch.tensor([0, 1]), torch.tensor([1])], weights).targets()
    assert float(found.mean) == pytest.approx((2 * 1 + 2 + 3 * 2) / 6)


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e9])
def test_a_huge_offset_costs_no_digits(offset: float):
    y = normal(1000)
    found = pooled([client_sums(part) for part in (y + offset).split(300)])
    np.testing.assert_allclose(found.sd, y.numpy().std(), rtol=1e-6)
    np.testing.assert_allclose(found.standardised(y + offset), (y - y.mean()) / y.std(correction=0), atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6, -3e-8])
def test_constant_targets_have_sd_1(value: float):
    y = torch.full((37,), value, dtype=torch.float64)
    found = pooled([client_sums(part) for part in y.split(10)])
    assert float(found.sd) == 1
    assert found.standardised(y).abs().max() <= 1e-12 * abs(value)


def test_stored_targets_come_back_bit_by_bit():
    found = Targets(normal(4), normal(4).exp())
    back = Targets.from_dict(found.to_dict())
    assert back is not None
    assert torch.equal(back.mean, found.mean)
    assert torch.equal(back.sd, found.sd)
    assert Targets.from_dict(None) is None


def test_targets_that_cannot_be_are_refused():
    with pytest.raises(InputError, match=r"sd \[0.0\]: give finite means and positive sds"):
        Targets.of(1.0, 0.0)
    with pytest.raises(InputError, match=r"shapes \(2,\) and \(1,\)"):
        Targets.of([1.0, 2.0], 1.0)
    with pytest.raises(InputError, match=r"Targets \(5, 3\) do not have 2 outputs"):
        Targets.of([1.0, 2.0], [1.0, 1.0]).standardised(torch.zeros(5, 3))


def ridge(n: int, p: int, delta: float) -> tuple[np.ndarray, np.ndarray, float]:
    """H = XᵀX of a random design, the precision H + δI, and the trace of the hat matrix from its own eigenvalues."""
    x = normal(n, p).numpy()
    values = np.linalg.svd(x, compute_uv=False) ** 2
    return x.T @ x, x.T @ x + delta * np.eye(p), float((values / (values + delta)).sum())


@pytest.mark.parametrize("tau", [1.0, 1e-3])
def test_effective_parameters_are_the_trace_of_the_hat_matrix_at_any_temperature(tau: float):
    data, _, trace = ridge(20, 4, 3.0)
    prior = Full().natural(torch.zeros(4, dtype=torch.float64), 3.0)
    lam = Full().natural(normal(4), torch.tensor(data / tau + 3 * np.eye(4)))
    assert effective_parameters(Full(), lam, prior, tau) == pytest.approx(trace, rel=1e-9)
    diagonal = np.diag(data)
    prior = Diagonal().natural(torch.zeros(4, dtype=torch.float64), 3.0)
    lam = Diagonal().natural(normal(4), torch.tensor(diagonal / tau + 3))
    wanted = (diagonal / (diagonal + 3)).sum()
    assert effective_parameters(Diagonal(), lam, prior, tau) == pytest.approx(wanted, rel=1e-9)


def test_a_point_has_all_its_parameters_and_noise_below_the_prior_counts_nothing():
    point = Isotropic(1.0).natural(normal(7))
    assert effective_parameters(Isotropic(1.0), point, point, 1.0) == 7
    prior = Diagonal().natural(torch.zeros(3, dtype=torch.float64), 2.0)
    assert effective_parameters(Diagonal(), prior, prior, 0.1) == 0
    assert effective_parameters(Diagonal(), Diagonal().natural(normal(3), 1.5), prior, 0.1) == 0


def test_noise_is_the_posterior_of_an_inverse_gamma():
    """1/σ² ~ Gamma(½(ν + a₀), ½(Σ r² + b₀)) has the mean (ν + a₀)/(Σ r² + b₀)."""
    squares, weight, parameters = torch.tensor([8.0, 2.0], dtype=torch.float64), 30.0, 6.0
    free, b = weight - parameters / 2, PRIOR_EXAMPLES * PRIOR_VARIANCE
    precision = torch.distributions.Gamma((free + PRIOR_EXAMPLES) / 2, (squares + b) / 2).mean
    torch.testing.assert_close(noise_variance(squares, weight, parameters), 1 / precision)


def test_noise_is_unbiased_for_least_squares_with_many_examples():
    n, p, sigma = 20_000, 5, 0.3
    x, noise = normal(n, p), sigma * normal(n)
    residuals = noise - x @ torch.linalg.lstsq(x, noise[:, None]).solution[:, 0]
    found = math.sqrt(float(noise_variance(residuals.square().sum()[None], n, p)))
    assert found == pytest.approx(sigma, rel=5 / math.sqrt(2 * n))


@pytest.mark.parametrize("parameters", [0.0, 10.0, 1e6])
def test_noise_is_positive_however_many_parameters_fit_the_data(parameters: float):
    found = float(noise_variance(torch.zeros(1, dtype=torch.float64), 10.0, parameters))
    assert 0 < found <= PRIOR_VARIANCE
