"""What a federated regression returns: coefficients, intervals, tests, predictions and plots, like R's `glm`."""

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import pandas as pd
from numpy.typing import ArrayLike

from fedual.glm import export, plots, prediction
from fedual.glm.figures import Figures
from fedual.glm.heterogeneity import Heterogeneity, heterogeneity
from fedual.glm.inference import Use, chosen, interval, robust, table
from fedual.glm.summary import Summary
from fedual.glm.survival import baseline as baselines
from fedual.glm.survival import curves
from fedual.glm.survival.baseline import Baseline
from fedual.glm.survival.curves import Curves
from fedual.glm.tables import Source

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Fit(Figures):
    """A federated regression; `print(fit.summary())` shows all of it.

    Its fields are those of `Figures`. Estimates are maximum likelihood, as `glm()` finds on the pooled table, where
    that exists; the posterior under the prior is beside it.
    """

    @property
    def table(self) -> pd.DataFrame:
        """The coefficients, one row a term, with 95 % intervals; other levels: `summary(level).frame()`.

        Columns `estimate`, `se`, `lower`, `upper`, `z` and `p` are maximum likelihood; `posterior`, `posterior_sd`,
        `posterior_lower` and `posterior_upper` the posterior, NaN if the prior is flat. Where the maximum likelihood
        does not exist, the first four are the posterior's, `z` and `p` are NaN, and `table.attrs["estimate"]` is
        "posterior". `z` has a normal distribution, or, as `table.attrs["statistic"]` says, Student's t: with `df_resid`
        degrees of freedom for the gaussian and gamma families, and one less than the sites for clustered errors.
        """
        return table(self, 0.95)

    @property
    def coefficients(self) -> pd.Series:
        """The estimates by term; those of the posterior where the maximum likelihood does not exist."""
        return pd.Series(self.estimate.coefficients, index=pd.Index(self.terms, name="term"), name="estimate")

    @property
    def covariance(self) -> pd.DataFrame:
        """Their covariance, by term."""
        names = pd.Index(self.terms, name="term")
        return pd.DataFrame(self.estimate.covariance, index=names, columns=names)

    def confint(self, level: float = 0.95, use: Use | None = None) -> pd.DataFrame:
        """Intervals of the coefficients, `lower` and `upper`: of "ml" or the "posterior".

        By default of "ml" where it exists; for mixed models of few sites of the posterior, which integrates σ: those of
        "ml" are too narrow there.
        """
        lower, upper = interval(*chosen(self, use), level)
        return pd.DataFrame({"lower": lower, "upper": upper}, index=pd.Index(self.terms, name="term"))

    def summary(self, level: float = 0.95) -> Summary:
        """Everything on one page: text for `print`, HTML for notebooks and `.html()`, `.frame()` for the table."""
        return Summary(self, level)

    def robust(self, kind: Literal["hc0", "cluster"] = "hc0") -> "Fit":
        """The fit with sandwich standard errors.

        "hc0" is White's: right if the variance is not that of the family. "cluster" is right if rows of a site depend
        on each other, too; it needs many sites, and its intervals use t with K − 1 degrees of freedom. The posterior,
        the likelihood and the comparison of sites stay as they are.
        """
        return replace(self, ml=robust(self, kind), covariance_kind=kind)

    @property
    def heterogeneity(self) -> Heterogeneity:
        """Do the sites have the same coefficients? Score test, I², and estimates by site."""
        return heterogeneity(self)

    @property
    def site_table(self) -> pd.DataFrame:
        """One row a site: rows, mean response, or events of a survival model, and missing values of each column."""
        last = lambda site: {"mean_response": site.mean_response} if site.events is None else {"events": site.events}
        rows: list[dict[str, float]] = [{"n": site.n, **last(site)} for site in self.sites]
        columns = sorted({column for site in self.sites for column in site.missing})
        for row, site in zip(rows, self.sites, strict=True):
            row |= {f"missing {column}": site.missing.get(column, 0) for column in columns}
        return pd.DataFrame(rows, index=pd.Index([site.name for site in self.sites], name="site"))

    def predict(
        self,
        frame: pd.DataFrame,
        level: float = 0.95,
        kind: prediction.Kind | None = None,
        use: Use | None = None,
        intercept: float | None = None,
        new_site: bool = False,
    ) -> pd.DataFrame:
        """Predict for the rows of a table: `fit`, `se`, `lower` and `upper`; rows with missing values are NaN.

        Args:
            frame: The formula's variables; the response need not be there.
            level: Coverage of the intervals.
            kind: "mean", the default, is the mean of the response: its interval is that of the linear predictor,
                mapped, and its se is first-order. "link" is the linear predictor. "observation" is a new response: its
                interval for the gaussian family has t quantiles and the variance of mean and dispersion; for other
                families it has the quantiles of the family's distribution at the estimated mean (for successes in
                `trials`, of the count). `attrs["interval"]` of the result says which it is. Of survival models,
                "hazard-ratio", the default, and "link", its logarithm, are relative to the means of all columns.
            use: "ml" or "posterior"; by default maximum likelihood where it exists, and for mixed models of few sites
                the posterior, which integrates σ.
            intercept: The intercept of the site to predict for, on the scale of the link, for fits with
                `site_effects="fixed"`. It counts as known exactly.
            new_site: Predict for a site that was not among those of a mixed model: its effects are drawn anew, so that
                intervals are wider, and the mean is that over sites. Otherwise they are for a site whose effects are
                zero, as a typical one's are.
        """
        return prediction.predict(self, frame, level, kind, use, intercept, new_site)

    def baseline(self, table: Source) -> Baseline:
        """The baseline hazard of a site, for whoever has its table: a Cox fit lacks it, and sites do not tell it.

        Args:
            table: The site's table, or the rows of one of its strata.
        """
        return baselines.baseline(self, table)

    def curves(
        self,
        frame: pd.DataFrame,
        baseline: Baseline | None = None,
        times: ArrayLike | None = None,
        level: float = 0.95,
    ) -> Curves:
        """Predict the survival of the rows of a table, with bands; `.frame()` and `.plot()` show it.

        Args:
            frame: The formula's variables; the response and strata need not be there.
            baseline: Of a Cox fit, a site's `baseline`, which may be coarse; a common one is in the fit.
            times: When; by default the times of the baseline, or up to one piece beyond the last cut.
            level: Coverage of the bands, at each time.
        """
        return curves.curves(self, frame, baseline, times, level)

    def plot(
        self,
        kind: Literal["forest", "coefficients", "calibration", "residuals"] = "coefficients",
        term: str | None = None,
        level: float = 0.95,
        ax: "Axes | None" = None,
    ) -> "Axes":
        """Draw with matplotlib, and return the axes.

        Args:
            kind: "forest": one term's estimates by site, one Newton step from the pooled fit, and the pooled one.
                "coefficients": all slopes, maximum likelihood and posterior. "calibration": mean response against mean
                prediction, in bins. "residuals": the histogram of Pearson residuals.
            term: The term of a forest.
            level: Coverage of the intervals.
            ax: Where to draw; by default on a new figure.
        """
        return plots.plot(self, kind, term, level, ax)

    def to_csv(self, path: str | os.PathLike[str], level: float = 0.95) -> None:
        """Write the table of coefficients with all its digits."""
        export.to_csv(self, path, level)

    def to_json(self, path: str | os.PathLike[str], level: float = 0.95) -> None:
        """Write all figures as strict JSON, for R's `jsonlite::fromJSON`: data frames, matrices, null for NaN."""
        export.to_json(self, path, level)

    def to_latex(self, level: float = 0.95, caption: str | None = None, label: str | None = None) -> str:
        """The table of coefficients for LaTeX with booktabs: a `tabular`, within a `table` if it has a caption."""
        return export.to_latex(self, level, caption, label)

    def to_arviz(self, draws: int = 1000, seed: int = 0) -> "xarray.DataTree":
        """Draws of the posterior as one chain of ArviZ's group "posterior", a variable for each term.

        They are independent draws of a normal distribution; with a flat prior that of the maximum likelihood and its
        covariance. Needs the package arviz-base.
        """
        return export.to_arviz(self, draws, seed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fit to a JSON file, whole or not at all; `load` restores every bit."""
        export.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Fit":
        """Read a fit that `save` wrote."""
        return export.load(path, cls)

    def __repr__(self) -> str:
        about = f"{self.formula!r}, {self.family}, {self.n:,} rows at {len(self.sites)} sites"
        return f"Fit({about}, {self.convergence.words()})"

    def _repr_html_(self) -> str:
        return self.summary().html()
