"""`fedual.glm.fit`: the pooled regression without pooling the data, its sites simulated on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedual.glm import models
from fedual.glm.figures import SiteEffects
from fedual.glm.guards import Guard
from fedual.glm.messages import Ask, Message
from fedual.glm.prior import PriorLike
from fedual.glm.result import Fit
from fedual.glm.rules import Guards
from fedual.glm.settings import EstimateKind, Settings
from fedual.glm.site import Site
from fedual.glm.survival.figures import BaselineKind, Ties, Transform
from fedual.glm.survival.options import PIECES
from fedual.glm.tables import Source, sources

KEPT = 2**27
"""Bytes of designs that are kept in memory between rounds; other sites make theirs anew for every message."""


def fit(
    formula: str,
    sites: Mapping[str, Source] | Sequence[Source],
    family: str = "gaussian",
    *,
    link: str | None = None,
    weights: str | None = None,
    offset: str | None = None,
    trials: str | None = None,
    event: str | None = None,
    site: SiteEffects = "pooled",
    prior: PriorLike = "default",
    estimate: EstimateKind | None = None,
    levels: Mapping[str, Sequence[str]] | None = None,
    max_rounds: int = 8,
    guards: Guards | None = None,
    baseline: BaselineKind = "stratified",
    ties: Ties = "efron",
    pieces: int | Sequence[float] = PIECES,
    transform: Transform = "identity",
) -> Fit:
    """Fit a generalised linear model, or one of survival, to the tables of several sites, as if they were one table.

    Every site answers as it would on a machine of its own; what its guards would refuse there is among the warnings.

        fit = fedual.glm.fit("sick ~ age + C(sex)", {"north": "north.csv", "south": "south.csv"}, family="binomial")
        print(fit.summary())

    Args:
        formula: As in R, for example "y ~ age + C(sex) + bs(bmi, df=4)".
        sites: Data frames, arrays `(X, y)`, CSV or Parquet files, or functions that return a data frame; with names, or
            named after their files.
        family: "gaussian", "binomial", "poisson", "negative-binomial" or "gamma".
        link: See `fedual.glm.Settings`, also for all arguments that follow.
        weights: A column.
        offset: A column.
        trials: A column.
        event: A class of the response.
        site: "pooled", or "fixed" or "random" intercepts.
        prior: The prior of the coefficients.
        estimate: What the rounds find.
        levels: Levels of categorical variables.
        max_rounds: Rounds at most.
        guards: The rules that warnings are about; the defaults if None.
        baseline: Of survival models, `Surv(time, event) ~ …`: "stratified" by site, or "piecewise" and common.
        ties: "efron" or "breslow".
        pieces: Of a common baseline.
        transform: Of the test of proportional hazards.
    """
    settings = Settings(
        formula, family, link, weights, offset, trials, event, site, prior, estimate, levels or {}, max_rounds,
        baseline=baseline, ties=ties, pieces=pieces, transform=transform,
    )  # fmt: skip
    return simulate(settings, sites, guards)


def simulate(settings: Settings, sites: Mapping[str, Source] | Sequence[Source], guards: Guards | None = None) -> Fit:
    """`fit` with its settings as one object."""
    rules = Guards() if guards is None else guards
    members = [Site(name, source, Guard(rules, None, False, name)) for name, source in sources(sites).items()]
    result = models.estimate(asking(members), settings)
    return replace(result, warnings=result.warnings + refusals(members))


def refusals(sites: Sequence[Site]) -> tuple[str, ...]:
    """What the guards of the sites warned of, a sentence for each reason."""
    by_reason: dict[str, list[str]] = {}
    for site in sites:
        for reason in site.guard.warnings if site.guard is not None else ():
            by_reason.setdefault(reason, []).append(repr(site.name))
    return tuple(
        f"site{'s' * (len(names) > 1)} {', '.join(names)} would refuse: {reason}" for reason, names in by_reason.items()
    )


def asking(sites: Sequence[Site]) -> Ask:
    """Ask sites of this process in turn; their designs are kept between messages as far as memory is meant for them."""
    held = 0

    def ask(message: Message) -> dict[str, Message]:
        nonlocal held
        replies = {}
        for site in sites:
            replies[site.name] = site.answer(message)
            if message.kind == "moments":
                held += int(replies[site.name].facts["rows"]) * len(message.facts["model"]["schema"]["terms"]) * 8
                site.keep = site.keep and held <= KEPT
                if not site.keep:
                    site.release()
        return replies

    return ask
