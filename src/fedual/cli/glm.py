"""`fedual glm`: a regression on several tables, as if they were one, with their sites simulated here."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedual.cli.output import echo
from fedual.cli.run import Json

Formula = Annotated[
    str,
    typer.Argument(help="As in R: 'y ~ age + C(sex) + bs(bmi, df=4)', 'Surv(time, event) ~ age'.", metavar="FORMULA"),
]
Tables = Annotated[
    list[str], typer.Argument(help="A CSV or Parquet file for each site; NAME=FILE names it.", metavar="FILE…")
]
Family = Annotated[str, typer.Option(help="gaussian, binomial, poisson, negative-binomial or gamma.")]
Link = Annotated[str | None, typer.Option(help="E.g. logit, probit, log, identity.", show_default="the family's")]
Weights = Annotated[str | None, typer.Option(metavar="COLUMN", help="Weights of the rows.")]
Offset = Annotated[str | None, typer.Option(metavar="COLUMN", help="Added to the linear predictor.")]
Trials = Annotated[str | None, typer.Option(metavar="COLUMN", help="Trials, where the response counts successes.")]
Event = Annotated[
    str | None, typer.Option(metavar="CLASS", help="The class that counts as 1.", show_default="the second in order")
]
SiteEffects = Annotated[
    str, typer.Option("--site", help="pooled, fixed: an intercept for each site, or random: integrated out.")
]
Prior = Annotated[str, typer.Option(help="default: slopes N(0, 2.5/sd(x)); flat; or another number in place of 2.5.")]
Estimate = Annotated[
    str | None,
    typer.Option(help="ml, reml, posterior, both or variational.", show_default="ml; reml for linear mixed models"),
]
Levels = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN=A,B,…", help="Levels of a categorical column, the base first; may be repeated."),
]
Baseline = Annotated[
    str, typer.Option(help="Of Surv(time, event): stratified (Cox, a baseline for each site), or piecewise, for all.")
]
Ties = Annotated[str, typer.Option(help="Tied times in Cox regression: efron or breslow.")]
Pieces = Annotated[str, typer.Option(metavar="N|T,T,…", help="Pieces of a common baseline, or the times to cut at.")]
Transform = Annotated[str, typer.Option(help="Time in the test of proportional hazards: identity, log or none.")]
MaxRounds = Annotated[int, typer.Option(help="Rounds at most.")]
Tol = Annotated[float, typer.Option(help="Converged if the next step is at most so many standard errors.")]
Level = Annotated[float, typer.Option(help="Coverage of the intervals.")]
Robust = Annotated[str, typer.Option(help="Standard errors: none, hc0, or cluster (by site).")]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write fit.json, figures.json, table.csv, summary.txt and summary.html."),
]


def glm(
    formula: Formula,
    tables: Tables,
    family: Family = "gaussian",
    link: Link = None,
    weights: Weights = None,
    offset: Offset = None,
    trials: Trials = None,
    event: Event = None,
    site: SiteEffects = "pooled",
    prior: Prior = "default",
    estimate: Estimate = None,
    levels: Levels = None,
    baseline: Baseline = "stratified",
    ties: Ties = "efron",
    pieces: Pieces = "10",
    transform: Transform = "identity",
    max_rounds: MaxRounds = 8,
    tol: Tol = 1e-4,
    level: Level = 0.95,
    robust: Robust = "none",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Fit a regression to the tables of several sites: the numbers of the pooled table, without pooling it.

    The sites are simulated: each file is one site, which sends what it would send from a machine of its own. Notes name
    the sites that would refuse. `fedual init --glm` writes the same for machines of their own.

    Example: fedual glm 'sick ~ age + C(sex)' north.csv south.csv west.csv --family binomial --out fit
    """
    from fedual.errors import import_optional

    import_optional("fedual glm", "fedual.glm", "'fedual[glm]'")
    from fedual.glm import fitting, result_folder
    from fedual.glm.inference import check_level
    from fedual.glm.options import levels_of, settings_from
    from fedual.rundir.jsonable import without_nan
    from fedual.rundir.locking import in_use

    check_level(level)
    result_folder.check_robust(robust)
    settings = settings_from(
        {
            "formula": formula, "family": family, "link": link, "weights": weights, "offset": offset, "trials": trials,
            "event": event, "site": site, "prior": prior, "estimate": estimate, "levels": levels_of(levels or ()),
            "max_rounds": max_rounds, "tol": tol,
            "baseline": baseline, "ties": ties, "pieces": pieces, "transform": transform,
        }
    )  # fmt: skip
    with in_use(out):
        fit = result_folder.with_errors(fitting.simulate(settings, _sites(tables)), robust)
        echo(str(fit.summary(level)))
        if out is not None:
            result_folder.write(fit, out, level)
            echo(f"\nwrote {out}/fit.json, figures.json, table.csv, summary.txt and summary.html")
    if as_json:
        content = {
            "formula": fit.formula, "family": fit.family, "link": fit.link, "event": fit.schema.event, "n": fit.n,
            "sites": [site.name for site in fit.sites],
            "coefficients": fit.summary(level).frame().reset_index().to_dict("records"),
            "level": level, "robust": robust,
            "loglik": fit.loglik, "deviance": fit.deviance, "aic": fit.aic, "dispersion": fit.dispersion,
            "converged": fit.convergence.converged, "rounds": fit.convergence.rounds, "step": fit.convergence.step,
            **({} if fit.survival is None else {"events": fit.survival.events, "concordance": fit.survival.c}),
            "components": None if fit.components is None else fit.components.to_json(),
            "separation": fit.separation, "aliased": list(fit.aliased), "warnings": list(fit.warnings),
            "path": None if out is None else str(out),
        }  # fmt: skip
        echo(json.dumps(without_nan(content)))


def _sites(tables: list[str]) -> dict[str, str]:
    """Files by name: their own, unless it is given."""
    from fedual.errors import InputError

    found: dict[str, str] = {}
    for text in tables:
        name, _, path = text.partition("=")
        if not path or Path(text).exists():
            name, path = Path(text).stem, text
        if name in found:
            raise InputError(f"Two sites have the name {name!r}: name each of them by NAME=FILE.")
        found[name] = path
    return found
