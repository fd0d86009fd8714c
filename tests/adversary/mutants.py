"""Wrong rules, one line each, that the checker must catch: what a schedule finds, it must find in these.

A mutant is a file of fedual's, a line of it and another line. The functions of the changed source take the place of the
real ones in a process that was forked for it.
"""

import inspect
import types
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from adversary import schedules
from adversary.harness import Report, run

SCHEDULES = 250
"""A mutant must be caught within so many schedules."""


class Mutant(NamedTuple):
    """A module, a text that is in its source once, what takes its place, and what is wrong then."""

    module: str
    line: str
    instead: str
    wrong: str


VAULT, SITE, LEDGER = "fedual.flower.vault", "fedual.flower.site", "fedual.flower.ledger"
ROSTER, READMISSION, FOLDER = "fedual.flower.roster", "fedual.flower.readmission", "fedual.flower.run_folder"
REPLIES, UPDATES = "fedual.flower.replies", "fedual.flower.updates"
# Not here: attempts at a round that are named alike (the nonce without `starts`, or `starts` never counted). They are
# caught in some seeds only, within 24 to 134 schedules, because a site answers the same question with the same numbers.
MUTANTS = {
    "ack not checked": Mutant(VAULT, "if ack is not None and ack not in copies:", "if False:",
                              "a site goes on from zero, or crashes, where its state is lost"),
    "lost state starts anew": Mutant(VAULT, "if ack is not None and ack not in copies:",
                                     "ack = ack if ack in copies else None\n        if False:",
                                     "a site whose state is lost goes on from zero"),
    "pending never promoted": Mutant(VAULT, "for copy in (self._committed, self._pending) if copy is not None",
                                     "for copy in (self._committed,) if copy is not None",
                                     "an answer that counted is not found"),
    "committed dropped": Mutant(VAULT, "for copy in (self._committed, self._pending) if copy is not None",
                                "for copy in (self._pending,) if copy is not None",
                                "an answer that was lost takes the committed rows with it"),
    "pending taken for committed": Mutant(VAULT, "self._base = None if ack is None else copies[ack]",
                                          "self._base = self._pending or (None if ack is None else copies[ack])",
                                          "an answer that did not count moves the dual"),
    "committed not kept": Mutant(VAULT, "self._write(self._base, new)", "self._write(new, new)",
                                 "the rows of the last round that counted are gone"),
    "rows not stored": Mutant(VAULT, "self._write(self._base, new)",
                              "self._write(self._base, self._pending or new)",
                              "the new rows are not on disk when the answer leaves"),
    "older message answered": Mutant(SITE,
                                     "if vault.answered is not None and overtaken(request.nonce, vault.answered):",
                                     "if False:", "an older message takes the place of one that counted"),
    "dual put after the answer": Mutant(SITE, "vault.put(request.nonce, kept)", "pass",
                                        "the site's dual never moves"),
    "acks of all who were asked": Mutant(LEDGER, "self.acks |= dict.fromkeys(uploads, nonce)",
                                         "self.acks |= dict.fromkeys([reply.client for reply in replies], nonce)",
                                         "what was refused is acknowledged"),
    "acks forgotten": Mutant(LEDGER, "self.acks |= dict.fromkeys(uploads, nonce)", "pass",
                             "nobody hears that its answer counted"),
    "old nonce accepted": Mutant(UPDATES, "if reply.nonce != nonce:", "if False:",
                                 "an answer to an earlier attempt counts"),
    "released client keeps its share": Mutant(LEDGER, "self.acks.pop(client, None)", "pass",
                                              "a client that starts anew is told of an answer that it lost"),
    "ledger not saved": Mutant(FOLDER, "self.ledger.save(self.checkpoint)",
                               "self.ledger.server.round % 2 or self.ledger.save(self.checkpoint)",
                               "every other round is not on disk before the next begins"),
    "ledger saved before its record": Mutant(FOLDER, "self.run.append(record)",
                                             "self.ledger.save(self.checkpoint); self.run.append(record)",
                                             "a round counts that has no record"),
    "records not rewound": Mutant(FOLDER, "run.rewind(ledger.server.round,",
                                  "run.history() and (ledger.server.round,",
                                  "a round that did not count keeps its record"),
    "replies paired by order": Mutant(REPLIES,
                                      "if (client := clients.get(message.metadata.reply_to_message_id)) is not None:",
                                      "if (client := [*clients.values()][0]) is not None:",
                                      "an answer is taken for another client's"),
    "client's id not checked": Mutant(REPLIES, 'if config.get("client") != client:', "if False:",
                                      "one client's answer counts for another"),
    "recount lacks one": Mutant(LEDGER, "eta_sum += shares[client]",
                                "eta_sum += shares[client] * (client != min(shares))",
                                "the dual of a client that stays is not part of the new sum"),
}  # fmt: skip
"""By name."""


def find(mutant: Mutant) -> tuple[Any, str]:
    """The module of a mutant and its source, in which the line must be."""
    module = import_module(mutant.module)
    source = Path(inspect.getfile(module)).read_text(encoding="utf-8")
    if mutant.line not in source:
        raise LookupError(f"{mutant.module} has no {mutant.line!r}: mend this mutant")
    return module, source


def apply(mutant: Mutant) -> None:
    """Put the functions of the changed source in the place of the real ones, in this process, for good."""
    module, source = find(mutant)
    other = types.ModuleType(module.__name__)
    other.__dict__.update({"__file__": module.__file__, "__package__": module.__package__})
    exec(compile(source.replace(mutant.line, mutant.instead, 1), inspect.getfile(module), "exec"), other.__dict__)
    if not _replaced(vars(module), vars(other), module.__name__):
        raise LookupError(f"{mutant.module}: nothing changed with {mutant.instead!r}")


def _replaced(old: Any, new: Any, module: str) -> int:
    """Give functions, methods and properties the code of their namesakes; how many changed."""
    changed = 0
    for name, value in list(old.items()):
        twin = new.get(name)
        if isinstance(value, type) and value.__module__ == module and isinstance(twin, type):
            changed += _replaced(vars(value), vars(twin), module)
        for one, other in zip(_functions(value), _functions(twin), strict=False):
            if one.__module__ == module and one.__code__ != other.__code__:
                one.__code__ = other.__code__
                changed += 1
    return changed


def _functions(value: Any) -> list[types.FunctionType]:
    """The functions behind a function, a method or a property."""
    parts = [value.fget] if isinstance(value, property) else [getattr(value, "__func__", value)]
    parts += [inspect.unwrap(part) for part in parts if hasattr(part, "__wrapped__")]
    return [part for part in parts if isinstance(part, types.FunctionType)]


def hunt(name: str, seed: int, most: int = SCHEDULES) -> Report:
    """Schedules of a mutant until one of them fails."""

    find(MUTANTS[name])  # in this process: an error in the other would look like a catch

    def fuzzer(folder: Path) -> Any:
        apply(MUTANTS[name])
        return schedules.schedule(folder)

    return run(f"mutant {name}", fuzzer, seed, range(most), 60.0, most=1)
