"""A site's own effects in a mixed model, found by the site from the result and its own table."""

import numpy as np
import pandas as pd
import torch
from scipy import stats

from fedual.errors import InputError
from fedual.glm import schema as schemas
from fedual.glm.figures import Figures
from fedual.glm.inference import check_level
from fedual.glm.likelihood import Likelihood
from fedual.glm.mixed.cholesky import places
from fedual.glm.mixed.integrated import Integrated
from fedual.glm.mixed.model import MixedModel
from fedual.glm.mixed.own import own
from fedual.glm.tables import Source, read


def site_effects(fit: Figures, table: Source, level: float = 0.95) -> pd.DataFrame:
    """What a site adds to the coefficients of a mixed model: conditional modes (BLUPs), as R's `ranef`.

    Nobody else can compute them without the site's rows: call it where the table is. Columns `estimate`, `sd`, `lower`
    and `upper`, a row for each random effect. The coefficients and variance components count as known.

    Args:
        fit: A fit with random effects; `Fit.load` reads it from a file.
        table: The site's: a data frame, a CSV or Parquet file, or what else `fedual.glm.fit` takes.
        level: Coverage of the intervals.
    """
    check_level(level)
    if fit.components is None or fit.ml is None:
        raise InputError("site_effects needs a fit with random effects of sites: use site='random'.")
    facts = {"schema": fit.schema.to_dict(), "family": fit.family, "link": fit.link, "random": fit.components.terms}
    model = MixedModel.from_facts({**facts, "site": "random"})
    design = schemas.design(read(table, "this site"), "this site", fit.schema)
    y, weight = model.responses(design, "this site")
    plain = Likelihood(model.distribution, design.x, y, weight / fit.dispersion, design.offset)
    width, count = len(fit.terms), len(fit.components.terms)
    spread = torch.zeros(width, count, dtype=torch.float64)
    spread[[fit.terms.index(term) for term in fit.components.terms], range(count)] = 1.0
    rows, columns = places(count)
    psi = torch.cat([torch.tensor(fit.ml.coefficients), torch.tensor(_root(fit.components.covariance))[rows, columns]])
    units = torch.zeros(width, dtype=torch.float64), torch.ones(width, dtype=torch.float64)
    found = own(Integrated(plain, spread), psi, fit.components.terms, fit.terms, units)
    frame = pd.DataFrame({"estimate": found.estimate, "sd": found.sd}, index=pd.Index(found.terms, name="term"))
    half = stats.norm.ppf((1 + level) / 2) * frame["sd"]
    return frame.assign(lower=frame["estimate"] - half, upper=frame["estimate"] + half)


def _root(covariance: np.ndarray) -> np.ndarray:
    """A lower triangular root of a matrix that may be singular."""
    values, vectors = np.linalg.eigh(covariance)
    return np.linalg.qr((vectors * np.sqrt(values.clip(0))).T)[1].T
