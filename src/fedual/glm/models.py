"""The models that a federated regression fits; each is a class with the server's side, made of its sites' sums.

A model is a sibling of `Estimation`: it is made from `ask` and `settings`, and its `fit` returns the result.
"""

import torch

from fedual.errors import NotConvergedError
from fedual.glm.estimation import Estimation
from fedual.glm.messages import Ask
from fedual.glm.result import Fit
from fedual.glm.settings import Settings

BEYOND = "the sums of all sites are beyond float64's range or precision: rescale the response or the columns"


def estimate(ask: Ask, settings: Settings) -> Fit:
    """Fit a regression to the sites behind `ask`.

    Args:
        ask: Sends a message to all sites.
        settings: What is fitted.
    """
    try:
        return Estimation(ask, settings).fit()
    except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise NotConvergedError(f"{settings.formula!r}: {BEYOND}.") from error
