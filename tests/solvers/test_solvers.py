"""Solvers of the client's problem (Eq. 15), and the losses with their expectations."""

import pytest
import torch
from problems import full_gaussian, logistic, normal, poisson_counts, quadratics, rng

from fedual.algorithm import Subproblem
from fedual.errors import DomainError, InputError, NotConvergedError
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
)
from fedual.solvers import BLR, VON, Conjugate, Exact, Linear, Loss, Point, Stack
from fedual.solvers.base import derivatives

HERMITE = GaussHermite(30)


def subproblem(family, losses, lam_g, eta=None, rho=0.8, tau=1.0):
    num = len(losses)
    eta = lam_g.new_zeros(num, *lam_g.shape) if eta is None else eta
    return Subproblem(family, losses, eta, lam_g, rho, eta.new_full((num,), tau), {})


class Hidden(Loss):
    """A loss without its closed forms: its expectations come from quadrature and automatic differentiation."""

    def __init__(self, losses):
        self.losses = losses

    def __len__(self):
        return len(self.losses)

    def __getitem__(self, clients):
        return Hidden(self.losses[clients])

    def __call__(self, theta):
        return self.losses(theta)


@pytest.mark.parametrize("make", [full_gaussian, poisson_counts])
def test_eq32_generic_solver_equals_the_closed_form(make):
    """The learning rule with quadrature finds the conjugate solution that `Exact` writes down."""
    problem = make(num_clients=3, dim=2)
    eta = 0.2 * problem.losses.c
    exact = Exact()(subproblem(problem.family, problem.losses, problem.prior, eta)).lam
    hidden = subproblem(problem.family, Hidden(problem.losses), problem.prior, eta)
    found = BLR(rule=GaussHermite(60), tol=1e-9, max_steps=500)(hidden).lam
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


def test_bits_by_enumeration_equal_the_closed_form():
    family, c = Bernoulli(), normal((3, 1, 5), 0)
    problem = subproblem(family, Conjugate(family, c), family.natural(torch.full((5,), 0.3)))
    found = BLR(tol=1e-12)(problem._replace(losses=Hidden(problem.losses))).lam
    torch.testing.assert_close(found, Exact()(problem).lam, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", [Diagonal(), Full()], ids=str)
def test_eq57_natural_gradient_from_derivatives_equals_autograd_through_the_moments(family):
    """(g − Hm, ½H) with Bonnet's and Price's theorems against d/dμ of E_q[ℓ] by reparameterised quadrature."""
    losses = logistic(num_clients=2, dim=2)
    lam = family.natural(normal((2, 2), 1), 8.0)
    mu = family.expectation(lam).requires_grad_()
    nodes, weight = GaussHermite(40)(2, 0, lam)
    theta = family.place(family.from_expectation(mu), nodes[:, None].expand(-1, 2, 2))
    (by_autograd,) = torch.autograd.grad((weight[:, None] * losses(theta)).sum(), mu)
    _, found = Hidden(losses).natural_gradient(family, lam, GaussHermite(40))
    if isinstance(family, Full):  # autograd may put the off-diagonal part on either side
        by_autograd[:, 1:] = (by_autograd[:, 1:] + by_autograd[:, 1:].mT) / 2
    torch.testing.assert_close(found, by_autograd, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", ["gaussian", "binomial", "poisson", "softmax"])
@pytest.mark.parametrize("family", [Isotropic(9.0), Diagonal(), Full()], ids=str)
def test_predictor_space_moments_equal_parameter_space_moments(kind, family):
    """E[ℓ], E[∇ℓ], E[∇²ℓ] of linear predictors: C-dimensional nodes against P-dimensional ones and autograd."""
    classes, dim = (2, 2) if kind == "softmax" else (1, 3)
    clients = []
    for k, size in enumerate((4, 6)):
        y = torch.randint(0, 2, (size,), generator=rng(k))
        target = torch.nn.functional.one_hot(y, 2) if kind == "softmax" else y
        clients.append((normal((size, dim), 3 + k), target))
    losses = Linear.from_clients(kind, clients)
    assert losses.dim == dim * classes
    precision = None if isinstance(family, Isotropic) else 9.0
    lam = family.natural(normal((2, losses.dim), 9), precision)
    if isinstance(family, Full):
        root = normal((2, losses.dim, losses.dim), 10)
        lam = family.natural(normal((2, losses.dim), 9), 6 * torch.eye(losses.dim) + root @ root.mT)
    ours = losses.moments(family, lam, GaussHermite(20))
    plain = Hidden(losses).moments(family, lam, GaussHermite(9))
    for a, b in zip(ours, plain, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


def test_linear_losses_at_a_point_against_torch():
    x, y = normal((9, 4), 0), torch.randint(0, 3, (9,), generator=rng(1))
    losses = Linear.from_clients("softmax", [(x, torch.nn.functional.one_hot(y, 3))])
    theta = normal((1, 12), 2)
    known = torch.nn.functional.cross_entropy(x @ theta[0].reshape(4, 3), y, reduction="sum")
    torch.testing.assert_close(losses(theta)[0], known)
    delta = losses.moments(Full(), Full().natural(theta, 1.0), Delta())
    plain = derivatives(losses, theta, "full")
    for a, b in zip(delta, plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("optimiser", ["newton", "lbfgs", "gradient"])
@pytest.mark.parametrize("family", [Isotropic(2.0), FixedPrecision(torch.tensor([1.0, 2.0, 0.5]))], ids=str)
def test_point_solvers_are_stationary(optimiser, family):
    losses, eta = logistic(), normal((3, 1, 3), 4)
    family = family if isinstance(family, Isotropic) else FixedPrecision(family.matrix.double())
    problem = subproblem(family, losses, family.natural(normal((3,), 5)), eta, tau=0.5)
    lam = Point(optimiser, lr=2e-3, tol=1e-8, max_steps=5000)(problem).lam
    mean = family.mean(lam).requires_grad_()
    (gradient,) = torch.autograd.grad(losses(mean).sum(), mean)
    torch.testing.assert_close(
        gradient / 0.5 + eta[:, 0] + 0.8 * (lam - problem.lam_g)[:, 0], torch.zeros(3, 3), atol=1e-6, rtol=0
    )


def test_newton_solves_a_quadratic_in_one_step():
    a, b = quadratics(num_clients=3, dim=4)
    losses = Stack([lambda t, k=k: ((t @ a[k]) * t).sum(-1) / 2 + t @ b[k] for k in range(3)])
    lam = Point(max_steps=1)(subproblem(Isotropic(1.0), losses, torch.zeros(1, 4))).lam
    torch.testing.assert_close(lam[:, 0], torch.linalg.solve(a + 0.8 * torch.eye(4), -b))


def test_noisy_von_comes_close_to_the_converged_one():
    losses, family = logistic(), Full()
    problem = subproblem(family, losses, family.natural(torch.zeros(3), 1.0))
    exact = VON(rule=HERMITE)(problem).lam
    noisy = VON(rule=MonteCarlo(64, seed=1, fresh=True), beta=0.1, max_steps=200)(problem).lam
    torch.testing.assert_close(family.mean(noisy), family.mean(exact), atol=0.05, rtol=0.05)
    assert (noisy != exact).any()


def test_von_stays_positive_definite_where_the_plain_step_does_not():
    """After a first round at ρ = 1/K, S_g − V_k/ρ is indefinite; every move of VON is in the domain."""
    family, lam = Full(), Full().natural(normal((5, 3), 0), 1.0)
    target = family.natural(normal((5, 3), 1), -torch.diag(torch.tensor([5.0, 0.1, -3.0])))
    moved = VON().move(family, lam, target, torch.ones(5))
    check(family, moved)
    with pytest.raises(DomainError):
        check(family, BLR().move(family, lam, target, torch.ones(5)))


def test_von_move_agrees_with_the_learning_rule_to_first_order():
    family, lam = Full(), Full().natural(normal((5, 3), 0), 1.0)
    target = family.natural(normal((5, 3), 1), 2.0)
    for beta in (1e-3, 1e-4):
        small = torch.full((5,), beta)
        gap = VON().move(family, lam, target, small) - BLR().move(family, lam, target, small)
        assert gap.abs().max() < 10 * beta**2


def test_gaussian_loss_is_half_the_squared_error():
    x, y, theta = normal((5, 2), 0), normal((5,), 1), normal((1, 2), 2)
    losses = Linear.from_clients("gaussian", [(x, y)])
    torch.testing.assert_close(losses(theta)[0], ((x @ theta[0] - y) ** 2).sum() / 2)


@pytest.mark.parametrize("optimiser", ["newton", "lbfgs"])
def test_point_survives_steps_that_overflow(optimiser):
    """Counts of 2000 from a start at zero: the first Newton step lands at e^2000."""
    losses = Linear.from_clients("poisson", [(torch.ones(4, 1), torch.full((4,), 2000.0))])
    lam = Point(optimiser)(subproblem(Isotropic(1.0), losses, torch.zeros(1, 1), rho=1.0)).lam
    theta = lam[0, 0, 0]
    torch.testing.assert_close(4 * theta.exp() + theta, torch.tensor(8000.0), rtol=1e-6, atol=0)


def test_point_in_single_precision():
    truth = normal((10,), 0)
    clients = []
    for k in range(3):
        x = normal((2000, 10), 1 + k)
        clients.append((x.float(), (torch.rand(2000, generator=rng(k)) < torch.sigmoid(x @ truth)).float()))
    losses = Linear.from_clients("binomial", clients)
    for tau in (1.0, 0.1):
        lam = Point()(subproblem(Isotropic(1.0), losses, torch.zeros(1, 10, dtype=torch.float32), tau=tau)).lam
        assert lam.dtype == torch.float32


def test_newton_leaves_a_maximum():
    losses = Stack([lambda t: 3 * torch.cos(2 * t[..., 0])])
    lam = Point()(subproblem(Isotropic(1.0), losses, torch.full((1, 1), 0.3), rho=1.0)).lam
    theta = float(lam)
    assert -6 * torch.sin(torch.tensor(2 * theta)) + theta - 0.3 == pytest.approx(0, abs=1e-6)
    assert -12 * torch.cos(torch.tensor(2 * theta)) + 1 > 0


def test_the_last_step_counts():
    family, c = Diagonal(), torch.stack([normal((4, 2), 0), -torch.ones(4, 2)], 1)
    problem = subproblem(family, Conjugate(family, c), family.natural(torch.zeros(2), 1.0), rho=1.0)
    torch.testing.assert_close(BLR(max_steps=1)(problem).lam, Exact()(problem).lam)


def test_noisy_steps_that_only_leave_the_domain_give_no_answer():
    losses = Stack([lambda t: -5 * t[..., 0] ** 2, lambda t: t[..., 0] ** 2])
    problem = subproblem(Diagonal(), losses, Diagonal().natural(torch.zeros(1), 1.0), rho=1.0)
    found = BLR(MonteCarlo(4, fresh=True), max_steps=20)(problem).lam
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


class TestRefusals:
    def problem(self, family, **changes):
        prior = family.natural(torch.zeros(3), None if isinstance(family, Isotropic) else 1.0)
        return subproblem(family, changes.pop("losses", logistic()), prior, **changes)

    def test_exact_needs_conjugate_losses(self):
        with pytest.raises(InputError, match="Conjugate"):
            Exact()(self.problem(Full()))

    def test_point_needs_a_fixed_precision(self):
        with pytest.raises(InputError, match="fixed precision"):
            Point()(self.problem(Diagonal()))

    def test_von_needs_full_gaussians(self):
        with pytest.raises(InputError, match="Full"):
            VON(rule=HERMITE)(self.problem(Diagonal()))

    def test_delta_method_needs_a_gaussian(self):
        with pytest.raises(InputError, match="Gaussian"):
            Gamma().nodes(poisson_counts(dim=2).prior, Delta())

    @pytest.mark.parametrize("optimiser", ["newton", "lbfgs", "gradient"])
    def test_stopping_rule_of_point(self, optimiser):
        with pytest.raises(NotConvergedError, match=r"‖∇F\(m\)‖.* ≤ 1.0e-12.*max_steps"):
            Point(optimiser, tol=1e-12, max_steps=1)(self.problem(Isotropic(1.0)))

    def test_stopping_rule_of_blr(self):
        with pytest.raises(NotConvergedError, match=r"VON did not reach .* in 1 steps for 3 of 3 clients"):
            VON(rule=HERMITE, max_steps=1)(self.problem(Full()))

    @pytest.mark.parametrize(("solver", "family"), [(Point(), Isotropic(1.0)), (VON(rule=HERMITE), Full())])
    def test_loss_that_is_not_finite(self, solver, family):
        losses = logistic()
        losses.x[1, 0, 0] = torch.nan
        with pytest.raises(DomainError, match=r"1 of 3 clients is not finite \(first: number 1"):
            solver(self.problem(family, losses=losses))

    @pytest.mark.parametrize("rule", [HERMITE, MonteCarlo(4, fresh=True)], ids=str)
    def test_unbounded_problem_gives_no_answer_and_leaves_the_others_alone(self, rule):
        """η_1 takes more curvature away than ρ q_g and the loss have: client 1 has no minimum, the others do."""
        solver, eta = VON(rule=rule), torch.zeros(3, 4, 3)
        alone = solver(self.problem(Full(), eta=eta)).lam
        eta[1, 1:] = -50 * torch.eye(3)
        found = solver(self.problem(Full(), eta=eta)).lam
        assert found[1].isnan().all()
        torch.testing.assert_close(found[[0, 2]], alone[[0, 2]])

    @pytest.mark.parametrize("clients", [[], [(torch.ones(0, 2), torch.ones(0))], [(torch.ones(3, 2), torch.ones(2))]])
    def test_linear_needs_examples(self, clients):
        with pytest.raises(InputError, match="at least one example"):
            Linear.from_clients("binomial", clients)

    @pytest.mark.parametrize(
        ("x", "complaint"),
        [
            (torch.ones(3, 2, dtype=torch.int64), "int64"),
            (torch.ones(3, 4), r"\(3, 4\)"),
            (torch.full((3, 2), torch.nan), "NaN"),
        ],
    )
    def test_linear_names_the_client_whose_inputs_are_wrong(self, x, complaint):
        good = (torch.ones(3, 2), torch.ones(3))
        with pytest.raises(InputError, match=f"Client 1.*{complaint}"):
            Linear.from_clients("binomial", [good, (x, torch.ones(3))])

    @pytest.mark.parametrize("loss", [lambda t: (t**2).sum(), lambda t: t**2, lambda t: (t**2).sum(-1, keepdim=True)])
    def test_a_loss_of_a_wrong_shape(self, loss):
        with pytest.raises(InputError, match="Loss 0 takes θ"):
            Stack([loss])(torch.ones(4, 1, 3))

    @pytest.mark.parametrize(("kind", "y"), [("softmax", torch.tensor([0, 1, 2])), ("poisson", -torch.ones(3))])
    def test_targets_that_do_not_fit(self, kind, y):
        with pytest.raises(InputError, match="Targets"):
            Linear.from_clients(kind, [(torch.ones(3, 2), y)])

    def test_unknown_names(self):
        with pytest.raises(InputError, match="choose newton"):
            Point("adam")  # pyright: ignore[reportArgumentType]
        with pytest.raises(InputError, match="choose gaussian"):
            Linear.from_clients("probit", [(torch.ones(3, 2), torch.ones(3))])  # pyright: ignore[reportArgumentType]

    def test_conjugate_losses_of_another_family(self):
        family = Gamma()
        with pytest.raises(InputError, match="needs"):
            Conjugate(family, torch.ones(3, 1, 2))
        with pytest.raises(InputError, match="conjugate to Gamma"):
            Conjugate(family, torch.ones(3, 2, 2)).natural_gradient(Diagonal(), torch.ones(3, 2, 2), Delta())

    def test_odd_number_of_antithetic_samples(self):
        with pytest.raises(InputError, match="pairs"):
            MonteCarlo(3)
