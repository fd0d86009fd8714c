import pytest
import torch
from laws import Laws
from problems import normal, rng
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal
from torch.distributions import Gamma as TorchGamma

from fedual.errors import DomainError, InputError
from fedual.families import (
    Bernoulli,
    Delta,
    Diagonal,
    FixedPrecision,
    Full,
    Gamma,
    GaussHermite,
    Isotropic,
    MonteCarlo,
    check,
    kl,
)


def spd(batch, dim, seed):
    root = normal((*batch, dim, dim), seed)
    return root @ root.mT + torch.eye(dim)


class TestIsotropic(Laws):
    family = Isotropic(2.5)

    def params(self, batch, seed):
        return self.family.natural(normal((*batch, self.dim), seed))

    def outside(self, lam):
        lam[1, 0, :2] = torch.inf
        return lam, 2

    def distribution(self, lam) -> Distribution:
        return Independent(Normal(self.family.mean(lam), 2.5**-0.5), 1)

    def test_eq21_fixed_gaussian(self):
        """N(m, I): λ = μ = T = m, and the natural gradient is the expected gradient."""
        unit, mean, gradient = Isotropic(1.0), normal((4, 3), 0), normal((4, 3), 1)
        lam = unit.natural(mean)
        assert torch.equal(lam[:, 0], mean)
        assert torch.equal(unit.expectation(lam)[:, 0], mean)
        assert torch.equal(unit.statistic(mean)[:, 0], mean)
        assert torch.equal(unit.natural_gradient(lam, gradient)[:, 0], gradient)

    def test_another_prior_is_refused(self):
        zero = torch.zeros(3)
        assert torch.equal(self.family.natural(zero, 2.5), self.family.natural(zero))
        for other in (1.0, torch.full((4,), 2.5)):
            with pytest.raises(InputError, match="contains its precision"):
                self.family.natural(zero, other)

    @pytest.mark.parametrize("delta", [0.0, -1.0, float("nan")])
    def test_bad_precision(self, delta):
        with pytest.raises(InputError, match=f"delta = {delta}: it must be a positive"):
            Isotropic(delta)


class TestFixedDiagonal(TestIsotropic):
    family = FixedPrecision(torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64))

    def distribution(self, lam) -> Distribution:
        return Independent(Normal(self.family.mean(lam), self.family.matrix**-0.5), 1)

    def test_another_prior_is_refused(self):
        with pytest.raises(InputError, match="contains its precision"):
            self.family.natural(torch.zeros(3), 1.0)


class TestFixedFull(TestFixedDiagonal):
    family = FixedPrecision(torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.0], [0.1, 0.0, 3.0]], dtype=torch.float64))

    def distribution(self, lam):
        return MultivariateNormal(self.family.mean(lam), precision_matrix=self.family.matrix)

    def test_samples_have_the_inverse_precision_as_covariance(self):
        draws = self.family.sample(self.params((), 0), 200_000, rng(1))
        torch.testing.assert_close(draws.T.cov(), torch.linalg.inv(self.family.matrix), atol=0.02, rtol=0)

    def test_equal_where_the_precision_is_equal(self):
        assert self.family == FixedPrecision(self.family.matrix.clone())
        assert self.family != FixedPrecision(2 * self.family.matrix)

    def test_another_number_of_parameters(self):
        with pytest.raises(InputError, match="5 parameters for a FixedPrecision of 3"):
            check(self.family, torch.zeros(1, 5))


@pytest.mark.parametrize(
    "matrix",
    [
        torch.tensor([1.0, -1.0]),
        torch.tensor([1.0, torch.inf]),
        torch.tensor([[1.0, 2.0], [2.0, 1.0]]),
        torch.tensor([[2.0, 0.5], [0.1, 2.0]]),
    ],
)
def test_precision_that_is_not_positive(matrix):
    with pytest.raises(DomainError, match="positive"):
        FixedPrecision(matrix)


@pytest.mark.parametrize(
    ("family", "mean", "precision", "complaint"),
    [
        (Diagonal(), torch.tensor([1, 2]), 0.5, "int64"),
        (Full(), torch.tensor([1, 2]), 0.5, "int64"),
        (Diagonal(), torch.ones(2), torch.eye(2), r"shape \(2, 2\)"),
        (Diagonal(), torch.ones(4), torch.ones(3), r"shape \(3,\)"),
        (Full(), torch.ones(2), torch.tensor([[2.0, 1.0], [0.0, 2.0]]), "not symmetric"),
    ],
    ids=str,
)
def test_natural_refuses_what_it_would_misread(family, mean, precision, complaint):
    with pytest.raises(InputError, match=complaint):
        family.natural(mean, precision)


def test_rounding_does_not_make_a_matrix_asymmetric():
    for seed in range(50):
        rotation = torch.linalg.qr(normal((6, 6), seed).float()).Q
        FixedPrecision(rotation @ torch.diag(torch.logspace(-2, 2, 6, dtype=torch.float32)) @ rotation.T)


def test_precision_of_a_wrong_shape():
    with pytest.raises(InputError, match=r"\(2, 3\)"):
        FixedPrecision(torch.ones(2, 3))


class TestDiagonal(Laws):
    family = Diagonal()

    def params(self, batch, seed):
        return self.family.natural(normal((*batch, self.dim), seed), normal((*batch, self.dim), seed + 7).exp())

    def outside(self, lam):
        lam[0, 1, 1] *= -1
        lam[3, 1, 0] = 0.0
        return lam, 2

    def distribution(self, lam):
        return Independent(Normal(self.family.mean(lam), self.family.precision(lam) ** -0.5), 1)

    def test_eq56_parameters(self):
        mean, s = normal((5, 3), 0), normal((5, 3), 1).exp()
        lam = self.family.natural(mean, s)
        torch.testing.assert_close(lam, torch.stack([s * mean, -s / 2], -2))
        torch.testing.assert_close(self.family.expectation(lam), torch.stack([mean, mean**2 + 1 / s], -2))
        torch.testing.assert_close(self.family.mean(lam), mean)

    def test_eq60_kl(self):
        """½ Σ (s_g/s_k − log(s_g/s_k) − 1) + ½ ‖m_k − m_g‖²_{s_g}; the paper writes + log s, up to a constant."""
        p, q = self.params((5,), 0), self.params((5,), 1)
        s_k, s_g = self.family.precision(p), self.family.precision(q)
        ratio, away = s_g / s_k, self.family.mean(p) - self.family.mean(q)
        torch.testing.assert_close(kl(self.family, p, q), (ratio - ratio.log() - 1 + s_g * away**2).sum(-1) / 2)

    def test_backtracking_is_a_matter_of_each_coordinate(self):
        """In a stack, too: one that would lose more than half of its precision stays, the others arrive."""
        precision = lambda *rows: self.family.natural(torch.ones(2, 3), torch.tensor(rows))
        lam, target = precision([2.0, 2.0, 2.0], [4.0, 4.0, 4.0]), precision([1.1, 0.9, 9.0], [0.5, 2.1, 4.0])
        found, part = self.family.backtrack(lam, target)
        assert self.family.precision(found).tolist() == [pytest.approx([1.1, 2.0, 9.0]), pytest.approx([4.0, 2.1, 4.0])]
        assert part == pytest.approx(4 / 6)


class TestFull(Laws):
    family = Full()

    def params(self, batch, seed):
        return self.family.natural(normal((*batch, self.dim), seed), spd(batch, self.dim, seed + 7))

    def outside(self, lam):
        lam[1, 1:] *= -1
        lam[2, 1:, 0] = 0.0
        return lam, 2

    def distribution(self, lam):
        return MultivariateNormal(self.family.mean(lam), precision_matrix=self.family.precision(lam))

    def symmetric(self, weight):
        return torch.cat([weight[..., :1, :], (weight[..., 1:, :] + weight[..., 1:, :].mT) / 2], -2)

    def test_eq44_parameters(self):
        mean, precision = normal((5, 3), 0), spd((5,), 3, 1)
        lam = self.family.natural(mean, precision)
        torch.testing.assert_close(lam[:, 0], (precision @ mean[..., None])[..., 0])
        torch.testing.assert_close(lam[:, 1:], -precision / 2)
        mu = self.family.expectation(lam)
        torch.testing.assert_close(mu[:, 0], mean)
        torch.testing.assert_close(mu[:, 1:], mean[..., None] * mean[:, None] + torch.linalg.inv(precision))

    def test_eq47_kl(self):
        """½ (tr(S_k⁻¹S_g) − log det(S_g)/det(S_k) − P + ‖m_k − m_g‖²_{S_g})."""
        p, q = self.params((5,), 0), self.params((5,), 1)
        s_k, s_g, away = self.family.precision(p), self.family.precision(q), self.family.mean(p) - self.family.mean(q)
        trace = (torch.linalg.inv(s_k) @ s_g).diagonal(dim1=-2, dim2=-1).sum(-1)
        quadratic = (away[:, None] @ s_g @ away[..., None])[:, 0, 0]
        torch.testing.assert_close(kl(self.family, p, q), (trace - s_g.logdet() + s_k.logdet() - 3 + quadratic) / 2)

    def test_diagonal_and_scalar_precisions_are_matrices(self):
        mean, diagonal = normal((3,), 0), torch.tensor([1.0, 2.0, 3.0])
        assert torch.equal(self.family.natural(mean, diagonal), self.family.natural(mean, torch.diag(diagonal)))
        assert torch.equal(self.family.natural(mean, 2.0), self.family.natural(mean, 2 * torch.eye(3)))
        batch = self.family.natural(normal((3, 3), 1), diagonal)
        assert torch.equal(self.family.precision(batch), torch.diag(diagonal).expand(3, 3, 3))
        with pytest.raises(InputError, match=r"shape \(2, 3\)"):
            self.family.natural(normal((2, 3), 1), torch.ones(2, 3))


class TestBernoulli(Laws):
    family = Bernoulli()

    def params(self, batch, seed):
        return self.family.natural(torch.sigmoid(1.5 * normal((*batch, self.dim), seed)))

    def outside(self, lam):
        lam[0, 0, 0] = torch.inf
        return lam, 1

    def distribution(self, lam):
        return Independent(TorchBernoulli(logits=lam[..., 0, :]), 1)

    def test_enumeration_is_exact(self):
        lam = self.params((), 4)
        theta, weight = self.family.nodes(lam, Delta())
        assert len({tuple(row) for row in theta.tolist()}) == 2**self.dim
        product = torch.sigmoid(lam[0]).prod()
        torch.testing.assert_close((weight * theta.prod(-1)).sum(), product)

    def test_drawn_nodes_have_the_right_mean(self):
        lam = self.params((2,), 4)
        theta, weight = self.family.nodes(lam, MonteCarlo(100_000, seed=1))
        mean = (weight[..., None] * theta).sum(0)
        torch.testing.assert_close(mean, torch.sigmoid(lam[:, 0]), atol=0.01, rtol=0)


class TestGamma(Laws):
    family = Gamma()

    def params(self, batch, seed):
        shape = normal((*batch, self.dim), seed).exp() + 0.2
        return self.family.natural(shape, normal((*batch, self.dim), seed + 7).exp())

    def outside(self, lam):
        lam[1, 0, 2] = -1.0
        lam[1, 1, 1] = 0.0
        lam[2, 1, :] = 1.0
        return lam, 5

    def distribution(self, lam):
        return Independent(TorchGamma(self.family.shape(lam), self.family.rate(lam)), 1)

    @pytest.mark.parametrize("shape", [0.01, 0.5, 3.0, 1e4])
    def test_inverse_over_many_orders_of_magnitude(self, shape):
        lam = self.family.natural(torch.full((2,), shape), torch.tensor([0.1, 7.0]))
        back = self.family.from_expectation(self.family.expectation(lam))
        torch.testing.assert_close(self.family.shape(back), self.family.shape(lam), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("family", "mu"),
    [
        (Diagonal(), torch.tensor([[1.0, 1.0], [0.5, 2.0]])),
        (Full(), torch.tensor([[1.0, 1.0], [0.5, 0.0], [0.0, 2.0]])),
        (Bernoulli(), torch.tensor([[0.0, 0.5]])),
        (Gamma(), torch.tensor([[1.0, 0.0], [2.0, 2.0]])),
    ],
    ids=str,
)
def test_moments_that_no_distribution_has(family, mu):
    with pytest.raises(DomainError, match="is not a"):
        family.from_expectation(mu)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 1, 3)])
def test_wrong_shape_names_the_right_one(shape):
    with pytest.raises(InputError, match=r"needs \(\.\.\., 4, P\)"):
        check(Full(), torch.ones(shape))


def test_rules_integrate_gaussian_moments():
    for rule in (GaussHermite(5), MonteCarlo(200_000, seed=3)):
        nodes, weight = rule(2, 0, torch.zeros(1))
        second = torch.einsum("n,ni,nj->ij", weight, nodes, nodes)
        torch.testing.assert_close(weight @ nodes, torch.zeros(2), atol=1e-12, rtol=0)
        torch.testing.assert_close(second, torch.eye(2), atol=0.02, rtol=0)


def test_monte_carlo_is_fixed_or_fresh():
    like = torch.zeros(1)
    fixed, fresh = MonteCarlo(4), MonteCarlo(4, fresh=True)
    assert torch.equal(fixed(3, 0, like)[0], fixed(3, 9, like)[0])
    assert not torch.equal(fresh(3, 0, like)[0], fresh(3, 9, like)[0])
    assert torch.equal(fresh(3, 9, like)[0], fresh(3, 9, like)[0])


def test_too_many_nodes_names_the_remedy():
    with pytest.raises(InputError, match="MonteCarlo"):
        GaussHermite(10)(20, 0, torch.zeros(1))


def test_sampling_is_a_function_of_the_generator():
    for case in (TestDiagonal(), TestFull(), TestBernoulli(), TestGamma()):
        lam = case.params((2,), 0)
        assert torch.equal(case.family.sample(lam, 3, rng(1)), case.family.sample(lam, 3, rng(1)))
