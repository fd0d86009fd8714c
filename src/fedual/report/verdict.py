"""Remarks on a run, each with its rule: did it finish, converge and beat guessing, and who was left out?"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Any, Literal, NamedTuple

from fedual.algorithm.influence import SUSPICIOUS
from fedual.report.run_data import PLACES, RunData, number
from fedual.run import LARGEST_NLL

NATS, SHARE = 0.01, 0.05  # a loss has settled if it changed by less than this, or by less than this share of itself
STILL = 0.01  # a run has converged if both residuals are below this fraction of ‖λ_g‖
JUDGED = [f"{name}{place}" for place in ("_mc", "", "_mc_clients", "_clients") for name in ("nll", "loss")]
"""The losses that convergence is judged by: the first of these that the records have."""


class Remark(NamedTuple):
    """One finding: a heading of a few words, and the reason."""

    kind: Literal["good", "note", "bad"]
    head: str
    text: str


class Absence(NamedTuple):
    """A client that was left out of some rounds; the most frequent reason comes first."""

    client: str
    rounds: list[int]
    reasons: list[str]


def verdict(run: RunData) -> list[Remark]:
    """All remarks; the first says how the run ended."""
    return [_end(run) or _convergence(run), *_notes(run)]


def _end(run: RunData) -> Remark | None:
    """A remark if the run diverged or stopped before its last round, else None."""
    last = next((record for record in reversed(run.history) if any(key in record for key in JUDGED)), {})
    values = {key: number(last, key) for key in JUDGED if key in last}
    advice = "Lower the learning rate, or raise ρ."
    if lost := [key for key, value in values.items() if value is None]:
        return Remark("bad", "Diverged", f"In round {last['round']} {', '.join(lost)} is not a finite number. {advice}")
    nll = max((value or 0.0 for value in values.values()), default=0.0)
    if run.classes and nll > LARGEST_NLL:
        return Remark("bad", "Diverged", f"In round {last['round']} the NLL is {nll:.3g}. {advice}")
    if run.diverged:
        return Remark("bad", "Diverged", run.diverged)
    if run.history and run.done >= run.rounds:
        return None
    where = f"after round {run.done} of {run.rounds}"
    if run.posterior:
        return Remark("note", "Stopped early", f"The run was ended {where}.")
    head = "Not finished" if run.history else "No round is finished"
    return Remark("bad", head, f"The records end {where}: the run goes on, or was interrupted; --resume continues it.")


def _convergence(run: RunData) -> Remark:
    """Compare the mean loss of the last quarter of evaluations with the quarter before, and read the residuals."""
    primal, dual, norm = (number(run.history[-1], key) for key in ("primal", "dual", "norm"))
    moves = None if primal is None or dual is None or not norm else (100 * primal / norm, 100 * dual / norm)
    still = moves is not None and max(moves) < 100 * STILL
    residuals = ""
    if moves is not None:
        apart, moved = (f"{share:.2g}%" if share < 10 else f"{share:.0f}%" for share in moves)
        residuals = (
            f"In the last round clients were {apart} of ‖λ_g‖ apart from the server, which moved by {moved} of it. "
            + (f"Both are below {STILL:.0%}." if still else f"Converged means that both are below {STILL:.0%}.")
        )
    key = next((key for key in JUDGED if run.column(key)), None)
    if key is None and moves is None:
        return Remark("note", "Nothing to judge by", "The records have neither metrics nor residuals.")
    if key is None:
        return Remark("good", "Converged", residuals) if still else Remark("note", "Still moving", residuals)
    values = run.column(key)
    quarter = len(values) // 4
    if quarter < 2:
        text = f"{len(values)} evaluations are too few to compare their last quarter with the one before."
        return Remark("note", "Too short to say", text)
    before, after = fmean(values[-2 * quarter : -quarter]), fmean(values[-quarter:])
    name, _, end = key.partition("_")
    text = (
        f"The {'NLL' if name == 'nll' else name} {PLACES[f'_{end}' if end else '']} is {after:.3g} on average over the "
        f"last {quarter} evaluations, {before:.3g} over the {quarter} before; a change below {NATS:g} or {SHARE:.0%} "
        "counts as none."
    )
    if abs(after - before) <= max(NATS, SHARE * abs(before)):
        return Remark("good", "Converged" if still else "Settled", f"{text} {residuals}".rstrip())
    if after < before:
        return Remark("note", "Still improving", f"{text} More rounds may help.")
    best, place = min((value, place) for place, value in run.points("round", key))
    return Remark("bad", "Getting worse", f"{text} It was lowest in round {place}: {best:.3g}.")


def _notes(run: RunData) -> Iterator[Remark]:
    """What else is worth knowing: bad predictions, absent clients, shortened steps, and what uncertainties mean."""
    column = run.column("nll_mc") or run.column("nll")
    if run.classes and column and column[-1] > math.log(run.classes):
        chance = f"guessing one of {run.classes} classes has {math.log(run.classes):.3g}"
        yield Remark("bad", "Worse than guessing", f"The last NLL is {column[-1]:.3g}; {chance}. Try a lower lr.")
    column = run.column("r2_mc") or run.column("r2")
    if column and column[-1] <= 0:
        reason = f"The last R² is {column[-1]:.3g}; the mean of the test targets has 0"
        remedy = "Check the scale of the inputs, try more rounds, or a smaller network."
        yield Remark("bad", "Worse than predicting the mean", f"{reason}. {remedy}")
    if (noise := run.regression) is not None:
        sizes = ", ".join(f"{sd:.3g}" for sd in noise["noise_sd"])
        covered = (
            f"intervals of {noise['interval']:.0%} cover {noise['coverage']:.1%} of {noise['examples']} test targets"
        )
        yield Remark(
            "note", "Noise", f"An observation has noise of sd {sizes}; {covered}, and the NLL is {noise['nll']:.3g}."
        )
    yield from _missing(run)
    yield from _bounded(run)
    if parts := [part for part in run.column("shortened") if part < 1]:
        cause = f"In {_rounds(len(parts))} the full step of the server would have left the domain"
        yield Remark("note", "Steps shortened", f"{cause}; at least {min(parts):.6g} of it was taken.")
    if run.history and not run.last():
        yield Remark("note", "No test set", "The run had none: there are residuals, but no metrics.")
    if run.is_point:
        yield Remark("note", "A point", "This method learns a mean only: there is no q_g to be uncertain with.")
    if run.calibration is not None:
        yield Remark("good", "Calibrated", run.about[0].upper() + run.about[1:])
    elif run.is_whole:
        yield Remark("good", "Full covariance", run.about)
    elif run.about:
        yield Remark("note", "Tempered", run.about)


def absences(run: RunData) -> list[Absence]:
    """The clients that were left out, the most frequent first; simulated clients without names have numbers."""
    sites = run.sites
    rounds, reasons = defaultdict(list), defaultdict(Counter)
    for record in run.history:
        out: Any = record.get("left_out")
        if not isinstance(out, dict):
            numbers = record.get("refused_clients")
            numbers = numbers if isinstance(numbers, list) else []
            names = [sites[n] if isinstance(n, int) and 0 <= n < len(sites) else str(n) for n in numbers]
            out = dict.fromkeys(names, "its update left the domain")
        for client, reason in out.items():
            rounds[client].append(record["round"])
            reasons[client][str(reason)] += 1
    gone = [Absence(name, own, [reason for reason, _ in reasons[name].most_common()]) for name, own in rounds.items()]
    return sorted(gone, key=lambda absence: -len(absence.rounds))


def _missing(run: RunData) -> Iterator[Remark]:
    """A remark about the clients that were left out, and how often, if any were."""
    refused, asked = (sum(int(number(r, key) or 0) for r in run.history) for key in ("refused", "active"))
    if not refused:
        return
    some = [
        f"{who.client} {'once' if len(who.rounds) == 1 else f'{len(who.rounds)} times'} ({who.reasons[0].rstrip('.')})"
        for who in absences(run)
    ]
    names = f": {', '.join(some[:3])}" if some else ""
    names += f" and {len(some) - 3} more" if len(some) > 3 else ""
    empty = sum(number(record, "counted") == 0 for record in run.history)
    nobody = f" In {_rounds(empty)} no update counted." if empty else ""
    text = f"{refused} of {asked} updates of clients were left out{names}.{nobody}"
    yield Remark("bad" if 2 * refused > asked else "note", "Clients left out", text)


def _bounded(run: RunData) -> Iterator[Remark]:
    """Remarks about the clients whose updates were far too large, and whose numbers of examples were."""
    cut, capped = Counter[str](), set[str]()
    for record in run.history:
        factors: Any = record.get("cut") or {}
        cut.update(client for client, factor in factors.items() if factor < SUSPICIOUS)
        capped |= dict(record.get("capped") or {}).keys()  # type: ignore[arg-type]
    if cut:
        names = ", ".join(f"{client} in {_rounds(count)}" for client, count in cut.most_common(3))
        text = f"Updates were cut to less than {SUSPICIOUS:.0%} before they counted: {names}."
        yield Remark("bad", "Updates far too large", text)
    if capped:
        text = f"{', '.join(sorted(capped)[:3])} said so many examples that they count for fewer."
        yield Remark("note", "Examples capped", text)


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"
