"""IVON against the published optimiser, against Algorithm 2 as printed, and at its fixed point."""

import math
from typing import Any

import ivon
import pytest
import torch
from problems import normal, rng
from torch import nn

from fedual import methods
from fedual.algorithm import Broadcast, ClientState, Subproblem, client_step, total
from fedual.errors import InputError
from fedual.families import Diagonal, Isotropic
from fedual.solvers import IVON
from fedual.solvers.stepper import Batches

N = 40.0


class Quadratic(Batches):
    """Two clients' batches: ∇ = A_t θ − b_t, another A_t and b_t in every step."""

    def __init__(self, dim=5, steps=30, clients: int = 2, noise_seed=7):
        self.root = normal((steps, clients, dim, dim), 1)
        self.b = normal((steps, clients, dim), 2)
        self.steps, self.epsilon = [steps] * clients, normal((steps, 3, clients, dim), noise_seed)

    @property
    def num_examples(self):
        return torch.full((len(self),), N)

    def __len__(self):
        return len(self.steps)

    def __getitem__(self, clients):
        return self

    def noise(self, step, sample, like):
        return self.epsilon[step, sample]

    def gradient(self, theta, step, out=None):
        a = self.root[step] @ self.root[step].mT
        return (a @ theta[..., None])[..., 0] - self.b[step]


def problem(losses, eta=None, rho=0.5, tau=0.2, delta=3.0, mean=0.0, start=None, dim=5):
    """λ = N/(ρτ) = 400 in IVON's letters."""
    family = Diagonal()
    lam_g = family.natural(torch.full((dim,), mean), delta)
    eta = torch.zeros(2, 2, dim) if eta is None else eta
    carry = IVON().init(family, lam_g, 2)
    return Subproblem(family, losses, eta, lam_g, rho, torch.full((2,), tau), carry, start)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(("clip", "debias"), [(0.0, True), (0.02, True), (0.0, False)])
def test_without_multipliers_it_is_the_published_optimiser(samples, clip, debias):
    """Step for step on the same noise, which is read off the published optimiser's own perturbed parameters."""
    losses, start = Quadratic(), normal((5,), 3)
    settings: Any = {"lr": 0.05, "beta1": 0.8, "beta2": 0.9}
    parameters = [nn.Parameter(start.clone()) for _ in range(2)]
    theirs = [
        ivon.IVON(
            [parameter],
            ess=400.0,
            hess_init=0.7,
            weight_decay=3.0 / 400,  # δ/ess
            mc_samples=samples,
            clip_radius=clip or math.inf,
            debias=debias,
            rescale_lr=False,
            **settings,
        )
        for parameter in parameters
    ]
    means = []
    precision = torch.full((2, 5), 400 * (0.7 + 3.0 / 400))
    torch.manual_seed(0)
    for step in range(30):
        for k, (parameter, optimiser) in enumerate(zip(parameters, theirs, strict=True)):
            before = parameter.detach().clone()
            sigma = 1 / precision[k].sqrt()
            for sample in range(samples):
                with optimiser.sampled_params(train=True):
                    losses.epsilon[step, sample, k] = (parameter.detach() - before) / sigma
                    a = losses.root[step, k] @ losses.root[step, k].mT
                    parameter.grad = a @ parameter.detach() - losses.b[step, k]
            optimiser.step()
            optimiser.zero_grad()
            h = optimiser.param_groups[0]["hess"].detach()
            precision[k] = 400 * (h + 3.0 / 400)
        means.append(torch.stack([parameter.detach() for parameter in parameters]))
    solver = IVON(h0=0.7, samples=samples, clip=clip, debias=debias, **settings)
    solution = solver(problem(losses, start=start))
    torch.testing.assert_close(Diagonal().mean(solution.lam), means[-1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(Diagonal().precision(solution.lam), precision, rtol=1e-6, atol=1e-9)
    for k, optimiser in enumerate(theirs):
        momentum = optimiser.param_groups[0]["momentum"]
        torch.testing.assert_close(solution.carry["momentum"][k], momentum, rtol=1e-6, atol=1e-9)


def printed(losses, eta, start, rho, tau, delta, mean, lr, h0, beta1, beta2, hold=-math.inf):
    """Algorithm 2 line by line, with v_k, u_k, λ, δ and h as the paper writes them.

    Of the terms of the mean, v − u m + δ (m − m_p) = v − u m_p + (δ − u)(m − m_p), the last may be held at `hold` δ.
    """
    ess, v, u = N / (rho * tau), tau / N * eta[:, 0], tau / N * (-2 * eta[:, 1])
    m, h, g = start.expand(2, -1).clone(), torch.full((2, 5), h0), torch.zeros(2, 5)
    d = torch.full((5,), delta) / ess
    sigma = 1 / (ess * (h + d)).sqrt()
    for step in range(losses.steps[0]):
        theta = m + sigma * losses.noise(step, 0, m)
        g_hat = losses.gradient(theta, step)
        h_hat = g_hat * (theta - m) / sigma**2 - u
        g = beta1 * g + (1 - beta1) * g_hat
        h = beta2 * h + (1 - beta2) * h_hat + (1 - beta2) ** 2 * (h - h_hat) ** 2 / (h + d) / 2
        m = m - lr * (g + v - u * mean + torch.maximum(d - u, hold * d) * (m - mean)) / (h + d)
        sigma = 1 / (ess * (h + d)).sqrt()
    return m, 1 / sigma**2


@pytest.mark.parametrize("held", [{}, {"hold": 0.5}])
def test_eq61_it_is_algorithm_2_as_printed(held):
    """Prior mean not zero, both multipliers, no debiasing (which the printed algorithm leaves out)."""
    losses, start = Quadratic(), normal((5,), 3)
    eta = torch.stack([normal((2, 5), 4), -torch.rand(2, 5, generator=rng(5))], 1)
    settings: Any = {"lr": 0.02, "h0": 0.9, "beta1": 0.8, "beta2": 0.95, **held}
    m, s = printed(losses, eta, start, 0.5, 0.2, 3.0, 0.6, **settings)
    solution = IVON(debias=False, clip=0.0, **settings)(problem(losses, eta, mean=0.6, start=start))
    torch.testing.assert_close(Diagonal().mean(solution.lam), m, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(Diagonal().precision(solution.lam), s, rtol=1e-9, atol=1e-12)


class Conjugate(Quadratic):
    """Full batches of a diagonal quadratic ½ h θ² − bθ a mean loss: everything is known in closed form."""

    def __init__(self, steps):
        super().__init__(steps=1)
        self.steps: list[int] = [steps] * 2
        self.h, self.b = torch.rand(2, 5, generator=rng(1)) + 0.5, normal((2, 5), 2)

    def noise(self, step, sample, like):
        """±1: with two samples the expectations are exact."""
        return torch.full((1, 5), 1.0 if sample else -1.0)

    def gradient(self, theta, step, out=None):
        return self.h * theta - self.b


def test_eq32_its_fixed_point_solves_the_clients_problem():
    """λ_k = λ_g − (η_k + ∇L_k/τ)/ρ, ∇L_k = N (g − hm, ½h) in closed form, from q_g and with both multipliers."""
    losses = Conjugate(steps=4000)
    eta = torch.stack([normal((2, 5), 4), -0.2 * torch.rand(2, 5, generator=rng(5))], 1)
    wanted = problem(losses, eta, mean=0.4)
    lam = IVON(lr=0.05, beta2=0.9, samples=2, clip=0.0)(wanted).lam
    gradient = torch.stack([-losses.b, losses.h / 2], 1) * 40 / 0.2
    torch.testing.assert_close(lam, wanted.lam_g - (eta + gradient) / 0.5, rtol=1e-8, atol=1e-8)


def test_a_mean_whose_multiplier_outweighs_the_proximal_term_is_held():
    """A loss without curvature, u = 3δ: nothing else holds it; h, and a mean at m_g without a force, stay the same.

    The record counts it, and not where u = 0.
    """
    losses, eta = Conjugate(steps=300), torch.stack([torch.zeros(2, 5), torch.full((2, 5), -0.5 * 3 * 1.5)], 1)
    losses.h, losses.b = torch.zeros(2, 5), torch.full((2, 5), 1e-3)
    solve = lambda **held: IVON(lr=0.05, beta2=0.999, samples=2, clip=0.0, **held)(problem(losses, eta)).lam
    free, held = solve(), solve(hold=0.5)
    torch.testing.assert_close(free[:, 1], held[:, 1])
    assert (Diagonal().mean(held).abs() < 1e-3 / (0.5 * 3 / 400)).all()  # the balance of the force and of ½δ
    assert (Diagonal().mean(free).abs() > 10).all()
    losses.b, wanted = torch.zeros(2, 5), problem(losses, eta, mean=0.4)
    eta[:, 0] = -2 * eta[:, 1] * 0.4  # v = u m_g
    eta[1, :, 2:] = 0
    method = methods.ivon_admm(rho=0.5, damping=0.1, tau=0.2, solver=IVON(lr=0.05, samples=2, hold=0.5))
    broadcast = Broadcast(wanted.lam_g)
    upload, _ = client_step(method, broadcast, ClientState(eta, None, wanted.carry), losses)
    torch.testing.assert_close(Diagonal().mean(upload.lam), torch.full((2, 5), 0.4))
    guards = total(method, broadcast, upload, torch.arange(2), 2).guards
    assert guards == (0.0, pytest.approx((1 + 0.4) / 2))


def test_the_precision_stays_positive_whatever_the_curvature():
    """ĥ far below −(h + δ), in single precision too, where h + δ formed as a sum would cancel."""
    losses = Conjugate(steps=300)
    losses.h = torch.full((2, 5), -50.0)
    lam = IVON(lr=1e-6, beta2=0.5, clip=1.0)(problem(losses)).lam
    assert (Diagonal().precision(lam) > 0).all()


def test_a_client_starts_at_the_servers_posterior_once_it_has_moved():
    inner = IVON().begin(problem(Quadratic(), mean=0.6))
    assert (inner["mean"] == 0.6).all()
    torch.testing.assert_close(inner["sigma"] ** -2, torch.full((2, 5), 3.0))
    inner = IVON(h0=0.25).begin(problem(Quadratic(), mean=0.6, start=torch.arange(5.0)))
    torch.testing.assert_close(inner["mean"], torch.arange(5.0).expand(2, 5))
    torch.testing.assert_close(inner["sigma"] ** -2 / inner["ess"], torch.full((2, 5), 0.25 + 3 / 400))


@pytest.mark.parametrize(
    "bad", [{"lr": 0}, {"h0": -1.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"clip": -1.0}, {"hold": 1.5}, {"samples": 0}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        IVON(**bad)


def test_other_families_are_refused():
    with pytest.raises(InputError, match="Diagonal"):
        IVON().init(Isotropic(), torch.zeros(1, 3), 2)


def test_decay_is_a_precision_that_the_client_knows():
    """½ d‖θ‖² more in a client's mean loss is d/c more in its multiplier's precision, c = τ/N."""
    decay, losses, start = 0.3, Quadratic(), normal((5,), 3)
    eta = 0.1 * normal((2, 2, 5), 4)
    told = eta + torch.stack([torch.zeros(2, 5), torch.full((2, 5), decay / 2 * 40 / 0.2)], 1)
    settings: Any = {"lr": 0.05, "beta1": 0.8, "beta2": 0.9}
    found = IVON(weight_decay=decay, **settings)(problem(losses, eta, start=start))
    expected = IVON(**settings)(problem(losses, told, start=start))
    torch.testing.assert_close(found.lam, expected.lam)
    assert not torch.allclose(found.lam, IVON(**settings)(problem(losses, eta, start=start)).lam, rtol=1e-3)
