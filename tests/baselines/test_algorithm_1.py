"""IVON-ADMM and IVON-PVI: the server and the duals in means and precisions, from what the clients' IVON returned."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from federations import begin  # pyright: ignore[reportMissingImports]
from harness import NUM, last, near_all, networks
from problems import normal

from fedual import methods
from fedual.algorithm import Blend, Method, init, step
from fedual.families import Diagonal
from fedual.networks import Minibatches
from fedual.run import ENGINES
from fedual.solvers import IVON, Conjugate, Exact

SOLVER = IVON(lr=0.05, beta2=0.99)
PLANS = [[[0, 1, 2, 3, 4]] * 4, [[0, 3], [1, 2, 4], [2], [0, 1, 2, 3, 4]]]


class Round(NamedTuple):
    """After a round, in means and precisions."""

    server: tuple[np.ndarray, ...]  # m_g, s_g, v (K, P), u (K, P)
    m: np.ndarray  # of the clients of the round
    s: np.ndarray


def posteriors(method: Method, plan, losses) -> Iterator[Round]:
    family, minibatches = Diagonal(), isinstance(losses, Minibatches)
    assert isinstance(method.delta, float)
    prior = family.natural(torch.zeros(losses.dim), method.delta)
    state = init(method, prior, len(losses), losses.network.initial() if minibatches else None)
    for number, clients in enumerate(plan):
        now = losses.at(number) if minibatches else losses
        state, info = step(method, state, now, torch.tensor(clients))
        assert info.shortened == 1.0
        assert int(info.counted.sum()) == len(clients)
        server = family.mean(state.lam_g), family.precision(state.lam_g), state.eta[:, 0], -2 * state.eta[:, 1]
        lam = state.lam[clients]
        yield Round(tuple(a.numpy() for a in server), family.mean(lam).numpy(), family.precision(lam).numpy())


@pytest.mark.parametrize(("momentum", "unit"), [(0.0, 0.0), (0.6, 0.0), (0.0, 7.0), (0.6, 7.0)])
@pytest.mark.parametrize("plan", PLANS, ids=["everybody", "some"])
def test_eq59_ivon_admm_is_algorithm_1(plan, momentum, unit):
    """v_k, u_k, s_g and m_g as printed, γ = damping·ρ; α counts the clients of the round, the sums are over all.

    With a unit, clients count by their examples, w_k = N_k/unit: ρ_k = ρ w_k, γ_k = γ w_k, and their mean is weighted.
    With momentum, clients start from where the server would be if it moved on, but not as in the first round, in which
    it left the prior; and where it would lose more than half of its precision, it does not.
    """
    rho, damping, delta, losses = 0.3, 0.2, 2.0, networks()
    gamma, dim = damping * rho, losses.dim
    given, seen, (v, u) = np.stack([np.zeros(dim), np.full(dim, delta)]), [], np.zeros((2, NUM, dim))
    method = methods.ivon_admm(rho, damping, delta, 0.1, SOLVER, momentum, unit)
    for clients, ours in zip(plan, posteriors(method, plan, losses), strict=True):
        w = np.array(losses.data.sizes)[clients, None] / unit if unit else np.ones((len(clients), 1))
        v[clients] += gamma * w * (ours.s * ours.m - given[0])
        u[clients] += gamma * w * (ours.s - given[1])
        alpha, mean = 1 / (1 + rho * w.sum()), lambda x, w=w: (w * x).sum(0) / w.sum()
        s_g = (1 - alpha) * mean(ours.s) + alpha * (delta + u.sum(0))
        m_g = ((1 - alpha) * mean(ours.s * ours.m) + alpha * v.sum(0)) / s_g
        near_all(ours.server, (m_g, s_g, v, u))
        seen.append((s_g * m_g, s_g))
        on = [now + momentum * (now - old) for now, old in zip(seen[-1], seen[-2:][0], strict=True)]
        given = np.where(on[1] < s_g / 2, seen[-1], on)
        assert np.ptp(ours.s, 1).min() > 0.1  # IVON has moved every client's precision


@pytest.mark.parametrize("plan", PLANS, ids=["everybody", "some"])
def test_ivon_pvi_multiplies_sites(plan):
    """q_g ∝ N(0, I/δ) Π_k t_k and t_k ← t_k (q_k/q_g)^damping, t_k = exp(a_kᵀθ − ½ θᵀdiag(b_k)θ)."""
    damping, delta, losses = 0.2, 2.0, networks()
    a, b = np.zeros((2, NUM, losses.dim))
    for clients, ours in zip(
        plan, posteriors(methods.ivon_pvi(damping, delta, 0.1, SOLVER), plan, losses), strict=True
    ):
        shift, precision = a.sum(0), delta + b.sum(0)
        a[clients] += damping * (ours.s * ours.m - shift)
        b[clients] += damping * (ours.s - precision)
        near_all(ours.server, (a.sum(0) / (delta + b.sum(0)), delta + b.sum(0), a, b))


def test_ivon_pvi_is_ivon_admm_with_rho_and_alpha_one():
    admm = methods.ivon_admm(1.0, 0.2, 2.0, 0.1, SOLVER)
    assert methods.ivon_pvi(0.2, 2.0, 0.1, SOLVER) == replace(admm, server=Blend(1.0))


@pytest.mark.parametrize("engine", ENGINES)
def test_eq59_the_engines_rounds_are_those_of_step(engine):
    method, losses, plan = methods.ivon_admm(0.3, 0.2, 2.0, 0.1, SOLVER, 0.6, 7.0), networks(), PLANS[1]
    m_g, s_g, v, u = last(posteriors(method, plan, losses)).server
    server, store = begin(method, losses.network.initial(), NUM)
    for number, clients in enumerate(plan):
        server, _ = ENGINES[engine](method, server, store, losses.at(number), torch.tensor(clients), 2)
    family, eta = Diagonal(), store.read(torch.arange(NUM))["eta"]
    ours = family.mean(server.lam_g), family.precision(server.lam_g), eta[:, 0], -2 * eta[:, 1]
    near_all(ours, (m_g, s_g, v, u))


@pytest.mark.parametrize("name", ["ivon-admm", "ivon-pvi"])
def test_exact_clients_in_place_of_ivon_reach_the_pooled_posterior(name):
    """ℓ_k = ½ θᵀdiag(h_k)θ − b_kᵀθ: precision δ + Σ h_k/τ, mean Σ b_k/τ over it, and the duals b_k/τ, h_k/τ."""
    delta, tau, exact = 1.5, 0.2, Exact()
    h, b = normal((NUM, 4), 1).square() + 0.1, normal((NUM, 4), 2)
    losses: Any = Conjugate(Diagonal(), torch.stack([b, -h / 2], 1))
    if name == "ivon-admm":
        method = methods.ivon_admm(0.4, 0.3, delta, tau, exact)  # type: ignore[arg-type]
    else:
        method = methods.ivon_pvi(0.3, delta, tau, exact)  # type: ignore[arg-type]
    found = last(posteriors(method, [[0, 1, 2, 3, 4]] * 150, losses))
    precision = delta + h.sum(0) / tau
    near_all(found.server, (b.sum(0) / tau / precision, precision, b / tau, h / tau))
