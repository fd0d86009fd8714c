"""A run in words: did it finish, converge, beat guessing; whom did it leave out. Each rule is said with its answer."""

import math
from collections import Counter
from statistics import fmean
from typing import Any, Literal, NamedTuple

from fedual.report.seen import PLACES, Seen, number
from fedual.runs.run import LARGEST_NLL

NATS, SHARE = 0.01, 0.05
"""A figure has settled when it changed by less than this, or by less than this part of itself."""

STILL = 0.01
"""q_g has converged when both residuals are below this part of ‖λ_g‖."""

JUDGED = [f"{name}{place}" for place in ("_mc", "", "_mc_clients", "_clients") for name in ("nll", "loss")]
"""What convergence is judged by: the first of these that the records have."""


class Remark(NamedTuple):
    """One finding: a few words, and what they rest on."""

    kind: Literal["good", "note", "bad"]
    head: str
    text: str


class Absence(NamedTuple):
    """A client that was left out."""

    client: str
    rounds: list[int]
    reasons: list[str]


def verdict(run: Seen) -> list[Remark]:
    """All remarks; the first is the one to read."""
    remarks = [_end(run), _guessing(run), _missing(run), _shortened(run), _test(run), _spread(run)]
    found = [remark for remark in remarks if remark is not None]
    return found if run.done < run.rounds or not run.history else [_convergence(run), *found]


def _end(run: Seen) -> Remark | None:
    """Whether it came to its end, or to none."""
    where = f"after round {run.done} of {run.rounds}"
    if broken := _broken(run):
        return Remark("bad", "Diverged", f"{broken} Lower the learning rate, or raise ρ.")
    if run.diverged:
        return Remark("bad", "Diverged", run.diverged)
    if run.done < run.rounds and run.posterior:
        return Remark("note", "Stopped early", f"It was ended {where}.")
    if run.done < run.rounds:
        head = "Not finished" if run.history else "No round is finished"
        return Remark("bad", head, f"Its records end {where}: it goes on, or was interrupted; --resume continues it.")
    return None


def _broken(run: Seen) -> str | None:
    """What is wrong with the last figures, if they are no figures any more."""
    judged = [record for record in run.history if any(key in record for key in JUDGED)]
    if not judged:
        return None
    last = judged[-1]
    values = {key: number(last, key) for key in JUDGED if key in last}
    if lost := [key for key, value in values.items() if value is None]:
        return f"In round {last['round']} {', '.join(lost)} is not a finite number."
    nll = max((value or 0.0) for value in values.values())
    return f"In round {last['round']} the NLL is {nll:.3g}." if run.classes and nll > LARGEST_NLL else None


def _convergence(run: Seen) -> Remark:
    """The figure's change over the last quarter of rounds, and the residuals beside ‖λ_g‖."""
    moves = _residuals(run)
    key = next((key for key in JUDGED if run.column(key)), None)
    if key is None:
        if moves is None:
            return Remark("note", "Nothing to judge by", "The records have neither figures nor residuals.")
        if max(moves) < STILL:
            return Remark("good", "Converged", f"{_said(moves)} Both are below {STILL:.0%}.")
        return Remark("note", "Still moving", f"{_said(moves)} Converged means that both are below {STILL:.0%}.")
    column = run.column(key)
    quarter = len(column) // 4
    if quarter < 2:
        text = f"The figures of {len(column)} rounds are too few to compare their last quarter with the one before."
        return Remark("note", "Too short to say", text)
    name = "NLL" if key.startswith("nll") else "loss"
    values = [value for _, value in column]
    before, after = fmean(values[-2 * quarter : -quarter]), fmean(values[-quarter:])
    change = after - before
    rule = f"a change below {NATS:g} or {SHARE:.0%} of it counts as none"
    means = f"{after:.3g} on average over the last {quarter} evaluations, {before:.3g} over the {quarter} before"
    text = f"The {name} {PLACES[key.removeprefix('nll').removeprefix('loss')]} is {means}; {rule}."
    best_round, best = min(column, key=lambda point: point[1])
    if abs(change) > max(NATS, SHARE * abs(before)):
        if change > 0:
            return Remark("bad", "Getting worse", f"{text} It was lowest in round {best_round}: {best:.3g}.")
        return Remark("note", "Still improving", f"{text} More rounds may help.")
    if moves is None:
        return Remark("good", "Settled", text)
    if max(moves) < STILL:
        return Remark("good", "Converged", f"{text} {_said(moves)} Both are below {STILL:.0%}.")
    return Remark("good", "Settled", f"{text} {_said(moves)} Converged would mean below {STILL:.0%}, both.")


def _residuals(run: Seen) -> tuple[float, float] | None:
    """Primal and dual residual of the last round, as parts of ‖λ_g‖."""
    last = run.history[-1]
    primal, dual, norm = (number(last, key) for key in ("primal", "dual", "norm"))
    return None if primal is None or dual is None or not norm else (primal / norm, dual / norm)


def _said(moves: tuple[float, float]) -> str:
    apart, moved = (f"{share:.2g}%" if share < 10 else f"{share:.0f}%" for share in (100 * moves[0], 100 * moves[1]))
    return f"In the last round clients were {apart} of ‖λ_g‖ apart from the server, which moved by {moved} of it."


def _guessing(run: Seen) -> Remark | None:
    """Whether it knows more than the number of classes."""
    if not run.history or not run.classes:
        return None
    chance = math.log(run.classes)
    column = run.column("nll_mc") or run.column("nll")
    if not column or column[-1][1] <= chance:
        return None
    text = (
        f"The last NLL is {column[-1][1]:.3g}; one of {run.classes} classes, guessed, has {chance:.3g}. Try a lower lr."
    )
    return Remark("bad", "Worse than guessing", text)


def absences(run: Seen) -> list[Absence]:
    """Who was left out and why, most often first; deployed clients have names and reasons, simulated ones numbers."""
    rounds: dict[str, list[int]] = {}
    reasons: dict[str, Counter[str]] = {}
    for record in run.history:
        named: Any = record.get("left_out")
        if not isinstance(named, dict):
            numbers = record.get("refused_clients")
            named = dict.fromkeys(numbers if isinstance(numbers, list) else [], "its update left the domain")
        for client, reason in named.items():
            rounds.setdefault(str(client), []).append(record["round"])
            reasons.setdefault(str(client), Counter())[str(reason)] += 1
    found = [Absence(name, own, [reason for reason, _ in reasons[name].most_common()]) for name, own in rounds.items()]
    return sorted(found, key=lambda absence: -len(absence.rounds))


def _missing(run: Seen) -> Remark | None:
    """Who was left out, and how often."""
    refused = sum(int(number(record, "refused") or 0) for record in run.history)
    if not run.history or not refused:
        return None
    asked = sum(int(number(record, "active") or 0) for record in run.history)
    some = [
        f"{who.client} {'once' if len(who.rounds) == 1 else f'{len(who.rounds)} times'} ({who.reasons[0].rstrip('.')})"
        for who in absences(run)
    ]
    rest = f" and {len(some) - 3} more" if len(some) > 3 else ""
    named = f": {', '.join(some[:3])}{rest}" if some else ""
    empty = sum(number(record, "counted") == 0 for record in run.history)
    nobody = f" In {_rounds(empty)} nobody counted." if empty else ""
    text = f"{refused} of {asked} updates of clients were left out{named}.{nobody}"
    return Remark("bad" if 2 * refused > asked else "note", "Clients left out", text)


def _shortened(run: Seen) -> Remark | None:
    """Whether the server's step had to be cut."""
    parts = [part for _, part in run.column("shortened") if part < 1]
    if not parts:
        return None
    cause = f"In {_rounds(len(parts))} the whole step of the server would have left the domain"
    text = f"{cause}; at least {min(parts):.6g} of it was taken."
    return Remark("note", "Steps shortened", text)


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


def _test(run: Seen) -> Remark | None:
    """Whether there are figures at all."""
    if not run.history or run.figures():
        return None
    return Remark("note", "No test set", "The run was given none: there are no figures, only residuals.")


def _spread(run: Seen) -> Remark | None:
    """What the uncertainties mean: τ < 1, or none at all."""
    if run.is_point:
        return Remark("note", "A point", "This method learns a mean alone: there is no q_g to be unsure with.")
    tau = run.parts.get("tau")
    if not isinstance(tau, int | float) or not 0 < tau < 1:
        return None
    text = f"τ = {tau:g}: q_g counts every example {1 / tau:g} times, and is surer than the posterior of these data."
    return Remark("note", "Tempered", text)
