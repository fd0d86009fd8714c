"""What a site refuses to tell, and the ledger of what it told: enforced at the site, never by the server.

A server that follows the protocol needs sums over many rows only. One that does not could choose coefficients at which
the sums are those of one row, ask so often that the rows follow from the answers, or subtract the sums of two fits.
`Guard` refuses each of these by a rule of `Guards`; docs/how-to/disclosure.md shows the attacks.

    guard = Guard(Guards(), folder / "ledger", enforce=True, site="north")
    guard.table(design, terms, variables)         # whenever the site has made a design
    guard.point(weights, scores)                  # at every point at which something of the reply is evaluated
    guard.charge(reply, numbers, fit)             # last: on disk before the reply leaves

A refusal tells the server the rule and the column, and neither a figure of the site nor a level's name: `private`, with
the figure, is for the site's own log.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.glm.budget import Table, alike, closed, objections
from fedual.glm.design import Design
from fedual.glm.isolation import effective_rows, groups, largest_share, nearly_constant, singled_out
from fedual.glm.ledger import Book, opened
from fedual.glm.rules import Guards, Refusal

log = logging.getLogger("fedual.glm")

DOMINANT = 0.8
"""Largest w_i² / Σw² at a point: beyond, the sums are those of one row with noise of half its size."""
HEAVIER = 1.25
"""Unless a row has so much by its own weight or trials: the largest w_i² / Σw² relative to that of these."""


class Guard:
    """Keeps the rules of one site.

    Args:
        rules: The rules.
        ledger: The site's ledger, one file for its table, whatever the experiment; in memory if None.
        enforce: Raise a `Refusal`; otherwise collect `warnings`, as the simulator does.
        site: The site's name.
    """

    def __init__(self, rules: Guards, ledger: Path | None, enforce: bool, site: str):
        if enforce and ledger is None:
            raise InputError(f"The guard of site {site!r} has no ledger: name a file that survives.")
        self.rules, self.ledger, self.enforce, self.site = rules, ledger, enforce, site
        self.warnings: list[str] = []
        self._book = Book()
        self._table: Table | None = None
        self._effective = math.inf  # fewest effective rows of the points since the last charge

    def columns(self, names: Iterable[str]) -> None:
        """Refuse columns that are not on the allow list."""
        self._allowed("columns", names)

    def formulas(self, *texts: str | None) -> None:
        """Refuse a formula, or an expression for weights, offset or trials, that is not on the list, but for spaces."""
        allowed = self.rules.formulas
        known = {"".join(text.split()) for text in allowed or ()}
        self._allowed("formulas", (text for text in texts if text is not None and "".join(text.split()) not in known))

    def levels(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Refuse variables with a level, or a class, of a few rows; one without any is fine."""
        for name, levels in counts.items():
            rare = {level: n for level, n in levels.items() if 0 < n < self.rules.min_cell}
            if rare:
                words = f"a level of {name!r} has fewer than {self.rules.min_cell} rows; merge levels or leave it out."
                self._refuse("min_cell", words, f"levels of {name!r} have {rare} rows", probes=True)

    def values(self, name: str, column: Tensor) -> None:
        """Refuse a column `(N,)`, whose mean or histogram is asked for, if only a few rows differ from the others."""
        self._cells([name], column[:, None])

    def rows(self, digests: np.ndarray, variables: Mapping[str, int]) -> None:
        """Check the rows that a reply is about; all numbers that follow are about them.

        Args:
            digests: A uint64 for each row, which must identify it in the site's table whatever columns a fit uses.
            variables: Every column of the table that the reply depends on, with the values that a row has in it: 1, or
                one less than the levels. Columns that follow from others do not count: they are nothing more to find.
        """
        self.columns(variables)
        if len(digests) < self.rules.min_rows:
            words = f"a fit needs at least {self.rules.min_rows} rows here."
            self._refuse("min_rows", words, f"{len(digests)} rows")
        with self._opened() as book:
            rows = book.hashed(np.asarray(digests).astype(np.uint64))
            gap = book.difference(rows, self.rules.min_difference)
        self._table = Table(rows, len(digests), 1, variables, len(digests), None)
        if gap is not None:
            self._refuse(*alike(self.rules, gap), probes=True, about=rows.tobytes())

    def table(self, design: Design, terms: Sequence[str], variables: Mapping[str, int]) -> None:
        """Check the table of a fit: its `rows`, and all of its columns.

        Args:
            design: The design.
            terms: Names of the columns of `design.x`.
            variables: As for `rows`.
        """
        rules, (n, p) = self.rules, design.x.shape
        self.rows(design.row_digests, variables)
        assert self._table is not None
        if n < rules.rows_per_parameter * p:
            words = f"a fit needs at least {rules.rows_per_parameter:g} rows for each of its {p} columns; take fewer."
            self._refuse("rows_per_parameter", words, f"{n} rows")
        if not n:
            return
        names = [_variable(term) for term in terms]
        varies = lambda column: bool((column != column[0]).any())
        beside = {"the weights": design.weights, "the offset": design.offset}
        if design.times is None:  # events have rules of their own
            beside = {"the response": design.y} | beside
        if varies(design.trials):
            beside |= {"the trials": design.trials, "the failures": design.trials - design.y}
        beside = {name: column for name, column in beside.items() if varies(column)}
        everything = torch.cat([design.x, *(column[:, None] for column in beside.values())], 1)
        self._cells([*names, *beside], everything)
        if rules.min_cell > 1 and singled_out(everything, rules.min_cell - 1):
            words = f"a combination of the columns differs from zero in fewer than {rules.min_cell} rows; take fewer."
            self._refuse("min_cell", words, f"columns {terms}", probes=True, about=_digest(everything))
        smallest, pair = groups(design.x, rules.min_pair, sum(variables.values()))
        exposed = pair and (names[pair[0]], names[pair[1]])
        own = design.weights * design.trials
        self._table = replace(self._table, parameters=p, smallest=smallest, exposed=exposed, share=largest_share(own))
        self.point(own)  # weighted means are told before the first round

    def events(self, terms: Sequence[str], columns: Tensor, strata: Sequence[int]) -> None:
        """Refuse few events, in all or in a stratum, and covariates in which few of them stand out; none are fine.

        Args:
            terms: Names of the columns.
            columns: The design's rows with an event.
            strata: How many of these are in each stratum.
        """
        least = self.rules.min_events
        if 0 < len(columns) < least:
            words = f"a survival model needs at least {least} events here, or none."
            self._refuse("min_events", words, f"{len(columns)} events", probes=True)
        if few := sorted(n for n in strata if 0 < n < min(least, len(columns))):
            words = f"a stratum has fewer than {least} events; merge strata."
            self._refuse("min_events", words, f"strata with {few} events", probes=True, about=repr(few).encode())
        if len(columns):
            self._cells([f"{_variable(term)} among events" for term in terms], columns)

    def pieces(self, events: Sequence[int], at_risk: Sequence[int]) -> None:
        """Refuse pieces of a baseline hazard with few events, or few rows at risk; none are fine."""
        for what, counts in (("events", events), ("rows at risk", at_risk)):
            if few := [n for n in counts if 0 < n < self.rules.min_cell]:
                words = f"a piece of the baseline has fewer than {self.rules.min_cell} {what}; take fewer pieces."
                self._refuse("min_cell", words, f"pieces with {few} {what}", probes=True, about=repr(few).encode())

    def point(self, weights: Tensor, scores: Tensor | None = None, swings: Tensor | None = None) -> None:
        """Refuse a point of evaluation at which a few rows have nearly all the weight.

        Args:
            weights: The rows' weights in the Hessian, `(N,)`.
            scores: The rows' weights in the gradient: the derivatives of their losses in the linear predictor.
            swings: The rows' weights in the covariance of gradients over a site's effects, where they are integrated.
        """
        least, table = self.rules.min_effective_rows, self._table
        most = max(DOMINANT, HEAVIER * table.share if table else 0) if least > 1 else 1
        for each in (one for one in (weights, scores, swings) if one is not None):
            if not each.isfinite().all():
                self._refuse("min_effective_rows", "the rows' weights at a point are infinite.", "infinite", True)
            elif each.any() and (effective_rows(each) < least or largest_share(each) > most):
                words = f"fewer than {least:g} rows have nearly all the weight at a point; fit fewer columns."
                private = f"{effective_rows(each):.3g} effective rows, largest share {largest_share(each):.3g}"
                self._refuse("min_effective_rows", words, private, probes=True, about=_digest(each))
        if weights.any() and weights.isfinite().all():
            self._effective = min(self._effective, effective_rows(weights))
        if table is not None and table.exposed and bool((weights != weights[0]).any()):
            cell = f"a cell of {table.exposed[0]!r} and {table.exposed[1]!r}"
            words = (
                f"{cell} has so few rows that their weights would tell their other columns; merge levels or leave one "
                "out."
            )
            self._refuse("min_pair", words, f"a cell of {table.exposed}", probes=True)

    def charge(self, reply: str, numbers: int, fit: str | None = None) -> None:
        """Enter a reply in the ledger; when this returns, the entry is on disk and the reply may leave.

        A reply that was charged before costs nothing: the same bytes tell nothing new, whoever asks for them again.

        Args:
            reply: The digest of the reply (not of the request: the answer to it may have changed).
            numbers: How many numbers are in it.
            fit: What tells this fit from others, if the reply is one of its rounds.
        """
        effective, self._effective = self._effective, math.inf
        table = self._table
        with self._opened() as book:
            known = reply in book.replies and len(book.refusals) < self.rules.max_refusals
            refused = [] if known else objections(self.rules, book, table, numbers, effective, fit)
            if table is not None and table.size and not known and not (refused and self.enforce):
                book.charge(table.rows, dict.fromkeys(table.variables, table.told(numbers, effective)))
                book.replies.add(reply)
                if fit is not None:
                    book.rounds[fit] = book.rounds.get(fit, 0) + 1
        for objection in refused:
            self._refuse(*objection)

    def afford(self, numbers: int) -> None:
        """Refuse before the first number leaves if so many would be more than the budget has left."""
        with self._opened() as book:
            refused = objections(self.rules, book, self._table, numbers)
        for objection in refused:
            self._refuse(*objection)

    def failed(self, error: DataError) -> None:
        """Count an error that depends on the table's content, such as a negative weight, as a refusal."""
        if self.enforce:
            self._count(str(error))

    def _allowed(self, rule: str, names: Iterable[str]) -> None:
        allowed = getattr(self.rules, rule)
        for name in names:
            if allowed is not None and name not in allowed:
                words = f"{name!r} is not on its list; leave it out."
                self._refuse(rule, words, f"on the list: {', '.join(sorted(allowed))}")

    def _cells(self, names: Sequence[str], columns: Tensor) -> None:
        least = self.rules.min_cell
        if not least or not len(columns):
            return
        rare = nearly_constant(columns, least).tolist()
        for name in dict.fromkeys(name for name, few in zip(names, rare, strict=True) if few):
            words = f"fewer than {least} rows differ from the others in {name!r}; merge levels or leave it out."
            self._refuse("min_cell", words, f"{name!r} is nearly constant", probes=True)

    def _refuse(self, rule: str, words: str, private: str, probes: bool = False, about: bytes = b"") -> None:
        """Raise, or collect a warning; a refusal that `probes` the table's content is counted once for each request."""
        if not self.enforce:
            warning = f"{rule}: {words}"
            if warning not in self.warnings:
                self.warnings.append(warning)
            return
        self._effective = math.inf
        if probes:
            self._count(f"{rule} {words} ", about)
        self._raise(rule, words, private)

    def _count(self, text: str, about: bytes = b"") -> None:
        """Enter a refusal in the ledger, or refuse everything if it has too many."""
        digest = sha256(text.encode() + about).hexdigest()
        with self._opened() as book:
            new = digest not in book.refusals
            full = len(book.refusals) >= self.rules.max_refusals
            if new and not full:
                book.refusals.add(digest)
                book.changed = True
        if new and full:
            self._raise(*closed(book))

    def _raise(self, rule: str, words: str, private: str) -> NoReturn:
        log.warning("%s refuses by its rule %s: %s (%s)", self.site, rule, words, private)
        raise Refusal(self.site, rule, words, private)

    @contextmanager
    def _opened(self) -> Iterator[Book]:
        if self.ledger is None:
            yield self._book
            return
        try:
            with opened(self.ledger) as book:
                yield book
        except DataError as error:
            words = "its ledger cannot be used; its operator finds the reason in its log."
            log.error("%s: %s", self.site, error)
            raise Refusal(self.site, "ledger", words, str(error)) from error


def _variable(term: str) -> str:
    """A term without the level that it stands for."""
    return term.partition("[")[0]


def _digest(values: Tensor) -> bytes:
    return sha256(values.contiguous().numpy().tobytes()).digest()
