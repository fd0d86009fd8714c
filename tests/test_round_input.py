"""What Bayesian-ADMM refuses, and how it says so."""

import pytest
import torch
from problems import full_gaussian

from fedual import methods
from fedual.algorithm import Blend, Expectation, Method, Natural, Relax, init, step
from fedual.errors import DomainError, InputError
from fedual.families import Full
from fedual.solvers import Exact


class TestBadInput:
    @property
    def problem(self):
        return full_gaussian(num_clients=3, dim=2)

    method = Method(Full(), Exact(), Natural(1.0), Blend(), 1.0)

    @pytest.mark.parametrize("rho", [-1.0, 0.0, float("nan"), float("inf"), "1", None])
    def test_rho(self, rho):
        for make in (
            lambda: methods.admm(rho),
            lambda: methods.newton_admm(rho),
            lambda: methods.ama(Full(), Exact(), rho),
            lambda: methods.bregman_admm(Full(), Exact(), rho),
            lambda: methods.preconditioned_admm(torch.ones(2), rho),
        ):
            with pytest.raises(InputError, match="rho"):
                make()

    @pytest.mark.parametrize("bad", [-0.1, 0.0, 1.5])
    def test_server_weights(self, bad):
        for part in (Blend, Relax):
            with pytest.raises(InputError, match=r"alpha|beta"):
                part(bad)

    def test_dual_step(self):
        for part in (Natural, Expectation):
            with pytest.raises(InputError, match="gamma"):
                part(-0.5)

    def test_tau(self):
        with pytest.raises(InputError, match="tau"):
            methods.newton_admm(tau=0.0)

    def test_no_clients(self):
        with pytest.raises(InputError, match="at least one client"):
            init(self.method, self.problem.prior, 0)

    def test_prior_of_a_wrong_shape(self):
        with pytest.raises(InputError, match="shape"):
            init(self.method, torch.zeros(2, 2), 3)
        with pytest.raises(InputError, match="shape"):
            init(self.method, self.problem.prior.expand(3, 3, 2), 3)

    def test_prior_that_is_not_positive_definite(self):
        with pytest.raises(DomainError, match="positive definite"):
            init(self.method, Full().natural(torch.zeros(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]])), 3)

    def test_wrong_number_of_losses(self):
        with pytest.raises(InputError, match="3 losses for 2 clients"):
            step(self.method, init(self.method, self.problem.prior, 2), self.problem.losses)

    def test_losses_of_another_size(self):
        state = init(self.method, Full().natural(torch.zeros(5), 1.0), 3)
        with pytest.raises(InputError, match="The losses have dim 2, the prior 5"):
            step(self.method, state, self.problem.losses)

    def test_losses_of_another_type(self):
        state = init(self.method, self.problem.prior.float(), 3)
        with pytest.raises(InputError, match=r"dtype torch.float64, the prior torch.float32"):
            step(self.method, state, self.problem.losses)

    def test_active_may_be_a_list_or_of_any_integer_type(self):
        state = init(self.method, self.problem.prior, 3)
        wanted, _ = step(self.method, state, self.problem.losses, torch.tensor([0, 2]))
        for active in ([0, 2], torch.tensor([2, 0], dtype=torch.int32), [True, False, True]):
            found, _ = step(self.method, state, self.problem.losses, active)  # pyright: ignore[reportArgumentType]
            assert torch.equal(found.lam_g, wanted.lam_g)

    @pytest.mark.parametrize(
        "active",
        [
            torch.tensor([0.0]),
            torch.tensor([0, 0]),
            torch.tensor([3]),
            torch.tensor([-1]),
            torch.ones(2, dtype=torch.bool),
        ],
    )
    def test_active(self, active):
        with pytest.raises(InputError, match="active"):
            step(self.method, init(self.method, self.problem.prior, 3), self.problem.losses, active)
