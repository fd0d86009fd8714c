"""Exponential families: natural and expectation parameters as plain tensors `(..., R, P)`."""

from fedual.families.base import Family, check, entropy, finite, inner, kl, log_prob
from fedual.families.discrete import Bernoulli
from fedual.families.fixed import FixedPrecision, Isotropic, is_point
from fedual.families.gaussian import Curvature, Diagonal, Full, Gaussian
from fedual.families.positive import Gamma
from fedual.families.quadrature import Delta, GaussHermite, MonteCarlo, Rule
from fedual.parts import register

__all__ = [
    "Bernoulli", "Curvature", "Delta", "Diagonal", "Family", "FixedPrecision", "Full", "Gamma", "GaussHermite",
    "Gaussian", "Isotropic", "MonteCarlo", "Rule", "check", "entropy", "finite", "inner", "is_point", "kl", "log_prob",
]  # fmt: skip

register(Bernoulli, Diagonal, FixedPrecision, Full, Gamma, Isotropic, Delta, GaussHermite, MonteCarlo)
