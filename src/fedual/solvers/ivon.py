# ruff: noqa: D102 (`Stepper` documents these methods)
"""IVON with a general prior and two multipliers: the client's step of IVON-ADMM (paper app. D.4, Algorithm 2).

It minimises λ E_q[ℓ + vᵀθ − ½ θᵀdiag(u)θ] + KL(q ‖ p), with ess λ = N_k/(ρτ), v = (τ/N_k) v_k, u = (τ/N_k) u_k,
δ = s_g/λ:

    ĝ ← ∇̂ℓ(θ),  θ ~ N(m, σ²)                             ĥ ← ĝ (θ − m)/σ² − u
    g ← β₁ g + (1 − β₁) ĝ                                 h ← β₂ h + (1 − β₂) ĥ + ½ (1 − β₂)² (h − ĥ)²/(h + δ)
    m ← m − α (g + v − u m + δ (m − m_p))/(h + δ)         σ ← 1/√(λ (h + δ))

Here σ is carried rather than h: 1/(h + δ) = λσ², and a step needs one root and one division. With A = v − δ m_p,
B = δ − u (`quadratic`) and x = (1 − β₂)(ĥ − h)/(h + δ) = (1 − β₂)(λσ (ĝε + Bσ) − 1), the third line is
h + δ ← (h + δ)(1 + x + ½x²), or σ ← σ/√(1 + x + ½x²): positive whatever ĥ is, in floating point too.

Learning rate, h₀, clip and weight decay are numbers, or rules that a client evaluates (`fedual.solvers.adaptive`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedual.algorithm.method import Carry, Guards, Solution, Subproblem
from fedual.errors import InputError, require_count, require_positive, require_share
from fedual.families import Diagonal, Family
from fedual.solvers.adaptive import HiddenDecay, InitialNoise, RoundRate, StepLimit
from fedual.solvers.base import Stateless
from fedual.solvers.stepper import Schedule, Stepper, Variables, quadratic, scale, start_mean


@dataclass(frozen=True)
class IVON(Stepper):
    """Algorithm 2.

    Args:
        lr: The learning rate α.
        samples: Monte-Carlo samples a step.
        h0: h at the first step of a client while the server is at the prior; afterwards q starts at q_g (h = 0).
        beta1: Decay of the momentum g, which is carried from round to round.
        beta2: Decay of the curvature h.
        clip: The preconditioned step of each parameter is limited to ±clip, before the learning rate; 0 is no limit.
        weight_decay: ½ weight_decay ‖θ‖² is added to a client's mean loss. With ρ = 0 it is the prior: δ with m_p = 0.
        debias: Divide g by 1 − β₁ᵗ, t counted over all rounds.
        hold: An extension of Algorithm 2: the mean is pulled to m_p with at least this fraction of the proximal term,
            max(δ − u, hold · δ). Without it the mean diverges if a multiplier outweighs the proximal term, u > δ. h
            and the federation's fixed points stay the same.
    """

    lr: float | RoundRate = 0.03
    samples: int = 1
    h0: float | InitialNoise = 0.01
    beta1: float = 0.9
    beta2: float = 0.9998
    clip: float | StepLimit = 1.0
    weight_decay: float | HiddenDecay = 0.0
    debias: bool = True
    hold: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "h0"):
            if not isinstance(getattr(self, name), RoundRate | InitialNoise):
                require_positive(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            require_share(name, getattr(self, name))
        for name in ("clip", "weight_decay"):
            if getattr(self, name) != 0 and not isinstance(getattr(self, name), StepLimit | HiddenDecay):
                require_positive(name, getattr(self, name))
        if self.hold != 0:
            require_positive("hold", self.hold, most=1.0)
        require_count("samples", self.samples)

    @property
    def draws(self) -> int:
        return self.samples

    @property
    def schedule(self) -> Schedule:
        return self.lr.schedule if isinstance(self.lr, RoundRate) else "constant"

    def init(self, family: Family, prior: Tensor, num_clients: int) -> Carry:
        if not isinstance(family, Diagonal):
            raise InputError(f"IVON works on Diagonal Gaussians, not on {family}: use Diagonal().")
        momentum = prior.new_zeros(num_clients, prior.shape[-1])
        return {"momentum": momentum, "steps": momentum.new_zeros(num_clients)}

    def begin(self, problem: Subproblem) -> Variables:
        """q_k = q_g, or the network's initialisation with h = h0 in the first round."""
        if problem.rho == self.weight_decay == 0:
            raise InputError("rho = 0 and weight_decay = 0: IVON needs a prior, q_g by rho or one by weight_decay.")
        losses = problem.losses
        offset, slope = quadratic(problem)
        ess = 1 / ((problem.rho or 1.0) * scale(problem))
        mean, curvature = start_mean(problem), Diagonal().precision(problem.lam_g) / ess
        pull = slope
        if self.hold:  # curvature is δ = s_g/λ here
            pull = torch.maximum(slope, self.hold * curvature)
            offset = offset + (slope - pull) * Diagonal().mean(problem.lam_g)
        lr = self.lr.rate(losses, ess) if isinstance(self.lr, RoundRate) else torch.full_like(ess, self.lr)
        decay = self.weight_decay
        if isinstance(decay, HiddenDecay):
            decay = decay.decay(losses, mean)
        slope, pull = slope + decay, pull + decay
        clip = self.clip
        limit = clip.limit(losses, mean, lr) if isinstance(clip, StepLimit) else torch.full_like(ess, clip or torch.inf)
        if problem.start is not None:
            curvature = curvature if problem.rho else slope.expand_as(curvature)  # δ
            curvature = curvature + (self.h0.h0(losses, mean, ess) if isinstance(self.h0, InitialNoise) else self.h0)
        variables = {"mean": mean, "sigma": (ess * curvature).rsqrt(), "ess": ess, "lr": lr}  # curvature is h + δ here
        variables |= {"offset": offset, "slope": slope, "limit": limit} | ({"pull": pull} if self.hold else {})
        carry = problem.carry or {"momentum": torch.zeros_like(mean), "steps": mean.new_zeros(len(mean))}
        variables["debias"] = self._debias(carry["steps"] + 1)
        return variables | {name: value.clone() for name, value in carry.items()}  # because steps are in place

    def place(self, variables: Variables, noise: Tensor) -> Tensor:
        """θ = m + σε."""
        return torch.addcmul(variables["mean"], noise, variables["sigma"])

    def update(self, variables: Variables, gradient: Tensor, correlation: Tensor | None) -> Variables:
        assert correlation is not None
        sigma, steps = variables["sigma"], variables["steps"] + 1
        x = variables["ess"] * sigma * (correlation + variables["slope"] * sigma) - 1
        x = (1 - self.beta2) * x
        sigma = sigma * (1 + x + x * x / 2).rsqrt()
        momentum = torch.lerp(gradient, variables["momentum"], self.beta1)
        moved = {**variables, "sigma": sigma, "momentum": momentum, "steps": steps}
        direction = self._direction(moved, variables["debias"]).clamp(-variables["limit"], variables["limit"])
        moved["debias"] = self._debias(steps + 1)
        return {**moved, "mean": variables["mean"] - variables["lr"] * direction}

    def _debias(self, steps: Tensor) -> Tensor:
        """1/(1 − β₁ᵗ), `(n, 1)`: a variable, because compiled code would take the power anew for each parameter."""
        return (1 / (1 - self.beta1**steps) if self.debias else torch.ones_like(steps))[:, None]

    def _direction(self, variables: Variables, debias: Tensor) -> Tensor:
        """(g + v − u m_p + B (m − m_p))/(h + δ), B = δ − u or the pull of `hold`."""
        pull = variables.get("pull", variables["slope"])
        force = debias * variables["momentum"] + variables["offset"] + pull * variables["mean"]
        return force * (variables["ess"] * variables["sigma"] ** 2)

    def end(self, problem: Subproblem, variables: Variables) -> Solution:
        """(m, s) with s = λ (h + δ) = 1/σ²."""
        lam = Diagonal().natural(variables["mean"], variables["sigma"] ** -2)
        fraction = lambda where: where.to(lam.dtype).mean(1)
        direction = self._direction(variables, self._debias(variables["steps"]))
        limited = fraction(direction.abs() > variables["limit"])
        held = fraction(variables["pull"] > variables["slope"]) if self.hold else 0.0
        carry = {name: variables[name] for name in problem.carry}
        return Solution(lam, carry, guards=Guards(limited, held))


@dataclass(frozen=True)
class FreshIVON(Stateless, IVON):
    """IVON that begins each round with g = 0 and t = 0, so that clients keep nothing."""
