"""Each named method against what its docstring says it is equivalent to."""

import numpy as np
import oracles
import pytest
import torch
from problems import full_gaussian, logistic, normal, poisson_counts, quadratics

from fedual import methods
from fedual.algorithm import Blend, Method, Natural, init, step
from fedual.families import Bernoulli, Delta, Diagonal, Full, GaussHermite, Isotropic, MonteCarlo
from fedual.solvers import BLR, VON, Exact, Linear, Point, Stack

HERMITE = GaussHermite(30)
PRECISE = VON(rule=HERMITE, tol=1e-11)


def zeros(dim):
    return torch.zeros(1, dim)


def rounds(method, prior, losses, number):
    state = init(method, prior, len(losses))
    for _ in range(number):
        state, _ = step(method, state, losses)
        yield state


def last(iterable):
    *_, item = iterable
    return item


@pytest.mark.parametrize("delta", [1.0, 25.0, 0.2])
def test_eq5_eq6_eq7_admm_is_consensus_admm(delta):
    """`admm` and an independent consensus ADMM, iterate for iterate over 20 rounds, δ = 1 and not."""
    losses, rho = logistic(num_clients=3, dim=3), 0.7
    arrays = [
        (x[w > 0].numpy(), y[w > 0, 0].numpy()) for x, y, w in zip(losses.x, losses.y, losses.weight, strict=True)
    ]
    oracle = oracles.consensus_admm(
        [oracles.logistic_value(*a) for a in arrays], [oracles.logistic_gradient(*a) for a in arrays], 3, rho, delta, 20
    )
    method = methods.admm(rho, delta, Point(tol=1e-13))
    count = 0
    for state, (x, v, z) in zip(rounds(method, zeros(3), losses, 20), oracle, strict=True):
        np.testing.assert_allclose(method.family.expectation(state.lam)[:, 0], x, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(state.eta[:, 0], v, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(method.family.expectation(state.lam_g)[0], z, rtol=1e-10, atol=1e-10)
        count += 1
    assert count == 20


def test_eq8_admm_duals_are_gradients():
    losses = logistic()
    method = methods.admm(0.7, 2.0, Point(tol=1e-12))
    for state in rounds(method, zeros(3), losses, 5):
        mean = method.family.expectation(state.lam)[:, 0].requires_grad_()
        (gradient,) = torch.autograd.grad(losses(mean).sum(), mean)
        torch.testing.assert_close(state.eta[:, 0], -gradient, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("delta", [1.0, 25.0])
def test_eq2_eq4_admm_fixed_point(delta):
    """At convergence δθ_g = −Σ∇ℓ_k(θ_g) = Σ v_k and θ_k = θ_g (Eq. 2 and 4, with δ)."""
    losses = logistic()
    state = last(rounds(methods.admm(3.0, delta, Point(tol=1e-11)), zeros(3), losses, 200))
    mean = (state.lam_g / delta)[0].expand(3, 3).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(losses(mean).sum(), mean)
    torch.testing.assert_close(state.lam_g[0], -gradient.sum(0), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(state.lam_g, state.eta.sum(0), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(state.lam, state.lam_g.expand(3, 1, 3), rtol=1e-8, atol=1e-8)


def test_eq27_unit_regulariser_server():
    """θ_g = α Σ v_k + (1−α) mean θ_k for ℓ_0 = ½‖θ‖²."""
    losses, rho = logistic(), 0.7
    for state in rounds(methods.admm(rho), zeros(3), losses, 3):
        alpha = 1 / (1 + rho * 3)
        torch.testing.assert_close(state.lam_g, alpha * state.eta.sum(0) + (1 - alpha) * state.lam.mean(0))


@pytest.mark.parametrize("full", [False, True])
def test_preconditioned_admm(full):
    """Proximal term in the metric S; on quadratics every iterate in closed form with NumPy."""
    a, b = quadratics(num_clients=3, dim=4)
    root = normal((4, 4), 5)
    metric = root @ root.T + torch.eye(4) if full else torch.tensor([0.5, 1.0, 2.0, 4.0])
    method = methods.preconditioned_admm(metric, 0.6, Point(tol=1e-12))
    losses = Stack([lambda t, k=k: ((t @ a[k]) * t).sum(-1) / 2 + t @ b[k] for k in range(3)])
    s = (metric if full else torch.diag(metric)).numpy()
    theta_g, v = np.zeros(4), np.zeros((3, 4))
    for state in rounds(method, zeros(4), losses, 8):
        theta = np.stack(
            [np.linalg.solve(a[k].numpy() + 0.6 * s, 0.6 * s @ theta_g - v[k] - b[k].numpy()) for k in range(3)]
        )
        v = v + 0.6 * (theta - theta_g) @ s
        theta_g = (0.6 * theta.sum(0) + np.linalg.solve(s, v.sum(0))) / (1 + 0.6 * 3)
        np.testing.assert_allclose(method.family.expectation(state.lam_g)[0], theta_g, rtol=1e-9, atol=1e-10)


def test_preconditioned_admm_with_a_multiple_of_the_identity_is_admm():
    losses = logistic()
    ours = last(rounds(methods.preconditioned_admm(torch.full((3,), 4.0), 0.5), zeros(3), losses, 5))
    theirs = last(rounds(methods.admm(2.0, 4.0), zeros(3), losses, 5))
    torch.testing.assert_close(ours.lam_g, theirs.lam_g)


def test_eq22_eq41_random_admm_has_expected_gradients_as_duals():
    """With an expectation over N(m, I/δ) the dual is −E[∇ℓ_k], checked on a grid of 24³ points around m."""
    losses, family = logistic(), Isotropic(2.0)
    plain = Stack([lambda t, k=k: losses[k : k + 1](t[..., None, :])[..., 0] for k in range(3)])
    method = methods.admm(0.7, 2.0, Point(rule=GaussHermite(60), tol=1e-12))
    for state in rounds(method, zeros(3), losses, 3):
        expected = plain.moments(family, state.lam, GaussHermite(24)).gradient
        torch.testing.assert_close(state.eta[:, 0], -expected, rtol=1e-3, atol=1e-3)
        at_the_mean = losses.moments(family, state.lam, Delta()).gradient
        assert (state.eta[:, 0] + at_the_mean).abs().max() > 1e-2


def test_eq42_random_admm_server_is_the_admm_server():
    losses, rho, delta = logistic(), 0.7, 0.5
    for state in rounds(methods.admm(rho, delta, Point(rule=MonteCarlo(8), tol=1e-10)), zeros(3), losses, 3):
        mean = state.lam[:, 0] / delta
        torch.testing.assert_close(
            state.lam_g[0] / delta, (rho * mean.sum(0) + state.eta[:, 0].sum(0)) / (delta + rho * 3)
        )


def test_eq46_to_eq53_newton_admm_in_means_and_matrices():
    """The Newton-like method written with m, S, v, V instead of λ and η, on quadratics."""
    a, b = quadratics(num_clients=4, dim=3, seed=4)
    delta, rho = 0.8, 0.9
    problem = full_gaussian(num_clients=4, dim=3, seed=4)
    state = init(methods.newton_admm(rho, Exact()), Full().natural(torch.zeros(3), delta), 4)
    m_g, s_g = np.zeros(3), delta * np.eye(3)
    v, big_v = np.zeros((4, 3)), np.zeros((4, 3, 3))
    for _ in range(6):
        state, _ = step(methods.newton_admm(rho, Exact()), state, problem.losses)
        s = np.stack([s_g + (a[k].numpy() - big_v[k]) / rho for k in range(4)])  # Eq. 46, solved
        m = np.stack([np.linalg.solve(s[k], s_g @ m_g - (b[k].numpy() + v[k]) / rho) for k in range(4)])
        v = v + rho * (np.einsum("kij,kj->ki", s, m) - s_g @ m_g)  # Eq. 48
        big_v = big_v + rho * (s - s_g)  # Eq. 49
        alpha = 1 / (1 + rho * 4)
        s_g = (1 - alpha) * s.mean(0) + alpha * (delta * np.eye(3) + big_v.sum(0))  # Eq. 52
        shift = (1 - alpha) * np.einsum("kij,kj->ki", s, m).mean(0) + alpha * v.sum(0)
        m_g = np.linalg.solve(s_g, shift)  # Eq. 53
        np.testing.assert_allclose(Full().mean(state.lam_g), m_g, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(Full().precision(state.lam_g), s_g, rtol=1e-10)
        np.testing.assert_allclose(-2 * state.eta[:, 1:], big_v, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(state.eta[:, 0], v, rtol=1e-8, atol=1e-10)


def test_eq23_eq45_newton_duals_are_expected_hessians():
    """V_k = E_{q_k}[∇²ℓ_k] and v_k = −(g − Hm) after every client step, on a loss that is not quadratic."""
    losses, family = logistic(), Full()
    for state in rounds(methods.newton_admm(1.0, PRECISE), family.natural(torch.zeros(3), 1.0), losses, 4):
        found = losses.moments(family, state.lam, HERMITE)
        assert found.hessian is not None
        torch.testing.assert_close(-2 * state.eta[:, 1:], found.hessian, rtol=1e-8, atol=1e-8)
        shift = found.gradient - (found.hessian @ family.mean(state.lam)[..., None])[..., 0]
        torch.testing.assert_close(state.eta[:, 0], -shift, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("family", "solver"), [(Full(), PRECISE), (Diagonal(), BLR(HERMITE, tol=1e-11))], ids=str)
def test_eq13_bayesian_duality_at_convergence(family, solver):
    """μ_k = μ_g, η_k = −∇L_k(μ_k), λ_g = Σ η_k, μ_g = ∇A(λ_g), and Eq. 12, on logistic regression."""
    losses, prior = logistic(), family.natural(torch.zeros(3), 1.0)
    method = Method(family, solver, Natural(1.0), Blend(), 1.0)
    state = last(rounds(method, prior, losses, 150))
    mu_g = family.expectation(state.lam_g)
    torch.testing.assert_close(family.expectation(state.lam), mu_g.expand(3, *mu_g.shape), rtol=1e-7, atol=1e-7)
    _, gradient = losses.natural_gradient(family, state.lam, HERMITE)
    torch.testing.assert_close(state.eta, -gradient, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(state.lam_g, prior + state.eta.sum(0), rtol=1e-7, atol=1e-7)
    leaf = state.lam_g.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(family.log_partition(leaf), leaf)[0], mu_g)
    _, at_server = losses.natural_gradient(family, state.lam_g.expand_as(state.lam), HERMITE)
    torch.testing.assert_close(state.lam_g, prior - at_server.sum(0), rtol=1e-6, atol=1e-6)  # Eq. 12


def test_eq9_newton_admm_reaches_the_batch_variational_optimum():
    """The pooled problem solved by SciPy on (m, Cholesky) gives the same Gaussian."""
    losses, family = logistic(), Full()
    keep = losses.weight > 0
    mean, covariance, _ = oracles.variational_logistic(losses.x[keep].numpy(), losses.y[keep][:, 0].numpy(), 1.0)
    state = last(rounds(methods.newton_admm(1.0, PRECISE), family.natural(torch.zeros(3), 1.0), losses, 150))
    np.testing.assert_allclose(family.mean(state.lam_g), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(family.covariance(state.lam_g), covariance, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("damping", [1.0, 0.4])
def test_eq36_eq37_eq38_pvi_is_the_product_of_sites(damping):
    """q_g ∝ π_0 Π t_k with t_k ← t_k (q_k/q_g)^damping, in natural parameters, on Poisson counts."""
    problem = poisson_counts(num_clients=4, dim=3)
    method = methods.pvi(problem.family, Exact(), damping)
    sites, server = torch.zeros_like(problem.losses.c), problem.prior
    for state in rounds(method, problem.prior, problem.losses, 5):
        tilted = server - sites + problem.losses.c  # cavity × likelihood: Eq. 36 solved
        sites = sites + damping * (tilted - server)
        server = problem.prior + sites.sum(0)
        torch.testing.assert_close(state.lam_g, server)
        torch.testing.assert_close(state.eta, sites)


def test_eq39_damped_pvi():
    """η_k ← (1−γ) η_k − γ ∇L_k(μ_k): the minus is the erratum's."""
    losses, family, damping = logistic(), Full(), 0.3
    old = torch.zeros(3, 4, 3)
    for state in rounds(methods.pvi(family, PRECISE, damping), family.natural(torch.zeros(3), 1.0), losses, 5):
        _, gradient = losses.natural_gradient(family, state.lam, HERMITE)
        torch.testing.assert_close(state.eta, (1 - damping) * old - damping * gradient, rtol=1e-7, atol=1e-7)
        old = state.eta


@pytest.mark.slow
def test_plain_pvi_diverges_on_diagonal_gaussians_and_not_on_full_ones():
    """Why the paper saw it diverge: K clients with the same correlated inputs, where D⁻¹A has the eigenvalue a (D the
    diagonal of A), multiply the error of the mean by −(a−1)(1−1/K)/((a−1)/K + 1) a round: −(K−1) as a grows."""
    dim, num = 20, 3
    x = normal((50, 1), 1) + 0.3 * normal((50, dim), 2)
    losses = Linear.from_clients("gaussian", [(x, normal((50,), 3 + k)) for k in range(num)])
    gram = x.T @ x
    a = float(torch.linalg.eigvals(gram / gram.diagonal()[:, None]).real.max())
    growth = (a - 1) * (1 - 1 / num) / ((a - 1) / num + 1)
    optimum = torch.linalg.solve(num * gram + 0.1 * torch.eye(dim), (losses.x.mT @ losses.y).sum(0))[:, 0]

    def errors(method, family):
        prior = family.natural(torch.zeros(dim), 0.1)
        return [float((family.mean(s.lam_g) - optimum).norm()) for s in rounds(method, prior, losses, 20)]

    diagonal, full = BLR(Delta(), tol=1e-6, max_steps=5000), VON(Delta())  # exact on quadratics
    assert growth > 1.5
    plain = errors(methods.pvi(Diagonal(), diagonal), Diagonal())
    assert plain[-1] / plain[-2] == pytest.approx(growth, rel=0.05)
    assert errors(methods.pvi(Full(), full), Full())[-1] < 1e-5
    ours = Method(Diagonal(), diagonal, Natural(1.0), Blend(), 1.0)
    calm = errors(ours, Diagonal())
    assert calm[-1] < calm[0]


def test_ama_keeps_the_server_at_the_sum_of_the_sites_and_is_pvi_at_one():
    losses, family = logistic(), Full()
    prior = family.natural(torch.zeros(3), 1.0)
    for state in rounds(methods.ama(family, PRECISE, 0.9), prior, losses, 4):
        torch.testing.assert_close(state.lam_g, prior + state.eta.sum(0))
    ours = last(rounds(methods.ama(family, PRECISE, 1.0), prior, losses, 4))
    assert torch.equal(ours.lam_g, last(rounds(methods.pvi(family, PRECISE), prior, losses, 4)).lam_g)


def test_bregman_admm_is_admm_where_both_coordinates_agree():
    losses = logistic()
    ours = last(rounds(methods.bregman_admm(Isotropic(1.0), Point(), 0.7), zeros(3), losses, 6))
    torch.testing.assert_close(ours.lam_g, last(rounds(methods.admm(0.7), zeros(3), losses, 6)).lam_g)


def test_bregman_duals_are_no_natural_gradients():
    losses, family = logistic(), Full()
    method = methods.bregman_admm(family, PRECISE, 1.0, gamma=0.2)
    state = last(rounds(method, family.natural(torch.zeros(3), 1.0), losses, 2))
    _, gradient = losses.natural_gradient(family, state.lam, HERMITE)
    assert (state.eta + gradient).norm() > 0.1 * gradient.norm()


def test_blr_is_natural_gradient_descent_on_the_pooled_objective():
    """λ_g ← (1−β) λ_g + β (λ_0 − Σ ∇L_k(μ_g)); two clients or one with all the data make no difference."""
    losses, family, beta = logistic(num_clients=2), Full(), 0.6
    prior, keep = family.natural(torch.zeros(3), 1.0), losses.weight > 0
    pooled = type(losses).from_clients("binomial", [(losses.x[keep], losses.y[keep])])
    lam = prior
    for state in rounds(methods.blr(family, beta, HERMITE), prior, losses, 6):
        _, gradient = pooled.natural_gradient(family, lam[None], HERMITE)
        lam = (1 - beta) * lam + beta * (prior - gradient[0])
        torch.testing.assert_close(state.lam_g, lam, rtol=1e-8, atol=1e-8)


def test_one_round_of_admm_makes_the_learning_rule_safe():
    """A schedule of methods: ρ = 1/K once, then BLR, reaches the optimum that BLR alone misses from a weak prior."""
    losses, family = logistic(num_clients=3, dim=3, seed=40), Full()
    prior = family.natural(torch.zeros(3), 0.01)
    rule = methods.blr(family, 1.0, HERMITE)
    state = init(methods.newton_admm(1 / 3, PRECISE), prior, 3)
    state, _ = step(methods.newton_admm(1 / 3, PRECISE), state, losses)
    for _ in range(60):
        state, info = step(rule, state, losses)
        assert info.shortened == 1.0
    keep = losses.weight > 0
    mean, _, _ = oracles.variational_logistic(losses.x[keep].numpy(), losses.y[keep][:, 0].numpy(), 0.01)
    np.testing.assert_allclose(family.mean(state.lam_g), mean, rtol=1e-3, atol=1e-3)
    alone = last(rounds(rule, prior, losses, 60))
    assert family.mean(alone.lam_g).norm() > 100 * np.linalg.norm(mean)


@pytest.mark.slow
def test_bayesian_admm_on_bits_with_interactions():
    """Nothing is Gaussian-only: a quadratic loss over {0,1}^P, clients by the generic solver, against BLR on all."""
    family, solver = Bernoulli(), BLR(tol=1e-11, max_steps=2000)
    couple = normal((3, 4, 4), 8) / 2
    losses = Stack([lambda t, k=k: ((t @ couple[k]) * t).sum(-1) for k in range(3)])
    prior = family.natural(torch.full((4,), 0.4))
    method = Method(family, solver, Natural(1.0), Blend(), 1.0)
    state = last(rounds(method, prior, losses, 200))
    _, gradient = losses.natural_gradient(family, state.lam_g.expand(3, 1, 4), GaussHermite(2))
    torch.testing.assert_close(state.lam_g, prior - gradient.sum(0), rtol=1e-7, atol=1e-7)


@pytest.mark.slow
def test_temperature_scales_the_losses():
    losses, family = logistic(), Full()
    prior = family.natural(torch.zeros(3), 1.0)
    cold = last(rounds(methods.newton_admm(1.0, PRECISE, tau=0.5), prior, losses, 3))
    doubled = Stack([lambda t, k=k: 2 * losses[k : k + 1](t[..., None, :])[..., 0] for k in range(3)])
    same = last(rounds(methods.newton_admm(1.0, VON(rule=GaussHermite(12), tol=1e-11)), prior, doubled, 3))
    torch.testing.assert_close(cold.lam_g, same.lam_g, rtol=1e-3, atol=1e-3)


def test_every_method_passes_its_temperature_on():
    family, solver = Full(), Exact()
    for method in (
        methods.admm(tau=0.3),
        methods.preconditioned_admm(torch.ones(2), tau=0.3),
        methods.newton_admm(tau=0.3),
        methods.pvi(family, solver, tau=0.3),
        methods.ama(family, solver, tau=0.3),
        methods.bregman_admm(family, solver, tau=0.3),
        methods.blr(family, tau=0.3),
    ):
        assert method.tau == 0.3


@pytest.mark.parametrize("tau", [1.0, 0.2])
def test_first_round_of_each_method_on_conjugate_losses(tau):
    """λ_k = λ_0 + c_k/(ρτ), and the duals that follow from it, written out."""
    problem = poisson_counts(num_clients=3, dim=2)
    family, c, prior = problem.family, problem.losses.c, problem.prior

    def once(method):
        return step(method, init(method, prior, 3), problem.losses)[0]

    ama = once(methods.ama(family, Exact(), rho=0.4, tau=tau))
    torch.testing.assert_close(ama.lam, prior + c / (0.4 * tau))
    torch.testing.assert_close(ama.eta, c / tau)
    bregman = once(methods.bregman_admm(family, Exact(), rho=0.4, gamma=0.1, tau=tau))
    moved = family.expectation(prior + c / (0.4 * tau)) - family.expectation(prior)
    torch.testing.assert_close(bregman.eta, 0.1 * moved)
    rule = once(methods.blr(family, 0.5, tau=tau))
    torch.testing.assert_close(rule.lam_g, prior + 0.5 * c.sum(0) / tau)


def test_every_method_is_registered_under_its_name():
    assert {name.replace("-", "_") for name in methods.METHODS} == {f.__name__ for f in methods.METHODS.values()}
    assert all(f.__doc__ and "quivalence" in f.__doc__ for f in methods.METHODS.values())
