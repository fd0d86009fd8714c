"""What a site has told about its table, in one file: with which rows, how many numbers, in how many rounds.

    with opened(path) as book:
        if book.difference(rows, least=5) is None:
            book.charge(rows, told)     # on disk when the block ends

A reply leaves the site after the block only. Rows are kept as 64-bit hashes under a random key of the file: 8 bytes a
row, and a bit for every set of rows that a fit has used. The file is sealed (`fedual.rundir.checksum`), and nobody but
its owner can read it.

A *set* is the rows of a fit. `spent[set][variable]` is what was told about a variable's values with these rows: the
numbers sent, shared out evenly among the values that they depend on. Two sums over sets can be subtracted, and so can
sums of sums; `difference` looks for the smallest group of rows whose sum follows from those of all sets.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from math import comb
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedual.errors import DataError
from fedual.parsing import parsing
from fedual.rundir.atomic import PRIVATE, make_private, store, sync, writing
from fedual.rundir.checksum import parse, seal, verify
from fedual.rundir.locking import locked

FORMAT = "fedual-glm-ledger-1"
WAIT = 60.0
"""Seconds to wait for an earlier message that is still being answered."""
MOST_GROUPS = 1_000_000
"""Groups of small cells that are tried one by one; where there are more, every small cell counts as exposed."""
CHUNK = 20_000
"""Groups at a time."""
ROUNDING = 1e-9

Rows = NDArray[np.uint64]
"""Hashes of rows, sorted, without repetitions."""


class Told(NamedTuple):
    """What a reply tells of each value of the variables that it depends on."""

    numbers: float  # numbers for each value of the fit's rows
    exposed: float  # numbers for each value of the rows that have nearly all the weight


@dataclass
class Book:
    """The content of a ledger.

    Attributes:
        salt: The key of the rows' hashes.
        rows: All rows that a fit has used.
        sets: For each set which of `rows` are in it, `(J, U)`.
        spent: For each set what was told about each variable.
        replies: Digests of the replies that were sent.
        rounds: The rounds of each fit.
        refusals: Digests of what was refused because of the table's content.
        changed: True if it differs from the file.
    """

    salt: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    rows: Rows = field(default_factory=lambda: np.empty(0, np.uint64))
    sets: NDArray[np.bool_] = field(default_factory=lambda: np.empty((0, 0), bool))
    spent: list[dict[str, Told]] = field(default_factory=list)
    replies: set[str] = field(default_factory=set)
    rounds: dict[str, int] = field(default_factory=dict)
    refusals: set[str] = field(default_factory=set)
    changed: bool = False

    def hashed(self, digests: NDArray[np.uint64]) -> Rows:
        """The hashes of a table's rows; of rows with equal digests, each has a hash of its own."""
        order = np.sort(digests)
        repetition = (np.arange(len(order)) - np.searchsorted(order, order)).astype("<u8")
        keys = np.frombuffer(self.salt, "<u8").astype(np.uint64)
        hashed = _mixed(_mixed(order ^ keys[0]) + repetition.astype(np.uint64) ^ keys[1])
        rows = np.sort(_mixed(hashed ^ keys[2]) ^ keys[3])
        return rows[np.append(rows[1:] != rows[:-1], True)[: len(rows)]]

    def before(self, rows: Rows, variables: Iterable[str]) -> dict[str, Told]:
        """What was told so far about variables, averaged over the values of these rows."""
        shares = [float(share) for share in self.sets[:, self._members(rows)].sum(1) / len(rows)]
        found = {}
        for name in variables:
            told = [(share, each[name]) for share, each in zip(shares, self.spent, strict=True) if name in each]
            found[name] = Told(sum(share * t.numbers for share, t in told), sum(share * t.exposed for share, t in told))
        return found

    def charge(self, rows: Rows, told: Mapping[str, Told]) -> None:
        """Add what a reply tells about variables."""
        self.rows, self.sets = self._with(rows)
        self.spent += [{} for _ in range(len(self.sets) - len(self.spent))]
        number = self._number(rows)
        assert number is not None
        spent = self.spent[number]
        for variable, new in told.items():
            old = spent.get(variable, Told(0.0, 0.0))
            spent[variable] = Told(old.numbers + new.numbers, old.exposed + new.exposed)
        self.changed = True

    def difference(self, rows: Rows, least: int) -> int | None:
        """The size of a group of fewer than `least` rows whose sum would follow from those of all sets, or None.

        Rows in the same sets form a cell; sums over sets are sums over cells, and their linear combinations are the
        column space V of the matrix (cells x sets) of zeros and ones. A group of cells T is exposed if V has a vector
        that is zero elsewhere: the largest eigenvalue of V's projector, restricted to T, is then one.
        """
        if not len(self.sets):
            return len(rows) if len(rows) < least else None
        if self._number(rows) is not None:
            return None
        _, sets = self._with(rows)
        packed = np.packbits(sets, axis=0)
        _, first, sizes = np.unique(packed, axis=1, return_index=True, return_counts=True)
        basis, values, _ = np.linalg.svd(sets[:, first].T.astype(float), full_matrices=False)
        basis = basis[:, values > ROUNDING * values[0]]
        small = np.flatnonzero(sizes < least)
        if sum(comb(len(small), number) for number in range(1, least)) > MOST_GROUPS:
            return int(sizes[small].min())
        leverage = (basis**2).sum(1)
        for number in range(1, least):
            groups = np.array(list(combinations(small, number)), dtype=int).reshape(-1, number)
            groups = groups[(sizes[groups].sum(1) < least) & (leverage[groups].sum(1) > 1 - ROUNDING)]
            for start in range(0, len(groups), CHUNK):
                parts = basis[groups[start : start + CHUNK]]
                exposed = np.linalg.eigvalsh(parts @ parts.swapaxes(1, 2))[:, -1] > 1 - ROUNDING
                if exposed.any():
                    return int(sizes[groups[start:][np.flatnonzero(exposed)[0]]].sum())
        return None

    def _members(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of `self.rows` are among these rows."""
        if np.array_equal(self.rows, rows):  # the usual case
            return np.ones(len(rows), bool)
        return np.isin(self.rows, rows, assume_unique=True)

    def _with(self, rows: Rows) -> tuple[Rows, NDArray[np.bool_]]:
        """`rows` and `sets`, with these rows as the last set unless they are one already."""
        if self._number(rows) is not None:
            return self.rows, self.sets
        everything = np.union1d(self.rows, rows) if len(self.rows) else rows
        sets = np.zeros((len(self.sets) + 1, len(everything)), bool)
        sets[:-1, np.searchsorted(everything, self.rows)] = self.sets
        sets[-1, np.searchsorted(everything, rows)] = True
        return everything, sets

    def _number(self, rows: Rows) -> int | None:
        """The number of these rows' set; None if they are none."""
        members = self._members(rows)
        equal = np.flatnonzero((self.sets == members).all(1)) if members.sum() == len(rows) else []
        return int(equal[0]) if len(equal) else None

    def to_bytes(self) -> bytes:
        """The file."""
        tensors = {
            "rows": torch.from_numpy(self.rows.view(np.int64)),
            "sets": torch.from_numpy(np.packbits(self.sets, axis=1)),
        }
        about = {
            "format": FORMAT, "salt": self.salt.hex(), "spent": self.spent,
            "replies": sorted(self.replies), "rounds": self.rounds, "refusals": sorted(self.refusals),
        }  # fmt: skip
        return seal(tensors, {"ledger": json.dumps(about)})

    @classmethod
    def from_bytes(cls, content: bytes) -> "Book":
        """The inverse of `to_bytes`; `ValueError` or `KeyError` if it is none of ours."""
        if not verify(content):
            raise ValueError("its checksum is wrong")
        metadata, tensors = parse(content)
        about = json.loads(metadata["ledger"])
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']}")
        rows = tensors["rows"].numpy().view(np.uint64)
        return cls(
            salt=bytes.fromhex(about["salt"]),
            rows=rows,
            sets=np.unpackbits(tensors["sets"].numpy(), axis=1, count=len(rows)).astype(bool),
            spent=[{name: Told(*told) for name, told in each.items()} for each in about["spent"]],
            replies=set(about["replies"]),
            rounds=about["rounds"],
            refusals=set(about["refusals"]),
        )


@contextmanager
def opened(path: Path, wait: float = WAIT) -> Iterator[Book]:
    """Open a ledger for this process and thread alone; what the block changes is on disk when it ends.

    The lock beside it remembers that there is a ledger: one that is lost does not silently become a new one.

    Args:
        path: The file; made if it was never there.
        wait: Seconds to wait until another process or thread closes it.

    Raises:
        DataError: It is damaged, lost, still open elsewhere, or cannot be read or written.
    """
    make_private(path.parent)
    lock = path.with_name(path.name + ".lock")
    with locked(lock, wait):
        book = _read(path, lock)
        yield book
        if book.changed:
            content = book.to_bytes()
            store(path, content, mode=PRIVATE)
            if not lock.stat().st_size:
                # in place, because the lock is held on this very file
                with writing(lock, 1, "the ledger is on disk"), lock.open("r+b") as file:
                    file.write(b"+")
                sync(lock)
            book.changed = False


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood's finaliser (SplitMix64, 2014): one to one, and every bit depends on all."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _read(path: Path, lock: Path) -> Book:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if lock.stat().st_size:
            raise DataError(
                f"{path} is lost: put it back, or remove {lock} too, after which what was told counts for nothing."
            ) from None
        return Book(changed=True)  # with its key, on which the hashes depend
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): allow reading it.") from error
    with parsing(path, "is damaged, or no ledger", "put back an intact copy"):
        return Book.from_bytes(content)
