"""The server of a survival model: the rounds of a GLM, begun at the null model, and figures that follow from sums.

All rounds go through `client_step` and `server_step`, as those of a GLM. In the first, sites also expand at the null
model: the score test follows, and the second round looks at a pooled Newton step from there, which is better where
sites have few events. Cavity rounds leave less than 10⁻⁶ SE after the fourth on tables where Newton leaves 10⁻².
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedual.errors import DataError, NotConvergedError
from fedual.glm.estimation import FAMILY, MOST_NAMES, NOT_CONVERGED, WEAK, Estimation
from fedual.glm.figures import Convergence, SiteFigures
from fedual.glm.messages import Message
from fedual.glm.prior import INTERCEPT
from fedual.glm.rounds import SeparatedError
from fedual.glm.survival.figures import Survival, Test, Transform, piece_names
from fedual.glm.survival.pieces import cuts
from fedual.glm.survival.proportionality import chi2_test, tests


class SurvivalEstimation(Estimation):
    """One fit of a survival model."""

    def _about(self) -> dict[str, Any]:
        settings = self.settings
        # the test of proportional hazards is that of the partial likelihood
        transform = None if settings.transform == "none" or settings.baseline == "piecewise" else settings.transform
        about = {"ties": settings.ties, "cuts": None, "transform": transform}
        if settings.baseline == "stratified":
            return about
        model = {"schema": self.schema.to_dict(), "family": "cox", "link": "log", **about}
        return about | {"cuts": cuts(self.ask, model, settings.pieces)}

    @property
    def pieces(self) -> list[str]:
        """The pieces of a common baseline, in words."""
        return [] if self.model["cuts"] is None else piece_names(self.model["cuts"])

    def _terms(self) -> tuple[str, ...]:
        terms = tuple(term for term in self.schema.terms if term != INTERCEPT)
        if not terms:
            raise DataError(f"{self.settings.formula!r} has no covariate: add a term, as in Surv(time, event) ~ age.")
        return terms

    def _extra(self) -> tuple[str, ...]:
        return tuple(f"log hazard in {piece}" for piece in self.pieces)

    def _packing(self) -> int:
        return len(self.extra)

    def _total(self, name: str) -> np.ndarray:
        return np.sum([counts[name] for counts in self.moments.counts.values()], 0)

    def _first_intercept(self) -> float:
        """Nothing, after a look at the events."""
        if not self._total("events"):
            raise DataError(f"No site has an event of {self.schema.response}: check the event's code, or event=.")
        if self.pieces:
            for name, deaths in zip(self.pieces, self._total("deaths"), strict=True):
                if not deaths:
                    raise DataError(f"No site has an event in the piece {name}: take fewer pieces, or other cuts.")
        return 0.0

    def _start(self) -> Tensor:
        """The null model: no effects, and the rates of all sites together as hazards."""
        lam = self._natural(WEAK, 1.0)
        if not self.pieces:
            return lam
        rates = np.log(self._total("deaths") / self._total("exposure"))
        mean = torch.cat([torch.zeros(len(self.terms)), torch.tensor(rates)]).to(lam)
        return FAMILY.natural(mean, FAMILY.precision(lam))

    def _smallest(self) -> float:
        """So small that the sites also expand at the null model, whose score test follows."""
        return 0.0

    def _beside(self) -> str:
        if self.pieces:
            return "the other terms and the pieces of the baseline"
        return "the other terms within the strata, and a site is one"

    def _separated(self, error: SeparatedError) -> str:
        names = [repr(self._name(j)) for j in error.entries] or ["the terms together"]
        names = ", ".join(names[:MOST_NAMES]) + f" and {len(names) - MOST_NAMES} more" * (len(names) > MOST_NAMES)
        return f"The likelihood rises for ever with {names} (no events in a level, for example), so it has no maximum"

    def _name(self, entry: int) -> str:
        return self.terms[entry] if entry < len(self.terms) else self.extra[entry - len(self.terms)]

    def _lean(self) -> Tensor:
        """H_βα H_αα⁻¹ at the last expansion, `(p, J)`."""
        p, information = len(self.terms), FAMILY.precision(self.rounds.state.eta_sum)
        return information[:p, p:] / information[p:, p:].diagonal()

    def _figures(self, converged: bool, separation: str | None = None) -> dict[str, Any]:
        settings, rounds, p = self.settings, self.rounds, len(self.terms)
        if lost := [site for site, reply in rounds.replies.items() if reply.facts["loss"] is None]:
            raise NotConvergedError(
                f"The rounds ended where the likelihood of site {lost[0]!r} is zero: rescale a term."
            )
        n = sum(self.moments.rows.values())
        transform = self.model["transform"]
        tensors = {**rounds.units, "theta": rounds.mean} | ({"lean": self._lean()} if self.pieces else {})
        self.closing = self.ask(Message("figures", rounds.facts, tensors))
        inverse, units, meat = torch.linalg.inv(rounds.precision)[:p, :p], self._own_units(), self._matrix("meat")
        hc0 = units @ inverse @ meat @ inverse @ units.mT
        loglik = sum(float(reply.facts["loglik"]) for reply in self.closing.values())
        null_loglik, null_score = self._null()
        return {
            "schema": self.schema, "family": settings.family, "link": settings.link, "n": n,
            "sites": self._sites(), "parameters": self.dim, "prior": self.prior,
            "loglik": loglik, "null_loglik": null_loglik, "deviance": -2 * loglik, "null_deviance": -2 * null_loglik,
            "pearson": float("nan"), "df_model": p, "df_resid": n - self.dim,
            "hc0": None if rounds.prior.any() else hc0.numpy(),
            "convergence": Convergence(
                converged, len(rounds.history), rounds.history[-1]["step_se"], rounds.tol, tuple(rounds.history)
            ),
            "separation": separation, "dispersion": 1.0,
            "warnings": () if converged else (NOT_CONVERGED,),
            "survival": self._survival(chi2_test(null_score, p), transform),
        }  # fmt: skip

    def _null(self) -> tuple[float, float]:
        """The log-likelihood of the null model, and the score test there: it was the first point."""
        eta, (loss, at, _) = self.rounds.first, self.rounds.visited[0]
        assert eta is not None
        information = FAMILY.precision(eta)
        score = information @ at - eta[0]
        return -loss, float(score @ torch.linalg.solve(information, score))

    def _survival(self, null_score: Test, transform: Transform | None) -> Survival:
        settings, p, units = self.settings, len(self.terms), self._own_units()
        found: dict[str, Any] = {}
        if transform is not None:
            score = torch.stack([reply.tensors["trend"] for reply in self.closing.values()]).sum(0)
            once, twice = (self._matrix(name) for name in ("once", "twice"))
            assert once is not None
            assert twice is not None
            information = FAMILY.precision(self.rounds.state.eta_sum)
            found["trends"] = tuple(tests(score.numpy(), once.numpy(), twice.numpy(), information.numpy()))
        if self.pieces:
            joint = torch.block_diag(units, torch.eye(self.dim - p, dtype=units.dtype))
            found |= {
                "cuts": tuple(self.model["cuts"]),
                "log_hazards": self.rounds.mean[p:].numpy(),
                "joint": (joint @ torch.linalg.inv(self.rounds.precision) @ joint.mT).numpy(),
                "events_by_piece": self._total("deaths"),
            }
        return Survival(
            baseline=settings.baseline, ties=settings.ties, events=int(self._total("events")),
            strata=self.schema.parsed.strata,
            null_score=null_score,
            concordance=tuple(np.sum([reply.facts["concordance"] for reply in self.closing.values()], 0).tolist()),
            means=self.moments.centre[self.kept].numpy(), transform=transform or "none", **found,
        )  # fmt: skip

    def _sites(self) -> tuple[SiteFigures, ...]:
        """Each site's rows and events, and its gradient and Hessian, from which a common baseline is taken out."""
        p, inverse, moments = len(self.terms), torch.linalg.inv(self._own_units()), self.moments
        sites = []
        for site, eta in self.rounds.etas.items():
            gradient = hessian = None
            if not self.rounds.prior.any():
                curve = FAMILY.precision(eta)
                without = torch.eye(p, dtype=eta.dtype)
                if self.pieces:
                    without = torch.cat([without, -self._lean()], 1)
                gradient = (inverse.mT @ without @ (curve @ self.rounds.mean - eta[0])).numpy()
                hessian = (inverse.mT @ without @ curve @ without.mT @ inverse).numpy()
            of_table = moments.rows[site], moments.missing[site], moments.means[site]
            events = int(moments.counts[site]["events"])
            sites.append(SiteFigures(site, *of_table, gradient, hessian, events))
        return tuple(sites)
