"""Laws of the limits on updates and of the trimmed mean, against NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import normal, rng

from fedual.algorithm import Blend, Broadcast, ExampleWeights, Method, Natural, Upload, server_init, server_step, total
from fedual.algorithm.influence import DEFAULT, SHARE, factors, sizes, trimmed, weighted_median
from fedual.families import Diagonal
from fedual.solvers import Exact

SITES, DIM = 10, 6
METHOD = Method(Diagonal(), Exact(), Natural(0.3), Blend(), 0.5)


def uploads(seed: int = 0, num: int = SITES) -> tuple[torch.Tensor, Upload]:
    """λ_g and honest updates around it."""
    lam_g = Diagonal().natural(normal((DIM,), seed), torch.rand(DIM, generator=rng(seed)) + 0.5)
    lam = Diagonal().natural(normal((num, DIM), seed + 1), torch.rand(num, DIM, generator=rng(seed + 2)) + 0.5)
    return lam_g, Upload(torch.ones(num, dtype=torch.bool), lam, None, None, torch.ones(num, dtype=torch.float64))


def cut(lam_g, lam, limits=DEFAULT, usual=0.0):
    moves, examples = (lam - lam_g) / len(lam), torch.ones(len(lam), dtype=torch.float64)
    found = sizes(Diagonal(), lam_g, moves)
    return factors(Diagonal(), lam_g, moves, examples, found, usual, limits)


def kl(a, b):
    """KL(N(m, 1/s) ‖ N(m2, 1/s2)) of independent Gaussians, from its textbook form."""
    (m, s), (m2, s2) = [(x[0] / (-2 * x[1]), -2 * x[1]) for x in (a.numpy(), b.numpy())]
    return 0.5 * (np.log(s / s2) + s2 / s + s2 * (m - m2) ** 2 - 1).sum()


def test_the_size_is_the_symmetric_divergence():
    lam_g, upload = uploads()
    found = sizes(Diagonal(), lam_g, upload.lam - lam_g)
    expected = [kl(lam, lam_g) + kl(lam_g, lam) for lam in upload.lam]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_the_weighted_median_is_that_of_repeated_values(seed):
    random = np.random.default_rng(seed)
    values, weights = random.normal(size=7), random.integers(1, 6, 7)
    repeated = np.sort(np.repeat(values, weights))
    expected = repeated[(len(repeated) - 1) // 2]
    assert float(weighted_median(torch.tensor(values), torch.tensor(weights))) == expected


def test_honest_updates_are_not_cut():
    lam_g, upload = uploads()
    assert (cut(lam_g, upload.lam)[0] == 1).all()


@pytest.mark.parametrize("far", [1e1, 1e3, 1e6, 1e9])
def test_one_site_moves_q_g_and_its_precision_no_further_than_the_limits(far):
    lam_g, upload = uploads()
    lam = upload.lam.clone()
    lam[3] = far * lam[3]
    lam[3, 0] *= -1
    c, most = cut(lam_g, lam)
    move = c[3] * (lam[3] - lam_g) / SITES
    assert kl(lam_g + move, lam_g) + kl(lam_g, lam_g + move) <= most * (1 + 1e-6)
    growth = ((upload.lam - lam_g)[:, 1] / SITES / lam_g[1]).abs().numpy()
    usual = np.maximum(np.sort(growth, 0)[SITES // 2], np.sort(growth.mean(1))[SITES // 2])
    assert (np.asarray(move[1] / lam_g[1]) <= 10 * usual + 0.25 + 1e-9).all()
    assert (c[[0, 1, 2, *range(4, SITES)]] == 1).all()
    assert most <= max(DIM, 10 * np.sort(sizes(Diagonal(), lam_g, (upload.lam - lam_g) / SITES))[SITES // 2])


def test_who_is_cut_does_not_depend_on_the_order():
    lam_g, upload = uploads()
    lam, order = upload.lam.clone(), torch.randperm(SITES, generator=rng(9))
    lam[2] *= 50
    torch.testing.assert_close(cut(lam_g, lam)[0][order], cut(lam_g, lam[order])[0])


def test_share_cuts_everybody_to_the_median():
    lam_g, upload = uploads()
    c, _ = cut(lam_g, upload.lam, SHARE)
    moves = (upload.lam - lam_g) / SITES
    found = sizes(Diagonal(), lam_g, c[:, None, None] * moves)
    median = np.sort(sizes(Diagonal(), lam_g, moves))[SITES // 2 - 1]
    assert float(found.max()) <= median * (1 + 1e-6)


def test_a_minority_cannot_raise_the_limit():
    lam_g, upload = uploads()
    lam = upload.lam.clone()
    lam[:4] *= 1e8
    largest = sizes(Diagonal(), lam_g, (upload.lam - lam_g) / SITES).max()
    assert cut(lam_g, lam, replace(DEFAULT, reach=0.0))[1] <= 10 * float(largest)


def by_numpy(gap, weights, away):
    """The weighted mean of each coordinate without its `away` smallest and largest."""
    result = np.zeros(gap.shape[1:])
    for place in np.ndindex(*result.shape):
        order = np.argsort(gap[(slice(None), *place)])[away : len(gap) - away]
        result[place] = np.average(gap[(order, *place)], weights=weights[order])
    return result


def test_the_trimmed_sums_are_those_of_numpy():
    lam_g, upload = uploads()
    examples = torch.arange(1, SITES + 1).double()
    method, upload = replace(METHOD, weighting=ExampleWeights(2.0)), upload._replace(num_examples=examples)
    found = trimmed(method, Broadcast(lam_g), upload, torch.arange(SITES), SITES)
    gap, weights = (upload.lam - lam_g).numpy(), examples.numpy() / 2
    np.testing.assert_allclose(found.lam / found.weight, lam_g.numpy() + by_numpy(gap, weights, 3), rtol=1e-12)
    change = 0.3 * weights[:, None, None] * gap
    np.testing.assert_allclose(found.eta, SITES * by_numpy(change, np.ones(SITES), 3), rtol=1e-12)


def test_trimming_does_not_depend_on_the_order():
    lam_g, upload = uploads()
    order = torch.randperm(SITES, generator=rng(4))
    sums = [trimmed(METHOD, Broadcast(lam_g), each, torch.arange(SITES), SITES) for each in (
        upload, upload._replace(lam=upload.lam[order])
    )]  # fmt: skip
    torch.testing.assert_close(sums[0].lam, sums[1].lam)
    torch.testing.assert_close(sums[0].eta, sums[1].eta)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_where_nothing_is_trimmed_it_is_the_plain_rule(num):
    lam_g, upload = uploads(num=num)
    one, other = (rule(METHOD, Broadcast(lam_g), upload, torch.arange(num), num) for rule in (trimmed, total))
    assert torch.equal(one.lam, other.lam)  # type: ignore[arg-type]
    assert torch.equal(one.eta, other.eta)  # type: ignore[arg-type]


def test_equal_updates_give_the_plain_rule():
    lam_g, upload = uploads()
    upload = upload._replace(lam=upload.lam[:1].expand(SITES, -1, -1))
    one, other = (rule(METHOD, Broadcast(lam_g), upload, torch.arange(SITES), SITES) for rule in (trimmed, total))
    torch.testing.assert_close(one.lam, other.lam)
    torch.testing.assert_close(one.eta, other.eta)


@pytest.mark.parametrize("liars", [0, 1, 2, 3])
def test_up_to_a_third_of_liars_cannot_move_the_server_beyond_the_honest_sites(liars):
    """The breakdown point: whatever they send, each coordinate stays between honest ones."""
    lam_g, upload = uploads()
    lam = upload.lam.clone()
    lam[:liars] = lam[:liars] * 1e12
    found = trimmed(METHOD, Broadcast(lam_g), upload._replace(lam=lam), torch.arange(SITES), SITES)
    honest, mean = upload.lam[liars:], found.lam / found.weight
    assert (mean >= honest.amin(0) - 1e-12).all()
    assert (mean <= honest.amax(0) + 1e-12).all()
    server, _ = server_step(METHOD, server_init(METHOD, None, lam_g), found)
    assert Diagonal().inside(server.lam_g)


def test_more_than_a_third_break_it():
    lam_g, upload = uploads()
    lam = upload.lam.clone()
    lam[:4] *= 1e12
    found = trimmed(METHOD, Broadcast(lam_g), upload._replace(lam=lam), torch.arange(SITES), SITES)
    assert float(torch.as_tensor(found.lam / found.weight).abs().max()) > 1e9
