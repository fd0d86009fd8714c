"""The page of the regressions: Markdown and a picture, made from the records alone."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from studies.figures.common import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, paint
from studies.regression.tables import GAUSSIAN, HARD, PENALISED, WELL

Record = dict[str, Any]
GROUPS = (GAUSSIAN, WELL, PENALISED, HARD)
LEVELS = (0.1, 0.01, 1e-4, 1e-6)
TARGETS = {  # group → (round, coefficient error, relative error of standard errors)
    GAUSSIAN: [(1, 1e-10, None)],
    WELL: [(3, 1e-2, 3e-2), (4, 1e-5, 1e-3), (5, 1e-8, 1e-6)],
    PENALISED: [(4, 2e-3, 2e-2), (5, 1e-5, 1e-3)],
}
FIGURES = (("coefficients", "error"), ("standard errors", "se_error"))
BETWEEN = (0.93, 0.975)
"""Where a coverage of 95 % intervals is to be."""
COLOURS = {
    "fedual": RED, "Newton": BLUE, "IRLS from 0": INK, "ADMM": GREEN, "ADMM, rho = 1": PURPLE, "damped PVI": ORANGE,
    "FedAvg": GREY,
}  # fmt: skip
"""Of each method's line."""
NAMES = {"ADMM": "ADMM, ρ = 1/K", "ADMM, rho = 1": "ADMM, ρ = 1", "damped PVI": "PVI damped by ½"}
SHOWN = (
    "logit, 10 sites", "gamma, inverse, 50 sites", "randhie, poisson, sorted by lpi, 50 sites",
    "breast cancer, 30 columns, random, 5 sites", "breast cancer, 30 columns, sorted, 5 sites", "wine, 4 sites",
)  # fmt: skip
LEAST, MOST = 1e-13, 30.0
"""Of the picture's vertical axis."""

INTRODUCTION = """\
Errors are largest over all coefficients (for the negative binomial, log α is one), in standard errors of the pooled
fit. Errors of standard errors are relative. The pooled fit is statsmodels' on standardised columns, and under the prior
N(0, 2.5/sd) Newton's method in NumPy; both are exact to 10⁻¹² SE. Rounds count one message to every site and one back;
the last one is the certificate, and the handshake is not counted. After round 1 there is no certificate yet: its figure
is the error of the estimate that round 2 sends. Every column is a fit of its own with `max_rounds=r` and
`cavity_rounds=r−1`; by default, fits stop when the next step is below 10⁻⁴ SE.
"""
OTHERS = f"""\
Rounds until the error is below {" / ".join(f"{level:g}" for level in LEVELS)} SE for good; – if it is not within 12
rounds (fedual: 8). Newton is safeguarded, and starts where fedual does, at the fit with an intercept alone; sites tell
the losses of its line search along with each full step. IRLS is Fisher scoring from 0. ADMM is `newton_admm` in the
delta limit, whose server averages with α = 1/(1 + ρK): it differs from fedual's rounds by the server alone if ρ = 1; a
client whose problem is unbounded sits out the round. PVI has client and server of fedual's cavity rounds with duals
damped by ½. Sites of FedAvg take 20 gradient steps with a line search, and the server averages by rows.
"""

ERRORS = """\
Each cell is the error of coefficients, then that of standard errors; the largest over the seeds, each with another
split into sites, and for simulated tables with other rows. Sizes are those of the first seed. The tables from breast
cancer with 6 columns on have no targets: they are small, rare, collinear or steep.

"""
INTERVALS = """\
95 % intervals of four slopes, with four sites of uneven sizes; by slope in brackets. Maximum likelihood: the table of
`fit`, in replications where the maximum exists (a linear program tells). Posterior: the same table's column, expanded
at the maximum of the likelihood. Own mode: `estimate="posterior"`. The standard error of a coverage from 400
replications is about 0.006 over the four slopes, and 0.011 for one.
"""


def text(rounds: Sequence[Record], coverage: Sequence[Record]) -> str:
    """The page as Markdown."""
    parts = [
        "## Regressions: error against rounds", INTRODUCTION, "### Targets", _targets(rounds, coverage),
        "### Errors of fedual", _errors(rounds), "### Beside other methods", OTHERS, _versus(rounds),
        "![Error against rounds](regression.svg)", "### Coverage", _coverage(coverage), "### Records",
        _origin([*rounds, *coverage]),
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _targets(rounds: Sequence[Record], coverage: Sequence[Record]) -> str:
    lines = ["| tables | round | target | worst | of the table | target holds for |", "|---|---|---|---|---|---|"]
    for group, targets in TARGETS.items():
        mine = [line for line in rounds if line["group"] == group]
        for round, *limits in targets:
            for (what, key), limit in zip(FIGURES, limits, strict=True):
                if limit is None or not mine:
                    continue
                worst = max(mine, key=lambda line: line["fedual"][key][round - 1])
                value = worst["fedual"][key][round - 1]
                within = sum(line["fedual"][key][round - 1] <= limit for line in mine)
                goal, share = f"{what} ≤ {limit:.0e}", f"{within} of {len(mine)}"
                lines.append(f"| {group} | {round} | {goal} | {value:.2e} | {worst['table']} | {share} |")
    extra = [
        (_rounds(line, "fedual", level) - _rounds(line, "Newton", level), line["table"])
        for line in rounds for level in LEVELS
    ]  # fmt: skip
    more = list(dict.fromkeys(table for rounds, table in extra if rounds > 0))
    share = f"{sum(rounds <= 0 for rounds, _ in extra)} of {len(extra)}"
    goal = "no more rounds than Newton to any of four levels"
    lines.append(f"| all | | {goal} | {max(extra)[0]:+.0f} | {'; '.join(more)} | {share} |")
    for line in coverage:
        if line["target"]:
            rate = float(np.mean(line["coverage"]["ml"]["slopes"]))
            goal, share = f"coverage {BETWEEN[0]} … {BETWEEN[1]}", int(BETWEEN[0] <= rate <= BETWEEN[1])
            lines.append(f"| {line['setting']} | | {goal} | {rate:.3f} | | {share} of 1 |")
    return "\n".join(lines)


def _errors(rounds: Sequence[Record]) -> str:
    head = "| table | rows | smallest site | columns | round 1 | 2 | 3 | 4 | 5 | 6 | by default |"
    lines = [head, "|---|" + "---|" * 10]
    for name, some in _by_table(rounds).items():
        each, first = [line["fedual"] for line in some], some[0]
        at = lambda r, each=each: (max(one["error"][r] for one in each), max(one["se_error"][r] or 0 for one in each))
        own = [one["defaults"] for one in each]
        default = _pair(max(one["error"] for one in own), max(one["se_error"] for one in own))
        used = "/".join(map(str, sorted({one["rounds"] for one in own})))
        size = f"{first['rows']:,} | {first['smallest']} | {first['columns']}"
        cells = " | ".join(_pair(*at(r)) for r in range(6))
        lines.append(f"| {name} | {size} | {cells} | {used} rounds: {default} |")
    return "\n".join([ERRORS, *lines])


def _pair(error: float, se: float) -> str:
    return f"{error:.0e}" if not se else f"{error:.0e}, {se:.0e}"


def needed(errors: Sequence[float | None], level: float) -> float:
    """The first round from which on errors are at most `level`; infinite if there is none."""
    bad = [r for r, error in enumerate(errors, 1) if error is None or not error <= level]
    return (bad[-1] + 1 if bad[-1] < len(errors) else math.inf) if bad else 1


def _curve(line: Record, method: str) -> list[float | None]:
    return line["fedual"]["error"] if method == "fedual" else line["others"][method]


def _rounds(line: Record, method: str, level: float) -> float:
    return needed(_curve(line, method), level)


def _versus(rounds: Sequence[Record]) -> str:
    methods = list(COLOURS)
    lines = [f"| table | {' | '.join(NAMES.get(name, name) for name in methods)} |", "|---|" + "---|" * len(methods)]
    for table, some in _by_table(rounds).items():
        most = lambda name, level, some=some: max(_rounds(line, name, level) for line in some)
        cells = ["/".join(_count(most(name, level)) for level in LEVELS) for name in methods]
        lines.append(f"| {table} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _count(rounds: float) -> str:
    return "–" if math.isinf(rounds) else f"{rounds:.0f}"


def _by_table(rounds: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by table, in the order of the groups."""
    found: dict[str, list[Record]] = {}
    for line in sorted(rounds, key=lambda line: GROUPS.index(line["group"])):
        found.setdefault(line["table"], []).append(line)
    return found


def _coverage(coverage: Sequence[Record]) -> str:
    if not coverage:
        return "Nothing has been run yet."
    head = "| data | replications | no maximum, of which told | maximum likelihood | posterior | own mode |"
    lines = [INTERVALS, head, "|---|---|---|---|---|---|"]
    for line in coverage:
        cells = [_rate(line["coverage"][kind]) for kind in ("ml", "posterior", "laplace")]
        told = f"{line['separated']}, {line['told']}"
        lines.append(f"| {line['setting']} | {line['replications']} | {told} | {' | '.join(cells)} |")
    troubles = ("wrongly told", "refused", "not converged")
    counts = ", ".join(f"{name} {sum(line[name] for line in coverage)}" for name in troubles)
    return "\n".join([*lines, "", f"In all replications: {counts}."])


def _rate(found: Record) -> str:
    return f"{np.mean(found['slopes']):.3f} ({', '.join(f'{rate:.3f}' for rate in found['slopes'])})"


def _origin(records: Sequence[Record]) -> str:
    seeds = sorted({line["seed"] for line in records})
    places = sorted({_place(line["environment"]) for line in records})
    return f"Seeds {', '.join(map(str, seeds))}, none of which was used before. Measured at {'; '.join(places)}."


def _place(found: Record) -> str:
    return f"commit {found['commit']} on {found['platform']} ({found['cpus']} CPUs), PyTorch {found['torch']}"


def picture(rounds: Sequence[Record]) -> Any:
    """Error against rounds, a panel a table."""
    first = {line["table"]: line for line in reversed(rounds)}
    chosen = [first[name] for name in SHOWN if name in first]

    def plot(figure: Any) -> None:
        axes = figure.subplots(2, 3, sharex=True, sharey=True).flat
        for axis, line in zip(axes, chosen, strict=False):
            for name, colour in COLOURS.items():
                errors = [min(max(e, LEAST), MOST) if e is not None else math.nan for e in _curve(line, name)]
                axis.plot(
                    range(1, len(errors) + 1), errors, "o-" if name == "fedual" else ".-", color=colour, markersize=4,
                    linewidth=2.2 if name == "fedual" else 1.2, label=NAMES.get(name, name),
                    zorder=3 if name == "fedual" else 2,
                )  # fmt: skip
            axis.set(title=line["table"], yscale="log", ylim=(LEAST, MOST), xticks=range(2, 13, 2))
            axis.title.set_fontsize(8.5)
            axis.set_xlabel("rounds" if line in chosen[3:] else "")
        for axis in figure.axes[::3]:
            axis.set_ylabel("largest error, SE")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)

    return paint(10.2, 6.2, plot)
