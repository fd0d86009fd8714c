"""Federated regression: the coefficients that `glm()` finds on the pooled table, without pooling it."""

from fedual.glm.anova import anova
from fedual.glm.fitting import fit
from fedual.glm.mixed.at_site import site_effects
from fedual.glm.prior import Prior
from fedual.glm.result import Fit
from fedual.glm.rules import Guards
from fedual.glm.settings import Settings
from fedual.glm.survival.baseline import Baseline

__all__ = ["Baseline", "Fit", "Guards", "Prior", "Settings", "anova", "fit", "site_effects"]
