"""Survival across sites: common baselines, what a fit offers, and what is refused."""

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch
from test_survival_against_r import TABLE, fitted, sites

from fedual import glm
from fedual.errors import DataError, FedualError, InputError, NotConvergedError
from fedual.glm.fitting import simulate
from fedual.glm.messages import packed, packed_lam, unpacked, unpacked_lam
from fedual.glm.settings import Settings
from fedual.glm.survival import data
from fedual.glm.survival.baseline import Baseline
from fedual.glm.survival.figures import Survival
from fedual.glm.survival.partial import PartialLikelihood
from fedual.glm.survival.times import Times

PLAIN = "Surv(time, status) ~ age + dose"
CUTS = [5.0, 10.0, 20.0]


def expanded(table: pd.DataFrame, cuts: list[float]) -> pd.DataFrame:
    """One row for each row and piece, as R's `survSplit` makes it."""
    parts = []
    for j, (low, high) in enumerate(pairwise([0.0, *cuts, np.inf])):
        exposure = np.clip(np.minimum(table["time"], high) - np.maximum(table["entry"], low), 0, None)
        died = table["status"] * (table["time"] > low) * (table["time"] <= high)
        parts.append(table.assign(piece=j, exposure=exposure, died=died)[exposure > 0])
    return pd.concat(parts)


def poisson(table: pd.DataFrame, **weights: Any) -> tuple[np.ndarray, Any]:
    """The design, centred, with a column for each piece, and statsmodels' fit."""
    centred = [table[name] - TABLE[name].mean() for name in ("age", "dose")]
    x = np.column_stack([*centred, pd.get_dummies(table["piece"])]).astype(float)
    model = sm.GLM(table["died"].to_numpy(), x, sm.families.Poisson(), exposure=table["exposure"].to_numpy(), **weights)
    return x, model.fit(tol=1e-14)


@pytest.mark.parametrize("weights", [None, "weight"])
def test_a_common_baseline_is_a_poisson_regression_of_pieces(weights: str | None):
    """statsmodels' GLM of all sites' rows, split at the cuts."""
    options = {"baseline": "piecewise", "pieces": CUTS, "weights": weights, "tol": 1e-9}
    fit, table = fitted("Surv(entry, time, status) ~ age + dose", sites(), **options), expanded(TABLE, CUTS)
    _, oracle = poisson(table, **({} if weights is None else {"freq_weights": table["weight"].to_numpy()}))
    survival = fit.survival
    assert survival is not None
    np.testing.assert_allclose(fit.coefficients, oracle.params[:2], rtol=1e-8)
    np.testing.assert_allclose(np.asarray(survival.log_hazards), oracle.params[2:], rtol=1e-8)
    np.testing.assert_allclose(np.asarray(survival.joint), oracle.cov_params(), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(fit.covariance, oracle.cov_params()[:2, :2], rtol=1e-7)


def test_robust_errors_of_a_common_baseline():
    """The sandwich over rows of the table, whose pieces' scores are added."""
    fit = fitted(PLAIN, sites(), baseline="piecewise", pieces=CUTS, tol=1e-9)
    table = expanded(TABLE.assign(entry=0), CUTS)
    x, oracle = poisson(table)
    residuals = table["died"].to_numpy() - oracle.fittedvalues
    scores: Any = pd.DataFrame(x * residuals[:, None]).groupby(table.index.to_numpy()).sum()
    half = scores.to_numpy() @ oracle.cov_params()
    np.testing.assert_allclose(fit.robust().covariance, (half.T @ half)[:2, :2], rtol=1e-6)


def test_fifty_pieces_are_as_good_as_cox_regression():
    rossi = data.rossi()
    formula = "Surv(week, arrest) ~ fin + age + race + wexp + mar + paro + prio"
    halves = {"one": rossi.iloc[::2], "two": rossi.iloc[1::2]}
    common = fitted(formula, halves, baseline="piecewise", pieces=50)
    whole = fitted(formula, {"all": rossi})
    assert (np.abs(common.coefficients - whole.coefficients) / whole.table["se"]).max() < 0.06
    np.testing.assert_allclose(common.table["se"], whole.table["se"], rtol=0.01)


def test_a_common_baseline_does_not_depend_on_the_sites():
    one = fitted(PLAIN, {"all": TABLE}, baseline="piecewise", pieces=CUTS, tol=1e-9)
    three = fitted(PLAIN, sites(), baseline="piecewise", pieces=CUTS, tol=1e-9)
    np.testing.assert_allclose(three.coefficients, one.coefficients, rtol=1e-9)
    assert three.loglik == pytest.approx(one.loglik, rel=1e-12)


def test_quantiles_of_event_times_are_cuts():
    fit = fitted(PLAIN, sites(), baseline="piecewise", pieces=4)
    assert fit.survival is not None
    events = TABLE.loc[TABLE["status"] == 1, "time"]
    np.testing.assert_allclose(fit.survival.cuts, np.quantile(events, [0.25, 0.5, 0.75]), atol=events.std() / 2)
    assert sum(fit.survival.events_by_piece) == len(events)  # type: ignore[arg-type]


def test_curves_of_a_common_baseline():
    """Against the integral of the hazard, and the variance by a numerical derivative."""
    fit = fitted(PLAIN, sites(), baseline="piecewise", pieces=CUTS)
    survival = fit.survival
    assert survival is not None
    new = pd.DataFrame({"age": [50.0, 70.0], "dose": [1.0, 3.0]})
    theta = np.concatenate([fit.coefficients, survival.log_hazards])  # type: ignore[list-item]

    def cumulative(theta: np.ndarray, row: int, time: float) -> float:
        grid = (np.arange(20_000) + 0.5) * time / 20_000
        rate = np.exp(theta[2:])[np.searchsorted(CUTS, grid)] * np.exp((new.iloc[row] - survival.means) @ theta[:2])
        return float(rate.mean() * time)

    found = fit.curves(new, times=[3, 12, 40])
    for row in (0, 1):
        for k, time in enumerate((3, 12, 40)):
            h = cumulative(theta, row, time)
            change = lambda e: cumulative(theta + e, row, time) - cumulative(theta - e, row, time)  # noqa: B023
            slope = np.array([change(e) / 2e-5 for e in 1e-5 * np.eye(len(theta))])
            assert found.survival[row, k] == pytest.approx(np.exp(-h), rel=1e-5)
            assert found.se[row, k] == pytest.approx(np.exp(-h) * np.sqrt(slope @ survival.joint @ slope), rel=1e-4)


@pytest.mark.parametrize("diagonal", [0, 1, 4])
def test_products_of_pieces_are_not_sent(diagonal: int):
    matrix = torch.randn(5, 5)
    matrix = matrix + matrix.mT
    matrix[5 - diagonal :, 5 - diagonal :] = torch.diag(matrix.diagonal()[5 - diagonal :])
    sent = packed(matrix, diagonal)
    assert len(sent) == 15 - diagonal * (diagonal - 1) // 2
    torch.testing.assert_close(unpacked(sent, diagonal), matrix, rtol=0, atol=0)
    lam = torch.cat([torch.randn(1, 5), matrix])
    torch.testing.assert_close(unpacked_lam(packed_lam(lam, diagonal), diagonal), lam, rtol=0, atol=0)


CODES = {
    "0/1": (lambda s: s, {}),
    "1/2": (lambda s: s + 1, {}),
    "booleans": (lambda s: s.astype(bool), {}),
    "texts": (lambda s: s.map({0: "lost", 1: "dead"}), {"event": "dead"}),
    "three codes": (lambda s: s + 3 * (TABLE["row"] % 5 == 0) * (1 - s), {"event": 1}),
}


@pytest.mark.parametrize("code", CODES)
def test_codes_of_events(code: str):
    coded, options = CODES[code]
    TABLE["row"] = np.arange(len(TABLE))
    table = TABLE.assign(status=coded(TABLE["status"]))
    found = glm.fit(PLAIN, {str(k): rows for k, rows in table.groupby("site")}, prior="flat", **options)
    np.testing.assert_array_equal(found.coefficients, fitted(PLAIN, sites()).coefficients)


def test_a_comparison_is_an_event():
    found = fitted("Surv(time, code == 2) ~ age + dose", sites())
    np.testing.assert_array_equal(found.coefficients, fitted(PLAIN, sites()).coefficients)


def test_a_site_with_one_code_only():
    """All of its rows have an event, coded 2: the other sites know that 1 is none."""
    tables = sites()
    tables["west"] = tables["west"].query("code == 2")
    fit = fitted("Surv(time, code) ~ age + dose", tables)
    assert fit.site_table.loc["west", "events"] == len(tables["west"])


def test_a_site_without_events_has_no_part():
    tables = sites() | {"east": TABLE.head(20).assign(status=0)}
    fit, without = fitted(PLAIN, tables, tol=1e-9), fitted(PLAIN, sites(), tol=1e-9)
    np.testing.assert_allclose(fit.coefficients, without.coefficients, rtol=1e-9)
    assert fit.loglik == pytest.approx(without.loglik, rel=1e-12)
    assert "No event at east, which has no part in the estimates." in str(fit.summary()).replace("\n  ", " ")


def test_a_site_of_one_row():
    """It is compared with nobody."""
    fit = fitted(PLAIN, sites() | {"east": TABLE.head(1)}, tol=1e-9)
    np.testing.assert_allclose(fit.coefficients, fitted(PLAIN, sites(), tol=1e-9).coefficients, rtol=1e-9)


def test_rows_of_one_person_over_time():
    """A person in two rows, (0, 10] and (10, t], is that person: what changes is the covariate."""
    table = TABLE.assign(entry=0, id=np.arange(len(TABLE)))
    late = table["time"] > 10
    first = table.assign(time=np.minimum(table["time"], 10), status=table["status"] * ~late)
    split = pd.concat([first, table[late].assign(entry=10)])
    tables = {str(k): rows for k, rows in split.groupby("site")}
    found = fitted("Surv(entry, time, status) ~ age + dose", tables, tol=1e-9)
    np.testing.assert_allclose(found.coefficients, fitted(PLAIN, sites(), tol=1e-9).coefficients, rtol=1e-9)


def test_zero_times_are_times():
    tables = {k: rows.assign(time=rows["time"] - rows["time"].min()) for k, rows in sites().items()}
    np.testing.assert_allclose(
        fitted(PLAIN, tables, tol=1e-9).coefficients, fitted(PLAIN, sites(), tol=1e-9).coefficients, rtol=1e-9
    )


def test_a_zero_time_has_no_logarithm():
    tables = {k: rows.assign(time=rows["time"] - rows["time"].min(), status=1) for k, rows in sites().items()}
    with pytest.raises(DataError, match=r"row \d+: an event at time 0 has no logarithm: use transform='identity'"):
        glm.fit(PLAIN, tables, transform="log")


def test_a_likelihood_that_rises_for_ever():
    """No event in a level: told, and the fit under the prior in its place."""
    table = TABLE.assign(safe=((TABLE["status"] == 0) & (np.arange(len(TABLE)) % 2 == 0)).astype(int))
    tables = {str(k): rows for k, rows in table.groupby("site")}
    fit = glm.fit("Surv(time, status) ~ age + safe", tables)
    assert fit.ml is None
    assert fit.separation is not None
    assert "rises for ever with 'safe'" in fit.separation
    assert fit.convergence.converged
    with pytest.raises(NotConvergedError, match="fit under a prior"):
        fitted("Surv(time, status) ~ age + safe", tables)


def test_events_in_the_order_of_a_covariate():
    table = pd.DataFrame({"time": np.arange(1.0, 41), "status": 1, "x": -np.arange(40.0), "z": np.arange(40) % 3})
    fit = glm.fit("Surv(time, status) ~ x + z", {"a": table.iloc[::2], "b": table.iloc[1::2]})
    assert fit.ml is None
    assert fit.convergence.converged


def test_both_estimates():
    fit = glm.fit(PLAIN, sites(), estimate="both", prior=0.2)
    assert fit.posterior_kind == "laplace"
    assert (np.abs(fit.posterior.coefficients) < np.abs(fit.coefficients)).all()  # type: ignore[union-attr]


BAD: dict[str, tuple[str, dict[str, Any], type[FedualError], str]] = {
    "negative time": (PLAIN, {"time": -1}, DataError, r"'north', row 1: the time 'time' is negative: correct it"),
    "infinite time": (PLAIN, {"time": np.inf}, DataError, r"'time', row 1: an infinite value"),
    "late entry": ("Surv(entry, time, status) ~ age", {"entry": 99}, DataError, r"row 1: the entry 'entry' is not bef"),
    "all censored": (PLAIN, {"status": 0}, DataError, "No site has an event of Surv"),
    "codes": (PLAIN, {"status": [0, 1, 2]}, InputError, "codes '0', '1', '2': name the one that counts by event="),
    "texts": (PLAIN, {"status": ["dead", "lost"]}, InputError, "codes 'dead', 'lost': name the one"),
    "a number of events": ("Surv(time, status * 2) ~ age", {}, DataError, "has an event that is neither 0 nor 1"),
    "swapped": ("Surv(status, time) ~ age", {}, DataError, r"'time' has more than 10 values: Surv.* an event last"),
    "one argument": ("Surv(time) ~ age", {}, InputError, r"write Surv\(time, event\) or Surv\(entry, time, event\)"),
    "on the right": ("age ~ Surv(time, status)", {}, InputError, "needs Surv.* as the response|on the right"),
    "strata alone": (PLAIN.replace("age", "strata(sex)").replace("+ dose", ""), {}, DataError, "has no covariate"),
    "crossed strata": ("Surv(time, status) ~ age:strata(sex)", {}, InputError, "must be a term by itself"),
    "strata of a GLM": ("status ~ age + strata(sex)", {}, InputError, r"needs Surv\(time, event\) as the response"),
    "no intercept": ("Surv(time, status) ~ 0 + age", {}, InputError, "hazards have no intercept"),
    "constant at each site": (
        f"{PLAIN} + cluster",
        {},
        DataError,
        "'cluster' cannot be .* within the strata",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str):
    formula, columns, error, words = BAD[what]
    tables = {name: rows.assign(cluster=i) for i, (name, rows) in enumerate(sites().items())}
    for name, value in columns.items():
        for rows in tables.values():
            rows[name] = np.resize(np.array(value, object), len(rows)) if isinstance(value, list) else value
            if isinstance(value, list) and not isinstance(value[0], str):
                rows[name] = rows[name].astype(int)
    with pytest.raises(error, match=words):
        glm.fit(formula, tables)


SETTINGS = {
    "site": ({"site": "fixed"}, "each site has a baseline hazard of its own already"),
    "family": ({"family": "poisson"}, "leave the family out"),
    "ties": ({"ties": "exact"}, "ties = 'exact'"),
    "baseline": ({"baseline": "weibull"}, "baseline = 'weibull'"),
    "pieces": ({"pieces": 0}, "pieces = 0: give a number from 1 to 200"),
    "cuts": ({"pieces": [3, 2]}, "each later than the one before"),
    "transform": ({"transform": "km"}, "transform = 'km'"),
    "variational": ({"estimate": "variational"}, "use estimate='both'"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_bad_settings(what: str):
    options, words = SETTINGS[what]
    with pytest.raises(InputError, match=words):
        Settings(PLAIN, **options)


def test_settings_of_survival_need_times():
    with pytest.raises(InputError, match=r"baseline = 'piecewise' needs times: write Surv"):
        Settings("y ~ x", baseline="piecewise")
    with pytest.raises(InputError, match=r"family = 'cox' needs times"):
        Settings("y ~ x", "cox")


@pytest.mark.parametrize("options", [{}, {"baseline": "piecewise", "pieces": CUTS}])
def test_settings_survive_json(options: dict[str, Any]):
    settings = Settings(PLAIN, **options)
    assert Settings.from_dict(settings.to_dict()) == settings


def test_pieces_without_events_are_refused():
    with pytest.raises(DataError, match=r"No site has an event in the piece \(0, 0.001\]: take fewer pieces"):
        fitted(PLAIN, sites(), baseline="piecewise", pieces=[0.001, 10])


@pytest.fixture(scope="module", params=["stratified", "piecewise"])
def fit(request: pytest.FixtureRequest) -> glm.Fit:
    torch.set_default_dtype(torch.float64)
    return glm.fit("Surv(time, status) ~ age + dose + stage", sites(), baseline=request.param, pieces=CUTS)


def test_the_summary_has_what_a_survival_model_needs(fit: glm.Fit):
    shown = str(fit.summary())
    for words in ("Hazard ratios", "Likelihood ratio", "Wald", "Score", "Concordance", "events", "Heterogeneity"):
        assert words in shown
    assert ("Proportional hazards" in shown) == (fit.family == "cox")
    assert ("Baseline hazard" in shown) == (fit.family != "cox")
    assert "Deviance" not in shown
    assert "<table" in fit.summary().html()


def test_a_fit_survives_its_file(fit: glm.Fit, tmp_path):
    fit.save(tmp_path / "fit.json")
    again = glm.Fit.load(tmp_path / "fit.json")
    assert str(again.summary()) == str(fit.summary())
    assert isinstance(again.survival, Survival)
    np.testing.assert_array_equal(again.survival.means, fit.survival.means)  # type: ignore[union-attr]
    fit.to_json(tmp_path / "figures.json", 0.95)
    fit.to_csv(tmp_path / "table.csv")
    assert '"events"' in (tmp_path / "figures.json").read_text()


def test_what_else_a_fit_offers(fit: glm.Fit):
    assert "stage" in fit.to_latex()
    pytest.importorskip("arviz_base")
    assert fit.to_arviz(draws=10).posterior.sizes["draw"] == 10


def test_what_a_survival_model_does_not_have(fit: glm.Fit):
    with pytest.raises(InputError, match=r"kind = 'mean' of the family .*: use one of hazard-ratio, link, or curves"):
        fit.predict(TABLE, kind="mean")
    with pytest.raises(InputError, match="survival has none"):
        fit.plot("residuals")
    wrong = None if fit.family == "cox" else Baseline(*[np.zeros(1)] * 5)
    with pytest.raises(InputError, match="baseline"):
        fit.curves(TABLE, wrong)


def test_plots(fit: glm.Fit):
    pytest.importorskip("matplotlib").use("agg")
    own = fit.baseline(sites()["north"]) if fit.family == "cox" else None
    axes = fit.curves(TABLE.head(3), own).plot()
    assert len(axes.get_lines()) == 3
    assert axes.get_legend() is not None
    assert fit.plot("forest", term="age").get_xlabel().startswith("hazard ratio")


def test_anova():
    smaller, larger = fitted("Surv(time, status) ~ age", sites()), fitted(PLAIN, sites())
    found = glm.anova(smaller, larger)
    assert (found.test, found.df) == ("LR χ²", 1)
    assert found.statistic == pytest.approx(2 * (larger.loglik - smaller.loglik))


def test_a_coarse_baseline_shows_no_single_event(tmp_path):
    fit = fitted(PLAIN, sites())
    own = fit.baseline(sites()["north"])
    coarse = own.coarse(8)
    assert (np.diff(coarse.events, prepend=0) >= 8).all()
    assert coarse.events[-1] == own.events[-1]
    coarse.save(tmp_path / "north.json")
    again = Baseline.load(tmp_path / "north.json")
    np.testing.assert_array_equal(again.hazard, coarse.hazard)
    whole, part = (fit.curves(TABLE.head(2), one, times=[again.times[1]]).survival for one in (own, again))
    np.testing.assert_array_equal(whole, part)


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "is no JSON"), ('{"format": "x"}', "format"), ('{"format": "fedual-baseline-1"}', "times")],
)
def test_a_file_that_is_no_baseline(content: str, words: str, tmp_path):
    (tmp_path / "north.json").write_text(content)
    with pytest.raises(DataError, match=words):
        Baseline.load(tmp_path / "north.json")


def test_strata_have_baselines_of_their_own():
    fit = fitted("Surv(time, status) ~ age + strata(sex)", sites())
    north = sites()["north"]
    with pytest.raises(InputError, match="several strata of sex"):
        fit.baseline(north)
    assert len(fit.baseline(north.query("sex == 'male'")).times)


def test_no_row_of_the_site_is_in_its_messages():
    """The loss, λ_k and S_k, twice in the first round; five figures and four matrices at the end."""
    from fedual.glm import models
    from fedual.glm.fitting import asking
    from fedual.glm.messages import Message
    from fedual.glm.site import Site

    ask, said = asking([Site(name, table) for name, table in sites().items()]), []

    def listening(message: Message) -> dict[str, Message]:
        replies = ask(message)
        said.extend(reply for reply in replies.values() if message.kind in ("round", "figures"))
        return dict(replies)

    models.estimate(listening, Settings("Surv(time, status) ~ age + dose + sex", transform="log"))
    numbers = {(reply.kind, reply.numbers) for reply in said}
    assert numbers == {("round", 10), ("round", 20), ("figures", 4 + 3 * 6 + 3)}
    assert simulate(Settings(PLAIN, transform="none"), sites()).survival.trends == ()  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{}, {"baseline": "piecewise", "pieces": CUTS}])
def test_sites_gradients_and_hessians_add_up(options: dict[str, Any]):
    """To zero and to the information, from which a common baseline is taken out: Q needs both."""
    fit = fitted(PLAIN, sites(), tol=1e-9, **options)
    gradients = np.array([site.gradient for site in fit.sites])
    hessians = np.array([site.hessian for site in fit.sites])
    np.testing.assert_allclose(gradients.sum(0), 0, atol=1e-6 * np.abs(gradients).max())
    np.testing.assert_allclose(hessians.sum(0), np.linalg.inv(fit.covariance), rtol=1e-6)
    assert fit.heterogeneity.df == 4


def test_a_row_alone_at_risk_weighs_nothing():
    """Σ w̄ p(1 − p) over the events, row by row."""
    rng = np.random.default_rng(0)
    time, event, x = np.arange(1.0, 9), np.array([1, 0, 1, 1, 0, 1, 0, 1.0]), rng.normal(size=(8, 2))
    none = torch.full((8,), -torch.inf)
    times = Times(torch.tensor(time), none, torch.zeros(8, dtype=torch.int64))
    partial = PartialLikelihood(torch.tensor(x), torch.tensor(event), torch.ones(8), torch.zeros(8), times)
    theta = np.array([0.7, -0.4])
    expected = np.zeros(8)
    for i in np.flatnonzero(event):
        risk = np.exp(x @ theta) * (time >= time[i])
        share = risk / risk.sum()
        expected += share * (1 - share)
    np.testing.assert_allclose(partial.expand(torch.tensor(theta)).weights, expected, atol=1e-14)
