"""One site's loss: its derivatives against automatic differentiation, its values against SciPy's distributions."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch.autograd.functional import hessian, jacobian

from fedual.families import Delta, Full, GaussHermite
from fedual.glm.closing import figures, meat
from fedual.glm.distributions import DISTRIBUTIONS, distribution
from fedual.glm.likelihood import CHUNK, Likelihood
from fedual.glm.messages import packed, packed_lam, unpacked, unpacked_lam

CASES = [(name, link) for name, kind in DISTRIBUTIONS.items() for link in kind.links]


def problem(family: str, link: str, rows: int = 40, own: bool = False) -> tuple[Likelihood, torch.Tensor]:
    """A site and a point θ at which every mean is inside its domain."""
    generator = torch.Generator().manual_seed(3)
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    x = torch.cat([torch.ones(rows, 1, dtype=torch.float64), 0.3 * normal(rows, 3)], 1)
    counts = torch.poisson(torch.full((rows,), 2.0, dtype=torch.float64), generator=generator)
    y = {"gaussian": 7 + normal(rows), "binomial": (normal(rows) > 0).double(), "gamma": normal(rows).exp()}.get(
        family, counts
    )
    kind = distribution(family, link)
    theta = torch.tensor([2.0, 0.3, -0.2, 0.4] + [-0.5] * len(kind.extra), dtype=torch.float64)
    if family == "binomial":
        theta[0] = 0.3
    weight = torch.rand(rows, dtype=torch.float64, generator=generator) + 0.5
    offset = 0.1 * normal(rows)
    return Likelihood(kind, x, y, weight, offset, own), theta[1:] if own else theta


def pooled_loss(site: Likelihood, theta: torch.Tensor) -> torch.Tensor:
    """The loss by means alone, differentiable: an independent path to the derivatives."""
    size = len(theta) - len(site.distribution.extra)
    mean = site.distribution.mean(site.x @ theta[:size] + site.offset)
    y = site.y
    if site.distribution.extra:
        r = (-theta[-1]).exp()
        log_p = torch.lgamma(y + r) - torch.lgamma(r) + r * torch.log(r / (r + mean)) + y * torch.log(mean / (r + mean))
    else:
        log_p = {
            "gaussian": lambda: -((y - mean) ** 2) / 2,
            "binomial": lambda: y * mean.log() + (1 - y) * (1 - mean).log(),
            "poisson": lambda: y * mean.log() - mean,
            "gamma": lambda: -y / mean - mean.log(),
        }[site.distribution.name]()
    return -(site.weight * log_p).sum()


@pytest.mark.parametrize(("family", "link"), CASES)
def test_derivatives_are_those_of_the_loss(family, link):
    site, theta = problem(family, link)
    found = site.expand(theta)
    torch.testing.assert_close(found.loss, pooled_loss(site, theta))
    torch.testing.assert_close(found.gradient, jacobian(lambda t: pooled_loss(site, t), theta))
    torch.testing.assert_close(found.hessian, hessian(lambda t: pooled_loss(site, t), theta))
    torch.testing.assert_close(site(theta), found.loss)


@pytest.mark.parametrize(("family", "link"), [case for case in CASES if case[0] != "negative-binomial"])
def test_expected_information_is_the_variance_of_the_score(family, link):
    site, theta = problem(family, link)
    f = site.x @ theta + site.offset
    mean = site.distribution.mean(f)
    slope = jacobian(site.distribution.mean, f).diagonal()
    variance = {"gaussian": lambda m: torch.ones_like(m), "binomial": lambda m: m * (1 - m), "poisson": lambda m: m,
                "gamma": lambda m: m**2}[family](mean)  # fmt: skip
    expected = site.x.mT @ ((site.weight * slope**2 / variance)[:, None] * site.x)
    torch.testing.assert_close(site.expand(theta).expected, expected)
    torch.testing.assert_close(site.expand(theta).weights, site.weight * slope**2 / variance)


@pytest.mark.parametrize(("family", "link"), CASES)
def test_an_own_intercept_is_profiled_out(family, link):
    site, slopes = problem(family, link, own=True)
    whole, _ = problem(family, link)
    best = site.complete(slopes)
    at_best = whole.expand(best)
    assert abs(at_best.gradient[0]) < 1e-6 * at_best.hessian[0, 0]
    profile = lambda t: whole.expand(site.complete(t)).loss
    step = 1e-4
    for j in range(len(slopes)):
        up, down = slopes.clone(), slopes.clone()
        up[j] += step
        down[j] -= step
        torch.testing.assert_close(
            site.expand(slopes).gradient[j], (profile(up) - profile(down)) / (2 * step), rtol=1e-5, atol=1e-6
        )
        numeric = (site.expand(up).gradient - site.expand(down).gradient) / (2 * step)
        torch.testing.assert_close(site.expand(slopes).hessian[j], numeric, rtol=1e-5, atol=1e-5)


def test_a_site_of_one_class_says_nothing_about_slopes():
    site, slopes = problem("binomial", "logit", own=True)
    one = Likelihood(site.distribution, site.x, torch.ones_like(site.y), site.weight, site.offset, True)
    found = one.expand(slopes)
    assert one.says_nothing
    assert not site.says_nothing
    assert not any(term.any() for term in found[:3])
    assert figures(one, slopes, None, 1.0, 5)[0]["deviance"] == 0
    assert not meat(one, slopes).any()


@pytest.mark.parametrize(("family", "link"), [("binomial", "logit"), ("binomial", "probit"), ("poisson", "log")])
def test_expectations_are_taken_along_the_predictor(family, link):
    site, theta = problem(family, link)
    precision = torch.diag(torch.tensor([50.0, 80.0, 90.0, 60.0], dtype=torch.float64))
    lam = Full().natural(theta, precision)[None]
    found = site.moments(Full(), lam, GaussHermite(30))
    noise = torch.randn(200_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    draws = theta + noise / precision.diagonal().sqrt()
    f = draws @ site.x.mT + site.offset
    bend = site.distribution.bend(f, site.y)
    value = (site.weight * bend.loss).sum(1).mean()
    torch.testing.assert_close(found.value[0], value, rtol=3e-3, atol=0)
    gradient = ((site.weight * bend.first) @ site.x).mean(0)
    torch.testing.assert_close(found.gradient[0], gradient, rtol=0.02, atol=0.05)
    exact = site.moments(Full(), lam, Delta())
    torch.testing.assert_close(exact.value[0], site(theta))


def test_chunks_do_not_matter():
    site, theta = problem("poisson", "log", rows=2 * CHUNK + 17)
    torch.testing.assert_close(site.expand(theta).gradient, jacobian(lambda t: pooled_loss(site, t), theta))


@pytest.mark.parametrize(
    ("family", "density"),
    [
        ("gaussian", lambda y, mean, w: stats.norm.logpdf(y, mean, (0.7 / w) ** 0.5)),
        ("poisson", lambda y, mean, w: stats.poisson.logpmf(y, mean)),
        ("gamma", lambda y, mean, w: stats.gamma.logpdf(y, w / 0.7, scale=mean * 0.7 / w)),
        ("negative-binomial", lambda y, mean, w: stats.nbinom.logpmf(y, np.exp(0.5), 1 / (1 + np.exp(-0.5) * mean))),
    ],
)
def test_log_likelihoods_are_scipys(family, density):
    site, theta = problem(family, distribution(family).link)
    weight = torch.ones_like(site.weight) if family in ("poisson", "negative-binomial") else site.weight
    site = Likelihood(site.distribution, site.x, site.y, weight, site.offset)
    expected = density(site.y.numpy(), site.means(theta).numpy(), weight.numpy()).sum()
    found, _ = figures(site, theta, 0.3, 0.7, 5)
    assert found["loglik"] == pytest.approx(expected, rel=1e-10)


def test_binomial_counts_have_their_coefficients():
    site, theta = problem("binomial", "logit")
    trials = torch.arange(1.0, 41.0, dtype=torch.float64)
    successes = (trials / 3).floor()
    site = Likelihood(site.distribution, site.x, successes / trials, trials, site.offset)
    expected = stats.binom.logpmf(successes.numpy(), trials.numpy(), site.means(theta).numpy()).sum()
    assert figures(site, theta, None, 1.0, 5)[0]["loglik"] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("family", ["binomial", "poisson", "gamma", "negative-binomial"])
def test_the_deviance_is_twice_the_loss_above_a_perfect_fit(family):
    site, theta = problem(family, distribution(family).link)
    kind = site.distribution.at(site.split(theta)[1])
    y = torch.full_like(site.y, 0.3) if family == "binomial" else site.y + 0.5
    mean = site.means(theta)
    unit = torch.ones_like(y)
    above = kind.loglik(y, y, unit, 1.0) - kind.loglik(mean, y, unit, 1.0)
    torch.testing.assert_close(kind.deviance(mean, y).sum() / 2, above)


@pytest.mark.parametrize("link", ["logit", "probit", "cloglog"])
def test_far_predictors_stay_finite(link):
    kind = distribution("binomial", link)
    f = torch.tensor([-30.0, -5.0, 3.0, 30.0], dtype=torch.float64)
    for y in (0.0, 1.0):
        bend = kind.bend(f, torch.full_like(f, y))
        assert all(term.isfinite().all() for term in bend)
        assert (bend.loss >= 0).all()


def test_a_mean_outside_its_domain_has_an_infinite_loss():
    site, theta = problem("gamma", "inverse")
    assert torch.isinf(site(-theta))


def test_packing_is_undone():
    a = torch.randn(4, 4, dtype=torch.float64)
    matrix = a @ a.mT + torch.eye(4)
    assert torch.equal(unpacked(packed(matrix)), matrix) or torch.allclose(unpacked(packed(matrix)), matrix, rtol=1e-15)
    lam = Full().natural(torch.arange(4.0, dtype=torch.float64), (matrix + matrix.mT) / 2)
    torch.testing.assert_close(unpacked_lam(packed_lam(lam)), lam)
