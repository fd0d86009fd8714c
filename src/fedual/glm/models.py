"""The models that a federated regression fits, and what sites and server do for each.

| model    | at a site                      | at the server                            |
|----------|--------------------------------|------------------------------------------|
| GLM      | `model.Model`                  | `estimation.Estimation`                  |
| survival | `survival.model.SurvivalModel` | `survival.estimation.SurvivalEstimation` |
| mixed    | `mixed.model.MixedModel`        | `mixed.estimation.MixedEstimation`       |

A server's side is made from `ask` and `settings`, and its `fit` returns the result.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fedual.errors import NotConvergedError
from fedual.glm.estimation import Estimation
from fedual.glm.messages import Ask
from fedual.glm.mixed.estimation import MixedEstimation
from fedual.glm.mixed.model import MixedModel
from fedual.glm.model import Model
from fedual.glm.result import Fit
from fedual.glm.settings import Settings
from fedual.glm.survival.estimation import SurvivalEstimation
from fedual.glm.survival.model import SurvivalModel
from fedual.glm.survival.response import is_survival

BEYOND = "the sums of all sites are beyond float64's range or precision: rescale the response or the columns"


def model_of(facts: Mapping[str, Any]) -> Model:
    """The model of a message, as a site computes it."""
    if "cuts" in facts:
        return SurvivalModel.from_facts(facts)
    return (MixedModel if facts["site"] == "random" else Model).from_facts(facts)


def estimate(ask: Ask, settings: Settings) -> Fit:
    """Fit a regression to the sites behind `ask`.

    Args:
        ask: Sends a message to all sites.
        settings: What is fitted.
    """
    try:
        if is_survival(settings.formula):
            return SurvivalEstimation(ask, settings).fit()
        return (MixedEstimation if settings.site == "random" else Estimation)(ask, settings).fit()
    except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise NotConvergedError(f"{settings.formula!r}: {BEYOND}.") from error
