"""The delta limit of a client's problem: its mode by Newton steps, λ_k from the stationarity condition."""

import pytest
import torch
from problems import full_gaussian, normal
from scipy.optimize import minimize

from fedual import algorithm, methods
from fedual.algorithm.round import subproblem
from fedual.errors import DomainError, InputError, NotConvergedError
from fedual.families import Diagonal, Full
from fedual.solvers import Exact, Linear, Newton, Stack
from fedual.solvers.newton import solve


def logistic(num_clients: int = 3) -> Linear:
    x = normal((num_clients, 30, 4), 1).double()
    y = (normal((num_clients, 30), 2) > 0).double()
    return Linear.from_clients("binomial", list(zip(x, y, strict=True)))


def problem(losses, rho: float = 1.0, eta_scale: float = 0.1, tau: float = 1.0):
    """A client step at a random q_g with random duals."""
    family, dim, k = Full(), 4, len(losses)
    lam_g = family.natural(normal((dim,), 5).double(), torch.tensor([2.0, 3.0, 1.0, 4.0], dtype=torch.float64))
    roots = eta_scale * normal((k, dim, dim), 6).double()
    eta = family.natural(normal((k, dim), 7).double(), roots @ roots.mT)
    method = algorithm.Method(family, Newton(tol=1e-24), algorithm.Natural(rho), algorithm.Blend(), rho, tau)
    return subproblem(method, algorithm.Broadcast(lam_g), algorithm.ClientState(eta, None, {}), losses)


@pytest.mark.parametrize("rho", [1.0, 0.3])
def test_newton_finds_the_mode_that_scipy_finds_and_its_hessian_eq32(rho):
    family, losses, tau = Full(), logistic(), 0.7
    given = problem(losses, rho, tau=tau)
    lam = Newton(tol=1e-24)(given).lam
    for k in range(len(losses)):
        cavity = rho * given.lam_g - given.eta[k]
        mode = mode_by_scipy(losses[k : k + 1], cavity, tau)
        p = torch.sigmoid(losses.x[k] @ mode)
        hessian = losses.x[k].mT @ ((p * (1 - p))[:, None] * losses.x[k]) / tau
        gradient = losses.x[k].mT @ (p - losses.y[k, :, 0]) / tau
        expected = (cavity[0] + hessian @ mode - gradient) / rho
        precision = (family.precision(cavity) + hessian) / rho
        torch.testing.assert_close(family.precision(lam[k]), precision, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lam[k, 0], expected, rtol=1e-4, atol=1e-4)


def mode_by_scipy(loss: Linear, cavity: torch.Tensor, tau: float) -> torch.Tensor:
    """argmin ℓ(θ)/τ − ⟨c, θ⟩ + ½ θᵀCθ."""

    def objective(numbers) -> float:
        theta = torch.from_numpy(numbers)
        return float(loss(theta[None])[0] / tau - cavity[0] @ theta + theta @ Full().precision(cavity) @ theta / 2)

    return torch.from_numpy(minimize(objective, [0.0] * 4, tol=1e-14, method="BFGS").x)


def test_newton_is_exact_on_conjugate_losses():
    given = full_gaussian(dim=5)
    step = lambda solver: algorithm.step(
        methods.newton_admm(rho=1 / 7, solver=solver),
        algorithm.init(methods.newton_admm(), given.prior, 7),
        given.losses,
    )[0]
    torch.testing.assert_close(step(Newton()).lam_g, step(Exact()).lam_g, rtol=1e-6, atol=1e-6)


def test_an_anchor_holds_the_mode_back_and_the_dual_is_the_expansion_there():
    given, losses, weight = problem(logistic(1)), logistic(1), 0.5
    lam = Newton(tol=1e-24, anchor=weight)(given).lam[0]
    family, start = Full(), Full().mean(given.lam_g)
    at_start = losses.x[0].mT @ (
        torch.sigmoid(losses.x[0] @ start).mul(torch.sigmoid(-losses.x[0] @ start))[:, None] * losses.x[0]
    )
    anchored = given.lam_g - given.eta[0] + family.natural(start, weight * at_start)
    mode = mode_by_scipy(losses, anchored, 1.0)
    p = torch.sigmoid(losses.x[0] @ mode)
    hessian = losses.x[0].mT @ ((p * (1 - p))[:, None] * losses.x[0])
    gradient = losses.x[0].mT @ (p - losses.y[0, :, 0])
    expansion = torch.cat([(hessian @ mode - gradient)[None], -hessian / 2])
    torch.testing.assert_close(lam, given.lam_g - given.eta[0] + expansion, rtol=1e-4, atol=1e-4)


def test_newton_needs_full_gaussians():
    method = methods.pvi(Diagonal(), Newton())
    state = algorithm.init(method, Diagonal().natural(torch.zeros(4, dtype=torch.float64), 1.0), 3)
    with pytest.raises(InputError, match="Full Gaussians"):
        algorithm.step(method, state, logistic())


def test_newton_refuses_a_loss_that_is_not_finite_at_its_start():
    with pytest.raises(DomainError, match="not finite"):
        Newton()(problem(Stack([lambda theta: theta.sum(-1) * torch.inf])))


def test_newton_says_that_it_did_not_converge():
    with pytest.raises(NotConvergedError, match="Newton did not reach"):
        Newton(tol=1e-24, max_steps=1)(problem(logistic()))


def test_a_singular_system_is_solved_along_what_it_determines():
    matrix = torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    step = solve(matrix + torch.tensor([[0.0, 0.0], [0.0, 1e-30]]), torch.tensor([2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(step, torch.tensor([0.5, 0.0], dtype=torch.float64))


def test_an_indefinite_hessian_still_gives_a_descent_direction():
    matrix = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    vector = torch.tensor([1.0, -0.5], dtype=torch.float64)
    assert vector @ solve(matrix, vector) > 0
