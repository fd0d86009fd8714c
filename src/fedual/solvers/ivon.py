"""IVON with a general prior and two multipliers: the client's step of IVON-ADMM (paper app. D.4, Algorithm 2).

It minimises λ E_q[ℓ + vᵀθ − ½ θᵀdiag(u)θ] + KL(q ‖ p), with ess λ = N_k/(ρτ), v = (τ/N_k) v_k, u = (τ/N_k) u_k,
δ = s_g/λ:

    ĝ ← ∇̂ℓ(θ),  θ ~ N(m, σ²)                             ĥ ← ĝ (θ − m)/σ² − u
    g ← β₁ g + (1 − β₁) ĝ                                 h ← β₂ h + (1 − β₂) ĥ + ½ (1 − β₂)² (h − ĥ)²/(h + δ)
    m ← m − α (g + v − u m + δ (m − m_p))/(h + δ)         σ ← 1/√(λ (h + δ))

Here h + δ is carried rather than h. With A = v − δ m_p, B = δ − u (`quadratic`) and x = (1 − β₂)(ĥ − h)/(h + δ),
ĥ − h = ĝε/σ + B − (h + δ), and the third line is h + δ ← (h + δ)(1 + x + ½x²): positive whatever ĥ is, in floating
point too.

Where the multiplier of a client outweighs its proximal term, u > δ, the mean has nothing that holds it, and runs away.
With `hold` θ its pull to q_g is never weaker than θδ, max(δ − u, θδ) in the place of B in the second line, around m_p;
h, and where the federation comes to rest, stay as they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedual.contracts import Carry, Guards, Solution, Subproblem
from fedual.errors import InputError, require_count, require_positive, require_share
from fedual.families import Diagonal, Family
from fedual.relative import Relative
from fedual.solvers.scale import Gain, Hidden, Noise, Units
from fedual.solvers.stochastic import Inner, Schedule, Stepper, quadratic, scale, start_mean


@dataclass(frozen=True)
class IVON(Stepper):
    """Algorithm 2.

    Args:
        lr: α, or a rule for it.
        samples: Monte-Carlo samples a step.
        h0: h at the first step of a client whose server still sits at the prior, or a rule for it; afterwards q starts
            at q_g (h = 0).
        beta1: Of the momentum g, which is carried from round to round.
        beta2: Of the curvature h.
        clip: The preconditioned step is limited to ±clip a parameter, before the learning rate, or by a rule; 0 is no
            limit.
        weight_decay: ½ weight_decay ‖θ‖² is added to a client's mean loss; a rule has one for each parameter.
        debias: Divide g by 1 − β₁ᵗ, t counted over all rounds.
        hold: The part of the proximal term by which a mean is held to m_g, whatever the multiplier; 0 is Algorithm 2.
    """

    lr: float = 0.03
    samples: int = 1
    h0: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.9998
    clip: float = 1.0
    weight_decay: float = 0.0
    debias: bool = True
    hold: float = 0.0

    def __post_init__(self) -> None:
        require_positive("lr", self.lr)
        require_positive("h0", self.h0)
        for name in ("beta1", "beta2"):
            require_share(name, getattr(self, name))
        for name in ("clip", "weight_decay"):
            if getattr(self, name) != 0:
                require_positive(name, getattr(self, name))
        if self.hold != 0:
            require_positive("hold", self.hold, most=1.0)
        require_count("samples", self.samples)

    @property
    def draws(self) -> int:
        """`samples`."""
        return self.samples

    @property
    def schedule(self) -> Schedule:
        """A setting that nobody tuned has a rate that falls."""
        return "harmonic" if isinstance(self.lr, Gain | Relative) else "constant"

    def init(self, family: Family, prior: Tensor, num_clients: int) -> Carry:
        """No momentum, no steps taken."""
        if not isinstance(family, Diagonal):
            raise InputError(f"IVON works on Diagonal Gaussians, not on {family}.")
        momentum = prior.new_zeros(num_clients, prior.shape[-1])
        return {"momentum": momentum, "steps": momentum.new_zeros(num_clients)}

    def begin(self, problem: Subproblem) -> Inner:
        """q_k = q_g, or the network's initialisation with h = h0 in the first round."""
        if problem.rho == 0:
            raise InputError("rho = 0: IVON needs a proximal term, its prior is q_g.")
        offset, slope = quadratic(problem)
        ess = 1 / (problem.rho * scale(problem))
        mean, curvature = start_mean(problem), Diagonal().precision(problem.lam_g) / ess
        pull = slope
        if self.hold:  # curvature is δ = s_g/λ here
            pull = torch.maximum(slope, self.hold * curvature)
            offset = offset + (slope - pull) * Diagonal().mean(problem.lam_g)
        lr = self.lr.rate(problem.losses, ess) if isinstance(self.lr, Gain) else torch.full_like(ess, self.lr)
        decay = self.weight_decay
        decay = decay.each(problem.losses, mean) if isinstance(decay, Hidden) else decay
        slope, pull = slope + decay, pull + decay
        plain = torch.full_like(ess, self.clip or torch.inf)
        limit = self.clip.limit(problem.losses, mean, lr) if isinstance(self.clip, Units) else plain
        if problem.start is not None:
            first = self.h0.h0(problem.losses, mean, ess) if isinstance(self.h0, Noise) else self.h0
            curvature = curvature + first
        return {
            "mean": mean,
            "curvature": curvature,  # h + δ
            "momentum": problem.carry["momentum"],
            "steps": problem.carry["steps"],
            "ess": ess,
            "lr": lr,
            "offset": offset,
            "slope": slope,
            "limit": limit,
            **({"pull": pull} if self.hold else {}),
        }

    def place(self, inner: Inner, noise: Tensor) -> Tensor:
        """θ = m + σε, σ = 1/√(λ (h + δ))."""
        return torch.addcmul(inner["mean"], noise, (inner["ess"] * inner["curvature"]).rsqrt())

    def update(self, inner: Inner, gradient: Tensor, correlation: Tensor | None) -> Inner:
        """One step; `correlation` is ĝε."""
        assert correlation is not None
        mean, curvature, slope = inner["mean"], inner["curvature"], inner["slope"]
        x = correlation * (inner["ess"] * curvature).sqrt()  # ĝ (θ − m)/σ²
        x = (1 - self.beta2) * ((x + slope) / curvature - 1)
        curvature = curvature * (1 + x + x * x / 2)
        momentum = torch.lerp(gradient, inner["momentum"], self.beta1)
        steps = inner["steps"] + 1
        moved = {**inner, "curvature": curvature, "momentum": momentum, "steps": steps}
        direction = self._direction(moved).clamp(-inner["limit"], inner["limit"])
        return {**moved, "mean": mean - inner["lr"] * direction}

    def _direction(self, inner: Inner) -> Tensor:
        """(g + v − u m_p + B (m − m_p))/(h + δ), B = δ − u or what holds the mean."""
        first = inner["momentum"] / (1 - self.beta1 ** inner["steps"])[:, None] if self.debias else inner["momentum"]
        pull = inner.get("pull", inner["slope"])
        return (first + inner["offset"] + pull * inner["mean"]) / inner["curvature"]

    def end(self, problem: Subproblem, inner: Inner) -> Solution:
        """(m, s) with s = λ (h + δ)."""
        lam = Diagonal().natural(inner["mean"], inner["ess"] * inner["curvature"])
        part = lambda found: found.to(lam.dtype).mean(1)
        limited = part(self._direction(inner).abs() > inner["limit"])
        held = part(inner["pull"] > inner["slope"]) if self.hold else 0.0
        carry = {"momentum": inner["momentum"], "steps": inner["steps"]}
        return Solution(lam, carry, guards=Guards(limited, held))
