# ruff: noqa: D102 (`Loss` and `Solver` document these methods)
"""What the solvers share: the expected loss with its derivatives, natural gradients, and the stopping rule.

Expectations under q_k follow a `Rule` (delta method, Gauss–Hermite, Monte Carlo).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.algorithm.method import Carry, Losses, Subproblem
from fedual.errors import DomainError, InputError, NotConvergedError
from fedual.families import Curvature, Delta, Family, Gaussian, Rule, inner, kl, log_prob


class Loss(Losses):
    """Differentiable losses with a client axis: `losses(θ)` takes θ `(..., K, P)` to `(..., K)`.

    Subclasses define `__len__`, `__getitem__` and `__call__`; those with closed-form expectations under q also override
    `moments` or `natural_gradient`.
    """

    def __call__(self, theta: Tensor, /) -> Tensor:
        """ℓ_k(θ_k), `(..., K, P)` → `(..., K)`."""
        raise NotImplementedError

    def moments(
        self, family: Gaussian, lam: Tensor, rule: Rule, step: int = 0, curvature: Curvature | None = None
    ) -> "Moments":
        """E_q of the loss and its derivatives for `lam` `(K, R, P)`, by the nodes of a rule.

        `curvature` is the part of the Hessian to compute; by default what the family's natural gradient needs.
        """
        theta, weight = family.nodes(lam, rule, step)
        mean = lambda x: (weight.reshape(*weight.shape, *(1,) * (x.dim() - weight.dim())) * x).sum(0)
        value, gradient, hessian = derivatives(self, theta, curvature or family.curvature)
        return Moments(mean(value), mean(gradient), None if hessian is None else mean(hessian))

    def natural_gradient(self, family: Family, lam: Tensor, rule: Rule, step: int = 0) -> tuple[Tensor, Tensor]:
        """E_q[ℓ] and ∇_μ E_q[ℓ] (Eq. 11), `(K,)` and `(K, R, P)`.

        Gaussians: from E_q[∇ℓ] and E_q[∇²ℓ] (Bonnet, Price). Every other family: the score form
        ∇_μ Σ_n w_n ℓ(θ_n) q_λ(μ)(θ_n)/q(θ_n), differentiated through λ(μ), with E_q[ℓ] subtracted as a baseline.
        With the delta method the value is ℓ(m) + ½ tr(∇²ℓ(m) S⁻¹), of which this is the gradient in the precision.
        """
        if isinstance(family, Gaussian):
            value, gradient, hessian = self.moments(family, lam, rule, step)
            if isinstance(rule, Delta) and hessian is not None:
                value = value + _half_trace(family, hessian, lam)
            return value, family.natural_gradient(lam, gradient, hessian)
        theta, weight = family.nodes(lam, rule, step)
        loss = self(theta).detach()
        value = (weight * loss).sum(0)
        with torch.enable_grad():
            mu = family.expectation(lam).detach().requires_grad_()
            log_q = log_prob(family, family.from_expectation(mu), theta)
            (gradient,) = torch.autograd.grad((weight * (loss - value) * log_q).sum(), mu)
        return value, gradient


@dataclass(frozen=True)
class Stack(Loss):
    """Any list of functions θ `(..., P)` → `(...)` as one stack of losses."""

    functions: Sequence[Callable[[Tensor], Tensor]]

    def __len__(self) -> int:
        return len(self.functions)

    def __getitem__(self, clients: Any) -> "Stack":
        clients = clients.cpu() if isinstance(clients, Tensor) else clients
        return Stack([self.functions[int(k)] for k in torch.arange(len(self))[clients].reshape(-1)])

    def __call__(self, theta: Tensor) -> Tensor:
        values = [function(theta[..., k, :]) for k, function in enumerate(self.functions)]
        for k, value in enumerate(values):
            if value.shape != theta.shape[:-2]:
                shapes = f"{tuple(theta[..., k, :].shape)} to {tuple(value.shape)}"
                raise InputError(f"Loss {k} takes θ {shapes}: it must sum over the last axis, and over no other.")
        return torch.stack(values, -1)


class Moments(NamedTuple):
    """E_q[ℓ] `(K,)`, E_q[∇ℓ] `(K, P)` and E_q[∇²ℓ], a matrix, a diagonal or None as the family needs it."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor | None


def derivatives(losses: Loss, theta: Tensor, curvature: Curvature = "full") -> Moments:
    """ℓ, ∇ℓ and ∇²ℓ ("full", "diagonal" or "none" of it) at θ `(..., K, P)`, by automatic differentiation."""
    with torch.enable_grad():
        theta = theta.detach().requires_grad_()
        value = losses(theta)
        (gradient,) = torch.autograd.grad(value.sum(), theta, create_graph=curvature != "none")
        if curvature == "none":
            return Moments(value.detach(), gradient, None)
        rows = []
        for j in range(theta.shape[-1]):
            row = torch.zeros_like(theta)
            if gradient.requires_grad:  # a loss linear in θ has no graph left
                (row,) = torch.autograd.grad(gradient[..., j].sum(), theta, retain_graph=True, materialize_grads=True)
            rows.append(row if curvature == "full" else row[..., j])
        hessian = torch.stack(rows, -2 if curvature == "full" else -1)
    return Moments(value.detach(), gradient.detach(), hessian.detach())


def _half_trace(family: Gaussian, hessian: Tensor, lam: Tensor) -> Tensor:
    """½ tr(H S⁻¹), `(K,)`."""
    precision = family.precision(lam)
    if precision.dim() == hessian.dim() == 3:
        return torch.linalg.solve(precision, hessian).diagonal(dim1=-2, dim2=-1).sum(-1) / 2
    return (hessian / precision).sum(-1) / 2


def objective(problem: Subproblem, lam: Tensor, expected_loss: Tensor) -> Tensor:
    """The clients' objective of Eq. 15, `(K,)`."""
    family = problem.family
    linear = inner(problem.eta, family.expectation(lam))
    return problem.tempered(expected_loss) + linear + problem.rho * kl(family, lam, problem.lam_g)


def stationary(problem: Subproblem, gradient: Tensor) -> Tensor:
    """λ_g − (η_k + ∇_μ E_q[ℓ_k]/τ)/ρ: equal to λ_k where Eq. 15 is solved (Eq. 32)."""
    return problem.lam_g - (problem.eta + problem.tempered(gradient)) / problem.rho


def start(problem: Subproblem) -> Tensor:
    """Every client starts at q_g."""
    return problem.lam_g.expand_as(problem.eta).clone()


def tolerance(tol: float | None, like: Tensor) -> float:
    """The tolerance of the stopping rule, √eps of the dtype unless given."""
    return torch.finfo(like.dtype).eps ** 0.5 if tol is None else tol


def require_finite(value: Tensor) -> None:
    """Raise if the loss of a client is not finite at its start."""
    bad = (~value.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        raise DomainError(
            f"The loss of {len(bad)} of {len(value)} clients is not finite (first: number {bad[0]} of this round): "
            "check its data for NaN or infinity, and the scale of its inputs."
        )


def not_converged(name: str, rule: str, residual: Tensor, tol: float, steps: int) -> NotConvergedError:
    """The error of a stopping rule that was not met."""
    bad = int((~(residual <= tol)).sum())
    return NotConvergedError(
        f"{name} did not reach {rule} ≤ {tol:.1e} in {steps} steps for {bad} of {len(residual)} clients "
        f"(worst: {float(residual.max()):.1e}): raise max_steps or tol, or raise rho for an easier problem."
    )


class Stateless:
    """A solver that carries nothing from round to round."""

    def init(self, family: Family, prior: Tensor, num_clients: int) -> Carry:
        return {}
