"""What an analyst asks of a federated regression: one object for the simulator, the command line and Flower."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from fedual.errors import InputError, hint, require_count, require_positive
from fedual.glm.distributions import Binomial, distribution
from fedual.glm.figures import SiteEffects
from fedual.glm.mixed import bars
from fedual.glm.prior import Prior, PriorLike, prior
from fedual.glm.survival import options as survival
from fedual.glm.survival.figures import BaselineKind, Ties, Transform

EstimateKind = Literal["ml", "reml", "posterior", "both", "variational"]
"""What the rounds find."""
MIXED = {("gaussian", "identity"), ("poisson", "log"), *(("binomial", link) for link in Binomial.links)}
"""Families and links of models with random effects."""


@dataclass(frozen=True)
class Settings:
    """A federated regression.

    Args:
        formula: As in R: "y ~ age + C(sex) + bs(bmi, df=4)".
        family: "gaussian", "binomial", "poisson", "negative-binomial" or "gamma".
        link: The family's default if None; see `fedual.glm.distributions`.
        weights: The column of the weights.
        offset: The column that is added to the linear predictor.
        trials: The column with the numbers of trials, where the response counts successes.
        event: The class of a binomial response that counts as 1; the second in order if None.
        site: "pooled"; "fixed" for an intercept of each site's own, which stays there; "random" for intercepts that are
            integrated out, as does (1 | site) in the formula.
        prior: "default" is N(0, 2.5/sd(x)) for slopes; "flat", the slopes' sd, `term → (mean, sd)`, or a `Prior`.
        estimate: What the rounds find: "ml" the maximum likelihood, from whose quadratic the posterior follows; "reml"
            the restricted one of a gaussian model with random effects, for which it is the default;
            "posterior" the posterior's mode alone; "both"; "variational" the maximum likelihood, and the best Gaussian.
        levels: The levels of categorical variables, in order; what the sites have if a variable is not named.
        max_rounds: Rounds at most, the certificate included, the handshake not. As many again follow where the
            posterior is expanded by itself ("both", and after separation), more for a variational one.
        tol: The next step, in standard errors, at which a result counts as converged.
        cavity_rounds: Rounds before the certificate; 3, fewer where the estimate rests before, unless given.
        baseline: Of a survival model, `Surv(time, event) ~ …`: "stratified" is Cox regression with a baseline hazard of
            each site's own; "piecewise" a common one that is constant in pieces of time.
        ties: How Cox regression treats tied times: "efron" or "breslow".
        pieces: Of a common baseline: how many, cut at quantiles of the events' times; or the cuts.
        transform: g(t) of the test of proportional hazards: "identity" or "log"; "none" leaves it out.
    """

    formula: str
    family: str = "gaussian"
    link: str | None = None
    weights: str | None = None
    offset: str | None = None
    trials: str | None = None
    event: str | None = None
    site: SiteEffects = "pooled"
    prior: PriorLike = "default"
    estimate: EstimateKind | None = None
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    max_rounds: int = 8
    tol: float = 1e-4
    cavity_rounds: int | None = None
    baseline: BaselineKind = "stratified"
    ties: Ties = "efron"
    pieces: int | Sequence[float] | str = survival.PIECES
    transform: Transform = "identity"

    def __post_init__(self) -> None:
        for name in ("weights", "offset", "trials"):
            if not isinstance(value := getattr(self, name), str | None):
                raise InputError(f"{name} is a {type(value).__name__}: name a column of the tables.")
        given = self.levels or {}
        if not isinstance(given, Mapping) or any(isinstance(each, str) for each in given.values()):
            raise InputError(f"levels = {self.levels!r}: give a list of levels for each column, {{'sex': ['f', 'm']}}.")
        if bars.split(self.formula).random is not None:
            if self.site == "fixed":
                raise InputError(
                    f"{self.formula!r} has random effects of sites, and site = 'fixed': choose one of them."
                )
            object.__setattr__(self, "site", "random")
        options = (self.estimate or "ml", self.baseline, self.ties, self.transform)
        object.__setattr__(self, "family", survival.family(self.formula, self.family, self.site, *options))
        object.__setattr__(self, "pieces", survival.pieces(self.pieces))
        kind = distribution(self.family, self.link)
        object.__setattr__(self, "link", kind.link)
        under = prior(self.prior)
        object.__setattr__(self, "prior", under)
        levels = {name: tuple(map(str, each)) for name, each in given.items()}
        object.__setattr__(self, "levels", levels)
        for name, each in levels.items():
            if twice := [level for level in each if each.count(level) > 1]:
                raise InputError(f"levels= names the level {twice[0]!r} of {name!r} twice: name it once.")
        linear = self.site == "random" and self.family == "gaussian"
        if self.estimate is None:
            object.__setattr__(self, "estimate", "reml" if linear else "ml")
        for name, value, known in (("estimate", self.estimate, EstimateKind), ("site", self.site, SiteEffects)):
            if value not in get_args(known):
                raise InputError(f"{name} = {value!r}: {hint(value, get_args(known))}")
        require_count("max_rounds", self.max_rounds, least=2)
        require_positive("tol", self.tol)
        if self.cavity_rounds is not None:
            require_count("cavity_rounds", self.cavity_rounds)
        if self.estimate == "reml" and not linear:
            raise InputError("estimate = 'reml' is for gaussian models with random effects of sites: use 'ml'.")
        if self.site == "random":
            self._check_random()
        if under.flat and self.estimate not in ("ml", "reml"):
            raise InputError(f"estimate = {self.estimate!r} with a flat prior: give a prior, or estimate='ml'.")
        if self.trials is not None and self.family != "binomial":
            raise InputError(
                f"trials = {self.trials!r} with the family {self.family}: only binomial counts have trials."
            )
        if self.estimate == "variational" and (kind.extra or not kind.known_dispersion or self.site == "fixed"):
            raise InputError(
                f"estimate = 'variational' with the family {self.family} and site = {self.site!r}: it is there for "
                "binomial and poisson models with pooled sites; use estimate='both'."
            )

    def _check_random(self) -> None:
        """Refuse what mixed models do not have."""
        if (self.family, self.link) not in MIXED:
            raise InputError(
                f"Random effects of sites with the family {self.family} and the link {self.link}: they are there for "
                "gaussian (identity), binomial and poisson (log) models; use site='fixed'."
            )
        if self.estimate not in ("ml", "reml"):
            raise InputError(
                f"estimate = {self.estimate!r} with random effects of sites: use 'ml', with the posterior beside."
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        levels = {name: list(each) for name, each in self.levels.items()}
        pieces = self.pieces if isinstance(self.pieces, int) else [*self.pieces]
        return {**asdict(self), "prior": prior(self.prior).to_dict(), "levels": levels, "pieces": pieces}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Settings":
        """The inverse of `to_dict`."""
        return cls(**{**values, "prior": Prior.from_dict(values["prior"])})
