"""Density, named parameters and tables of a posterior, against torch.distributions, scipy and numpy."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from test_posterior import DIM, families, make
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal
from torch.func import functional_call

from fedual.errors import InputError
from fedual.families import Diagonal, Full, Gaussian, Isotropic, is_point
from fedual.networks.network import Network
from fedual.posterior import Posterior

FAMILIES = pytest.mark.parametrize(
    "family", families(), ids=lambda f: f"{f}{getattr(f, 'matrix', torch.empty(0)).dim()}"
)


def draw(family: Gaussian) -> Posterior:
    """A posterior with a random λ, and a precision that couples all parameters where the family has one."""
    posterior = make(family)
    if is_point(family):
        return posterior
    generator = torch.Generator().manual_seed(5)
    root = torch.randn(DIM, DIM, generator=generator)
    matrix = root @ root.mT / DIM + torch.eye(DIM)
    precision = matrix if isinstance(family, Full) else matrix.diagonal()
    return replace(posterior, lam=family.natural(posterior.mean, precision))


def matrix(posterior: Posterior) -> Tensor:
    """S as a matrix."""
    return posterior.precision if posterior.precision.dim() == 2 else torch.diag(posterior.precision)


@FAMILIES
@pytest.mark.parametrize("batch", [(), (4,), (2, 3)], ids=str)
def test_log_prob_is_the_density_of_a_gaussian(family: Gaussian, batch: tuple[int, ...]):
    posterior = draw(family)
    theta = torch.randn(*batch, DIM, generator=torch.Generator().manual_seed(6))
    wanted = MultivariateNormal(posterior.mean, precision_matrix=matrix(posterior)).log_prob(theta)
    found = posterior.log_prob(theta)
    assert found.shape == batch
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-9)


def test_log_prob_in_single_precision_loses_no_digits():
    torch.manual_seed(0)
    network = Network(nn.Linear(400, 100, dtype=torch.float32))
    lam = Diagonal().natural(torch.randn(network.dim, dtype=torch.float32), 1e6)
    posterior = Posterior(network, Diagonal(), lam)
    theta = posterior.sample(1)[0]
    wanted = Normal(posterior.mean.double(), posterior.precision.double().rsqrt()).log_prob(theta.double()).sum()
    assert posterior.log_prob(theta).dtype == torch.float64
    assert abs(float(posterior.log_prob(theta) - wanted)) < 1e-3  # from λ and T(θ) in float32: off by > 1000


def test_log_prob_has_the_gradient_of_a_gaussian():
    posterior = draw(Full())
    theta = posterior.sample(3).requires_grad_()
    posterior.log_prob(theta).sum().backward()
    assert theta.grad is not None
    torch.testing.assert_close(theta.grad, -(theta.detach() - posterior.mean) @ posterior.precision)


def test_named_parameters_are_those_of_the_module():
    posterior, x = make(), torch.rand(3, 4)
    theta = posterior.sample(5)
    parts = posterior.named_parameters(theta)
    assert {name: part.shape for name, part in parts.items()} == {
        name: (5, *value.shape) for name, value in posterior.module().named_parameters()
    }
    assert torch.equal(posterior.network.join(parts), theta)
    outputs = functional_call(posterior.module(), posterior.named_parameters(theta[2]), (x,))
    torch.testing.assert_close(outputs, posterior.network(theta[2], x))
    assert torch.equal(posterior.network.join(posterior.named_parameters()), posterior.mean)


@pytest.mark.parametrize("shape", [(), (DIM + 1,), (DIM, 2), (1,)], ids=str)
def test_a_theta_that_does_not_fit_is_refused(shape: tuple[int, ...]):
    posterior = make()
    for function in (posterior.log_prob, posterior.named_parameters):
        complaint = f"theta has shape {shape} for a network of 43 parameters: give (..., 43)."
        with pytest.raises(InputError, match=re.escape(complaint)):
            function(torch.zeros(shape))


@pytest.mark.parametrize("family", [Diagonal(), Full()], ids=str)
def test_summary_has_mean_and_interval_of_each_parameter(family: Gaussian):
    posterior = draw(family)
    table = posterior.summary()
    sd = np.sqrt(np.linalg.inv(matrix(posterior).numpy()).diagonal())
    lower, upper = stats.norm.interval(0.95, posterior.mean.numpy(), sd)
    assert list(table) == ["name", "mean", "sd", "lower", "upper"]
    for name, wanted in (("mean", posterior.mean.numpy()), ("sd", sd), ("lower", lower), ("upper", upper)):
        np.testing.assert_allclose(table[name], wanted, rtol=1e-9)


def test_summary_names_parameters_as_the_module_indexes_them():
    class Scaled(nn.Linear):
        """With a parameter that has no axis."""

        def __init__(self):
            super().__init__(4, 3)
            self.scale = nn.Parameter(torch.tensor(7.0))

    network = Network(nn.Sequential(Scaled(), nn.Conv1d(2, 3, 2)))
    posterior = Posterior(network, Diagonal(), Diagonal().natural(network.initial()))
    table = posterior.summary()
    values = dict(zip(table["name"], table["mean"], strict=True))
    assert len(values) == network.dim
    assert values["0.scale"] == 7
    for name, value in values.items():
        tensor, _, index = name.partition("[")
        place = tuple(int(i) for i in index.rstrip("]").split(",") if i)
        assert posterior.module().get_parameter(tensor)[place] == value


def test_summary_of_many_parameters_has_a_row_for_each_tensor():
    posterior = draw(Diagonal())
    assert len(posterior.summary(max_rows=DIM)) == DIM
    assert posterior.summary(max_rows=0).equals(posterior.summary(max_rows=DIM - 1))
    tensors, each = posterior.summary(max_rows=DIM - 1), posterior.summary()
    assert list(tensors) == ["name", "size", "mean", "sd", "lower", "upper"]
    assert tuple(tensors["name"]) == posterior.network.names
    assert tensors["size"].tolist() == [20, 5, 15, 3]
    of_tensor = each["name"].str.partition("[")[0]
    for i, name in enumerate(posterior.network.names):
        rows = each[of_tensor == name]
        wanted = rows["mean"].mean(), np.sqrt((rows["sd"] ** 2).mean()), rows["lower"].min(), rows["upper"].max()
        np.testing.assert_allclose(tensors.loc[i, ["mean", "sd", "lower", "upper"]].astype(float), wanted)


@pytest.mark.parametrize("family", families()[:3], ids=str)
def test_summary_of_a_point_has_no_spread(family: Gaussian):
    posterior = make(family)
    for rows in (0, DIM):
        table = posterior.summary(rows)
        assert np.isnan(table[["sd", "lower", "upper"]].to_numpy()).all()
        assert np.isfinite(table["mean"].to_numpy()).all()


@pytest.mark.parametrize("family", [Full(), Isotropic(2.5)], ids=str)
def test_arviz_gets_the_draws_of_sample(family: Gaussian):
    posterior = replace(draw(family), tau=0.5)
    group = posterior.to_arviz(samples=7, seed=3)["posterior"]
    assert dict(group.sizes) == {
        "chain": 1, "draw": 7, "1.weight_dim_0": 5, "1.weight_dim_1": 4, "1.bias_dim_0": 5,
        "3.weight_dim_0": 3, "3.weight_dim_1": 5, "3.bias_dim_0": 3,
    }  # fmt: skip
    for name, part in posterior.named_parameters(posterior.sample(7, seed=3)).items():
        np.testing.assert_array_equal(group[name].values, part.numpy()[None])
    assert (group.attrs["inference_library"], group.attrs["tau"]) == ("fedual", 0.5)
    assert group.attrs["family"] == str(family)


def test_bad_arguments_are_refused():
    with pytest.raises(InputError, match="max_rows = -1: it must be a whole number of at least 0"):
        make().summary(max_rows=-1)
    with pytest.raises(InputError, match="samples = 0: it must be a whole number of at least 1"):
        make().to_arviz(samples=0)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(InputError, match="summary needs pandas, which is missing: pip install pandas"):
        make().summary()
    with pytest.raises(InputError, match=r"to_arviz needs arviz_base, which is missing: pip install 'fedual\[arviz\]'"):
        make().to_arviz()
