"""Fedual's error after every number of rounds, against the fit to the pooled rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedual.glm import Fit, Settings
from fedual.glm.fitting import asking
from fedual.glm.messages import Message, unpacked_lam
from fedual.glm.models import estimate
from fedual.glm.prior import FLAT, Prior
from fedual.glm.site import Site
from studies.regression.pooled import Pooled
from studies.regression.tables import Table

ROUNDS = range(2, 9)
"""Rounds in all, the certificate included."""
NEVER = 1e-300
"""A step that rounds do not stop at."""


def settings(table: Table, **changes: Any) -> Settings:
    """The regression of a table."""
    prior, kind = (Prior(), "posterior") if table.penalised else (FLAT, "ml")
    names: Mapping[str, Any] = {"prior": prior, "estimate": kind}
    return Settings(table.formula, table.family, table.link, trials=table.trials, **names, **changes)


def errors(table: Table, oracle: Pooled) -> dict[str, Any]:
    """Errors of coefficients and of standard errors after 2, 3, … rounds, and of the defaults.

    The first entry of "error" is that of m_g after one round, as the next message tells it, without a certificate.
    """
    sites = [Site(name, frame) for name, frame in table.sites.items()]
    sent: list[Message] = []

    def ask(message: Message) -> Mapping[str, Message]:
        sent.append(message)
        return asking(sites)(message)

    found: dict[str, Any] = {"error": [], "se_error": [None]}
    for rounds in ROUNDS:
        fit = estimate(ask, settings(table, max_rounds=rounds, cavity_rounds=rounds - 1, tol=NEVER))
        assert fit.convergence.rounds == rounds or fit.convergence.step == 0
        if rounds == ROUNDS[0]:
            lam = next(message for message in sent if message.facts.get("method") == "newton").tensors["lam"]
            first = np.linalg.solve(-2 * unpacked_lam(lam)[1:].numpy(), unpacked_lam(lam)[0].numpy())
            found["error"].append(oracle.error(oracle.units @ first))
        coefficients, se = both(fit, oracle)
        found["error"].append(oracle.error(coefficients))
        found["se_error"].append(oracle.se_error(se))
        found["kinds"] = [each["kind"] for each in fit.convergence.history]
    fit = estimate(asking(sites), settings(table))
    known = fit.convergence
    error, se_error = oracle.error(both(fit, oracle)[0]), oracle.se_error(both(fit, oracle)[1])
    own = {"rounds": known.rounds, "step": known.step, "error": error, "se_error": se_error}
    return found | {"defaults": own}


def both(fit: Fit, oracle: Pooled) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and standard errors of a fit, log α after them if there is one."""
    estimate = fit.ml or fit.posterior
    assert estimate is not None
    assert fit.schema.terms == oracle.terms
    coefficients, se = estimate.coefficients, np.sqrt(np.diag(estimate.covariance))
    if fit.alpha is None or fit.alpha_se is None:
        return coefficients, se
    return np.append(coefficients, np.log(fit.alpha)), np.append(se, fit.alpha_se / fit.alpha)
