"""SGD and Laplace against PyTorch's own optimisers, step for step on a client's whole objective."""

from typing import Any

import pytest
import torch
from problems import normal, rng
from torch import nn

from fedual.algorithm import Subproblem
from fedual.errors import InputError
from fedual.families import Diagonal, FixedPrecision, Full, Isotropic
from fedual.solvers import SGD, Conjugate, Laplace
from fedual.solvers.stepper import Batches, estimate

DIM, STEPS, SIZES = 5, 25, torch.tensor([40.0, 10.0])


class Quadratic(Batches):
    """Two clients' batches of ½ θᵀA_tθ − scale·b_tᵀθ, another A_t and b_t in every step."""

    def __init__(self, scale=1.0):
        root = normal((STEPS, 2, DIM, DIM), 1) / 2
        self.a, self.b = root @ root.mT, scale * normal((STEPS, 2, DIM), 2)
        self.steps = [STEPS] * 2

    @property
    def num_examples(self):
        return SIZES

    def __len__(self):
        return 2

    def __getitem__(self, clients):
        return self

    def noise(self, step, sample, like):
        raise AssertionError("the gradient is taken at the mean")

    def value(self, theta, step, client):
        return theta @ self.a[step, client] @ theta / 2 - self.b[step, client] @ theta

    def gradient(self, theta, step, out=None):
        return (self.a[step] @ theta[..., None])[..., 0] - self.b[step]

    def curvature(self, theta):
        return theta**2 + 1


def problem(family: Any, losses, start=None) -> Subproblem:
    """τ_k differ, and so do N_k; q_g, η_k are arbitrary."""
    m_g, precision = normal((DIM,), 3), torch.rand(DIM, generator=rng(4)) + 0.5
    lam_g = family.natural(m_g, precision) if isinstance(family, Diagonal) else family.natural(m_g)
    eta = normal((2, family.rows(DIM), DIM), 5)
    return Subproblem(family, losses, eta, lam_g, 0.7, torch.tensor([0.3, 8.0]), {}, start)


def objective(given: Subproblem, theta, step, client):
    """The minibatch mean plus τ_k/N_k times vᵀθ − ½ θᵀdiag(u)θ + ρ/2 ‖θ − m_g‖²_S."""
    family: Any = given.family
    away = theta - family.mean(given.lam_g)
    rest = given.eta[client, 0] @ theta + given.rho / 2 * (family.precision(given.lam_g) * away**2).sum()
    if isinstance(family, Diagonal):
        rest = rest + given.eta[client, 1] @ theta**2
    return given.losses.value(theta, step, client) + given.tau[client] / SIZES[client] * rest


FAMILIES = [Isotropic(3.0), FixedPrecision(torch.linspace(0.5, 4.0, DIM, dtype=torch.float64)), Diagonal()]
TORCH = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, lr=0.05)),
    "momentum": ({"momentum": 0.8}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8)),
    "decay": (
        {"momentum": 0.8, "weight_decay": 0.3},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, weight_decay=0.3),
    ),
    "adam": ({"optimiser": "adam"}, lambda p: torch.optim.Adam(p, lr=0.05)),
    "adam, other betas": (
        {"optimiser": "adam", "beta1": 0.6, "beta2": 0.9, "eps": 1e-2},
        lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.6, 0.9), eps=1e-2),
    ),
    "adam, decay": (
        {"optimiser": "adam", "weight_decay": 0.3},
        lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.3),
    ),
}


def means(solver: SGD, given: Subproblem):
    """The clients' means after every step."""
    inner = solver.begin(given)
    for step in range(STEPS):
        inner = solver.update(inner, *estimate(solver, given.losses, inner, step))
        yield inner["mean"]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("name", TORCH)
def test_it_is_pytorchs_optimiser(name, family):
    settings, make = TORCH[name]
    kind = Laplace if isinstance(family, Diagonal) else SGD
    given = problem(family, Quadratic())
    ours = list(means(kind(**{"lr": 0.05, "optimiser": "sgd", **settings}), given))
    for client in range(2):
        theta = nn.Parameter(family.mean(given.lam_g))
        optimiser = make([theta])
        for step in range(STEPS):
            optimiser.zero_grad()
            objective(given, theta, step, client).backward()
            optimiser.step()
            torch.testing.assert_close(ours[step][client], theta.data, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("name", TORCH)
def test_proximal_norm_is_pytorchs_optimiser_on_the_norm_not_squared(name, moved):
    """From m_g, where PyTorch's gradient of the norm is zero too, or from the network's initialisation."""
    settings, make = TORCH[name]
    family, losses = Isotropic(3.0), Quadratic()
    given = problem(family, losses, None if moved else normal((DIM,), 9))
    m_g = family.mean(given.lam_g)
    ours = list(means(SGD(**{"lr": 0.05, "optimiser": "sgd", "proximal": "norm", **settings}), given))
    for client in range(2):
        theta = nn.Parameter(m_g.clone() if moved else normal((DIM,), 9))
        optimiser = make([theta])
        for step in range(STEPS):
            optimiser.zero_grad()
            rest = given.eta[client, 0] @ theta + given.rho / 2 * 3.0 * (theta - m_g).norm()
            (losses.value(theta, step, client) + given.tau[client] / SIZES[client] * rest).backward()
            optimiser.step()
            torch.testing.assert_close(ours[step][client], theta.data, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", [0.0, 1e6])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_max_norm_is_clip_grad_norm(optimiser, decay):
    """On gradients near 1e7, next to which the 1e-6 that PyTorch adds to the norm is nothing; decay comes after."""
    given = problem(Isotropic(3.0), Quadratic(1e7))
    ours = list(means(SGD(lr=1e-9, optimiser=optimiser, max_norm=2e7, weight_decay=decay), given))
    for client in range(2):
        theta = nn.Parameter(normal((DIM,), 3))
        its = (torch.optim.SGD if optimiser == "sgd" else torch.optim.Adam)([theta], lr=1e-9, weight_decay=decay)
        norms = []
        for step in range(STEPS):
            its.zero_grad()
            objective(given, theta, step, client).backward()
            norms.append(float(nn.utils.clip_grad_norm_([theta], 2e7)))
            its.step()
            torch.testing.assert_close(ours[step][client], theta.data, rtol=1e-10, atol=1e-10)
        assert min(norms) < 2e7 < max(norms)


def test_max_norm_bounds_the_whole_gradient_of_each_client():
    """The proximal term is part of it, and one client's large gradient does not shorten another's step."""
    given = problem(Isotropic(3.0), Quadratic())
    calm = SGD(lr=0.5, optimiser="sgd", max_norm=3.0)
    before = calm.begin(given)["mean"]
    pulled = {**calm.begin(given), "offset": torch.full((2, DIM), 1e3), "slope": torch.zeros(2, 1)}
    after = calm.update(pulled, torch.zeros(2, DIM), None)["mean"]
    torch.testing.assert_close((after - before).norm(dim=-1), torch.full((2,), 1.5))
    zero = {**pulled, "offset": torch.zeros(2, DIM)}
    small = torch.stack([torch.full((DIM,), 0.1), torch.full((DIM,), 1e9)])
    moved = calm.update(zero, small, None)["mean"] - before
    torch.testing.assert_close(moved[0], torch.full((DIM,), -0.05))
    torch.testing.assert_close(moved[1].norm(), torch.tensor(1.5))


def test_nothing_moves_without_a_gradient():
    """A gradient of zero has no direction to scale, and no NaN either."""
    given, solver = problem(Isotropic(3.0), Quadratic()), SGD(max_norm=1.0)
    inner = {**solver.begin(given), "offset": torch.zeros(2, DIM), "slope": torch.zeros(2, 1)}
    assert torch.equal(solver.update(inner, torch.zeros(2, DIM), None)["mean"], inner["mean"])


def test_it_starts_at_the_networks_initialisation_until_the_server_has_moved():
    start = normal((DIM,), 9)
    family = Isotropic(3.0)
    moved, first = problem(family, Quadratic()), problem(family, Quadratic(), start)
    assert torch.equal(SGD().begin(first)["mean"], start.expand(2, DIM))
    assert torch.equal(SGD().begin(moved)["mean"], family.mean(moved.lam_g).expand(2, DIM))


def test_eq32_laplace_adds_the_curvature_of_the_loss_to_the_precision():
    """s_k = s_g + (h/τ − u)/ρ at the mean that SGD ends at."""
    given, family = problem(Diagonal(), Quadratic()), Diagonal()
    solver = Laplace(lr=0.05)
    *_, mean = means(solver, given)
    lam = solver(given).lam
    torch.testing.assert_close(family.mean(lam), mean)
    u = -2 * given.eta[:, 1]
    expected = family.precision(given.lam_g) + ((mean**2 + 1) / given.tau[:, None] - u) / given.rho
    torch.testing.assert_close(family.precision(lam), expected)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"optimiser": "adamw"}, "choose adam or sgd"),
        ({"proximal": "l1"}, "proximal = 'l1': choose squared or norm"),
        ({"lr": 0.0}, "lr = 0.0"),
        ({"momentum": 1.0}, "momentum = 1.0"),
        ({"beta1": -0.1}, "beta1 = -0.1"),
        ({"beta2": 1.5}, "beta2 = 1.5"),
        ({"max_norm": 0.0}, "max_norm = 0.0"),
        ({"weight_decay": -1.0}, "weight_decay = -1.0"),
        ({"weight_decay": None}, "weight_decay = None"),
        ({"momentum": None}, "momentum = None"),
        ({"eps": 0.0}, "eps = 0.0"),
    ],
)
def test_bad_settings_are_refused(bad, message):
    with pytest.raises(InputError, match=message):
        SGD(**bad)


@pytest.mark.parametrize(
    ("solver", "family", "message"),
    [
        (SGD(), Diagonal(), "fixed precision"),
        (SGD(), FixedPrecision(torch.eye(DIM, dtype=torch.float64)), "diagonal precision"),
        (SGD(proximal="norm"), FixedPrecision(torch.ones(DIM, dtype=torch.float64)), "use 'squared'"),
        (Laplace(), Isotropic(1.0), "needs Diagonal"),
        (Laplace(), Full(), "diagonal precision"),
    ],
    ids=["sgd-diagonal", "sgd-matrix", "norm-vector", "laplace-isotropic", "laplace-full"],
)
def test_other_families_are_refused(solver, family, message):
    given = problem(family, Quadratic())
    with pytest.raises(InputError, match=message):
        solver(given)


def test_laplace_keeps_the_squared_norm():
    with pytest.raises(InputError, match="proximal = 'norm': with a precision for each parameter use 'squared'"):
        Laplace(proximal="norm")


def test_losses_without_minibatches_are_refused():
    with pytest.raises(InputError, match="must be `Minibatches`"):
        SGD()(problem(Isotropic(1.0), Conjugate(Isotropic(1.0), torch.zeros(2, 1, DIM))))
