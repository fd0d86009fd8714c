"""What a site finds about itself, its own effects, which stay there; and its sums at the estimate, without them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.glm.closing import figures
from fedual.glm.messages import packed
from fedual.glm.mixed.effects import spread
from fedual.glm.mixed.integrated import Integrated
from fedual.glm.prior import INTERCEPT
from fedual.rundir import atomic

FILE = "site-effects.json"
"""In the site's own folder."""


class Own(NamedTuple):
    """A site's own effects given its rows (conditional modes, or BLUPs), and their sds."""

    terms: tuple[str, ...]
    estimate: tuple[float, ...]
    sd: tuple[float, ...]

    def store(self, folder: Path) -> None:
        """Write them where the site keeps its state."""
        content = [dict(zip(("term", "estimate", "sd"), row, strict=True)) for row in zip(*self, strict=True)]
        atomic.store(folder / FILE, json.dumps(content, indent=1).encode(), "the site's own effects are lost")


def known(loss: Integrated, dispersion: float) -> Integrated:
    """The loss of a model with this dispersion."""
    plain = loss.plain
    return Integrated(replace(plain, weight=plain.weight / dispersion, last=[]), loss.spread)


def own(
    loss: Integrated, psi: Tensor, random: Sequence[str], terms: Sequence[str], units: tuple[Tensor, Tensor]
) -> Own:
    """The site's own effects in the terms' own units.

    Args:
        loss: With the dispersion in its weights.
        psi: (β, θ) of standardised columns.
        random: The columns with effects.
        terms: All columns.
        units: Centre and scale of each column.
    """
    mode, (_, scale) = loss.mode(psi), loss.split(psi)
    places = [terms.index(name) for name in random]
    own_units = torch.diag(1 / units[1])
    own_units[terms.index(INTERCEPT)] -= units[0] / units[1]
    loadings = (own_units @ spread(random, terms, *units))[places] @ scale
    sd = (loadings @ mode.root).square().sum(1).sqrt()
    return Own(tuple(random), tuple((loadings @ mode.place).tolist()), tuple(sd.tolist()))


def closing(loss: Integrated, psi: Tensor, dispersion: float, least: int) -> dict[str, Any]:
    """What a site tells at the estimate: sums about its own effects' modes, and the log-likelihood's constant.

    Args:
        loss: With dispersion 1.
        psi: (β, θ).
        dispersion: φ.
        least: Cells of histograms with fewer rows are told as empty.
    """
    whole = known(loss, dispersion)
    beta, scale = whole.split(psi)
    at = beta + whole.spread @ scale @ whole.mode(psi).place
    found, _ = figures(loss.plain, at, None, dispersion, least)
    facts = {name: found[name] for name in ("pearson", "residuals", "calibration") if name in found}
    plain = loss.plain
    loglik = plain.distribution.loglik(plain.means(at), plain.y, plain.weight, 1.0)
    return facts | {"constant": float(loglik + plain.loss(at)), "marginal": float(whole.loss(psi))}


def slices(loss: Integrated, points: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    """The losses at several (β, σ), and their gradients and Hessians in β."""
    size = loss.plain.dim
    found = [loss.expand(point) for point in points]
    slopes = torch.stack([each.gradient[:size] for each in found])
    curves = torch.stack([packed(each.hessian[:size, :size]) for each in found])
    return [float(each.loss) for each in found], {"slopes": slopes, "curves": curves}
