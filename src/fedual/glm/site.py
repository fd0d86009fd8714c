"""One site of a federated regression: it holds a table and answers the federation's messages about it.

| message       | what the site answers                                                                           |
|---------------|-------------------------------------------------------------------------------------------------|
| "describe"    | rows, missing values, kinds and levels of the formula's variables                               |
| "measure"     | moments and histograms that transformations such as scale(x) and bs(x) need                     |
| "times"       | moments or a histogram of the times of events, where pieces of a baseline hazard are cut         |
| "moments"     | rows, mean and squared deviation of every column of the design, and of the response             |
| "round"       | η_k after lines 1 and 2 of Bayesian-ADMM at λ_g, the loss at m_g, and what was asked besides     |
| "figures"     | once, at the estimate: sums from which the figures of fit follow                                |

The site keeps η_k from round to round. The federation sums the η_k of all sites anew in every round, so that a site
that lost its own starts from zero again and costs a round some accuracy, but no correctness.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedual.algorithm import Broadcast, ClientState, client_step
from fedual.errors import DataError, DomainError, FedualError, InputError, NotConvergedError, in_one_line
from fedual.families import Full
from fedual.glm import schema as schemas
from fedual.glm.closing import deviance, null_expansion
from fedual.glm.formula import parse
from fedual.glm.guards import Guard
from fedual.glm.identity import row_digests
from fedual.glm.likelihood import CHUNK, Likelihood
from fedual.glm.messages import Message, packed_lam, unpacked_lam
from fedual.glm.model import Model
from fedual.glm.models import model_of
from fedual.glm.plan import METHODS
from fedual.glm.schema import Columns, Design, Schema
from fedual.glm.survival import pieces
from fedual.glm.tables import Source, read
from fedual.rundir import atomic, checksum

log = logging.getLogger("fedual.glm")
UNREADABLE = (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError, RuntimeError)
"""What facts and tensors of other kinds and shapes than those of the protocol raise, wherever they are used first."""


class Site:
    """One site.

    Args:
        name: How the federation calls it.
        source: Its table: a data frame, arrays, a CSV or Parquet file, or a function that returns a data frame.
        guard: What it refuses to tell; nothing is refused without one.
        memory: The file in which it keeps η_k, so that a restart loses nothing.
        keep: Keep the design in memory between messages.
    """

    def __init__(
        self, name: str, source: Source, guard: Guard | None = None, memory: Path | None = None, keep: bool = True
    ):
        self.name, self.source, self.guard, self.memory, self.keep = name, source, guard, memory, keep
        self._guarded = ""  # the schema whose table the guard has seen
        self._design: tuple[str, Design] | None = None
        self._likelihood: tuple[str, Likelihood] | None = None
        self.own: Any = None  # what it found about itself: its effects in a mixed model
        self._eta: dict[str, dict[str, Tensor]] = {}  # the digest of the last message → η_k in its variants

    @property
    def least(self) -> int:
        """Levels and cells of histograms with fewer rows are not told."""
        return max(1, self.guard.rules.min_cell) if self.guard is not None and self.guard.enforce else 1

    def answer(self, message: Message) -> Message:
        """Answer a message, or raise a `FedualError` of one sentence."""
        handlers = {
            "describe": self._describe,
            "measure": self._measure,
            "moments": self._moments,
            "times": self._times,
            "round": self._round,
            "figures": self._figures,
        }
        if message.kind not in handlers:
            raise InputError(f"A site cannot answer {message.kind!r}: run the same version of fedual everywhere.")
        try:
            reply = handlers[message.kind](message)
        except (DomainError, NotConvergedError, torch.linalg.LinAlgError) as error:  # pyright: ignore[reportPrivateImportUsage]
            remedy = "rescale the response, the offset or the columns, or choose another link"
            failure = DataError(f"Site {self.name!r}: its sums are no finite numbers at an estimate: {remedy}.")
            if self.guard is not None:
                self.guard.failed(failure)
            raise failure from error
        except DataError as error:
            if self.guard is not None and message.kind != "describe":  # expressions that the server chose ask the table
                self.guard.failed(error)
            raise
        except FedualError:
            raise
        except UNREADABLE as error:
            what = f"the federation's {message.kind!r} cannot be read ({in_one_line(error)})"
            raise InputError(f"Site {self.name!r}: {what}: run the same version of fedual everywhere.") from error
        finally:
            if not self.keep:
                self.release()
        if self.guard is not None:
            is_round = message.kind == "round"
            fit = Message("", {"model": message.facts["model"]}).digest() if is_round else None
            self.guard.charge(reply.digest(), reply.numbers, fit)
        log.info("%s: answered %r with %d numbers", self.name, message.kind, reply.numbers)
        return reply

    def release(self) -> None:
        """Free the memory of the design."""
        self._design = self._likelihood = None

    def _describe(self, message: Message) -> Message:
        facts = message.facts
        formula = parse(facts["formula"], facts.get("categorical", ()))
        columns = Columns(**facts["columns"])
        if self.guard is not None:  # before the table is read: an error may tell the names of its columns
            self.guard.formulas(formula.text, columns.weights, columns.offset, columns.trials)
            self.guard.columns([*formula.variables, *columns.names()])
        reply, counts = schemas.describe(
            read(self.source, self.name), self.name, formula, columns, self.least, facts["levels"]
        )
        if self.guard is not None:
            self.guard.columns(reply["kinds"])  # those of a dot, too
            self.guard.levels(counts)
        return Message("describe", reply)

    def _measure(self, message: Message) -> Message:
        schema = Schema.from_dict(message.facts["schema"])
        self._allow(schema)
        frame = read(self.source, self.name)

        def check(places: np.ndarray, call: str, values: np.ndarray) -> None:
            if self.guard is not None:
                self.guard.rows(row_digests(frame)[places], variables(schema))
                self.guard.values(call, torch.tensor(values))

        return Message(
            "measure", schemas.measure(frame, self.name, schema, message.facts["request"], self.least, check)
        )

    def _times(self, message: Message) -> Message:
        design = self._read(model_of(message.facts["model"]))
        assert design.times is not None
        return Message("times", pieces.answer(design.times.time, design.y, message.facts["edges"], self.least))

    def _moments(self, message: Message) -> Message:
        model = model_of(message.facts["model"])
        design = self._read(model)
        if self.guard is not None:
            self.guard.afford(model.usual_numbers)
        y, weight = model.responses(design, self.name)
        centre = design.x.mean(0)
        spread = torch.stack([(chunk - centre).square().sum(0) for chunk in design.x.split(CHUNK)]).sum(0)
        mean = (weight @ y) / weight.sum()
        facts = {
            "rows": len(design.x),
            "missing": dict(design.missing),
            "weight": float(weight.sum()),
            "mean": float(mean),
            "spread": float(weight @ (y - mean) ** 2),
            "offset": float(weight @ design.offset / weight.sum()),
            **model.counts(design),
        }
        return Message("moments", facts, {"centre": centre, "spread": spread})

    def _round(self, message: Message) -> Message:
        facts, plain, model = message.facts, self._standardised(message), model_of(message.facts["model"])
        likelihood, packing = model.loss(plain, facts, message.tensors), model.packing
        lam_g = unpacked_lam(message.tensors["lam"], packing)
        mean = Full().mean(lam_g)
        method = METHODS[facts["method"]]
        dual = self._recalled(facts["previous"], facts["anchor"], lam_g)
        loss = _finite(likelihood.expand(mean).loss)  # where the solvers begin: computed once
        self._check_points(likelihood, mean[None])
        kept, reply = {"eta": dual}, {"loss": loss, "separated": likelihood.separated(mean)}
        if loss is not None:
            before = ClientState(dual[None], None, {})
            step = lambda method: client_step(method, Broadcast(lam_g), before, likelihood)[1]
            try:
                state = step(method)
            except NotConvergedError:  # its own mode may be at the edge of what the link allows
                state = step(METHODS["newton"])
            if facts["method"] == "cavity" and not facts["previous"] and likelihood.hides(mean):
                state = step(METHODS["anchored"])
            assert state.eta is not None
            if facts["method"] == "variational":
                likelihood.expand(mean)  # the quadrature has many points: the guard sees the one in the middle
            self._check_point(likelihood)
            kept["eta"] = state.eta[0]
            if facts["method"] == "newton" and not likelihood.distribution.known_dispersion:
                reply["deviance"] = deviance(likelihood, mean)
        if "look" in message.tensors:
            kept["look"], reply["look"] = self._expanded(likelihood, message.tensors["look"], dual)
        if "points" in message.tensors:
            self._check_points(likelihood, message.tensors["points"])
            reply["losses"] = [_finite(likelihood.loss(point)) for point in message.tensors["points"]]
        if "beside" in message.tensors:  # a point of the model without random effects
            point = message.tensors["beside"]
            kept["beside"], reply["beside"] = self._expanded(plain, point, point.new_zeros(len(point) + 1, len(point)))
        if facts["null"] is not None:
            reply["null"] = null_expansion(likelihood, mean, facts["null"])
        self._keep(message.digest(), kept)
        return Message("round", reply, {name: packed_lam(eta, packing) for name, eta in kept.items()})

    def _figures(self, message: Message) -> Message:
        facts, sent, model = message.facts, message.tensors, model_of(message.facts["model"])
        likelihood, theta = model.loss(self._standardised(message), facts, sent), sent["theta"]
        self._check_points(likelihood, model.points(theta, facts, sent))
        found, tensors = model.figures(likelihood, theta, facts, sent, self.least)
        self.own = model.own(likelihood, theta, facts, sent)
        if self.own is not None and self.memory is not None:
            self.own.store(self.memory.parent)
        return Message("figures", found, tensors)

    def _expanded(self, likelihood: Any, point: Tensor, dual: Tensor) -> tuple[Tensor, float | None]:
        """What η_k is after a "newton" round at a point, and the loss there; η_k as it is if that is infinite."""
        found = likelihood.expand(point)
        if not found.loss.isfinite():
            return dual, None
        self._check_point(likelihood)
        shift = found.hessian @ point - found.gradient
        return torch.cat([shift[None], -found.hessian / 2]), float(found.loss)

    def _check_point(self, likelihood: Any) -> None:
        """Let the guard see the rows' weights at the point whose expansion is about to leave."""
        if self.guard is not None and not likelihood.says_nothing:
            found = likelihood.last[1]
            self.guard.point(found.weights, found.scores, found.swings)

    def _check_points(self, likelihood: Any, points: Tensor) -> None:
        """Let the guard see points at which only losses are told: a loss can be that of one row."""
        if self.guard is not None and self.guard.enforce:  # a pass over the rows each, to no use without enforcement
            for point in points:
                if likelihood.expand(point).loss.isfinite():
                    self._check_point(likelihood)

    def _allow(self, schema: Schema) -> None:
        if self.guard is not None:
            self.guard.formulas(schema.formula, schema.weights, schema.offset, schema.trials)

    def _read(self, model: Model) -> Design:
        schema, key = model.schema, str(sorted(model.facts.items()))
        if self._design is None or self._design[0] != key:
            self._allow(schema)
            design = schemas.design(read(self.source, self.name), self.name, schema)
            if self.guard is not None and key != self._guarded:
                self.guard.table(design, schema.terms, variables(schema))
                model.guard(self.guard, design)
                self._guarded = key
            self._design = key, design
        return self._design[1]

    def _standardised(self, message: Message) -> Likelihood:
        """The likelihood of columns in the federation's units; it takes the place of the design in memory.

        Gaussian errors have a unit, too: `tol` and the weak prior of the start would depend on that of the response.
        """
        centre, scale, unit = message.tensors["centre"], message.tensors["scale"], float(message.facts["unit"])
        facts = {"model": message.facts["model"], "unit": unit}
        key = Message("", facts, {"centre": centre, "scale": scale}).digest()
        if self._likelihood is None or self._likelihood[0] != key:
            model = model_of(message.facts["model"])
            design = self._read(model)
            self._design = None
            x = design.x.sub_(centre).div_(scale)
            self._likelihood = key, model.likelihood(design, x, unit, self.name)
        return self._likelihood[1]

    def _recalled(self, previous: str, anchor: str, like: Tensor) -> Tensor:
        """η_k as the federation used it last; zero if this site does not know it."""
        if previous and previous not in self._eta and self.memory is not None and self.memory.exists():
            content = self.memory.read_bytes()
            if checksum.verify(content):
                metadata, tensors = checksum.parse(content)
                self._eta = {metadata["digest"]: tensors}
        return self._eta.get(previous, {}).get(anchor, torch.zeros_like(like))

    def _keep(self, digest: str, kept: dict[str, Tensor]) -> None:
        self._eta = {digest: kept}
        if self.memory is not None:
            atomic.make_private(self.memory.parent)
            content = checksum.seal(kept, {"digest": digest})
            atomic.store(self.memory, content, "the site's last answer was not sent", atomic.PRIVATE)


def variables(schema: Schema) -> dict[str, int]:
    """The columns of the table that a fit uses, with the numbers that a row has in each; a factor has some if coded.

    Not those that the server names besides: they would enlarge the budget.
    """
    formula = schema.parsed

    def numbers(name: str) -> int:
        coded = formula.uses.get(name, frozenset()) & {"levels", "term"} and name != formula.plain_response
        return max(1, len(schema.levels.get(name, ())) - 1) if coded else 1

    return {name: numbers(name) for name in (*formula.variables, *schema.columns.names())}


def _finite(loss: Tensor) -> float | None:
    """A loss as a JSON value; None if it is infinite."""
    return float(loss) if loss.isfinite() else None
