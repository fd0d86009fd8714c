"""The rounds of a federated regression: one engine, safeguards, and what a site may lose."""

import numpy as np
import pandas as pd
import pytest
import torch

from fedual import algorithm, glm
from fedual.errors import DataError, InputError, NotConvergedError
from fedual.families import Full
from fedual.glm import models
from fedual.glm.estimation import Estimation
from fedual.glm.fitting import asking, simulate
from fedual.glm.messages import Message, unpacked_lam
from fedual.glm.models import model_of
from fedual.glm.plan import METHODS
from fedual.glm.settings import Settings
from fedual.glm.site import Site
from fedual.solvers import Linear


def tables(rows=(60, 40, 100), seed: int = 0) -> dict[str, pd.DataFrame]:
    generator = np.random.default_rng(seed)
    found = {}
    for k, n in enumerate(rows):
        frame = pd.DataFrame({"a": generator.normal(k / 2, 1, n), "b": generator.normal(3, 2, n)})
        f = 0.4 * frame.a - 0.3 * frame.b + 0.5
        frame["sick"] = (generator.random(n) < 1 / (1 + np.exp(-f))).astype(int)
        frame["count"] = generator.poisson(np.exp(f))
        found[f"site {k}"] = frame
    return found


def members(**keywords) -> list[Site]:
    return [Site(name, frame, **keywords) for name, frame in tables().items()]


def test_a_round_is_that_of_the_algorithm():
    """The same λ_g as `algorithm.step` with the same method on the same losses, round for round."""
    named, sites = tables(), members()
    settings = Settings("sick ~ a + b", family="binomial")
    started = Estimation(asking(sites), settings)
    rounds, moments = started.rounds, started.moments
    scaled = [(site._read(model_of(started.model)).x - moments.centre) / moments.scale for site in sites]
    sick = [torch.tensor(frame["sick"].to_numpy(float)) for frame in named.values()]
    losses = Linear.from_clients("binomial", list(zip(scaled, sick, strict=True)))
    state = algorithm.State(rounds.state, algorithm.ClientState(
        torch.zeros(3, *rounds.start.shape, dtype=torch.float64), rounds.start.expand(3, -1, -1).clone(), {}
    ))  # fmt: skip
    for method in ("cavity", "cavity", "newton", "cavity"):
        rounds.exchange(method)
        state, _ = algorithm.step(METHODS[method], state, losses)
        torch.testing.assert_close(rounds.state.lam_g, state.lam_g, rtol=1e-9, atol=1e-9)
        for eta, own in zip(state.eta, rounds.etas.values(), strict=True):
            torch.testing.assert_close(own, eta, rtol=1e-9, atol=1e-9)


def test_a_rare_level_whose_rows_have_one_response_at_each_site_costs_no_round():
    """Sites' own modes are then far out, where those rows have no curvature."""
    generator = np.random.default_rng(0)
    named = {}
    for k in range(10):
        a, rare = generator.normal(size=200), (np.arange(200) < 2).astype(float)
        chance = 1 / (1 + np.exp(-0.5 * a))
        y = np.where(rare == 1, k % 2, generator.random(200) < chance)
        named[f"site {k}"] = pd.DataFrame({"y": y.astype(float), "a": a, "rare": rare})
    settings = lambda **keywords: Settings("y ~ a + rare", family="binomial", prior="flat", **keywords)
    exact = simulate(settings(tol=1e-9), named).estimate
    early = simulate(settings(max_rounds=3, cavity_rounds=2), named).estimate
    assert (np.abs(early.coefficients - exact.coefficients) / exact.se).max() < 1e-6


def test_a_site_that_forgot_its_dual_costs_accuracy_but_no_correctness():
    """A site is replaced by one without memory in every round: the same fit in the end."""
    named = tables()
    whole = glm.fit("sick ~ a + b", named, family="binomial", guards=glm.Guards())

    def ask(message: Message) -> dict[str, Message]:
        return {name: Site(name, frame).answer(message) for name, frame in named.items()}

    forgetful = models.estimate(ask, Settings("sick ~ a + b", family="binomial", tol=1e-9))
    np.testing.assert_allclose(forgetful.coefficients, whole.coefficients, rtol=1e-9)


def test_a_site_remembers_its_dual_in_a_file(tmp_path):
    named = tables()
    path = lambda name: tmp_path / f"{name}.safetensors"
    settings = Settings("sick ~ a + b", family="binomial")

    def ask(message: Message) -> dict[str, Message]:
        return {name: Site(name, frame, memory=path(name)).answer(message) for name, frame in named.items()}

    restarted = models.estimate(ask, settings)
    kept = models.estimate(asking(members()), settings)
    assert [step["loss"] for step in restarted.convergence.history] == [
        step["loss"] for step in kept.convergence.history
    ]
    np.testing.assert_array_equal(restarted.coefficients, kept.coefficients)
    first = path("site 0")
    first.write_bytes(first.read_bytes()[:-1] + b"x")  # damaged: as if there were none
    damaged = models.estimate(ask, settings)
    np.testing.assert_allclose(damaged.coefficients, kept.coefficients, rtol=1e-9)


def test_the_same_question_has_the_same_answer_bit_for_bit():
    def once() -> list[str]:
        said = []
        sites = members()
        inner = asking(sites)

        def ask(message: Message) -> dict[str, Message]:
            replies = dict(inner(message))
            said.extend(reply.digest() for reply in replies.values())
            return replies

        models.estimate(ask, Settings("count ~ a + b", family="poisson"))
        return said

    assert once() == once()


def test_from_a_bad_point_newton_steps_with_a_line_search_lead_back():
    """The summed loss rises: the rounds go back to the best point, search along Newton's step, and still arrive."""
    settings = Settings("count ~ a + b", family="poisson", max_rounds=30, cavity_rounds=3)
    started = Estimation(asking(members()), settings)
    rounds = started.rounds
    good = glm.fit("count ~ a + b", tables(), family="poisson")
    rounds.exchange("cavity")
    far = rounds.mean + torch.tensor([9.0, 2.0, -2.0], dtype=torch.float64)
    rounds.state = rounds.state._replace(lam_g=Full().natural(far, rounds.precision))
    fit = started.fit()
    kinds = [step["kind"] for step in fit.convergence.history]
    assert kinds.count("newton") > 1
    assert fit.convergence.converged
    np.testing.assert_allclose(fit.coefficients, good.coefficients, rtol=1e-8)


def test_a_loss_that_overflows_is_a_bad_point_and_no_failure():
    site = members()[0]
    started = Estimation(asking([site]), Settings("count ~ a + b", family="poisson"))
    rounds = started.rounds
    rounds.exchange("cavity")
    far = torch.tensor([800.0, 0.0, 0.0], dtype=torch.float64)
    rounds.state = rounds.state._replace(lam_g=Full().natural(far, rounds.precision))
    assert rounds.exchange("cavity") == np.inf


def test_rounds_that_do_not_suffice_are_said():
    fit = glm.fit("sick ~ a + b", tables(), family="binomial", max_rounds=2)
    assert not fit.convergence.converged
    assert fit.convergence.rounds == 2
    assert any("raise max_rounds" in warning for warning in fit.warnings)


def separated(quasi: bool) -> dict[str, pd.DataFrame]:
    named = tables()
    for frame in named.values():
        frame["sick"] = (frame.b > 3).astype(int)
        if quasi:
            frame.loc[frame.index[:5], "b"] = 3.0
            frame.loc[frame.index[:5], "sick"] = [0, 1, 0, 1, 0]
    return named


@pytest.mark.parametrize("quasi", [False, True])
def test_separation_is_named_and_the_estimate_is_that_under_the_prior(quasi):
    named = separated(quasi)
    fit = glm.fit("sick ~ a + b", named, family="binomial")
    assert fit.ml is None
    assert fit.separation is not None
    assert "separated" in fit.separation
    assert fit.convergence.converged
    direct = glm.fit("sick ~ a + b", named, family="binomial", estimate="posterior", max_rounds=12)
    np.testing.assert_allclose(fit.estimate.coefficients, direct.estimate.coefficients, rtol=1e-4)
    with pytest.raises(NotConvergedError, match=r"separated by .*fit under a prior"):
        glm.fit("sick ~ a + b", named, family="binomial", prior="flat")


@pytest.mark.parametrize("seed", range(4))
def test_a_separating_line_is_told_with_a_prior_and_without(seed: int):
    """Its coefficients run away by steps of one standard error and more, which is no sign of a maximum either."""
    random = np.random.default_rng(seed)
    frames = [pd.DataFrame(random.normal(size=(200, 2)), columns=["a", "b"]) for _ in range(3)]
    named = {f"site {k}": frame.assign(sick=(frame.a > 0).astype(int)) for k, frame in enumerate(frames)}
    fit = glm.fit("sick ~ a + b", named, family="binomial")
    assert "separated by" in (fit.separation or "")
    assert fit.convergence.converged
    with pytest.raises(NotConvergedError, match=r"separated by .*fit under a prior"):
        glm.fit("sick ~ a + b", named, family="binomial", prior="flat")


def test_a_level_without_one_class_has_a_converged_estimate_under_the_prior():
    """The rounds notice it late, and need some of their own after that."""
    named = tables()
    for frame in named.values():
        frame["group"] = np.where(np.arange(len(frame)) % 9 == 0, "rare", "usual")
        frame.loc[frame.group == "rare", "sick"] = 1
    fit = glm.fit("sick ~ a + group", named, family="binomial")
    assert "separated by 'group[T.usual]'" in (fit.separation or "")
    assert fit.convergence.converged
    direct = glm.fit("sick ~ a + group", named, family="binomial", estimate="posterior", max_rounds=12)
    np.testing.assert_allclose(fit.coefficients, direct.coefficients, rtol=1e-6)


def test_terms_that_others_determine_are_named():
    with pytest.raises(DataError, match=r"'a', 'I\(2 \* a\)' cannot be told apart"):
        glm.fit("sick ~ a + b + I(2 * a)", tables(), family="binomial")
    fit = glm.fit("sick ~ a + b + I(2 * a)", tables(), family="binomial", estimate="posterior")
    assert fit.convergence.converged


@pytest.mark.parametrize(("family", "response"), [("gaussian", "b"), ("binomial", "sick"), ("poisson", "count")])
def test_a_column_that_is_constant_at_each_site_follows_from_the_sites_intercepts(family, response):
    """Rounding leaves it a trace of information, and would leave it an estimate."""
    named = {name: frame.assign(beds=300.7 + k / 3) for k, (name, frame) in enumerate(tables().items())}
    with pytest.raises(DataError, match="'beds' cannot be estimated, because it follows from the intercepts"):
        glm.fit(f"{response} ~ a + beds", named, family=family, site="fixed")


def test_a_narrow_prior_of_one_term_leaves_the_others_their_estimates():
    keywords = {"prior": {"b": (0.0, 1e-9)}, "estimate": "posterior"}
    fit = glm.fit("sick ~ a + b", tables(), family="binomial", **keywords)
    assert abs(fit.table.loc["b", "estimate"]) < 1e-9
    without = glm.fit("sick ~ a", tables(), family="binomial", estimate="posterior")
    np.testing.assert_allclose(fit.table.loc["a", "estimate"], without.table.loc["a", "estimate"], rtol=1e-6)


def test_the_remedy_for_too_many_terms_is_one_that_the_family_has():
    few = {name: frame.iloc[:1] for name, frame in tables().items()}
    for family, response, remedy in (("gaussian", "b", "use fewer terms."), ("poisson", "count", "'posterior'.")):
        with pytest.raises(DataError, match=rf"3 rows cannot tell 4 coefficients apart: .*{remedy}$"):
            glm.fit(f"{response} ~ a + I(a**2) + sin", {n: f.assign(sin=np.sin(f.a)) for n, f in few.items()}, family)


def test_an_offset_beyond_all_counts_is_named_by_site():
    named = {name: frame.assign(long=1e4 * frame.a) for name, frame in tables().items()}
    with pytest.raises(NotConvergedError, match=r"likelihood of site 'site 0' is zero.*size of the offset"):
        glm.fit("count ~ b", named, family="poisson", offset="long")


def test_a_site_whose_own_mode_is_at_the_edge_of_the_link_tells_its_sums_at_the_federations():
    generator = np.random.default_rng(3)
    named = {
        f"site {k}": pd.DataFrame({"x": -generator.normal(50, 10, n), "y": np.random.default_rng(3).poisson(0.05, n)})
        for k, n in enumerate((200, 120, 90))
    }
    fit = glm.fit("y ~ x", named, family="poisson", link="identity")
    assert fit.convergence.converged
    pooled = pd.concat(named.values())
    x = np.column_stack([np.ones(len(pooled)), pooled.x])
    score = x.T @ (1 - pooled.y / (x @ fit.coefficients))
    assert np.abs(fit.estimate.covariance @ score / fit.estimate.se).max() < 1e-7


@pytest.mark.parametrize(("family", "value"), [("gaussian", 3.0), ("gaussian", 0.0), ("gamma", 2.0)])
def test_a_constant_response_is_named(family, value):
    named = {name: frame.assign(y=value) for name, frame in tables().items()}
    with pytest.raises(DataError, match="response of 'y ~ a' has the same value at all sites"):
        glm.fit("y ~ a", named, family=family)


def test_numbers_beyond_float64_are_an_error_of_one_sentence():
    named = {name: frame.assign(y=1e120 * np.exp(frame.a)) for name, frame in tables().items()}
    with pytest.raises(DataError, match=r"rescale the response"):
        glm.fit("y ~ b", named, family="gamma")


@pytest.mark.parametrize(
    ("family", "change", "keywords", "objection"),
    [
        ("binomial", lambda frame: frame.sick + 1, {}, "'site 0': the response 'y' is outside 0 … 1: .*event="),
        ("binomial", lambda frame: frame["count"] - 1, {"trials": "m"}, "'site 0', row .* 'y' is negative"),
        ("poisson", lambda frame: -frame["count"], {}, "'site 0': the response 'y' is negative"),
        ("gamma", lambda frame: frame["count"] - 1000, {}, "'site 0': the response 'y' is not positive"),
    ],
)
def test_a_response_of_another_family_is_named_before_its_mean_is_used(family, change, keywords, objection):
    named = {name: frame.assign(y=change(frame), m=1000) for name, frame in tables().items()}
    with pytest.raises(DataError, match=objection):
        glm.fit("y ~ a", named, family=family, **keywords)


def test_a_constant_column_is_named():
    named = {name: frame.assign(c=1.5) for name, frame in tables().items()}
    with pytest.raises(DataError, match="'c' is constant at all sites"):
        glm.fit("sick ~ a + c", named, family="binomial")


def test_one_class_at_all_sites_is_refused():
    named = {name: frame.assign(sick=0) for name, frame in tables().items()}
    with pytest.raises((DataError, InputError), match=r"'sick'|same value"):
        glm.fit("sick ~ a", named, family="binomial")


def test_counts_without_overdispersion_are_sent_to_poisson():
    with pytest.raises(NotConvergedError, match="family='poisson'"):
        glm.fit("count ~ a + b", tables(), family="negative-binomial")


@pytest.mark.parametrize(
    ("family", "frame_column", "value", "message"),
    [
        ("poisson", "count", -1.0, "negative"),
        ("gamma", "count", 0.0, "not positive"),
        ("binomial", "count", 7.0, "0 … 1"),
    ],
)
def test_a_response_of_another_family_is_refused_by_site_and_column(family, frame_column, value, message):
    named = tables()
    for frame in named.values():
        frame[frame_column] = 0.5
    named["site 1"].loc[0, frame_column] = value
    with pytest.raises(DataError, match=f"'site 1'.*'{frame_column}'.*{message}"):
        glm.fit(f"{frame_column} ~ a", named, family=family)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "binomal"}, "did you mean 'binomial'"),
        ({"family": "poisson", "link": "logit"}, "choose one of log, sqrt, identity"),
        ({"estimate": "map"}, "estimate = 'map'"),
        ({"site": "randm"}, "site = 'randm'"),
        ({"prior": "flat", "estimate": "posterior"}, "flat prior"),
        ({"prior": "wide"}, "give 'default', 'flat'"),
        ({"prior": -1.0}, "positive number"),
        ({"max_rounds": 1}, "at least 2"),
        ({"family": "poisson", "trials": "n"}, "only binomial counts have trials"),
        ({"family": "gamma", "estimate": "variational"}, "estimate='both'"),
    ],
)
def test_settings_are_checked_before_any_work(settings, message):
    with pytest.raises(InputError, match=message):
        glm.fit("y ~ x", {}, **settings)


def test_settings_come_back_from_json():
    settings = Settings("y ~ x", family="binomial", prior={"x": (0.0, 0.5)}, levels={"g": ["a", "b"]}, tol=1e-6)
    assert Settings.from_dict(settings.to_dict()) == settings


def test_a_prior_in_own_units_pulls_its_term():
    free, held = (
        glm.fit("sick ~ a + b", tables(), family="binomial", estimate="posterior", prior=prior).posterior
        for prior in ("default", {"a": (1.0, 1e-4)})
    )
    assert free is not None
    assert held is not None
    assert abs(free.coefficients[1] - 1) > 0.1
    assert held.coefficients[1] == pytest.approx(1, abs=1e-3)
    assert held.se[1] == pytest.approx(1e-4, rel=1e-3)
    with pytest.raises(InputError, match="prior names the slope 'c'"):
        glm.fit("sick ~ a + b", tables(), family="binomial", prior={"c": (0.0, 1.0)})


def test_the_variational_posterior_is_that_of_all_rows_at_one_site():
    named = tables()
    pooled = {"all": pd.concat(named.values(), ignore_index=True)}
    apart, together = (glm.fit("sick ~ a + b", t, family="binomial", estimate="variational") for t in (named, pooled))
    assert apart.posterior_kind == "variational"
    own, pooled = apart.posterior, together.posterior
    assert own is not None
    assert pooled is not None
    assert (np.abs(own.coefficients - pooled.coefficients) / own.se).max() < 2e-3
    np.testing.assert_allclose(own.se, pooled.se, rtol=1e-3)


def test_an_unknown_message_is_refused():
    with pytest.raises(InputError, match="same version of fedual"):
        members()[0].answer(Message("rows"))
    with pytest.raises(InputError, match=r"'site 0'.*cannot be read"):
        members()[0].answer(Message("round"))


def test_uploads_are_the_sites_quadratics_and_nothing_more():
    """What a cavity round sends: P(P+3)/2 numbers of η_k, and the loss."""
    said: list[Message] = []
    inner = asking(members())

    def ask(message: Message) -> dict[str, Message]:
        replies = dict(inner(message))
        said.extend(reply for reply in replies.values() if message.kind == "round")
        return replies

    models.estimate(ask, Settings("sick ~ a + b", family="binomial"))
    assert said
    assert {reply.numbers for reply in said} == {3 * 6 // 2 + 1}
    assert all(unpacked_lam(reply.tensors["eta"]).shape == (4, 3) for reply in said)


@pytest.mark.parametrize("link", ["identity", "log"])
@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_the_unit_of_a_gaussian_response_changes_no_round(link, unit):
    """The certificate counts standard errors, which a tolerance for errors of size one would not see."""
    named = tables()
    for frame in named.values():
        frame["level"] = np.exp(0.3 * frame.a) + frame.sick
    one, other = (
        glm.fit("y ~ a + b", {name: frame.assign(y=by * frame.level) for name, frame in named.items()}, link=link)
        for by in (1.0, unit)
    )
    assert other.convergence.rounds == one.convergence.rounds
    np.testing.assert_allclose(other.dispersion, unit**2 * one.dispersion, rtol=1e-9)
    np.testing.assert_allclose(other.table["z"].iloc[1:], one.table["z"].iloc[1:], rtol=1e-7)
    assert other.residuals == one.residuals
    np.testing.assert_allclose(other.heterogeneity.q, one.heterogeneity.q, rtol=1e-6)


@pytest.mark.parametrize("link", ["identity", "log"])
def test_residuals_are_in_standard_deviations_of_the_errors(link):
    """Not of the response, of which the terms may explain nearly all."""
    named = tables((300, 400))
    for frame in named.values():
        frame["y"] = 100 + 5 * frame.a + (frame.sick - frame.sick.mean())
    fit = glm.fit("y ~ a + b", named, link=link)
    pooled = pd.concat(named.values())
    predictor = np.column_stack([np.ones(len(pooled)), pooled.a, pooled.b]) @ fit.coefficients
    residual = pooled.y - (predictor if link == "identity" else np.exp(predictor))
    assert fit.residuals is not None
    edges = np.array([-np.inf, *fit.residuals["edges"][1:-1], np.inf])
    expected, _ = np.histogram(residual / np.sqrt(fit.deviance / fit.n), edges)
    np.testing.assert_allclose(
        fit.residuals["counts"], expected, atol=8
    )  # cells below 5 rows count as empty, edges move


@pytest.mark.parametrize(
    ("keywords", "objection"),
    [
        ({"weights": np.ones(3)}, "weights is a ndarray: name a column"),
        ({"levels": {"a": "xyz"}}, "levels = .*give a list of levels"),
        ({"levels": ["a"]}, "levels = .*give a list of levels"),
        ({"prior": None}, "prior = None: give 'default'"),
        ({"prior": {"a": 0}}, "prior of 'a' is 0: give"),
        ({"prior": {"a": (np.nan, 1.0)}}, "prior of 'a' is .*: give"),
        ({"prior": {"a": (0.0, -1.0)}}, "The prior's sd of 'a' is -1.0"),
        ({"prior": {"z": (0.0, 1.0)}}, "names the slope 'z': choose one of a, b"),
    ],
)
def test_settings_of_another_type_are_named(keywords, objection):
    with pytest.raises(InputError, match=objection):
        glm.fit("sick ~ a + b", tables(), family="binomial", **keywords)
