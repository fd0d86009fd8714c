"""FedIvon: IVON at the clients and the server's merge, written a second time with h and δ apart, as printed."""

from collections.abc import Iterator

import pytest
import torch
from federations import begin  # pyright: ignore[reportMissingImports]
from harness import NUM, near, networks
from torch import Tensor

from fedual import methods
from fedual.errors import InputError
from fedual.families import Diagonal
from fedual.networks import Minibatches
from fedual.run import ENGINES
from fedual.solvers import IVON, FreshIVON

LR, H0, DELTA, BETA1, BETA2 = 0.05, 0.3, 0.02, 0.9, 0.99
SOLVER = FreshIVON(LR, h0=H0, beta1=BETA1, beta2=BETA2, clip=0.0, weight_decay=DELTA)
PLANS = [[[0, 1, 2, 3, 4]] * 4, [[0, 3], [1, 2, 4], [2], [0, 1, 2, 3, 4]]]


def ivon(losses: Minibatches, m: Tensor, h: Tensor, ess: float) -> tuple[Tensor, Tensor]:
    """Shen et al. 2024, Algorithm 1, from (m, h) with a fresh momentum: one client, one sample a step."""
    g = torch.zeros_like(m)
    for t in range(losses.steps[0]):
        sigma = 1 / (ess * (h + DELTA)).sqrt()
        theta = m + sigma * losses.noise(t, 0, m[None])[0]
        gradient = losses.gradient(theta[None], t)[0]
        hessian = gradient * (theta - m) / sigma**2
        g = BETA1 * g + (1 - BETA1) * gradient
        h = BETA2 * h + (1 - BETA2) * hessian + (1 - BETA2) ** 2 / 2 * (h - hessian) ** 2 / (h + DELTA)
        m = m - LR * (g / (1 - BETA1 ** (t + 1)) + DELTA * m) / (h + DELTA)
    return m, h


def fedivon(losses: Minibatches, plan: list[list[int]], ess: float) -> Iterator[tuple[Tensor, Tensor]]:
    """(m, h) of the server: h ← Σ w_k h_k, m ← Σ w_k (h_k + δ) m_k / (h + δ), w_k = N_k/Σ_j N_j over the round."""
    m, h = losses.network.initial(), torch.full((losses.dim,), H0)
    for number, clients in enumerate(plan):
        size = losses.num_examples[clients]
        ms, hs = map(torch.stack, zip(*(ivon(losses.at(number)[[k]], m, h, ess) for k in clients), strict=True))
        w = (size / size.sum()).to(m)[:, None]
        h = (w * hs).sum(0)
        m = (w * (hs + DELTA) * ms).sum(0) / (h + DELTA)
        yield m, h


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("plan", PLANS, ids=["everybody", "some"])
def test_with_one_ess_it_is_ivon_and_the_merge_of_means_and_hessians(plan, engine):
    """λ = unit/τ for all clients, and s_g = λ (h + δ)."""
    losses, tau = networks(), 0.5
    unit = float(losses.num_examples.sum())
    method, family = methods.fedivon(tau, unit, SOLVER), Diagonal()
    server, store = begin(method, losses.network.initial(), NUM)
    assert not store.names
    for number, (m, h) in enumerate(fedivon(losses, plan, unit / tau)):
        active = torch.tensor(plan[number])
        server, info = ENGINES[engine](method, server, store, losses.at(number), active, 2)
        assert int(info.counted.sum()) == len(active)
        near(family.mean(server.lam_g), m)
        near(family.precision(server.lam_g), unit / tau * (h + DELTA))
        assert float(h.max() - h.min()) > 1e-3  # IVON has moved h


def test_without_a_unit_a_client_has_the_ess_of_its_examples():
    """λ_k = N_k/τ, and client k starts at q_g, which has h + δ = s_g/λ_k; λ_k are averaged by examples."""
    losses, tau = networks(), 0.5
    method, family, size = methods.fedivon(tau, solver=SOLVER), Diagonal(), losses.num_examples
    server, store = begin(method, losses.network.initial(), NUM)
    m, s = losses.network.initial(), None
    for number in range(3):
        found = []
        for k in range(NUM):
            ess = float(size[k]) / tau
            h = torch.full_like(m, H0) if s is None else s / ess - DELTA
            mean, h = ivon(losses.at(number)[[k]], m, h, ess)
            found.append(float(size[k] / size.sum()) * ess * (h + DELTA) * torch.stack([mean, torch.ones_like(mean)]))
        shift, s = sum(found).unbind()  # type: ignore[union-attr]
        m = shift / s
        server, _ = ENGINES["vectorised"](method, server, store, losses.at(number), torch.arange(NUM), 2)
        near(family.mean(server.lam_g), m)
        near(family.precision(server.lam_g), s)


def test_without_any_prior_it_is_refused():
    losses = networks()
    method = methods.fedivon(solver=IVON())
    server, store = begin(method, losses.network.initial(), NUM)
    with pytest.raises(InputError, match="rho = 0 and weight_decay = 0: IVON needs a prior"):
        ENGINES["vectorised"](method, server, store, losses, torch.arange(NUM), 5)
