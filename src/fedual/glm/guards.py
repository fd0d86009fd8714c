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
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.glm.isolation import effective_rows, groups, largest_share, nearly_constant, singled_out
from fedual.glm.ledger import Book, Rows, Told, opened
from fedual.glm.rules import Guards, Refusal

log = logging.getLogger("fedual.glm")

_Objection = tuple[str, str, str]  # rule, words for the server, words for the site's log
DOMINANT = 0.8
"""Largest w_i² / Σw² at a point: beyond, the sums are those of one row with noise of half its size."""
HEAVIER = 1.25
"""Unless a row has so much by its own weight or trials: the largest w_i² / Σw² relative to that of these."""
ROUNDING = 1e-9


class Table(Protocol):
    """What `Guard.table` needs of a design of N rows."""

    @property
    def x(self) -> Tensor: ...  # noqa: D102
    @property
    def y(self) -> Tensor: ...  # noqa: D102
    @property
    def weights(self) -> Tensor: ...  # noqa: D102
    @property
    def offset(self) -> Tensor: ...  # noqa: D102
    @property
    def trials(self) -> Tensor: ...  # noqa: D102
    @property
    def row_digests(self) -> np.ndarray: ...  # noqa: D102


@dataclass
class _Fit:
    """The table of the fit that the site is answering about."""

    rows: Rows
    size: int
    parameters: int
    variables: Mapping[str, int]  # variable → values in each row
    smallest: int  # rows of the smallest group of a 0/1 column
    exposed: tuple[str, str] | None  # two 0/1 columns with a cell that varying weights expose
    share: float = 0.0  # the largest w_i² / Σw² of the table's own weights and trials


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
        self._fit: _Fit | None = None
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
        self._fit = _Fit(rows, len(digests), 1, variables, len(digests), None)
        if gap is not None:
            self._refuse(*self._difference(gap), probes=True, about=rows.tobytes())

    def table(self, design: Table, terms: Sequence[str], variables: Mapping[str, int]) -> None:
        """Check the table of a fit: its `rows`, and all of its columns.

        Args:
            design: The design.
            terms: Names of the columns of `design.x`.
            variables: As for `rows`.
        """
        rules, (n, p) = self.rules, design.x.shape
        self.rows(design.row_digests, variables)
        assert self._fit is not None
        if n < rules.rows_per_parameter * p:
            words = f"a fit needs at least {rules.rows_per_parameter:g} rows for each of its {p} columns; take fewer."
            self._refuse("rows_per_parameter", words, f"{n} rows")
        if not n:
            return
        names = [_variable(term) for term in terms]
        varies = lambda column: bool((column != column[0]).any())
        beside = {"the response": design.y, "the weights": design.weights, "the offset": design.offset}
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
        self._fit = replace(self._fit, parameters=p, smallest=smallest, exposed=exposed, share=largest_share(own))
        self.point(own)  # weighted means are told before the first round

    def point(self, weights: Tensor, scores: Tensor | None = None) -> None:
        """Refuse a point of evaluation at which a few rows have nearly all the weight.

        Args:
            weights: The rows' weights in the Hessian, `(N,)`.
            scores: The rows' weights in the gradient: the derivatives of their losses in the linear predictor.
        """
        least, fit = self.rules.min_effective_rows, self._fit
        most = max(DOMINANT, HEAVIER * fit.share if fit else 0) if least > 1 else 1
        for each in (weights,) if scores is None else (weights, scores):
            if not each.isfinite().all():
                self._refuse("min_effective_rows", "the rows' weights at a point are infinite.", "infinite", True)
            elif each.any() and (effective_rows(each) < least or largest_share(each) > most):
                words = f"fewer than {least:g} rows have nearly all the weight at a point; fit fewer columns."
                private = f"{effective_rows(each):.3g} effective rows, largest share {largest_share(each):.3g}"
                self._refuse("min_effective_rows", words, private, probes=True, about=_digest(each))
        if weights.any() and weights.isfinite().all():
            self._effective = min(self._effective, effective_rows(weights))
        if fit is not None and fit.exposed and bool((weights != weights[0]).any()):
            words = (
                f"a cell of {fit.exposed[0]!r} and {fit.exposed[1]!r} has so few rows that their weights would tell "
                "their other columns; merge levels or leave one out."
            )
            self._refuse("min_pair", words, f"a cell of {fit.exposed}", probes=True)

    def charge(self, reply: str, numbers: int, fit: str | None = None) -> None:
        """Enter a reply in the ledger; when this returns, the entry is on disk and the reply may leave.

        A reply that was charged before costs nothing: the same bytes tell nothing new, whoever asks for them again.

        Args:
            reply: The digest of the reply (not of the request: the answer to it may have changed).
            numbers: How many numbers are in it.
            fit: What tells this fit from others, if the reply is one of its rounds.
        """
        effective, self._effective = self._effective, math.inf
        with self._opened() as book:
            objections = self._charged(book, reply, numbers, effective, fit)
        for objection in objections:
            self._refuse(*objection)

    def afford(self, numbers: int) -> None:
        """Refuse before the first number leaves if so many would be more than the budget has left."""
        with self._opened() as book:
            objections = self._objections(book, numbers, math.inf, None)
        for objection in objections:
            self._refuse(*objection)

    def failed(self, error: DataError) -> None:
        """Count an error that depends on the table's content, such as a negative weight, as a refusal."""
        if self.enforce:
            self._count(str(error))

    def _charged(self, book: Book, reply: str, numbers: int, effective: float, fit: str | None) -> list[_Objection]:
        """Charge a reply unless a rule objects; without enforcement, in any case."""
        known = reply in book.replies and len(book.refusals) < self.rules.max_refusals
        found = [] if known else self._objections(book, numbers, effective, fit)
        now = self._fit
        if now is not None and now.size and not known and not (found and self.enforce):
            book.charge(now.rows, dict.fromkeys(now.variables, self._told(now, numbers, effective)))
            book.replies.add(reply)
            if fit is not None:
                book.rounds[fit] = book.rounds.get(fit, 0) + 1
        return found

    def _told(self, fit: _Fit, numbers: int, effective: float) -> Told:
        """What a reply tells of each value."""
        exposed = numbers / min(effective, fit.size)
        if effective < math.inf:  # of every 0/1 column, the p numbers in its row of the Hessian
            exposed = max(exposed, min(numbers, fit.parameters) / fit.smallest)
        unknowns = sum(fit.variables.values())
        return Told(numbers / (fit.size * unknowns), exposed / unknowns)

    def _objections(self, book: Book, numbers: int, effective: float, fit: str | None) -> list[_Objection]:
        """The rules against a reply."""
        rules, now = self.rules, self._fit
        if len(book.refusals) >= rules.max_refusals:
            return [self._closed(book)]
        if now is None or not now.size:
            return []
        found: list[_Objection] = []
        if (gap := book.difference(now.rows, rules.min_difference)) is not None:  # another fit may have come between
            found.append(self._difference(gap))
        rounds = 0 if fit is None else book.rounds.get(fit, 0) + 1
        if rounds > rules.max_rounds:
            found.append(("max_rounds", f"a fit has at most {rules.max_rounds} rounds here.", f"round {rounds}"))
        new = self._told(now, numbers, effective)
        before = book.before(now.rows, now.variables)
        for rule, told in (
            ("numbers_per_unknown", {name: old.numbers + new.numbers for name, old in before.items()}),
            ("numbers_per_exposed", {name: old.exposed + new.exposed for name, old in before.items()}),
        ):
            if spent := {name: each for name, each in told.items() if each > getattr(rules, rule) + ROUNDING}:
                names = _several(list(spent))
                words = f"it has told as much of {names} as it may; ask for fewer columns, rounds or fits."
                private = ", ".join(f"{each:.3g} numbers for each value of {name!r}" for name, each in spent.items())
                found.append((rule, words, private))
        return found

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

    def _difference(self, gap: int) -> _Objection:
        words = (
            f"the rows of this fit and of earlier ones differ by fewer than {self.rules.min_difference}; use the "
            "columns with missing values in all fits, or in none."
        )
        return "min_difference", words, f"the sum over {gap} rows would follow from differences of fits"

    def _closed(self, book: Book) -> _Objection:
        words = "it has refused so many requests that it answers no more; its operator can raise the limit."
        return "max_refusals", words, f"{len(book.refusals)} refusals"

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
            closed = digest not in book.refusals and len(book.refusals) >= self.rules.max_refusals
            if not closed and digest not in book.refusals:
                book.refusals.add(digest)
                book.changed = True
        if closed:
            self._raise(*self._closed(book))

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


def _several(names: Sequence[str]) -> str:
    """The first name, and how many others there are."""
    others = len(names) - 1
    return f"{names[0]!r}" + (f" and {others} other column{'s' * (others != 1)}" if others else "")


def _variable(term: str) -> str:
    """A term without the level that it stands for."""
    return term.partition("[")[0]


def _digest(values: Tensor) -> bytes:
    return sha256(values.contiguous().numpy().tobytes()).digest()
