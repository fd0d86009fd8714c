import numpy as np
import pytest
import torch
from scipy import stats
from torch.func import vmap

from fedual.errors import InputError
from fedual.networks.losses import criterion, hessian_factors

NAMES = ["cross_entropy", "mse", "binary_cross_entropy", "poisson"]


def batch(name: str, num: int = 7, width: int = 4, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    f = torch.randn(num, width, generator=rng)
    if name == "cross_entropy":
        return f, torch.randint(width, (num,), generator=rng)
    if name == "mse":
        return f, torch.randn(num, width, generator=rng)
    return f, torch.randint(2 if name == "binary_cross_entropy" else 6, (num, width), generator=rng)


def minus_log_likelihood(name: str, f: np.ndarray, y: np.ndarray) -> np.ndarray:
    """By SciPy's distributions, less the terms without f."""
    if name == "cross_entropy":
        p = np.exp(f) / np.exp(f).sum(1, keepdims=True)
        return -np.log(p[np.arange(len(f)), y])
    if name == "mse":
        return -(stats.norm.logpdf(y, f) + np.log(2 * np.pi) / 2).sum(1)
    if name == "binary_cross_entropy":
        return -stats.bernoulli.logpmf(y, 1 / (1 + np.exp(-f))).sum(1)
    return -(
        stats.poisson.logpmf(y, np.exp(f)) + np.array([[np.log(np.arange(1, k + 1)).sum() for k in r] for r in y])
    ).sum(1)


@pytest.mark.parametrize("name", NAMES)
def test_criterion_is_minus_the_log_likelihood(name: str):
    f, y = batch(name)
    expected = minus_log_likelihood(name, f.numpy(), y.numpy())
    np.testing.assert_allclose(criterion(name)(f, y).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_criterion_works_over_a_client_axis(name: str):
    clients = [batch(name, seed=k) for k in range(3)]
    stacked = vmap(criterion(name))(*(torch.stack(part) for part in zip(*clients, strict=True)))
    for k, (f, y) in enumerate(clients):
        torch.testing.assert_close(stacked[k], criterion(name)(f, y))


@pytest.mark.parametrize("name", ["mse", "binary_cross_entropy", "poisson"])
def test_one_output_may_be_a_column_or_a_vector(name: str):
    f, y = batch(name, width=1)
    expected = criterion(name)(f, y)
    assert expected.shape == (7,)
    for outputs in (f, f[:, 0]):
        for target in (y, y[:, 0]):
            torch.testing.assert_close(criterion(name)(outputs, target), expected)


@pytest.mark.parametrize("name", NAMES)
def test_curvature_factors_are_the_hessian_in_the_outputs(name: str):
    f, y = batch(name)
    loss = criterion(name)
    for which in (name, lambda outputs, target: loss(outputs, target)):
        vectors, scales = hessian_factors(which)(f, y)
        matrices = torch.einsum("cb,cbi,cbj->bij", scales, vectors, vectors)
        for i in range(len(f)):
            one = torch.autograd.functional.hessian(lambda o, i=i: loss(o[None], y[i : i + 1])[0], f[i])
            torch.testing.assert_close(matrices[i], one)


@pytest.mark.parametrize("which", ["poisson", lambda f, y: (f.exp() - y * f).reshape(len(f), -1).sum(1)])
def test_curvature_of_outputs_without_a_second_axis(which):
    f, y = batch("poisson", width=1)
    vectors, scales = hessian_factors(which)(f[:, 0], y[:, 0])
    assert vectors.shape == scales.shape == (1, 7)
    torch.testing.assert_close(scales * vectors.square(), f.T.exp())


def test_a_callable_is_returned_as_it_is():
    def mine(f, y):
        return (f - y).abs().sum(1)

    assert criterion(mine) is mine


@pytest.mark.parametrize("find", [criterion, hessian_factors])
def test_unknown_name_suggests_the_nearest(find):
    with pytest.raises(InputError, match="'cross-entropy': did you mean 'cross_entropy'"):
        find("cross-entropy")
    with pytest.raises(InputError, match="choose one of cross_entropy, mse, "):
        find("zzz")


@pytest.mark.parametrize(
    ("name", "f", "y"),
    [
        ("cross_entropy", (4,), torch.zeros(4, dtype=torch.long)),
        ("cross_entropy", (4, 3), torch.zeros(4)),
        ("cross_entropy", (4, 3), torch.zeros(4, 3, dtype=torch.long)),
        ("mse", (4, 3), torch.zeros(4)),
        ("mse", (4, 3), torch.zeros(3, 4)),
        ("poisson", (4,), torch.zeros(1)),
        ("binary_cross_entropy", (4, 2), torch.zeros(4, 1)),
    ],
)
def test_targets_that_do_not_fit_are_refused(name: str, f: tuple, y: torch.Tensor):
    with pytest.raises(InputError, match=f"{name} got outputs"):
        criterion(name)(torch.zeros(f), y)


def test_a_loss_that_averages_is_refused():
    f, y = batch("mse")
    with pytest.raises(InputError, match="one value an example"):
        hessian_factors(lambda o, t: (o - t).square().mean())(f, y)
