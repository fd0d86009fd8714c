# ruff: noqa: D102 (`Stepper` documents these methods)
"""Minibatch SGD and Adam on the mean of a Gaussian: the local training of FedAvg and its descendants.

    m ← argmin_m  ℓ_k(m)/τ_k + ⟨η_k, T(m)⟩ + ρ/2 ‖m − m_g‖²_{S_g}

Its gradient times τ_k/N_k is ĝ + A + B m (`fedual.solvers.stepper`). The optimiser's state is reset in each round.
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedual.algorithm.method import Carry, Solution, Subproblem
from fedual.errors import InputError, require_positive, require_share
from fedual.families import Family, Gaussian, Isotropic, is_point
from fedual.solvers.adaptive import RoundReach
from fedual.solvers.stepper import Stepper, Variables, quadratic, scale, start_mean


@dataclass(frozen=True)
class SGD(Stepper):
    """Stochastic gradient descent, or Adam.

    Args:
        optimiser: "adam" or "sgd".
        momentum: For "sgd": velocity ← momentum · velocity + gradient.
        beta1: For "adam": decay of the first moment.
        beta2: For "adam": decay of the second moment.
        eps: For "adam": added to the root of the second moment.
        weight_decay: Adds weight_decay · m to the gradient of the mean loss (after `max_norm`, as in PyTorch).
        max_norm: A client's whole gradient is scaled down to this norm; None is no limit.
        proximal: "squared", or "norm" for ρδ/2 ‖m − m_g‖ instead of ρδ/2 ‖m − m_g‖². The paper's baselines used the
            norm, whose pull to m_g has the same strength at any distance. Dual and server stay the same.
    """

    lr: float | RoundReach = 1e-3
    optimiser: Literal["adam", "sgd"] = "adam"
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float | None = None
    proximal: Literal["squared", "norm"] = "squared"

    def __post_init__(self) -> None:
        if self.optimiser not in ("adam", "sgd"):
            raise InputError(f"optimiser = {self.optimiser!r}: choose adam or sgd.")
        if self.proximal not in ("squared", "norm"):
            raise InputError(f"proximal = {self.proximal!r}: choose squared or norm.")
        if not isinstance(self.lr, RoundReach):
            require_positive("lr", self.lr)
        require_positive("eps", self.eps)
        for name in ("momentum", "beta1", "beta2"):
            require_share(name, getattr(self, name))
        if self.weight_decay != 0:
            require_positive("weight_decay", self.weight_decay)
        if self.max_norm is not None:
            require_positive("max_norm", self.max_norm)

    def init(self, family: Family, prior: Tensor, num_clients: int) -> Carry:
        self.check(family)
        return {}

    def check(self, family: Family) -> None:
        """Refuse a family whose precision is not fixed."""
        if not is_point(family):
            raise InputError(f"SGD moves a mean and needs a fixed precision (Isotropic), not {family}: use Laplace.")
        if self.proximal == "norm" and not isinstance(family, Isotropic):
            raise InputError(f"proximal = 'norm' needs one δ for all parameters, not {family}: use 'squared'.")

    def begin(self, problem: Subproblem) -> Variables:
        """m_k = m_g (or the network's initialisation), with a new state of the optimiser."""
        self.check(problem.family)
        offset, slope = quadratic(problem)
        mean = start_mean(problem)
        lr = self.lr
        lr = lr.rate(problem.losses, mean) if isinstance(lr, RoundReach) else mean.new_full((len(mean), 1), lr)
        variables = {"mean": mean, "offset": offset, "slope": slope, "lr": lr, "first": torch.zeros_like(mean)}
        if self.proximal == "norm":  # A = c v, and half of B along (m − m_g)/‖m − m_g‖
            offset, centre = scale(problem) * problem.eta[:, 0], cast(Gaussian, problem.family).mean(problem.lam_g)
            variables |= {"offset": offset, "slope": slope / 2, "centre": centre.expand_as(mean).clone()}
        if self.optimiser == "adam":
            steps = mean.new_zeros(len(mean), 1)
            variables |= {"second": torch.zeros_like(mean), "steps": steps, **self._debias(steps + 1)}
        return variables

    def update(self, variables: Variables, gradient: Tensor, correlation: Tensor | None) -> Variables:
        mean = variables["mean"]
        along = mean if self.proximal == "squared" else normalize(mean - variables["centre"], dim=-1)  # 0 at m_g
        gradient = gradient + variables["offset"] + variables["slope"] * along
        if self.max_norm is not None:
            gradient = gradient * (self.max_norm / gradient.norm(dim=-1, keepdim=True)).clamp(max=1)
        if self.weight_decay:
            gradient = gradient + self.weight_decay * mean
        if self.optimiser == "sgd":
            first = self.momentum * variables["first"] + gradient
            return {**variables, "mean": mean - variables["lr"] * first, "first": first}
        steps = variables["steps"] + 1
        first = torch.lerp(gradient, variables["first"], self.beta1)
        second = self.beta2 * variables["second"] + (1 - self.beta2) * gradient**2
        spread = second.sqrt() * variables["debias2"] + self.eps
        mean = mean - variables["lr"] * variables["debias1"] * (first / spread)
        return {**variables, "mean": mean, "first": first, "second": second, "steps": steps, **self._debias(steps + 1)}

    def _debias(self, steps: Tensor) -> Variables:
        """1/(1 − β₁ᵗ) and 1/√(1 − β₂ᵗ): variables, because compiled code would take powers anew for each parameter."""
        return {"debias1": 1 / (1 - self.beta1**steps), "debias2": (1 - self.beta2**steps).rsqrt()}

    def end(self, problem: Subproblem, variables: Variables) -> Solution:
        mean, gradient = variables["mean"], None
        if self.optimiser == "sgd" and not self.momentum:  # the S steps sum up to lr · S times their mean gradient
            length = variables["lr"] * mean.new_tensor(problem.losses.steps)[:, None]
            gradient = (((start_mean(problem) - mean) / length - variables["offset"]) / scale(problem))[:, None]
        return Solution(cast(Gaussian, problem.family).natural(mean), problem.carry, gradient)
