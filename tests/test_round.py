"""Bayesian-ADMM on conjugate problems: every equation of the algorithm against a closed form."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import CONJUGATE, full_gaussian, linear_bits, normal, poisson_counts, rng

from fedual import methods
from fedual.algorithm import (
    Blend,
    ExampleWeights,
    Expectation,
    Method,
    Natural,
    ServerState,
    Totals,
    Zero,
    client_step,
    init,
    readmit,
    server_step,
    step,
    total,
)
from fedual.families import Diagonal, Full, check, kl
from fedual.solvers import Conjugate, Exact


def bayesian_admm(family, rho, gamma=None, tau=1.0):
    return Method(family, Exact(), Natural(rho if gamma is None else gamma), Blend(), rho, tau)


def relative(a, b):
    return float((a - b).norm() / b.norm())


def run(method, problem, rounds, actives=None):
    state = init(method, problem.prior, len(problem.losses))
    for t in range(rounds):
        state, _ = step(method, state, problem.losses, None if actives is None else actives[t])
    return state


def serve(method, server, lam):
    """λ_g after line 3, and the fraction of the step that was taken, where all clients send these λ_k `(K, R, P)`."""
    everybody = torch.ones(len(lam), dtype=torch.bool)
    after, info = server_step(method, server, Totals(everybody, ~everybody, float(len(lam)), lam.sum(0)))
    return after.lam_g, info.shortened


@pytest.mark.parametrize("make", CONJUGATE)
@pytest.mark.parametrize("seed", range(5))
def test_prop2_one_round_on_conjugate_losses(make, seed):
    """Prop. 2 (Eq. 54–55): at ρ = 1/K the server is the pooled posterior after one round, and stays there."""
    problem = make(seed=seed)
    method = bayesian_admm(problem.family, 1 / len(problem.losses))
    state = run(method, problem, 1)
    assert relative(state.lam_g, problem.pooled) < 1e-10
    state = run(method, problem, 3)
    assert relative(state.lam_g, problem.pooled) < 1e-10
    assert relative(state.lam[0], problem.pooled) < 1e-10


@pytest.mark.parametrize("seed", range(5))
def test_prop2_fails_for_bregman_admm_and_admm(seed):
    """On the Gaussian problems the rivals are not there after one round."""
    problem = full_gaussian(seed=seed)
    rho = 1 / len(problem.losses)
    state = run(methods.bregman_admm(problem.family, Exact(), rho), problem, 1)
    assert relative(state.lam_g, problem.pooled) > 1e-3
    plain = methods.admm(rho)
    unit = init(plain, torch.zeros(1, 20), len(problem.losses))
    centred = Full().natural(torch.zeros(20), 1.0) + problem.losses.c.sum(0)
    after, _ = step(plain, unit, problem.losses)
    assert relative(plain.family.expectation(after.lam_g)[0], Full().mean(centred)) > 1e-3


@pytest.mark.parametrize("make", CONJUGATE)
@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_eq33_dual_is_the_negative_natural_gradient(make, tau):
    """η_k = −∇_μ L_k(μ_k)/τ = c_k/τ after every exact client step with γ = ρ (app. C.1)."""
    problem = make(seed=3)
    method = bayesian_admm(problem.family, 0.6, tau=tau)
    state = init(method, problem.prior, 7)
    for _ in range(4):
        state, _ = step(method, state, problem.losses)
        assert relative(state.eta, problem.losses.c / tau) < 1e-8


@pytest.mark.parametrize("make", CONJUGATE)
def test_eq15_client_minimises_its_objective(make):
    """No nearby q_k has a smaller −⟨c, μ⟩/τ + ⟨η, μ⟩ + ρ KL(q ‖ q_g), and λ_k itself is in the domain."""
    problem, rho, tau = make(num_clients=3, dim=4, seed=1), 0.7, 0.5
    method = bayesian_admm(problem.family, rho, tau=tau)
    state, eta = run(method, problem, 1), 0.1 * problem.losses.c
    broadcast = state.server.broadcast(method.dual, 3)
    moved, _ = client_step(method, broadcast, state.clients._replace(eta=eta), problem.losses)

    def objective(lam):
        mu = problem.family.expectation(lam)
        linear = ((eta - problem.losses.c / tau) * mu).sum((-2, -1))
        return linear + rho * kl(problem.family, lam, state.lam_g)

    best, tried = objective(moved.lam), 0
    for seed in range(20):
        away = normal(moved.lam.shape, seed) * (1 + moved.lam.abs())
        near = moved.lam + 10.0 ** -(1 + seed % 4) * away
        inside = problem.family.inside(near)
        tried += int(inside.sum())
        assert (objective(near)[inside] >= best[inside] - 1e-9).all()
    assert tried > 30


@pytest.mark.parametrize("make", CONJUGATE)
def test_eq16_and_eq17_against_the_formulas(make):
    """Lines 2 and 3 with γ ≠ ρ, recomputed from λ_k alone; Eq. 50 vanishes at the new λ_g."""
    problem, rho, gamma = make(num_clients=4, dim=5, seed=2), 0.3, 0.12
    method = bayesian_admm(problem.family, rho, gamma)
    before = run(method, problem, 2)
    after, info = step(method, before, problem.losses)
    eta = before.eta + gamma * (after.lam - before.lam_g)
    torch.testing.assert_close(after.eta, eta)
    stationarity = (
        after.lam_g - problem.prior - eta.sum(0) + rho * (after.lam_g - after.lam).sum(0)
    )  # Eq. 50, with η_0 = λ_0 (errata)
    assert stationarity.abs().max() < 1e-10
    assert info.counted.all()
    assert info.shortened == 1.0


@pytest.mark.parametrize("make", CONJUGATE)
def test_eq51_server_minimises_its_objective(make):
    """Eq. 17: KL(q_g‖π_0) − Σ⟨η_k, μ_g⟩ + ρ Σ KL(q_g‖q_k) has zero gradient at the new λ_g (autograd)."""
    problem, rho = make(num_clients=4, dim=5, seed=2), 0.3
    state = run(bayesian_admm(problem.family, rho), problem, 2)
    leaf = state.lam_g.clone().requires_grad_()
    mu = problem.family.expectation(leaf)
    objective = kl(problem.family, leaf, problem.prior) - (state.eta.sum(0) * mu).sum()
    objective = objective + rho * sum(kl(problem.family, leaf, lam) for lam in state.lam)
    (gradient,) = torch.autograd.grad(objective, leaf)
    assert gradient.abs().max() < 1e-8


@pytest.mark.parametrize("make", CONJUGATE)
def test_prop1_clients_to_convergence_then_the_server_is_the_learning_rule(make):
    """Prop. 1 (Eq. 34): lines 1–2 repeated, then line 3, equal BLR with β = 1/(1 + ρK)."""
    problem, rho = make(num_clients=4, dim=5, seed=6), 0.8
    method = bayesian_admm(problem.family, rho)
    state = run(method, problem, 1)
    clients = state.clients
    for _ in range(30):
        _, clients = client_step(method, state.server.broadcast(method.dual, 4), clients, problem.losses)
    assert clients.lam is not None
    assert clients.eta is not None
    assert relative(clients.lam[0], state.lam_g) < 1e-10
    lam_g, _ = serve(method, state.server._replace(eta_sum=clients.eta.sum(0)), clients.lam)
    rule = methods.blr(problem.family, beta=1 / (1 + rho * 4))
    by_rule, _ = step(rule, state, problem.losses)
    assert relative(lam_g, by_rule.lam_g) < 1e-8


@pytest.mark.parametrize("make", CONJUGATE)
@settings(max_examples=5)
@given(seed=st.integers(0, 1000), rho=st.floats(0.1, 1.0))
def test_random_participation_reaches_the_same_posterior(make, seed, rho):
    """Random subsets of any size (also empty) each round; Σ η over all clients is kept as a running sum."""
    problem = make(num_clients=5, dim=3, seed=seed)
    actives = (torch.rand(200, 5, generator=rng(seed)) < 0.5).unbind()
    state = run(bayesian_admm(problem.family, rho), problem, 200, actives)
    assert relative(state.lam_g, problem.pooled) < 1e-7
    torch.testing.assert_close(state.server.eta_sum, state.eta.sum(0), rtol=1e-9, atol=1e-9)


def test_only_active_clients_move_and_alpha_counts_them():
    problem, rho = full_gaussian(num_clients=4, dim=3), 0.3
    method = bayesian_admm(problem.family, rho)
    before = run(method, problem, 1)
    after, info = step(method, before, problem.losses, torch.tensor([2, 0]))
    assert torch.equal(after.lam[[1, 3]], before.lam[[1, 3]])
    assert torch.equal(after.eta[[1, 3]], before.eta[[1, 3]])
    assert info.counted.tolist() == [True, False, True, False]
    alpha = 1 / (1 + rho * 2)
    wanted = (1 - alpha) * after.lam[[0, 2]].mean(0) + alpha * (problem.prior + after.eta.sum(0))
    torch.testing.assert_close(after.lam_g, wanted)


def test_nobody_active_leaves_the_server_alone():
    problem = poisson_counts(num_clients=3, dim=2)
    method = bayesian_admm(problem.family, 1.0)
    before = run(method, problem, 1)
    for nobody in (torch.zeros(3, dtype=torch.bool), torch.tensor([])):
        after, info = step(method, before, problem.losses, nobody)
        assert torch.equal(after.lam_g, before.lam_g)
        assert not info.counted.any()
        assert after.server.round == before.server.round + 1


def test_one_vector_up_is_enough():
    """The server can keep Σ η from Σ λ_k alone: Δ Σ η = γ Σ_S (λ_k − λ_g)."""
    problem, gamma = full_gaussian(num_clients=4, dim=3), 0.2
    method = bayesian_admm(problem.family, 0.5, gamma)
    state, eta_sum = init(method, problem.prior, 4), torch.zeros(4, 3)
    for t in range(10):
        active = torch.rand(4, generator=rng(t)) < 0.7
        new, _ = step(method, state, problem.losses, active)
        eta_sum = eta_sum + gamma * (new.lam[active].sum(0) - active.sum() * state.lam_g)
        state = new
    torch.testing.assert_close(state.server.eta_sum, eta_sum)


@pytest.mark.parametrize("weighting", [None, ExampleWeights(0.5)], ids=["equal", "weighted"])
@pytest.mark.parametrize("dual", [Natural(0.2), Zero()], ids=str)
def test_the_server_infers_the_change_of_a_dual_that_is_not_sent(dual, weighting):
    """`total` gives the same sums without η_k's change; one client is refused, and counts in neither."""
    problem = full_gaussian(num_clients=4, dim=3)
    method = replace(bayesian_admm(problem.family, 0.5), dual=dual, weighting=weighting)
    state = run(method, problem, 2)
    problem.losses.c[2] = torch.nan
    broadcast = state.server.broadcast(dual, 4)
    upload, _ = client_step(method, broadcast, state.clients, problem.losses)
    assert upload.ok.tolist() == [True, True, False, True]
    sent, inferred = (
        total(method, broadcast, upload._replace(eta_change=change), torch.arange(4), 4)
        for change in (upload.eta_change, None)
    )
    assert torch.equal(sent.counted, inferred.counted)
    torch.testing.assert_close(sent.eta, inferred.eta)
    torch.testing.assert_close(sent.lam, inferred.lam)


class Counting(Exact):
    """Exact, and carries how often each client was solved."""

    def init(self, family, prior, num_clients):
        return {"solved": torch.zeros(num_clients)}

    def __call__(self, problem):
        return super().__call__(problem)._replace(carry={"solved": problem.carry["solved"] + 1})


def test_what_a_solver_carries_follows_its_client():
    problem = full_gaussian(num_clients=4, dim=3)
    c = problem.losses.c.clone()
    method = Method(problem.family, Counting(), Natural(0.5), Blend(), 0.5)
    state = init(method, problem.prior, 4)
    state, _ = step(method, state, problem.losses, torch.tensor([3, 1]))
    state, _ = step(method, state, problem.losses, torch.tensor([1, 2]))
    assert state.clients.carry["solved"].tolist() == [0, 2, 1, 1]
    c[1] = torch.nan
    state, info = step(method, state, Conjugate(problem.family, c), torch.tensor([0, 1]))
    assert state.clients.carry["solved"].tolist() == [1, 2, 1, 1]
    assert info.refused.tolist() == [False, True, False, False]
    assert info.counted.tolist() == [True, False, False, False]
    state = readmit(method, state, torch.tensor([1]))
    assert state.clients.carry["solved"].tolist() == [1, 0, 1, 1]
    assert torch.equal(state.lam[1], state.lam_g)


def test_a_dual_that_is_not_finite_is_refused():
    problem = full_gaussian(num_clients=3, dim=3)

    class Broken(Zero):
        def __call__(self, problem, solution):
            eta = solution.lam - problem.lam_g
            eta[0] = torch.inf
            return eta

    method = Method(problem.family, Exact(), Broken(), Blend(), 0.5)
    after, info = step(method, init(method, problem.prior, 3), problem.losses)
    assert info.refused.tolist() == [True, False, False]
    assert after.server.eta_sum.isfinite().all()


def test_info_measures_the_residuals():
    problem = full_gaussian(num_clients=4, dim=3)
    method = bayesian_admm(problem.family, 0.5)
    before = run(method, problem, 2)
    after, info = step(method, before, problem.losses, torch.tensor([0, 2]))
    gaps = torch.stack([(after.lam[k] - before.lam_g).norm() for k in (0, 2)])
    assert info.primal == pytest.approx(float(gaps.square().mean().sqrt()))
    assert info.dual == pytest.approx(float((after.lam_g - before.lam_g).norm()))
    assert info.primal != pytest.approx(info.dual)


class TestLostClient:
    """A client that lost its η_k comes back."""

    @property
    def problem(self):
        return full_gaussian(num_clients=4, dim=3)

    def finish(self, state):
        method = bayesian_admm(self.problem.family, 0.5)
        for _ in range(150):
            state, _ = step(method, state, self.problem.losses)
        return relative(state.lam_g, self.problem.pooled)

    def lost(self):
        return run(bayesian_admm(self.problem.family, 0.5), self.problem, 5)

    def test_readmit_reaches_the_pooled_posterior(self):
        assert self.finish(readmit(bayesian_admm(self.problem.family, 0.5), self.lost(), torch.tensor([1]))) < 1e-10

    def test_restarting_at_zero_without_telling_the_server_does_not(self):
        state = self.lost()
        eta = state.eta.clone()
        eta[1] = 0
        assert self.finish(state._replace(clients=state.clients._replace(eta=eta))) > 1e-2


class TestOutOfDomain:
    def test_a_bad_client_is_left_out_and_counted(self):
        problem = full_gaussian(num_clients=4, dim=3)
        c = problem.losses.c.clone()
        c[1, 1:] = 50 * torch.eye(3)  # concave: its λ_1 has a negative precision
        c[2] = torch.nan
        method = bayesian_admm(problem.family, 0.25)
        after, info = step(method, init(method, problem.prior, 4), Conjugate(problem.family, c))
        assert info.refused.tolist() == [False, True, True, False]
        assert info.counted.tolist() == [True, False, False, True]
        assert (after.eta[[1, 2]] == 0).all()
        alone = Conjugate(problem.family, c[[0, 3]])
        same, _ = step(method, init(method, problem.prior, 2), alone)
        torch.testing.assert_close(after.lam_g, same.lam_g)

    @pytest.mark.parametrize("dual", [Natural(0.25), Expectation(0.25)], ids=str)
    def test_no_dual_step_is_tried_for_a_client_without_a_solution(self, dual):
        problem = full_gaussian(num_clients=3, dim=3)
        c = problem.losses.c.clone()
        c[1] = torch.nan
        method = Method(problem.family, Exact(), dual, Blend(), 0.25)
        after, info = step(method, init(method, problem.prior, 3), Conjugate(problem.family, c))
        assert info.refused.tolist() == [False, True, False]
        assert (after.eta[1] == 0).all()

    @pytest.mark.parametrize(("factor", "least"), [(1.01, 0.5), (1000.0, 1 / 64)])
    def test_a_server_step_out_of_the_domain_is_shortened(self, factor, least):
        problem = full_gaussian(num_clients=2, dim=3)
        method = methods.pvi(problem.family, Exact())
        state = run(method, problem, 1)
        bad = -factor * state.server.eta_sum
        lam_g, shortened = serve(method, state.server._replace(eta_sum=bad), state.lam)
        assert 0 < shortened <= least
        check(problem.family, lam_g)
        torch.testing.assert_close(lam_g, torch.lerp(state.lam.mean(0), problem.prior + bad, shortened))

    def test_coordinates_of_a_diagonal_step_that_lose_their_precision_do_not_take_part(self):
        """Of precisions 10 → 20, 6, −10, 4 the third leaves; the last is too near to that."""
        family = Diagonal()
        method = methods.pvi(family, Exact())
        mean = family.natural(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.full((4,), 10.0))
        change = family.natural(torch.tensor([1.0, -2.0, 5.0, 1.0]), torch.tensor([10.0, -4.0, -20.0, -6.0]))
        server = ServerState(mean, family.natural(torch.ones(4)), change)
        lam_g, shortened = serve(method, server, mean.expand(2, -1, -1))
        assert shortened == 0.5
        torch.testing.assert_close(lam_g, torch.cat([(mean + change)[:, :2], mean[:, 2:]], -1))

    def test_a_diagonal_step_that_stays_inside_is_taken_however_far_it_goes(self):
        family = Diagonal()
        now, change = (family.natural(torch.ones(2), torch.tensor(s)) for s in ([10.0, 10.0], [-9.99, 0.0]))
        method = methods.pvi(family, Exact())
        lam_g, shortened = serve(method, ServerState(now, now, change), now.expand(2, -1, -1))
        assert shortened == 1.0
        assert torch.equal(lam_g, now + change)

    @pytest.mark.parametrize("family", [Diagonal(), Full()], ids=str)
    def test_a_diagonal_or_full_step_that_is_not_finite_is_refused(self, family):
        now = family.natural(torch.ones(3))
        method = methods.pvi(family, Exact())
        server = ServerState(now, now, torch.full_like(now, torch.nan))
        lam_g, shortened = serve(method, server, now.expand(2, -1, -1))
        assert shortened == 0.0
        assert torch.equal(lam_g, now)

    def test_a_server_step_that_is_not_finite_is_refused(self):
        problem = linear_bits(num_clients=2, dim=3)
        method = methods.pvi(problem.family, Exact())
        state, bad = run(method, problem, 1), torch.full((1, 3), torch.nan)
        lam_g, shortened = serve(method, state.server._replace(eta_sum=bad), state.lam)
        assert shortened == 0.0
        assert torch.equal(lam_g, state.lam_g)
