"""Fits as files: CSV, JSON for R, LaTeX, the file of `Fit.save`, and draws for ArviZ."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedual.errors import DataError, InputError, import_optional, require_count
from fedual.forms import require
from fedual.glm.figures import Convergence, Estimate, Figures, SiteFigures
from fedual.glm.heterogeneity import heterogeneity
from fedual.glm.inference import chosen, reference, table
from fedual.glm.mixed.components import Components
from fedual.glm.prior import Prior
from fedual.glm.schema import Schema
from fedual.glm.stored_fit import FIT
from fedual.glm.summary import coefficients
from fedual.glm.survival.figures import Survival
from fedual.parsing import DOCUMENT, loads, parsing, read_bytes
from fedual.rundir.atomic import store
from fedual.rundir.jsonable import without_nan
from fedual.texts import cell

if TYPE_CHECKING:
    import xarray

T = TypeVar("T", bound=Figures)
FORMAT = "fedual-glm-1"
NOT_FINITE = "not finite"  # the key that marks NaN and ±∞, which JSON does not have
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
AS_THEY_ARE = (
    "formula", "family", "link", "n", "site_effects", "parameters", "dispersion", "loglik", "null_loglik", "deviance",
    "null_deviance", "pearson", "df_model", "df_resid", "aic", "bic", "pseudo_r2", "adjusted_r2", "alpha", "alpha_se",
    "covariance_kind", "posterior_kind", "separation", "aliased", "residuals", "calibration", "warnings", "survival",
)  # fmt: skip


def to_csv(fit: Figures, path: str | os.PathLike[str], level: float) -> None:
    """Write the table of coefficients with all its digits; a spreadsheet computes none of its texts."""
    content = table(fit, level).rename(index=cell).to_csv(float_format=lambda x: repr(float(x)), lineterminator="\n")
    store(Path(path), content.encode())


def to_json(fit: Figures, path: str | os.PathLike[str], level: float) -> None:
    """Write all figures as strict JSON; NaN is null. R's `jsonlite::fromJSON` makes data frames and matrices of it."""
    compared = heterogeneity(fit)
    sites = [
        {"site": s.name, "n": s.n, "mean_response": s.mean_response, "missing": dict(s.missing)}
        | ({} if s.events is None else {"events": s.events})
        for s in fit.sites
    ]
    content = {
        "format": f"{FORMAT}-figures",
        **{name: getattr(fit, name) for name in AS_THEY_ARE},
        "terms": list(fit.terms),
        "level": level,
        "statistic": reference(fit, "ml").name,
        "prior": fit.prior.words(),
        "coefficients": table(fit, level).reset_index().to_dict("records"),
        "covariance": None if fit.ml is None else fit.ml.covariance,
        "covariance_hc0": fit.hc0,
        "posterior_covariance": None if fit.posterior is None else fit.posterior.covariance,
        "sites": sites,
        "heterogeneity": {
            **{name: getattr(compared, name) for name in ("q", "df", "p", "i2", "left_out")},
            "by_term": compared.by_term.reset_index().to_dict("records"),
            "by_site": compared.frame(level).reset_index().to_dict("records"),
        },
        "components": None if fit.components is None else _plain(fit.components.to_json()),
        "convergence": {"words": fit.convergence.words()} | _plain(fit.convergence),
    }
    text = json.dumps(without_nan(_plain(content)), allow_nan=False, ensure_ascii=False, indent=1)
    store(Path(path), text.encode())


def to_latex(fit: Figures, level: float, caption: str | None, label: str | None) -> str:
    """A table of the coefficients for LaTeX with the package booktabs."""
    grid = coefficients(fit, level)
    line = lambda cells: " & ".join(cells) + r" \\"
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(grid.header) - 1)}}}", r"\toprule", line(map(escaped, grid.header))]
    lines += [r"\midrule", *(line([escaped(row[0]), *map(_math, row[1:])]) for row in grid.rows)]
    lines += [r"\bottomrule", r"\end{tabular}"]
    if caption is not None or label is not None:
        about = [rf"\caption{{{escaped(caption)}}}"] if caption is not None else []
        about += [rf"\label{{{label}}}"] if label is not None else []
        lines = [r"\begin{table}", r"\centering", *about, *lines, r"\end{table}"]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text as LaTeX shows it literally."""
    return "".join(LATEX.get(letter, letter) for letter in " ".join(text.split()))


def _math(number: str) -> str:
    """A number in math mode, where its minus is not a hyphen."""
    if number in ("–", ""):
        return "--" if number else ""
    digits, _, power = number.partition("e")
    return rf"${digits} \times 10^{{{int(power)}}}$" if power else f"${digits}$"


def save(fit: Figures, path: str | os.PathLike[str]) -> None:
    """Write everything as JSON from which `load` restores every bit."""
    content = _plain({field.name: getattr(fit, field.name) for field in fields(fit)})
    text = json.dumps(_marked(content), allow_nan=False, sort_keys=True)
    whole = json.dumps({"format": FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest(), "fit": text})
    store(Path(path), whole.encode())


def load(path: str | os.PathLike[str], kind: type[T]) -> T:
    """The fit that `save` wrote."""
    with parsing(path, "is damaged or not JSON", "save it again"):
        whole = loads(read_bytes(Path(path), DOCUMENT))
    form = whole.get("format") if isinstance(whole, dict) else None
    if form != FORMAT:
        raise DataError(f"{path} has the format {form!r}, not {FORMAT!r}: give a file that this version can read.")
    text = str(whole.get("fit"))
    if hashlib.sha256(text.encode()).hexdigest() != whole.get("sha256"):
        raise DataError(f"{path} is damaged (its checksum is wrong): save it again.")
    with parsing(path, "is not a fit that this version can read", "save it again"):
        found = _unmarked(loads(text))
        require(path, found, FIT, "save it again")
        try:
            return kind(**_fields(found))
        except InputError as error:
            raise DataError(f"{path} is not a fit that this version can read ({error}): save it again.") from None


def _fields(found: dict[str, Any]) -> dict[str, Any]:
    """What JSON holds, as the fields of `Figures`."""
    array = lambda value: None if value is None else np.array(value, dtype=float)
    both = lambda value: [np.array(value[name], dtype=float) for name in ("coefficients", "covariance")]
    estimate = lambda value: value and Estimate(*both(value))
    arrays = lambda site: {name: array(site[name]) for name in ("gradient", "hessian")}
    history = tuple(found["convergence"].pop("history"))
    return found | {
        "schema": Schema.from_dict(found["schema"]),
        "prior": Prior.from_dict(found["prior"]),
        "sites": tuple(SiteFigures(**site | arrays(site)) for site in found["sites"]),
        "convergence": Convergence(**found["convergence"], history=history),
        "ml": estimate(found["ml"]),
        "posterior": estimate(found["posterior"]),
        "hc0": array(found["hc0"]),
        "survival": (figures := found.get("survival")) and Survival.from_dict(figures),
        "components": Components.from_fields(found["components"]) if found.get("components") else None,
        "aliased": tuple(found["aliased"]),
        "warnings": tuple(found["warnings"]),
    }


def _plain(value: Any) -> Any:
    """Dataclasses, arrays and tuples as dicts, lists and numbers."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _marked(value: Any) -> Any:
    """NaN and ±∞ as objects."""
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    return {NOT_FINITE: repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _unmarked(value: Any) -> Any:
    """The inverse of `_marked`."""
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {NOT_FINITE}:
        return float(value[NOT_FINITE])
    return {key: _unmarked(item) for key, item in value.items()}


def to_arviz(fit: Figures, draws: int, seed: int) -> "xarray.DataTree":
    """See `Fit.to_arviz`."""
    arviz = import_optional("Fit.to_arviz", "arviz_base", "'fedual[arviz]'")
    require_count("draws", draws)
    require_count("seed", seed, 0)
    estimate = fit.posterior
    kind = fit.posterior_kind
    if estimate is None:
        estimate, kind = chosen(fit, "ml")[0], "quadratic"
    names = [term for term, value in zip(fit.terms, estimate.coefficients, strict=True) if not math.isnan(value)]
    if not names:
        raise InputError("to_arviz needs at least one estimated coefficient: all terms are aliased.")
    places = [fit.terms.index(term) for term in names]
    covariance = estimate.covariance[np.ix_(places, places)]
    scale = np.sqrt(np.diagonal(covariance))  # draws of standardised coefficients, whatever the units
    values, vectors = np.linalg.eigh(covariance / scale / scale[:, None])
    factor = scale[:, None] * vectors * np.sqrt(values.clip(0))
    noise = np.random.default_rng(seed).standard_normal((draws, len(names)))
    drawn = estimate.coefficients[places] + noise @ factor.T
    about = {"inference_library": "fedual", "family": fit.family, "link": fit.link, "formula": fit.formula}
    about |= {"prior": fit.prior.words(), "posterior": kind}
    chain = {name: drawn[None, :, i] for i, name in enumerate(names)}
    return arviz.from_dict({"posterior": chain}, attrs={"posterior": about})
